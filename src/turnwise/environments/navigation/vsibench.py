"""VSI-Bench: its rows as they are published, and its scoring rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from turnwise.errors import ConfigError, SceneError

DIRECTION_TYPES = ("object_rel_direction_easy", "object_rel_direction_medium", "object_rel_direction_hard")
CHOICE_TYPES = (*DIRECTION_TYPES, "object_rel_distance", "route_planning", "obj_appearance_order")
NUMBER_TYPES = ("object_counting", "object_abs_distance", "object_size_estimation", "room_size_estimation")
QUESTION_TYPES = (*CHOICE_TYPES, *NUMBER_TYPES)
_DATASETS = ("arkitscenes", "scannet", "scannetpp")
# 0.50, 0.55 … 0.95, exact to the last digit.
_THRESHOLDS = tuple(round(0.5 + 0.05 * i, 2) for i in range(10))


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the benchmark."""

    id: int
    dataset: str
    scene_name: str
    question_type: str
    question: str
    options: tuple[str, ...] | None = None
    """None for numbers."""
    ground_truth: str
    """A letter or a number."""
    pruned: bool | None = None

    def prompt(self) -> str:
        """The question as the benchmark asks it, its options below."""
        if self.options is None:
            return f"{self.question}\nPlease answer the question using a single word or phrase."
        listed = "\n".join(self.options)
        return f"{self.question}\nOptions:\n{listed}\nAnswer with the option's letter from the given choices directly."


class AnswerScore(msgspec.Struct, frozen=True, kw_only=True):
    """Two opinions of one answer: with the letter or number looked for in the text, and by the official rule."""

    score: float
    official: float


def read_questions(path: Path) -> tuple[Question, ...]:
    """The rows of a published file, `.jsonl` or `.parquet`."""
    if not path.is_file():
        raise SceneError(
            f"question file {path} does not exist; download test.jsonl or test_debiased.parquet of VSI-Bench"
        )
    rows = _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
    return tuple(_read_row(row, f"{path}, row {number}") for number, row in enumerate(rows, start=1))


def score_answer(
    answer: str, question_type: str, ground_truth: str, options: Iterable[str] | None = None
) -> AnswerScore:
    """0 to 1: accuracy for choices, mean relative accuracy for numbers."""
    if question_type in CHOICE_TYPES:
        found = extract_letter(answer, tuple(options or ()))
        return AnswerScore(
            score=float(found == ground_truth.strip().upper()),
            official=float(is_official_match(answer, ground_truth)),
        )
    truth = float(ground_truth)
    return AnswerScore(
        score=mean_relative_accuracy(_extract_number(answer), truth),
        official=mean_relative_accuracy(_to_float(_first_word(answer)), truth),
    )


def is_official_match(answer: str, ground_truth: str) -> bool:
    """VSI-Bench's own rule: the first word, without its full stop, equals the letter.

    "A." and "B. Turn Left" pass; "(A)" and "The answer is A" do not.
    """
    return _first_word(answer).lower() == ground_truth.lower()


def mean_relative_accuracy(predicted: float | None, truth: float) -> float:
    """Share of the thresholds θ = 0.50, 0.55 … 0.95 with |p − y| / y ≤ 1 − θ; 0 without a number.

    >>> mean_relative_accuracy(12.0, 10.0)  # off by 0.2: passes 0.50 … 0.80
    0.7
    """
    if predicted is None or truth == 0:
        return 0.0
    error = abs(predicted - truth) / abs(truth)
    # The tolerance keeps 12 against 10 at an error of 0.2, which binary fractions miss by an ulp.
    return fmean(float(error <= 1.0 - threshold + 1e-9) for threshold in _THRESHOLDS)


def extract_letter(answer: str, options: tuple[str, ...] = ()) -> str | None:
    """The option that an answer means, from its letter or, failing that, from an option's own words.

    >>> extract_letter("The answer is (B).")
    'B'
    """
    text = answer.strip().replace("*", "").replace("`", "")
    # "a" before a word is an article, so inside a sentence only a capital counts, and not before a word.
    patterns = (
        r"^\(?([A-Da-d])\)?[ \t]*(?:[.):,\n]|$)",
        r"(?i:answer|option|choice)\s*(?i:is)?\s*[:=]?\s*\(?([A-D])\b(?!')(?! +[a-z])",
        r"\(([A-Da-d])\)",
    )
    for pattern in patterns:
        found = re.search(pattern, text)
        if found:
            return found[1].upper()
    bodies = {option.partition(".")[2].strip().lower(): option.strip()[:1].upper() for option in options}
    named = [letter for body, letter in bodies.items() if body and body in text.lower()]
    if len(named) == 1:
        return named[0]
    alone = re.findall(r"(?<![A-Za-z'])([A-D])(?![A-Za-z'])(?!\s+[a-z])", text)
    return str(alone[-1]) if alone else None


def summarize(scores: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Mean per question type, and `overall`: the unweighted mean of the eight tasks, direction being one of them."""
    by_type: dict[str, list[float]] = {}
    for question_type, score in scores:
        by_type.setdefault(question_type, []).append(score)
    means = {name: fmean(values) for name, values in sorted(by_type.items())}
    directions = [means[name] for name in DIRECTION_TYPES if name in means]
    tasks = [mean for name, mean in means.items() if name not in DIRECTION_TYPES]
    if directions:
        means["object_rel_direction"] = fmean(directions)
        tasks.append(means["object_rel_direction"])
    if tasks:
        means["overall"] = fmean(tasks)
    return means


def _first_word(text: str) -> str:
    return text.split(" ")[0].rstrip(".").strip()


def _to_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _extract_number(answer: str) -> float | None:
    found = re.findall(r"-?\d+(?:,\d{3})*(?:\.\d+)?", answer)
    return float(found[-1].replace(",", "")) if found else None


def _read_jsonl(path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise SceneError(f"{path}, line {number} is not valid JSON: {error}") from None
    return rows


def _read_parquet(path: Path) -> list[Any]:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ConfigError(
            f"reading {path} needs pyarrow; install it with `pip install 'turnwise[data]'` or use test.jsonl"
        ) from None
    rows: list[Any] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


def _read_row(row: Mapping[str, Any], where: str) -> Question:
    try:
        options = row.get("options")
        found = Question(
            id=int(row["id"]), dataset=str(row["dataset"]), scene_name=str(row["scene_name"]),
            question_type=str(row["question_type"]), question=str(row["question"]),
            options=None if options is None else tuple(str(option) for option in options),
            ground_truth=str(row["ground_truth"]), pruned=row.get("pruned"),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SceneError(f"{where} is not a VSI-Bench row: {error!r}") from None
    if found.question_type not in QUESTION_TYPES:
        raise SceneError(
            f"{where} has the unknown question type {found.question_type!r}; known: {', '.join(QUESTION_TYPES)}"
        )
    if found.dataset not in _DATASETS:
        raise SceneError(f"{where} has the unknown dataset {found.dataset!r}; known: {', '.join(_DATASETS)}")
    is_choice = found.question_type in CHOICE_TYPES
    if is_choice and not found.options:
        raise SceneError(f"{where} is multiple choice ({found.question_type}) but has no options")
    if not is_choice and _to_float(found.ground_truth) is None:
        raise SceneError(f"{where} needs a number as ground truth, not {found.ground_truth!r}")
    return found
