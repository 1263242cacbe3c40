"""Produces episodes: an agent acts in environments, many at once, and whatever happens is recorded.

A failed episode is data: it keeps the turns it had, a stop reason and the stage that raised, and its
siblings go on without it.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from turnwise.config import RolloutConfig
from turnwise.environment import Environment, EnvironmentSpec, action_keys
from turnwise.errors import ContextOverflowError, EnvironmentFailure
from turnwise.masking import ActionTokenMasker, TurnMask
from turnwise.policy import Policy, Request
from turnwise.renderer import Renderer
from turnwise.streams import Conversation
from turnwise.types import (
    Completion,
    Episode,
    Failure,
    Group,
    Observation,
    StopReason,
    Task,
    Transition,
    Turn,
)

log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    """What turns messages into actions: a renderer, a policy, and a masker that finds the action."""

    policy: Policy
    renderer: Renderer
    masker: ActionTokenMasker


class Rollouts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that stays the same from one batch of episodes to the next."""

    agent: Agent
    environment: EnvironmentSpec
    config: RolloutConfig
    seed: int = 0
    environment_timeout_s: float = 60.0


class TurnBarrier:
    """Holds each episode at the start of its turn until all that are still going have arrived.

    The policy then sees the same batch every time, so the same seed gives the same bits.
    """

    def __init__(self, num_episodes: int) -> None:
        self._active = num_episodes
        self._waiting = 0
        self._gate = asyncio.Event()

    async def wait(self) -> None:
        gate = self._gate
        self._waiting += 1
        self._open_if_complete()
        await gate.wait()

    def leave(self) -> None:
        self._active -= 1
        self._open_if_complete()

    def _open_if_complete(self) -> None:
        if self._waiting and self._waiting >= self._active:
            self._gate.set()
            self._gate = asyncio.Event()
            self._waiting = 0


async def collect_groups(
    tasks: Sequence[Task],
    rollouts: Rollouts,
    *,
    label: str,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Group]:
    """`group_size` episodes of each task. Episode ids start with `label`, which must be new within the run."""
    config = rollouts.config
    plan = [
        (task, f"{label}-g{t:03d}", f"{label}-g{t:03d}-e{e:02d}")
        for t, task in enumerate(tasks)
        for e in range(config.group_size)
    ]
    finished: dict[str, Episode] = {}
    for attempt in range(config.max_retries + 1):
        open_plan = [item for item in plan if item[2] not in finished]
        for episode in await _run_all(open_plan, rollouts, attempt):
            if not _is_worth_retrying(episode) or attempt == config.max_retries:
                finished[episode.episode_id] = episode
                if on_episode is not None:
                    on_episode(episode)
    return [
        Group(group_id=group_id, task=task, episodes=tuple(finished[item[2]] for item in items))
        for (group_id, task), items in _by_group(plan)
    ]


def _by_group(
    plan: list[tuple[Task, str, str]],
) -> list[tuple[tuple[str, Task], list[tuple[Task, str, str]]]]:
    grouped = itertools.groupby(plan, key=lambda item: item[1])
    return [((items[0][1], items[0][0]), items) for items in (list(members) for _, members in grouped)]


def _is_worth_retrying(episode: Episode) -> bool:
    # The same seed would sample the same tokens, so an action that could not be found stays unfound.
    return episode.failure is not None and episode.failure.stage != "mask"


async def _run_all(plan: list[tuple[Task, str, str]], rollouts: Rollouts, attempt: int) -> list[Episode]:
    config = rollouts.config
    with ThreadPoolExecutor(max_workers=min(32, config.max_concurrent)) as threads:
        if config.schedule == "lockstep":
            # Waves of fixed membership, so that nobody's speed decides who shares a batch with whom.
            episodes: list[Episode] = []
            for first in range(0, len(plan), config.max_concurrent):
                wave = plan[first : first + config.max_concurrent]
                barrier = TurnBarrier(len(wave))
                episodes += await asyncio.gather(
                    *(_run_planned(item, rollouts, threads, attempt, barrier) for item in wave)
                )
            return episodes
        places = asyncio.Semaphore(config.max_concurrent)

        async def run_in_place(item: tuple[Task, str, str]) -> Episode:
            async with places:
                return await _run_planned(item, rollouts, threads, attempt, None)

        return list(await asyncio.gather(*(run_in_place(item) for item in plan)))


