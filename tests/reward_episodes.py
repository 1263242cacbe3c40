"""Small hand-made episodes for the tests of rewards."""

from __future__ import annotations

from typing import Any

import numpy as np

from turnwise.types import (
    Action,
    Episode,
    Failure,
    FinishReason,
    Group,
    MaskingMethod,
    Message,
    Observation,
    Role,
    SamplingParams,
    StopReason,
    Task,
    TokenStream,
    Turn,
)


def make_episode(
    *answers: str,
    episode_id: str = "e0",
    rewards: tuple[float, ...] | None = None,
    observations: tuple[tuple[Message, ...], ...] | None = None,
    ground_truth: Any = None,
    group_id: str = "g0",
    failure: Failure | None = None,
    metrics: dict[str, float] | None = None,
    actions: tuple[dict[str, Any] | None, ...] | None = None,
    data: dict[str, Any] | None = None,
) -> Episode:
    """An episode whose turn t reads tokens (t, t) and samples (100 + t, 100 + t, 100 + t); the last two are the action."""
    count = len(answers)
    ids = np.array([i for t in range(count) for i in (t, t, 100 + t, 100 + t, 100 + t)], dtype=np.int32)
    sampled = np.array([False, False, True, True, True] * count, dtype=bool)
    stream = TokenStream(
        ids=ids, is_sampled=sampled, logprobs=np.where(sampled, -0.5, 0.0).astype(np.float32)
    )
    turns = tuple(
        Turn(
            turn_index=t,
            stream=stream,
            prompt_start=5 * t,
            completion_start=5 * t + 2,
            completion_end=5 * t + 5,
            observation=Observation(
                messages=observations[t]
                if observations
                else (Message(role=Role.USER, content=f"question {t}"),),
                info={"position": t},
            ),
            action=Action(value=actions[t] if actions else None, text=""),
            text=answer,
            action_token_mask=np.array([False, True, True]),
            masking_method=MaskingMethod.BRACE_DEPTH,
            masking_confidence=1.0,
            finish_reason=FinishReason.END,
            policy_version=0,
            reward=rewards[t] if rewards else 0.0,
        )
        for t, answer in enumerate(answers)
    )
    return Episode(
        episode_id=episode_id,
        group_id=group_id,
        task=Task(task_id="t0", ground_truth=ground_truth, data=data or {}),
        turns=turns,
        streams=(stream,),
        stop_reason=StopReason.FAILED if failure else StopReason.TERMINAL,
        sampling=SamplingParams(),
        failure=failure,
        metrics=metrics or {},
    )


def make_group(*episodes: Episode) -> Group:
    return Group(group_id=episodes[0].group_id, task=episodes[0].task, episodes=episodes)
