"""Adds up several rewards' scores of one episode, and keeps each term visible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from turnwise.types import Score


def combine_scores(terms: Mapping[str, Score], weights: Mapping[str, float], name: str) -> Score:
    """The weighted sum of the terms' scores; unscored as soon as one term is.

    Step rewards are added turn by turn over the terms that gave any. Each term's score is the metric of its name,
    and its own metrics follow as `term/metric`.
    """
    first = next(iter(terms.values()))
    metrics: dict[str, float] = {}
    for term, score in terms.items():
        if score.score is not None:
            metrics[term] = score.score
        metrics.update({f"{term}/{metric}": value for metric, value in score.metrics.items()})
    errors = [f"{term}: {score.error or 'no score'}" for term, score in terms.items() if score.score is None]
    total = None
    if not errors:
        total = sum(weights[term] * score.score for term, score in terms.items() if score.score is not None)
    return Score(
        episode_id=first.episode_id,
        reward_name=name,
        score=total,
        step_rewards=() if errors else _add_steps(terms, weights),
        metrics=metrics,
        reason="; ".join(f"{term}: {score.reason}" for term, score in terms.items() if score.reason),
        error="; ".join(errors) or None,
        sandbox=_weakest_sandbox([score.sandbox for score in terms.values()]),
    )


def _add_steps(terms: Mapping[str, Score], weights: Mapping[str, float]) -> tuple[float | None, ...]:
    rows = [(weights[term], score.step_rewards) for term, score in terms.items() if score.step_rewards]
    if not rows:
        return ()
    total: list[float | None] = [None] * len(rows[0][1])
    for weight, rewards in rows:
        for turn, reward in enumerate(rewards):
            if reward is not None:
                total[turn] = (total[turn] or 0.0) + weight * reward
    return tuple(total)


def _weakest_sandbox(tiers: Sequence[str]) -> str:
    """The tiers that user code ran in, if any did; built-ins need none."""
    return "+".join(sorted({tier for tier in tiers if tier != "none"})) or "none"
