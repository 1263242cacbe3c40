"""What would have happened: goes back to a turn of a stored episode and samples other continuations from there.

The first K turns of a branch are the stored ones, token for token; from turn K on the policy samples anew. The environment is
brought back by its own snapshot when it can make one, else by taking the stored actions again from the task's seed.
Either way it must show what it showed then, or the branch is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from turnwise.advantages import step_returns
from turnwise.config import CreditConfig
from turnwise.credit import turn_rewards
from turnwise.environment import Environment, EnvironmentSpec, Restorable, TaskSource
from turnwise.errors import CreditError, EnvironmentFailure
from turnwise.policy import Policy, Request, TokenEvent
from turnwise.rewards.arguments import plain_message
from turnwise.rollout import Rollouts, collect_groups
from turnwise.state_keys import encode_state_key
from turnwise.types import (
    Action,
    Completion,
    Episode,
    Group,
    Json,
    KeptSets,
    Message,
    Observation,
    Role,
    Score,
    Task,
    Transition,
    Turn,
)


class ValueEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a state is worth, as the mean return of continuations from it."""

    episode_id: str
    turn_index: int
    value: float | None
    """None when no branch could be scored."""
    standard_error: float | None
    """None with fewer than two returns."""
    gamma: float
    returns: tuple[float, ...]
    branch_ids: tuple[str, ...]
    """The episodes the returns belong to."""
    original_return: float | None
    """What the stored episode got from this turn on."""
    policy_version: int
    is_restored: bool
    """True when the environment's snapshot was used, False when the actions were taken again."""


async def branch_episode(
    episode: Episode, rollouts: Rollouts, *, turn: int, num: int, label: str | None = None
) -> tuple[Group, bool]:
    """`num` continuations of `episode` from its turn `turn` on, and whether a snapshot was used.

    Their ids start with `label` and fix what is sampled: another label gives other continuations.
    """
    if not 0 <= turn < episode.num_turns:
        raise CreditError(
            f"episode {episode.episode_id} has turns 0 to {episode.num_turns - 1}; it cannot be branched at turn {turn}"
        )
    if num < 1:
        raise CreditError(f"{num} branches were asked for; at least 1 is needed")
    snapshot = await asyncio.to_thread(go_back, rollouts.environment.make(), episode, turn)
    config = rollouts.config.model_copy(
        # A branch may go on as long as the stored episode could.
        update={"group_size": num, "max_turns": max(rollouts.config.max_turns, episode.num_turns)}
    )
    branches = msgspec.structs.replace(
        rollouts,
        config=config,
        agent=msgspec.structs.replace(
            rollouts.agent, policy=ReplayPolicy(rollouts.agent.policy, episode, turn)
        ),
        environment=BranchedEnvironments(rollouts.environment, episode, turn, snapshot),
    )
    (group,) = await collect_groups([episode.task], branches, label=label or f"{episode.episode_id}-t{turn}")
    return group, snapshot is not None


def estimate_value(
    episode: Episode,
    branches: Group,
    scores: Mapping[str, Score],
    config: CreditConfig,
    *,
    turn: int,
    is_restored: bool = False,
) -> ValueEstimate:
    """The mean return from `turn` on over the branches that were scored; `scores` may hold the stored episode's too."""
    gamma = 1.0 if config.gamma is None else config.gamma
    returns = {
        branch.episode_id: _return_from(branch, scores[branch.episode_id], config, gamma, turn)
        for branch in branches.episodes
        if branch.num_turns > turn and branch.failure is None and scores[branch.episode_id].score is not None
    }
    own = scores.get(episode.episode_id)
    values = list(returns.values())
    return ValueEstimate(
        episode_id=episode.episode_id,
        turn_index=turn,
        value=float(np.mean(values)) if values else None,
        standard_error=float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None,
        gamma=gamma,
        returns=tuple(values),
        branch_ids=tuple(returns),
        original_return=None
        if own is None or own.score is None
        else _return_from(episode, own, config, gamma, turn),
        policy_version=max((branch.turns[turn].policy_version for branch in branches.episodes if branch.num_turns > turn), default=0),
        is_restored=is_restored,
    )  # fmt: skip


def _return_from(episode: Episode, score: Score, config: CreditConfig, gamma: float, turn: int) -> float:
    paid = turn_rewards(episode, score, config)[turn:]
    return float(step_returns([0] * len(paid), paid, gamma=gamma)[0])


def preference_pairs(episode: Episode, branches: Group, estimate: ValueEstimate) -> list[dict[str, Json]]:
    """The best answer at the branched turn beside each worse one, in the form DPO trainers read.

    An answer is worth the mean return of the branches that gave it, so a lucky continuation alone does not win.
    """
    turn = estimate.turn_index
    returns_of: dict[str, list[float]] = {}
    by_id = {branch.episode_id: branch for branch in branches.episodes}
    for name, value in zip(estimate.branch_ids, estimate.returns, strict=True):
        returns_of.setdefault(by_id[name].turns[turn].text, []).append(value)
    worth = {answer: float(np.mean(values)) for answer, values in returns_of.items()}
    if not worth:
        return []
    best = max(worth, key=lambda answer: (worth[answer], len(returns_of[answer])))
    prompt = [plain_message(message) for message in _spoken_before(episode, turn)]
    return [
        {
            "prompt": prompt,
            "chosen": [{"role": "assistant", "content": best}],
            "rejected": [{"role": "assistant", "content": answer}],
            "chosen_return": worth[best],
            "rejected_return": worth[answer],
            "num_chosen": len(returns_of[best]),
            "num_rejected": len(returns_of[answer]),
            "episode_id": episode.episode_id,
            "turn_index": turn,
        }
        for answer in worth
        if worth[answer] < worth[best]
    ]


