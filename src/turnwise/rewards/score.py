"""From groups of episodes to scores: calls each reward, aligns what it said, adds the terms up.

An episode that failed, or that a reward could not score, gets `score=None` and a reason. It is never 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

import msgspec

from turnwise.config import RewardConfig, RewardsConfig
from turnwise.errors import RewardError
from turnwise.rewards.align import align_step_rewards, episode_score, turn_message_indices
from turnwise.rewards.arguments import batch_arguments, pointwise_arguments
from turnwise.rewards.combine import combine_scores
from turnwise.rewards.evaluators import Evaluator, Outcome
from turnwise.rewards.interface import EvaluateResult
from turnwise.rewards.loading import load_evaluator
from turnwise.types import Episode, Group, Json, Score, StopReason


class Term(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One reward of several, and how much it counts."""

    name: str
    weight: float
    params: dict[str, Json]
    evaluator: Evaluator


class Rewards:
    """The rewards of a run, ready to be called; `close` ends the processes they run in."""

    def __init__(self, terms: Sequence[Term]) -> None:
        if not terms:
            raise RewardError("there is no reward function; rewards.functions needs at least one")
        names = [term.name for term in terms]
        for name in names:
            if names.count(name) > 1:
                raise RewardError(
                    f"two rewards are called {name!r}; their metrics could not be told apart, give one a label"
                )
        self.terms = tuple(terms)

    @property
    def name(self) -> str:
        """The one term's name, or `combined`."""
        return self.terms[0].name if len(self.terms) == 1 else "combined"

    def close(self) -> None:
        for term in self.terms:
            term.evaluator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def build_rewards(config: RewardsConfig) -> Rewards:
    """Load every reward the config names; user code is started in its sandbox, so that mistakes show now."""
    terms: list[Term] = []
    try:
        terms.extend(_build_term(function, config) for function in config.functions)
        return Rewards(terms)
    except BaseException:
        for term in terms:
            term.evaluator.close()
        raise


def _build_term(function: RewardConfig, config: RewardsConfig) -> Term:
    evaluator = load_evaluator(function, config)
    return Term(
        name=function.label or evaluator.declaration.name,
        weight=function.weight,
        params=dict(function.params),
        evaluator=evaluator,
    )


async def score_groups(groups: Sequence[Group], rewards: Rewards) -> dict[str, Score]:
    """Each episode's weighted score, by episode id."""
    terms = await score_terms(groups, rewards)
    episodes = [episode for group in groups for episode in group.episodes]
    if len(rewards.terms) == 1 and rewards.terms[0].weight == 1.0:
        return terms[rewards.name]
    weights = {term.name: term.weight for term in rewards.terms}
    return {
        episode.episode_id: combine_scores(
            {name: scores[episode.episode_id] for name, scores in terms.items()}, weights, rewards.name
        )
        for episode in episodes
    }


async def score_terms(groups: Sequence[Group], rewards: Rewards) -> dict[str, dict[str, Score]]:
    """Each reward's own scores: by reward name, then by episode id."""
    ids = [episode.episode_id for group in groups for episode in group.episodes]
    if len(set(ids)) != len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise RewardError(f"episode id {twice} appears twice; scores are kept by episode id")
    scored = await asyncio.gather(*(_score_term(groups, term) for term in rewards.terms))
    return {term.name: scores for term, scores in zip(rewards.terms, scored, strict=True)}


async def score_run(episodes: Iterable[Episode], rewards: Rewards) -> list[Score]:
    """Scores for stored episodes, in their order; batch rewards see the episodes of a group together."""
    episodes = list(episodes)
    scores = await score_groups(group_episodes(episodes), rewards)
    return [scores[episode.episode_id] for episode in episodes]


def group_episodes(episodes: Iterable[Episode]) -> list[Group]:
    """Episodes put back into their groups, in order of first appearance."""
    members: dict[str, list[Episode]] = {}
    for episode in episodes:
        members.setdefault(episode.group_id, []).append(episode)
    return [
        Group(group_id=group_id, task=found[0].task, episodes=tuple(found))
        for group_id, found in members.items()
    ]


async def _score_term(groups: Sequence[Group], term: Term) -> dict[str, Score]:
    """One reward over all groups; failed episodes are not shown to it."""
    declaration = term.evaluator.declaration
    scores: dict[str, Score] = {}
    batches: list[tuple[Episode, ...]] = []
    for group in groups:
        alive = tuple(episode for episode in group.episodes if _failure(episode) is None)
        for episode in group.episodes:
            reason = _failure(episode)
            if reason is not None:
                scores[episode.episode_id] = _unscored(episode, term, reason)
        if declaration.mode == "pointwise":
            batches.extend((episode,) for episode in alive)
        elif alive:
            batches.append(alive)
    calls = [
        pointwise_arguments(batch[0], declaration, term.params)
        if declaration.mode == "pointwise"
        else batch_arguments(batch, declaration, term.params)
        for batch in batches
    ]
    outcomes = await term.evaluator.evaluate(calls)
    for batch, outcome in zip(batches, outcomes, strict=True):
        for index, episode in enumerate(batch):
            scores[episode.episode_id] = _score_of(episode, term, outcome, index)
    return scores


def _score_of(episode: Episode, term: Term, outcome: Outcome, index: int) -> Score:
    if outcome.error is not None:
        return _unscored(episode, term, outcome.error)
    result = outcome.results[index]
    try:
        return _score_of_result(episode, term, result)
    except RewardError as error:
        return _unscored(episode, term, str(error))


def _score_of_result(episode: Episode, term: Term, result: EvaluateResult) -> Score:
    declaration = term.evaluator.declaration
    if result.error is not None or not result.is_score_valid:
        reason = result.error or result.reason or "the reward declared its score invalid"
        return _unscored(episode, term, reason)
    step_rewards = align_step_rewards(
        result,
        message_indices=turn_message_indices(episode),
        function=term.name,
        episode_id=episode.episode_id,
        step_index_kind=declaration.step_index_kind,
    )
    score = episode_score(
        result,
        function=term.name,
        episode_id=episode.episode_id,
        score_from_steps=declaration.score_from_steps,
    )
    return Score(
        episode_id=episode.episode_id,
        reward_name=term.name,
        score=score,
        step_rewards=step_rewards,
        metrics={name: metric.score for name, metric in result.metrics.items() if metric.is_score_valid},
        reason=result.reason,
        sandbox=term.evaluator.tier,
    )


def _unscored(episode: Episode, term: Term, reason: str) -> Score:
    return Score(
        episode_id=episode.episode_id,
        reward_name=term.name,
        score=None,
        error=reason,
        sandbox=term.evaluator.tier,
    )


def _failure(episode: Episode) -> str | None:
    """Why an episode is not for scoring, or None."""
    if episode.stop_reason is StopReason.CANCELLED:
        return "the episode was cancelled"
    if episode.failure is not None:
        return f"the episode failed in {episode.failure.stage}: {episode.failure.error}"
    if episode.stop_reason is StopReason.FAILED:
        return "the episode failed"
    if not episode.turns:
        return "the episode has no turns"
    return None
