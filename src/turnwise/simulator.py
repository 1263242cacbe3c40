"""`EpisodeSimulator`: a model plays episodes in an environment, called like any ordinary Python object.

It is the plain door to `rollout`: no config, no run folder, no event loop to care about.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

import msgspec

from turnwise.config import RolloutConfig
from turnwise.environment import Environment
from turnwise.errors import EnvironmentFailure
from turnwise.masking import ActionTokenMasker, MaskingStatistics
from turnwise.policy import Policy
from turnwise.renderer import Renderer
from turnwise.rollout import Agent, Rollouts, TurnBarrier, episode_seed, run_episode
from turnwise.types import Episode, Task

log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class PlannedEpisode(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An episode to be played: where, from what, and under which name."""

    environment: Environment
    task: Task
    episode_id: str


class EpisodeSimulator:
    """Plays episodes with a model.

    simulator = EpisodeSimulator(model, processor, temperature=0.8)
    episode = simulator.run_episode(env, env.get_random_pose(), "ep001")
    print(episode.is_valid, episode.masking_quality, episode.final_reward)
    """

    def __init__(
        self,
        model: Any,  # a transformers model, or a Policy
        processor: Any,  # a transformers processor, or a tokenizer for text models
        do_sample: bool = True,
        temperature: float = 1.0,
        top_p: float = 0.9,
        top_k: int = 50,
        min_action_tokens: int = 10,
        max_action_tokens: int = 100,
        *,
        max_turns: int = 10,
        max_new_tokens: int = 256,
        stop_at_action: bool = True,
        use_grammar: bool = False,
        history: Literal["keep", "fork", "error"] = "fork",
        seed: int = 0,
        environment_timeout_s: float = 60.0,
        kv_budget_mb: int = 2048,
    ) -> None:
        self.config = RolloutConfig(
            max_turns=max_turns, max_new_tokens=max_new_tokens, stop_at_action=stop_at_action, use_grammar=use_grammar,
            temperature=temperature if do_sample else 0.0, top_p=top_p if do_sample else 1.0,
            top_k=top_k if do_sample else 0, min_action_tokens=min_action_tokens,
            max_action_tokens=max_action_tokens, history=history, kv_budget_mb=kv_budget_mb,
        )  # fmt: skip
        tokenizer = getattr(processor, "tokenizer", processor)
        image_processor = getattr(processor, "image_processor", None)
        self._masker = ActionTokenMasker(
            tokenizer, min_action_tokens=min_action_tokens, max_action_tokens=max_action_tokens
        )
        self.policy = _as_policy(model, tokenizer, image_processor, kv_budget_mb)
        renderer = Renderer(tokenizer, image_processor=image_processor, history=history)
        self._rollouts = Rollouts(
            agent=Agent(policy=self.policy, renderer=renderer, masker=self._masker),
            environment=_NoEnvironments(),
            config=self.config,
            seed=seed,
            environment_timeout_s=environment_timeout_s,
        )
        self._numbers = itertools.count()
        self._loop = _BackgroundLoop()

    def run_episode(
        self,
        env: Environment,
        initial_pose: Any = None,  # whatever the environment calls a pose, or a Task
        episode_id: str | None = None,
        *,
        seed: int | None = None,
    ) -> Episode:
        """Play one episode from a pose (or a `Task`) to its end; what goes wrong inside it is recorded in it.

        The same seed and episode id give the same episode; `seed` replaces the simulator's own.
        """
        episode_id = f"episode_{next(self._numbers):03d}" if episode_id is None else episode_id
        task = make_task(env, initial_pose, episode_id)
        planned = PlannedEpisode(environment=env, task=task, episode_id=episode_id)
        return self.run_episodes([planned], seed=seed)[0]

    def run_episodes(self, planned: Sequence[PlannedEpisode], *, seed: int | None = None) -> list[Episode]:
        """Play several episodes at once, each in its own environment; turns are sampled together."""
        if len({id(item.environment) for item in planned}) < len(planned):
            raise EnvironmentFailure(
                "two episodes cannot be played in one environment at the same time; give each its own"
            )
        rollouts = self._rollouts if seed is None else msgspec.structs.replace(self._rollouts, seed=seed)
        return self._loop.run(_play_together(planned, rollouts))

    @property
    def statistics(self) -> MaskingStatistics:
        """What the masker has seen so far."""
        return self._masker.statistics

    def log_stats(self) -> dict[str, Any]:
        """Write the masking statistics to the log, and return them."""
        statistics = self.statistics
        shares = {name: count / max(1, statistics.num_turns) for name, count in statistics.methods.items()}
        log.info(
            "%d episodes, %d turns: %s; quality %s; dropped %d (%.1f %%) %s",
            statistics.num_episodes,
            statistics.num_turns,
            ", ".join(f"{name} {share:.1%}" for name, share in shares.items()),
            dict(statistics.qualities),
            statistics.num_dropped,
            100 * statistics.dropout_rate,
            dict(statistics.dropouts),
        )
        return {**msgspec.to_builtins(statistics), "dropout_rate": statistics.dropout_rate}

    def close(self) -> None:
        """Free the policy; the simulator cannot be used afterwards."""
        self._loop.run(self.policy.close())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def make_task(env: Environment, initial_pose: Any, episode_id: str) -> Task:
    """The task that starts from `initial_pose`: a `Task` itself, a pose the environment understands, a mapping, or nothing."""
    if isinstance(initial_pose, Task):
        return initial_pose
    seed = episode_seed(episode_id)
    if initial_pose is None:
        return Task(task_id=episode_id, seed=seed)
    if hasattr(env, "task_from_pose"):
        task = env.task_from_pose(initial_pose, episode_id)
        assert isinstance(task, Task)
        return task
    if isinstance(initial_pose, Mapping):
        return Task(task_id=episode_id, seed=seed, data=dict(initial_pose))
    raise EnvironmentFailure(
        f"{type(env).__name__} has no task_from_pose, so it cannot start from a {type(initial_pose).__name__}; "
        "pass a Task, a mapping or nothing"
    )


async def _play_together(planned: Sequence[PlannedEpisode], rollouts: Rollouts) -> list[Episode]:
    barrier = TurnBarrier(len(planned))

    async def play(item: PlannedEpisode) -> Episode:
        try:
            return await run_episode(
                rollouts, item.task, episode_id=item.episode_id, group_id=item.task.task_id, barrier=barrier,
                environment=item.environment,
            )  # fmt: skip
        finally:
            barrier.leave()

    return list(await asyncio.gather(*map(play, planned)))


def _as_policy(model: Any, tokenizer: Any, image_processor: Any, kv_budget_mb: int) -> Policy:
    if hasattr(model, "complete"):
        policy: Policy = model
        return policy
    from turnwise.policies.local import LocalPolicy

    return LocalPolicy(model.eval(), tokenizer, image_processor=image_processor, kv_budget_mb=kv_budget_mb)


class _NoEnvironments:
    """Stands where a config would name environments; the simulator is always handed its own."""

    @property
    def tasks(self) -> Any:
        raise AssertionError("the simulator is handed tasks")

    def make(self) -> Environment:
        raise AssertionError("the simulator is handed environments")


class _BackgroundLoop:
    """An event loop in a thread of its own, so that plain code and notebooks can wait for coroutines."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(
            target=_run_forever, args=(self._loop,), name="turnwise-episodes", daemon=True
        ).start()
        self._stop = weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        self._stop()


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
