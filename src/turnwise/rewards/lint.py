"""Audits a reward before it is trained on: what it pays for spoilt episodes, whether it repeats itself, crashes, is slow.

A finding is a reason to look. No finding is no promise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from turnwise.errors import RewardError
from turnwise.rewards.arguments import batch_arguments, pointwise_arguments
from turnwise.rewards.mutations import MUTATIONS, mutate
from turnwise.rewards.score import Rewards, Term, group_episodes, score_terms
from turnwise.types import (
    Action,
    Episode,
    FinishReason,
    Group,
    Json,
    MaskingMethod,
    Message,
    Observation,
    Role,
    SamplingParams,
    Score,
    StopReason,
    Task,
    TokenStream,
    Turn,
)

_TOLERANCE = 1e-6
_SLOW_S = 1.0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a reward does and should not."""

    kind: str
    """exploit, crash, nondeterminism, slow or constant."""
    mutation: str
    """What was done to the episodes; "none" when they were left as they were."""
    count: int
    """In how many episodes."""
    gain: float | None = None
    """For exploits: the most that an episode earned by being spoilt."""
    detail: str = ""
    episode_id: str = ""
    """Where to look."""


class LintReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the audit saw."""

    reward: str
    sandbox: str
    num_episodes: int
    num_calls: int
    findings: tuple[Finding, ...]
    mean_score: float | None
    gains: dict[str, float]
    """The mean change of score by each mutation, over the episodes that could be scored both times."""
    ms_per_call: float
    max_ms_per_call: float


async def lint_reward(rewards: Rewards, episodes: Sequence[Episode], *, repeats: int = 3) -> LintReport:
    """Score the episodes as they are, again, and spoilt in every way known; `rewards` holds one term."""
    if len(rewards.terms) != 1:
        raise RewardError(f"lint audits one reward at a time, not {len(rewards.terms)}")
    term = rewards.terms[0]
    groups = group_episodes(episodes)
    runs = [(await score_terms(groups, rewards))[term.name] for _ in range(max(2, repeats))]
    honest = runs[0]
    findings = [*_crashes(honest, "none"), *_changes(runs), *_constancy(honest)]
    gains: dict[str, float] = {}
    num_calls = len(runs) * len(episodes)
    for name in MUTATIONS:
        spoilt_groups, origins = _spoil(groups, name)
        scores = (await score_terms(spoilt_groups, rewards))[term.name]
        spoilt = {origin: scores[episode_id] for episode_id, origin in origins.items()}
        num_calls += len(spoilt)
        findings += _crashes(spoilt, name, besides=honest)
        gain, exploit = _exploit(honest, spoilt, name)
        if gain is not None:
            gains[name] = gain
        findings += exploit
    times = await _time_calls(term, groups)
    if max(times) > _SLOW_S:
        findings.append(
            Finding(
                kind="slow",
                mutation="none",
                count=sum(t > _SLOW_S for t in times),
                detail=f"{max(times):.1f} s",
            )
        )
    known = [score.score for score in honest.values() if score.score is not None]
    return LintReport(
        reward=term.name,
        sandbox=term.evaluator.tier,
        num_episodes=len(episodes),
        num_calls=num_calls + len(times),
        findings=tuple(findings),
        mean_score=statistics.fmean(known) if known else None,
        gains=gains,
        ms_per_call=1000 * statistics.median(times),
        max_ms_per_call=1000 * max(times),
    )


def _spoil(groups: Sequence[Group], name: str) -> tuple[list[Group], dict[str, str]]:
    """Each episode spoilt, among its siblings as they were: one group per episode, so that batch rewards compare too."""
    spoilt, origins = [], {}
    for group in groups:
        for index, episode in enumerate(group.episodes):
            changed = mutate(episode, name, seed=index)
            siblings = [
                changed
                if other is episode
                else msgspec.structs.replace(
                    other, episode_id=f"{other.episode_id} beside {changed.episode_id}"
                )
                for other in group.episodes
            ]
            origins[changed.episode_id] = episode.episode_id
            spoilt.append(msgspec.structs.replace(group, episodes=tuple(siblings)))
    return spoilt, origins


def _crashes(
    scores: dict[str, Score], mutation: str, besides: dict[str, Score] | None = None
) -> list[Finding]:
    """Episodes without a score; those that had none before being spoilt are not counted again."""
    failed = {
        name: score
        for name, score in scores.items()
        if score.score is None and (besides is None or besides[name].score is not None)
    }
    reasons: dict[str, list[str]] = {}
    for name, score in failed.items():
        reasons.setdefault(str(score.error)[:200], []).append(name)
    return [
        Finding(kind="crash", mutation=mutation, count=len(names), detail=reason, episode_id=names[0])
        for reason, names in reasons.items()
    ]


def _changes(runs: Sequence[dict[str, Score]]) -> list[Finding]:
    differing = [
        name
        for name in runs[0]
        if len({(run[name].score, run[name].step_rewards, run[name].error) for run in runs}) > 1
    ]
    if not differing:
        return []
    values = [run[differing[0]].score for run in runs]
    return [
        Finding(
            kind="nondeterminism",
            mutation="none",
            count=len(differing),
            detail=f"the same episode got {', '.join(map(str, values))}",
            episode_id=differing[0],
        )
    ]


def _constancy(honest: dict[str, Score]) -> list[Finding]:
    known = {score.score for score in honest.values() if score.score is not None}
    if len(known) != 1 or len(honest) < 3:
        return []
    detail = f"every episode got {known.pop()}: there is nothing to learn from these"
    return [Finding(kind="constant", mutation="none", count=len(honest), detail=detail)]


def _exploit(
    honest: dict[str, Score], spoilt: dict[str, Score], name: str
) -> tuple[float | None, list[Finding]]:
    """The mean gain by being spoilt, and a finding when any episode gained."""
    gains = {
        episode_id: after.score - before.score
        for episode_id, before in honest.items()
        if before.score is not None and (after := spoilt[episode_id]).score is not None
    }
    if not gains:
        return None, []
    mean = statistics.fmean(gains.values())
    winners = {episode_id: gain for episode_id, gain in gains.items() if gain > _TOLERANCE}
    if not winners:
        return mean, []
    best = max(winners, key=lambda episode_id: winners[episode_id])
    detail = f"{honest[best].score:.4g} became {spoilt[best].score:.4g}"
    finding = Finding(
        kind="exploit", mutation=name, count=len(winners), gain=winners[best], detail=detail, episode_id=best
    )
    return mean, [finding]


async def _time_calls(term: Term, groups: Sequence[Group]) -> list[float]:
    """Seconds of single calls, one after another."""
    declaration = term.evaluator.declaration
    if declaration.mode == "batch":
        calls = [batch_arguments(group.episodes, declaration, term.params) for group in groups]
    else:
        calls = [
            pointwise_arguments(episode, declaration, term.params)
            for group in groups
            for episode in group.episodes
        ]
    times = []
    for call in calls:
        started = time.perf_counter()
        await term.evaluator.evaluate([call])
        times.append(time.perf_counter() - started)
    return times


def sample_episodes(ground_truth: Json = None) -> list[Episode]:
    """A few plain conversations to lint with when there is no run: right, wrong, long, short and in several turns."""
    truth = "Paris" if ground_truth is None else ground_truth
    conversations = [
        [("What is the capital of France?", f"The capital of France is {truth}.")],
        [("What is the capital of France?", "I believe it is Lyon, a city on the river Rhône.")],
        [("What is the capital of France?", str(truth))],
        [
            (
                "Find the capital of France; you may look it up.",
                'I look it up: {"tool": "search", "query": "France"}',
            ),
            ("The tool says: France, capital Paris.", f'{{"answer": "{truth}"}}'),
        ],
        [
            ("Find the capital of France; you may look it up.", '{"tool": "search", "query": "weather"}'),
            ("The tool says: error.", '{"tool": "search", "query": "France capital"}'),
            ("The tool says: France, capital Paris.", '{"answer": "Lyon"}'),
        ],
    ]
    task = Task(task_id="sample", ground_truth=truth)
    return [_conversation(index, talk, task) for index, talk in enumerate(conversations)]


def _conversation(index: int, talk: list[tuple[str, str]], task: Task) -> Episode:
    stream = TokenStream(
        ids=np.zeros(0, dtype=np.int32),
        is_sampled=np.zeros(0, dtype=bool),
        logprobs=np.zeros(0, dtype=np.float32),
    )
    turns = tuple(
        Turn(
            turn_index=ordinal,
            stream=stream,
            prompt_start=0,
            completion_start=0,
            completion_end=0,
            observation=Observation(messages=(Message(role=Role.USER, content=question),)),
            action=Action(value=None),
            text=answer,
            action_token_mask=np.zeros(0, dtype=bool),
            masking_method=MaskingMethod.FAILED,
            masking_confidence=0.0,
            finish_reason=FinishReason.END,
            policy_version=0,
        )
        for ordinal, (question, answer) in enumerate(talk)
    )
    return Episode(
        episode_id=f"sample-{index}",
        group_id="sample",
        task=task,
        turns=turns,
        streams=(stream,),
        stop_reason=StopReason.TERMINAL,
        sampling=SamplingParams(),
    )
