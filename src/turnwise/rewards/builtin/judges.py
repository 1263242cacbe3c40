"""A language model as the judge: of one episode at a time, or of a group's episodes side by side."""

from __future__ import annotations

import os
from functools import lru_cache

from turnwise.errors import RewardError
from turnwise.rewards.interface import EvaluateResult, message_text, reward_function
from turnwise.rewards.judge import Judge
from turnwise.types import Json


@reward_function(name="judge")
async def judge_reward(
    messages: list[dict[str, Json]],
    base_url: str,
    model: str,
    rubric: str,
    ground_truth: Json = None,
    api_key_env: str | None = None,
    max_score: float = 10.0,
    max_concurrent: int = 8,
    timeout_s: float = 60.0,
    cache_path: str | None = None,
) -> EvaluateResult:
    """The judge's grade of the conversation, between 0 and 1; the truth, if any, is shown to the judge."""
    judge = _judge(base_url, model, rubric, api_key_env, max_score, max_concurrent, timeout_s, cache_path)
    verdict = await judge.grade(_transcript(messages, ground_truth))
    return EvaluateResult(score=verdict.score, reason=verdict.reason)


@reward_function(name="judge_ranking", mode="batch")
async def judge_ranking_reward(
    rollouts_messages: list[list[dict[str, Json]]],
    base_url: str,
    model: str,
    rubric: str,
    ground_truth: Json = None,
    api_key_env: str | None = None,
    max_score: float = 10.0,
    max_concurrent: int = 8,
    timeout_s: float = 60.0,
    cache_path: str | None = None,
) -> list[EvaluateResult]:
    """The judge's grades of a group's conversations, seen side by side, each between 0 and 1."""
    judge = _judge(base_url, model, rubric, api_key_env, max_score, max_concurrent, timeout_s, cache_path)
    verdicts = await judge.compare([_transcript(messages, ground_truth) for messages in rollouts_messages])
    return [EvaluateResult(score=verdict.score, reason=verdict.reason) for verdict in verdicts]


@lru_cache(maxsize=16)
def _judge(
    base_url: str,
    model: str,
    rubric: str,
    api_key_env: str | None,
    max_score: float,
    max_concurrent: int,
    timeout_s: float,
    cache_path: str | None,
) -> Judge:
    """One judge per setting, so that its limit and its cache hold across calls."""
    api_key = os.environ.get(api_key_env) if api_key_env else None
    if api_key_env and not api_key:
        raise RewardError(
            f"the judge's key is to be in the environment variable {api_key_env}, which is empty"
        )
    return Judge(
        base_url=base_url,
        model=model,
        rubric=rubric,
        api_key=api_key,
        max_score=max_score,
        max_concurrent=max_concurrent,
        timeout_s=timeout_s,
        cache_path=cache_path,
    )


def _transcript(messages: list[dict[str, Json]], ground_truth: Json) -> str:
    """The conversation as text; images are named, not shown."""
    lines = []
    for message in messages:
        images = sum(part["type"] == "image" for part in message["content"] if isinstance(part, dict))
        note = f" [{images} image(s)]" if images else ""
        lines.append(f"{message['role']}:{note} {message_text(message)}")
    if ground_truth is not None:
        lines.append(f"(the right answer: {ground_truth})")
    return "\n\n".join(lines)