async def _run_planned(
    item: tuple[Task, str, str],
    rollouts: Rollouts,
    threads: ThreadPoolExecutor,
    attempt: int,
    barrier: TurnBarrier | None,
) -> Episode:
    task, group_id, episode_id = item
    try:
        return await run_episode(
            rollouts,
            task,
            episode_id=episode_id,
            group_id=group_id,
            threads=threads,
            num_retries=attempt,
            barrier=barrier,
        )
    finally:
        if barrier is not None:
            barrier.leave()


async def run_episode(
    rollouts: Rollouts,
    task: Task,
    *,
    episode_id: str,
    group_id: str,
    threads: ThreadPoolExecutor | None = None,
    num_retries: int = 0,
    barrier: TurnBarrier | None = None,
    environment: Environment | None = None,
) -> Episode:
    """Play one task to its end. Never raises for what goes wrong inside the episode."""
    rollout = _Rollout(rollouts, task, episode_id, group_id, threads, barrier)
    started_at = time.time()
    stop_reason, failure = StopReason.MAX_TURNS, None
    try:
        stop_reason = await rollout.play(environment)
    except ContextOverflowError as error:
        log.info("episode %s: %s", episode_id, error)
        stop_reason = StopReason.CONTEXT_FULL
    except Exception as error:  # noqa: BLE001  (whatever a stage raises is recorded as this episode's outcome)
        failure = Failure(
            stage=rollout.stage, error=f"{type(error).__name__}: {error}", turn_index=len(rollout.outcomes)
        )
        stop_reason = StopReason.FAILED
        log.warning("episode %s failed in %s: %s", episode_id, failure.stage, failure.error)
    finally:
        await rollout.clean_up()
    return rollout.freeze(stop_reason, failure, num_retries, started_at)


