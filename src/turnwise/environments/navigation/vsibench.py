"""VSI-Bench: its rows as they are published. How answers are scored is `turnwise.rewards.vsibench`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from turnwise.errors import ConfigError, SceneError
from turnwise.rewards.vsibench import CHOICES, NUMBERS, as_number

QUESTION_TYPES = (*CHOICES, *NUMBERS)
_DATASETS = ("arkitscenes", "scannet", "scannetpp")


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


def read_questions(path: Path) -> tuple[Question, ...]:
    """The rows of a published file, `.jsonl` or `.parquet`."""
    if not path.is_file():
        raise SceneError(
            f"question file {path} does not exist; download test.jsonl or test_debiased.parquet of VSI-Bench"
        )
    rows = _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
    return tuple(_read_row(row, f"{path}, row {number}") for number, row in enumerate(rows, start=1))


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
    is_choice = found.question_type in CHOICES
    if is_choice and not found.options:
        raise SceneError(f"{where} is multiple choice ({found.question_type}) but has no options")
    if not is_choice and as_number(found.ground_truth) is None:
        raise SceneError(f"{where} needs a number as ground truth, not {found.ground_truth!r}")
    return found
