"""Calls a reward with messages at hand, without episodes: for loops of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from turnwise.errors import RewardError
from turnwise.rewards.arguments import Arguments, check_params, plain
from turnwise.rewards.interface import EvaluateResult
from turnwise.rewards.score import Rewards
from turnwise.types import Json


async def evaluate_messages(
    rewards: Rewards,
    rollouts_messages: Sequence[Sequence[Mapping[str, Json]]],
    ground_truths: Sequence[Json] | None = None,
) -> list[EvaluateResult]:
    """One result per rollout, from the one reward in `rewards`; a call that fails gives a result with `error`.

    The rollouts are taken for one group: a batch reward sees them together, and their first truth as the group's.
    """
    if len(rewards.terms) != 1:
        raise RewardError(f"evaluate_messages calls one reward, not {len(rewards.terms)}; build one for each")
    truths = list(ground_truths) if ground_truths is not None else [None] * len(rollouts_messages)
    if len(truths) != len(rollouts_messages):
        raise RewardError(
            f"there are {len(truths)} ground truths for {len(rollouts_messages)} rollouts; give one per rollout"
        )
    term = rewards.terms[0]
    declaration = term.evaluator.declaration
    is_batch = declaration.mode == "batch"
    offered = ("ground_truth", "ground_truths") if is_batch else ("ground_truth",)
    check_params(declaration, term.params, offered=offered)
    wanted = [name for name in offered if name in declaration.accepted or declaration.accepts_any]
    if is_batch:
        values = {"ground_truth": truths[0] if truths else None, "ground_truths": truths}
        calls = [_call(list(rollouts_messages), {name: values[name] for name in wanted}, term.params)]
    else:
        calls = [
            _call(messages, dict.fromkeys(wanted, truth), term.params)
            for messages, truth in zip(rollouts_messages, truths, strict=True)
        ]
    outcomes = await term.evaluator.evaluate(calls if rollouts_messages else [])
    results: list[EvaluateResult] = []
    for outcome in outcomes:
        if outcome.error is not None:
            failed = EvaluateResult(error=outcome.error, is_score_valid=False)
            results += [failed] * (len(rollouts_messages) if is_batch else 1)
        else:
            results += outcome.results
    return results


def _call(messages: Json, keywords: Mapping[str, Json], params: Mapping[str, Json]) -> Arguments:
    return Arguments(messages=plain(messages), keywords=plain({**keywords, **params}))