def _spoken_before(episode: Episode, turn: int) -> list[Message]:
    spoken: list[Message] = []
    for earlier in episode.turns[:turn]:
        spoken.extend(earlier.observation.messages)
        spoken.append(Message(role=Role.ASSISTANT, content=earlier.text))
    spoken.extend(episode.turns[turn].observation.messages)
    return spoken


class ReplayPolicy:
    """Gives the stored completions of an episode's first turns, then asks the real policy."""

    def __init__(self, policy: Policy, episode: Episode, num_turns: int) -> None:
        self._policy = policy
        self._stored = [
            stored_completion(turn, is_token_exact=episode.is_token_exact)
            for turn in episode.turns[:num_turns]
        ]
        self.version = policy.version

    async def complete(
        self, request: Request, *, on_token: Callable[[TokenEvent], None] | None = None
    ) -> Completion:
        *_, turn_index = request.seed
        if turn_index < len(self._stored):
            return self._stored[turn_index]
        return await self._policy.complete(request, on_token=on_token)

    async def release(self, stream_id: str) -> None:
        await self._policy.release(stream_id)

    async def load_weights(self, weights: Mapping[str, Any], version: int) -> str:
        return await self._policy.load_weights(weights, version)

    async def close(self) -> None:
        await self._policy.close()


def stored_completion(turn: Turn, *, is_token_exact: bool = True) -> Completion:
    """What the policy returned for a stored turn."""
    stream = turn.stream
    kept = None
    if stream.kept is not None:
        first = int(stream.is_sampled[: turn.completion_start].sum())
        kept = KeptSets.from_rows([stream.kept.row(first + i) for i in range(len(turn.generated_ids))])
    return Completion(
        completion_ids=turn.generated_ids,
        logprobs=turn.logprobs,
        text=turn.text,
        finish_reason=turn.finish_reason,
        policy_version=turn.policy_version,
        kept=kept,
        banned_ids=stream.banned_ids,
        is_token_exact=is_token_exact,
    )


def go_back(environment: Environment, episode: Episode, turn: int) -> bytes | None:
    """Take the stored actions up to `turn`, compare what is seen, and make a snapshot if the environment can."""
    try:
        observation = environment.reset(episode.task)
        _check_same(episode, 0, observation)
        for stored in episode.turns[:turn]:
            transition = environment.step(stored.action)
            _check_same(episode, stored.turn_index + 1, transition.observation)
        return environment.snapshot() if isinstance(environment, Restorable) else None
    finally:
        environment.close()


def _check_same(episode: Episode, turn: int, seen: Observation) -> None:
    stored = episode.turns[turn].observation
    is_same = seen.messages == stored.messages and encode_state_key(seen.state_key) == encode_state_key(
        stored.state_key
    )
    if not is_same:
        raise EnvironmentFailure(
            f"the environment does not repeat episode {episode.episode_id}: at turn {turn} it shows {seen.text!r:.120} instead of "
            f"{stored.text!r:.120}; branching needs an environment whose seed fixes everything, or one with snapshot and restore"
        )


class BranchedEnvironments:
    """Makes environments that stand at the branched turn once the stored actions were taken."""

    def __init__(self, spec: EnvironmentSpec, episode: Episode, turn: int, snapshot: bytes | None) -> None:
        self._spec = spec
        self._episode = episode
        self._turn = turn
        self._snapshot = snapshot

    @property
    def tasks(self) -> TaskSource:
        return self._spec.tasks

    def make(self) -> Environment:
        environment = self._spec.make()
        if self._snapshot is None or not isinstance(environment, Restorable):
            return environment
        return _RestoredEnvironment(environment, self._episode.turns[: self._turn + 1], self._snapshot)


class _RestoredEnvironment:
    """Shows the stored turns from memory, then goes on from a snapshot."""

    def __init__(self, environment: Environment, turns: Sequence[Turn], snapshot: bytes) -> None:
        self._environment = environment
        self._turns = turns
        self._snapshot = snapshot
        self._position = 0

    @property
    def action_schema(self) -> dict[str, Json] | None:
        return self._environment.action_schema

    def reset(self, task: Task) -> Observation:
        self._position = 0
        # Some environments load what a snapshot refers to when they are reset.
        self._environment.reset(task)
        if len(self._turns) == 1:
            self._restore()
        return self._turns[0].observation

    def step(self, action: Action) -> Transition:
        self._position += 1
        if self._position >= len(self._turns):
            return self._environment.step(action)
        stored = self._turns[self._position - 1]
        if self._position == len(self._turns) - 1:
            self._restore()
        return Transition(
            observation=self._turns[self._position].observation,
            reward=stored.reward,
            is_action_valid=stored.is_action_valid,
            metrics=stored.metrics,
        )

    def close(self) -> None:
        self._environment.close()

    def _restore(self) -> None:
        assert isinstance(self._environment, Restorable)
        self._environment.restore(self._snapshot)
