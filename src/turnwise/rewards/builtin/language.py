"""Rewards answers in the language that was asked for, as py3langid recognises it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from turnwise.errors import RewardError
from turnwise.rewards.interface import (
    EvaluateResult,
    StepOutput,
    assistant_turns,
    message_text,
    reward_function,
)
from turnwise.types import Json

LANGUAGES = (
    "ar", "bn", "de", "el", "en", "es", "fa", "fi", "fr", "he", "hi", "id", "it", "ja", "ko", "nl", "pl", "pt", "ru",
    "sv", "sw", "ta", "te", "th", "tr", "uk", "ur", "vi", "zh",
)  # fmt: skip
"""The languages told apart by default; fewer candidates make short answers safer to judge."""


@reward_function(name="language")
def language_reward(
    messages: list[dict[str, Json]],
    ground_truth: Json = None,
    task: Json = None,
    language: str | None = None,
    languages: list[str] | None = None,
) -> EvaluateResult:
    """The mean probability that the answers are in the wanted language.

    Wanted is `language`, else `ground_truth` (a code, or a mapping with `language`), else the task's `language`.
    """
    wanted = language or _language_in(ground_truth) or _language_in((task or {}).get("data"))
    if wanted is None:
        return EvaluateResult(error="no language is asked for; set the parameter `language` or the task's")
    candidates = tuple(sorted({*(languages or LANGUAGES), wanted}))
    outputs = []
    for index, message in assistant_turns(messages):
        share = language_probability(message_text(message), wanted, candidates)
        outputs.append(StepOutput(step_index=index, base_reward=share))
    if not outputs:
        return EvaluateResult(error="the agent said nothing")
    score = sum(output.base_reward for output in outputs) / len(outputs)
    return EvaluateResult(score=score, step_outputs=outputs, reason=f"asked for {wanted}")


def language_probability(text: str, language: str, candidates: tuple[str, ...] = LANGUAGES) -> float:
    """How likely the text is in that language rather than another candidate; 0 when it holds no letters."""
    if not any(letter.isalpha() for letter in text):
        return 0.0
    return float(dict(_identifier(candidates).rank(text)).get(language, 0.0))


def _language_in(value: Json) -> str | None:
    if isinstance(value, str) and 2 <= len(value) <= 3:
        return value
    if isinstance(value, dict) and isinstance(value.get("language"), str):
        return str(value["language"])
    return None


@lru_cache(maxsize=8)
def _identifier(candidates: tuple[str, ...]) -> Any:  # py3langid is not typed
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise RewardError(
            "the language reward needs py3langid; install it with `pip install turnwise[lang]`"
        ) from None
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    unknown = set(candidates) - set(identifier.labels)
    if unknown:
        raise RewardError(
            f"py3langid does not know {', '.join(sorted(unknown))}; use ISO 639-1 codes such as en or hi"
        )
    identifier.set_languages(candidates)
    return identifier