class _Rollout:
    """One episode under way."""

    def __init__(
        self,
        rollouts: Rollouts,
        task: Task,
        episode_id: str,
        group_id: str,
        threads: ThreadPoolExecutor | None,
        barrier: TurnBarrier | None,
    ) -> None:
        self.rollouts = rollouts
        self.task = task
        self.episode_id = episode_id
        self.group_id = group_id
        self.threads = threads
        self.barrier = barrier
        self.conversation = Conversation(rollouts.agent.renderer)
        self.outcomes: list[tuple[Observation, Completion, TurnMask, Transition]] = []
        self.stage = "reset"
        self.action_keys: frozenset[str] = frozenset()
        self._seed = episode_seed(episode_id)
        self._environment: Environment | None = None
        self._stream_ids: set[str] = set()

    async def play(self, environment: Environment | None) -> StopReason:
        if environment is None:
            environment = self._environment = await self._off_loop(self.rollouts.environment.make)
        observation = await self._off_loop(environment.reset, self.task)
        if not isinstance(observation, Observation):
            raise EnvironmentFailure(
                f"reset returned a {type(observation).__name__}; it must return an Observation"
            )
        schema = environment.action_schema
        self.action_keys = action_keys(schema)
        for turn_index in range(self.rollouts.config.max_turns):
            self.stage = "render"
            self.conversation.observe(observation.messages)
            completion = await self._sample(turn_index, schema)
            self.stage = "mask"
            mask = self.rollouts.agent.masker.mask(completion.completion_ids, self.action_keys)
            self.stage = "step"
            transition = await self._off_loop(environment.step, mask.action)
            _check_transition(transition)
            self.outcomes.append((observation, completion, mask, transition))
            if transition.is_terminal:
                return StopReason.TERMINAL
            observation = transition.observation
        return StopReason.MAX_TURNS

    async def _sample(self, turn_index: int, schema: dict[str, Any] | None) -> Completion:
        self.stage = "sample"
        if self.barrier is not None:
            await self.barrier.wait()
        stream_id = f"{self.episode_id}/{self.conversation.stream_index}"
        self._stream_ids.add(stream_id)
        request = Request(
            stream_id=stream_id,
            group_id=self.group_id,
            prompt_ids=self.conversation.prompt_ids,
            images=self.conversation.images,
            messages=self.conversation.messages,
            sampling=self.rollouts.config.sampling(),
            seed=(self.rollouts.seed, self._seed, turn_index),
            action_schema=schema,
            deadline_s=self.rollouts.config.turn_timeout_s,
        )
        completion = await self.rollouts.agent.policy.complete(request)
        self.conversation.answer(completion)
        return completion

    async def _off_loop(self, call: Callable[..., _Result], *args: Any) -> _Result:
        """Run environment code in a thread, with a deadline."""
        timeout_s = self.rollouts.environment_timeout_s
        future = asyncio.get_running_loop().run_in_executor(self.threads, call, *args)
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise EnvironmentFailure(f"{call.__qualname__} took longer than {timeout_s:g} s") from None

    async def clean_up(self) -> None:
        for stream_id in self._stream_ids:
            await self.rollouts.agent.policy.release(stream_id)
        if self._environment is not None:
            self._environment.close()

    def freeze(
        self, stop_reason: StopReason, failure: Failure | None, num_retries: int, started_at: float
    ) -> Episode:
        quality = self.rollouts.agent.masker.evaluate([mask for _, _, mask, _ in self.outcomes])
        if failure is None and not quality.is_valid and self.rollouts.config.drop_masking_failures:
            failure = Failure(stage="mask", error=quality.dropout_reason or "action tokens not found")
            stop_reason = StopReason.FAILED
        streams = self.conversation.streams()
        turns = []
        for index, (observation, completion, mask, transition) in enumerate(self.outcomes):
            span = self.conversation.spans[index]
            turns.append(
                Turn(
                    turn_index=index,
                    stream=streams[span.stream_index],
                    prompt_start=span.prompt_start,
                    completion_start=span.completion_start,
                    completion_end=span.completion_end,
                    observation=observation,
                    action=mask.action,
                    text=completion.text,
                    action_token_mask=mask.action_token_mask,
                    masking_method=mask.method,
                    masking_confidence=mask.confidence,
                    finish_reason=completion.finish_reason,
                    policy_version=completion.policy_version,
                    reward=transition.reward,
                    is_action_valid=transition.is_action_valid and mask.action.is_valid,
                    metrics=transition.metrics,
                )
            )
        return Episode(
            episode_id=self.episode_id,
            group_id=self.group_id,
            task=self.task,
            turns=tuple(turns),
            streams=streams,
            stop_reason=stop_reason,
            sampling=self.rollouts.config.sampling(),
            seed=self.rollouts.seed,
            failure=failure,
            num_retries=num_retries,
            metrics=dict(turns[-1].metrics) if turns else {},
            is_token_exact=all(completion.is_token_exact for _, completion, _, _ in self.outcomes),
            history=self.rollouts.config.history,
            action_keys=tuple(sorted(self.action_keys)),
            is_valid=failure is None and quality.is_valid,
            masking_quality=quality.masking_quality,
            dropout_reason=quality.dropout_reason,
            started_at=started_at,
            seconds=time.time() - started_at,
        )


def _check_transition(transition: Transition) -> None:
    """Environments are other people's code: what they return is checked before it becomes a fact."""
    if not isinstance(transition, Transition):
        raise EnvironmentFailure(f"step returned a {type(transition).__name__}; it must return a Transition")
    figures = {"reward": transition.reward, **transition.metrics}
    for name, value in figures.items():
        if not math.isfinite(value):
            raise EnvironmentFailure(f"step returned {name} {value}; it must be a finite number")


def episode_seed(episode_id: str) -> int:
    """A number that stands for this episode in random draws, whatever else runs beside it."""
    return int.from_bytes(hashlib.sha256(episode_id.encode()).digest()[:6], "big")
