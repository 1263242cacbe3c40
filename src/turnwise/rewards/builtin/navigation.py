"""Rewards for finding one's way: success, path efficiency, and how much nearer each step came; and VSI-Bench answers."""

from __future__ import annotations

from itertools import pairwise

from turnwise.errors import RewardError
from turnwise.rewards.builtin.json_validity import find_objects
from turnwise.rewards.builtin.matching import final_answer
from turnwise.rewards.interface import EvaluateResult, StepOutput, as_metrics, reward_function
from turnwise.rewards.vsibench import score_answer
from turnwise.types import Json

_DISTANCE = "distance_to_goal"


@reward_function(name="navigation")
def navigation_reward(
    messages: list[dict[str, Json]],
    metrics: dict[str, float],
    infos: list[dict[str, Json]],
    success: float = 1.0,
    spl: float = 0.0,
    progress: float = 0.0,
) -> EvaluateResult:
    """`success` × reached the goal + `spl` × path efficiency + `progress` × share of the way covered.

    With `progress`, each step's reward is `progress` × the share of the way it covered, so that a step back is worth less than nothing.
    """
    weights = {"success": success, "spl": spl}
    for name, weight in weights.items():
        if weight and name not in metrics:
            return EvaluateResult(error=f"the environment reports no {name}; set the parameter `{name}` to 0")
    shares = _progress(metrics, infos)
    if progress and shares is None:
        return EvaluateResult(
            error=f"the environment reports no {_DISTANCE}; set the parameter `progress` to 0"
        )
    covered = sum(shares or ())
    score = sum(weight * metrics.get(name, 0.0) for name, weight in weights.items()) + progress * covered
    reported = {name: metrics[name] for name in ("success", "spl", "soft_spl", _DISTANCE) if name in metrics}
    steps = [
        StepOutput(step_index=index, base_reward=progress * share) for index, share in enumerate(shares or ())
    ]
    return EvaluateResult(
        score=score,
        metrics=as_metrics({**reported, "progress": covered}),
        # Without a say about progress there is nothing to say about steps; zeros would be an opinion.
        step_outputs=steps if progress else None,
    )


def _progress(metrics: dict[str, float], infos: list[dict[str, Json]]) -> list[float] | None:
    """The share of the initial distance that each step covered; None when distances are not known."""
    reported = [info.get(_DISTANCE) for info in infos] + [metrics.get(_DISTANCE)]
    distances = [float(distance) for distance in reported if isinstance(distance, (int, float))]
    if len(distances) != len(reported):
        return None
    start = distances[0]
    if start <= 0:
        return [0.0] * len(infos)
    return [(before - after) / start for before, after in pairwise(distances)]


@reward_function(name="vsibench")
def vsibench_reward(
    messages: list[dict[str, Json]],
    ground_truth: Json,
    task: Json,
    question_type: str | None = None,
    extract: str | None = None,
) -> EvaluateResult:
    """MCA or MRA of the last answer. An answer may be text, or a JSON action with an `answer`.

    The truth is a string, or a mapping with `answer` and `question_type`; the task may name the `question_type` too.
    """
    truth, kind = ground_truth, question_type
    if isinstance(ground_truth, dict):
        truth = ground_truth.get("answer")
        kind = kind or ground_truth.get("question_type")
    kind = kind or (task or {}).get("data", {}).get("question_type")
    if truth is None or kind is None:
        return EvaluateResult(error="the task names no answer and question_type to compare with")
    answer = final_answer(messages, extract)
    if answer is None:
        return EvaluateResult(score=0.0, reason="no answer found")
    said = [str(found["answer"]) for found in find_objects(answer) if found.get("answer") is not None]
    answer = said[-1] if said else answer
    try:
        found = score_answer(answer, str(truth), str(kind))
    except RewardError as error:
        return EvaluateResult(error=str(error))
    return EvaluateResult(
        score=found.score,
        metrics=as_metrics({"official": found.official}),
        reason=f"said {answer[:80]!r}",
    )
