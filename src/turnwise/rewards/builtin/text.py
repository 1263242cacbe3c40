"""A reward for free text: long enough, no echo, several different words, and letters beyond ASCII.

length 0.4 + quality 0.3 + diversity 0.3;  good multilingual text 0.8–1.0, good English 0.5–0.7, short or echoed 0.1–0.3
"""

from __future__ import annotations

import re
import unicodedata

from turnwise.rewards.interface import (
    EvaluateResult,
    StepOutput,
    as_metrics,
    message_text,
    reward_function,
)
from turnwise.types import Json

_LENGTH, _QUALITY, _DIVERSITY = 0.4, 0.3, 0.3
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
# Scripts written without spaces: each character counts as a word.
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\u0e00-\u0e7f\u1000-\u109f\u1780-\u17ff]")
_ENOUGH_NON_ASCII = 0.3
"""Share of letters outside ASCII that earns the whole diversity part."""
_SHORT_WORDS = 5


@reward_function(name="text")
def text_reward(messages: list[dict[str, Json]], max_tokens: int = 64) -> EvaluateResult:
    """The mean over the agent's answers, each judged against the message before it; half of `max_tokens` is long enough."""
    outputs: list[StepOutput] = []
    prompt = ""
    answers = [m for m in messages if "step_index" in m] or [m for m in messages if m["role"] == "assistant"]
    for message in messages:
        if not any(message is answer for answer in answers):
            prompt = message_text(message)
            continue
        parts = score_text(prompt, message_text(message), max_tokens=max_tokens)
        outputs.append(
            StepOutput(step_index=len(outputs), base_reward=sum(parts.values()), metrics=as_metrics(parts))
        )
    if not outputs:
        return EvaluateResult(error="the agent said nothing")
    count = len(outputs)
    return EvaluateResult(
        score=sum(output.base_reward for output in outputs) / count,
        step_outputs=outputs,
        metrics=as_metrics(
            {
                name: sum(output.metrics[name].score for output in outputs) / count
                for name in ("length", "quality", "diversity")
            }
        ),
    )


def score_text(prompt: str, text: str, *, max_tokens: int = 64) -> dict[str, float]:
    """The three parts of one answer's reward."""
    words = split_words(text)
    if not words:
        return {"length": 0.0, "quality": 0.0, "diversity": 0.0}
    is_echo = echoes(prompt, words)
    is_short = len(words) < _SHORT_WORDS
    has_variety = len(set(words)) >= 2 and len(set(words)) >= 0.25 * min(len(words), 40)
    quality = (_QUALITY / 3) * (int(not is_short) + int(not is_echo) + int(has_variety))
    if is_echo or not has_variety:
        # Copied or repeated words are no longer text for being many.
        return {"length": 0.0, "quality": quality, "diversity": 0.0}
    # A word said often counts four times at most.
    length = min(1.0, min(len(words), 4 * len(set(words))) / (0.5 * max_tokens))
    return {
        "length": _LENGTH * length,
        "quality": quality,
        # A short answer earns in proportion, or one foreign word would be worth 0.3.
        "diversity": _DIVERSITY * min(1.0, non_ascii_share(text) / _ENOUGH_NON_ASCII) * min(1.0, 4 * length),
    }


def split_words(text: str) -> list[str]:
    """Lower-case words; in scripts without spaces, characters."""
    normal = unicodedata.normalize("NFKC", text).casefold()
    spaced = _UNSPACED.sub(lambda found: f" {found[0]} ", normal)
    # Vowel signs are no word characters for `re`, but they do not split words.
    joined = "".join(letter for letter in spaced if not unicodedata.category(letter).startswith("M"))
    return _WORD.findall(joined)


def echoes(prompt: str, words: list[str]) -> bool:
    """Whether most of the answer's word triples come from the prompt."""
    asked = split_words(prompt)
    if len(words) < 3:
        return bool(asked) and all(word in asked for word in words) and len(asked) <= 2 * len(words)
    triples = set(zip(asked, asked[1:], asked[2:], strict=False))
    said = list(zip(words, words[1:], words[2:], strict=False))
    return sum(triple in triples for triple in said) > 0.6 * len(said)


def non_ascii_share(text: str) -> float:
    """The share of letters that are not ASCII."""
    letters = [letter for letter in text if letter.isalpha()]
    return sum(not letter.isascii() for letter in letters) / len(letters) if letters else 0.0
