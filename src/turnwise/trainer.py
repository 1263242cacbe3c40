"""The training loop: collect, score, credit, update, deliver, record; once per step."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import msgspec

from turnwise.config import Config
from turnwise.credit import assign_advantages
from turnwise.environment import EnvironmentSpec
from turnwise.environments import build_environment
from turnwise.errors import StoreError, TrainingError
from turnwise.evaluate import Evaluation, evaluate
from turnwise.fingerprint import fingerprint
from turnwise.learner import Learner
from turnwise.masking import ActionTokenMasker, TokenBytes
from turnwise.models.loading import choose_threads, load_model
from turnwise.models.lora import adapt
from turnwise.policies.local import LocalPolicy
from turnwise.renderer import Renderer
from turnwise.rewards.score import Rewards, build_rewards, score_groups
from turnwise.rollout import Agent, Rollouts, collect_groups
from turnwise.samples import build_samples
from turnwise.store.checkpoints import list_checkpoints, load_checkpoint
from turnwise.store.run import Run
from turnwise.tasks import TaskStream
from turnwise.types import Episode, Group, Score

log = logging.getLogger(__name__)


class Watch(Protocol):
    """Somebody who wants to see how a run goes."""

    def on_episode(self, episode: Episode) -> None: ...

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Stages(msgspec.Struct, frozen=True, kw_only=True):
    """The objects that a config describes, in the order data passes through them."""

    environment: EnvironmentSpec
    tasks: TaskStream
    rollouts: Rollouts
    rewards: Rewards
    learner: Learner


async def train(run: Run, stages: Stages, watch: Watch, *, first_step: int = 0) -> int:
    """Run the steps that are left and return how many updates there are now.

    Ctrl-C ends it after the current step, ready to be resumed.
    """
    config, clock = run.config, Stopwatch()
    stages.learner.abort_folder = run.folder / "aborted"
    await deliver_weights(run, stages, version=first_step)
    with stop_on_interrupt() as is_interrupted:
        for step in range(first_step, config.training.num_steps):
            with clock.time("rollout"):
                groups = await collect_groups(
                    stages.tasks.batch(step),
                    stages.rollouts,
                    label=f"s{step:06d}",
                    on_episode=watch.on_episode,
                )
            run.record_groups(f"step-{step:06d}", groups)
            with clock.time("score"):
                scores = await score_groups(groups, stages.rewards)
            with clock.time("credit"):
                values = stages.learner.values(groups)
                advantages = assign_advantages(groups, scores, config.credit, values)
            with clock.time("update"):
                update = stages.learner.update(
                    build_samples(
                        groups,
                        advantages,
                        tokens_per_pack=config.training.tokens_per_pack,
                        use_trees=config.training.use_token_trees,
                        tokens=config.loss.tokens,
                    )
                )
            with clock.time("deliver"):
                await deliver_weights(run, stages, version=step + 1)
            metrics = {
                **summarize_step(groups, scores),
                **advantages.metrics,
                **update.metrics,
                **clock.lap(),
            }
            run.record_step(step, scores.values(), advantages, metrics)
            watch.on_step(step, metrics)
            await validate_and_save(run, stages, step + 1, metrics, is_last=is_interrupted())
            if is_interrupted():
                return step + 1
    return max(first_step, config.training.num_steps)


async def validate_and_save(
    run: Run, stages: Stages, num_updates: int, metrics: Mapping[str, float], *, is_last: bool
) -> None:
    """Evaluate and checkpoint when the config says so; always checkpoint after the last step."""
    config = run.config
    is_last = is_last or num_updates == config.training.num_steps
    score = metrics.get("reward/mean")
    if config.evaluation.every and num_updates % config.evaluation.every == 0:
        evaluation = await evaluate_now(run, stages, f"eval-{num_updates:06d}")
        run.record_evaluation(num_updates, evaluation.figures())
        score = evaluation.reward
    if is_last or num_updates % config.storage.checkpoint_every == 0:
        state = stages.learner.state()
        run.save_checkpoint(num_updates, state.tensors, {"learner": state.values}, score=score)


def build_stages(config: Config) -> Stages:
    """Turn a config into the objects it describes; every mistake in it shows here, before anything is written."""
    environment = build_environment(config.environment)
    rewards = build_rewards(config.rewards)
    model, sampler = load_model(config.model), load_model(config.model)
    choose_threads(model.network)
    policy = LocalPolicy(
        adapt(sampler.network, config.model.lora, seed=config.training.seed),
        sampler.tokenizer,
        image_processor=sampler.image_processor,
        schedule=config.rollout.schedule,
        kv_budget_mb=config.rollout.kv_budget_mb,
    )
    masker = ActionTokenMasker(
        TokenBytes(model.tokenizer),
        min_action_tokens=config.rollout.min_action_tokens,
        max_action_tokens=config.rollout.max_action_tokens,
    )
    renderer = Renderer(
        model.tokenizer, image_processor=model.image_processor, history=config.rollout.history
    )
    return Stages(
        environment=environment,
        tasks=TaskStream(
            environment.tasks, tasks_per_step=config.rollout.tasks_per_step, seed=config.training.seed
        ),
        rollouts=Rollouts(
            agent=Agent(policy=policy, renderer=renderer, masker=masker),
            environment=environment,
            config=config.rollout,
            seed=config.training.seed,
            environment_timeout_s=config.environment.timeout_s,
        ),
        rewards=rewards,
        learner=Learner(
            adapt(model.network, config.model.lora, seed=config.training.seed),
            loss=config.loss,
            training=config.training,
            image_processor=model.image_processor,
        ),
    )


async def close(run: Run, stages: Stages) -> None:
    """End the processes and threads of the stages, and the writing of the run."""
    stages.rewards.close()
    await stages.rollouts.agent.policy.close()
    run.close()


async def deliver_weights(run: Run, stages: Stages, version: int) -> None:
    """Give the policy the learner's weights, and stop the run unless both sides then hold the same."""
    weights = stages.learner.weights()
    sent = fingerprint(weights)
    received = await stages.rollouts.agent.policy.load_weights(weights, version)
    if received != sent:
        raise TrainingError(
            f"the policy holds weights {received[:12]} after being sent {sent[:12]} as version {version}; "
            "its episodes would not come from the trained model"
        )
    run.save_weights(version, weights, sent)


async def evaluate_now(run: Run, stages: Stages, label: str, watch: Watch | None = None) -> Evaluation:
    """Success and reward of the policy's current weights on held-out tasks."""
    return await evaluate(
        stages.rollouts,
        stages.environment.tasks,
        stages.rewards,
        run.config.evaluation,
        label=label,
        on_episode=None if watch is None else watch.on_episode,
    )


def restore(run: Run, stages: Stages) -> int:
    """Load the newest checkpoint into the learner and return the step to go on from."""
    tensors, state = run.rewind_to_checkpoint()
    stages.learner.load_state(tensors, state["learner"])
    step: int = state["step"]
    return step


async def evaluate_run(folder: Path, config: Config, watch: Watch) -> Evaluation:
    """Evaluate the newest checkpoint of a stored run, without changing the run."""
    checkpoints = list_checkpoints(folder)
    if not checkpoints:
        raise StoreError(f"{folder} has no checkpoint to evaluate")
    stages = build_stages(config)
    tensors, state = load_checkpoint(checkpoints[-1][1])
    stages.learner.load_state(tensors, state["learner"])
    await stages.rollouts.agent.policy.load_weights(stages.learner.weights(), state["step"])
    return await evaluate(
        stages.rollouts,
        stages.environment.tasks,
        stages.rewards,
        config.evaluation,
        label="eval",
        on_episode=watch.on_episode,
    )


def summarize_step(groups: Sequence[Group], scores: Mapping[str, Score]) -> dict[str, float]:
    """What a step's episodes were like."""
    episodes = [episode for group in groups for episode in group.episodes]
    finished = [episode for episode in episodes if episode.failure is None]
    known = [score.score for score in scores.values() if score.score is not None]
    sampled = sum(episode.num_sampled_tokens for episode in episodes)
    action = sum(turn.num_action_tokens for episode in episodes for turn in episode.turns)
    turns = sum(episode.num_turns for episode in episodes)
    metrics = {
        "episodes/count": float(len(episodes)),
        "episodes/failed": float(len(episodes) - len(finished)),
        "episodes/unscored": float(len(episodes) - len(known)),
        "episodes/turns": turns / max(1, len(episodes)),
        "tokens/sampled": float(sampled),
        "tokens/action_share": action / max(1, sampled),
        "actions/invalid_share": sum(
            not turn.is_action_valid for episode in episodes for turn in episode.turns
        )
        / max(1, turns),
    }
    if known:
        metrics["reward/mean"] = sum(known) / len(known)
    for name in sorted({name for episode in finished for name in episode.metrics}):
        values = [episode.metrics[name] for episode in finished if name in episode.metrics]
        metrics[f"environment/{name}"] = sum(values) / len(values)
    return metrics


class Stopwatch:
    """Adds up the seconds of each stage within a step."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - started

    def lap(self) -> dict[str, float]:
        """The seconds since the last lap, by stage and in all."""
        seconds = {f"time/{stage}": value for stage, value in self._seconds.items()}
        seconds["time/step"] = time.perf_counter() - self._started
        self._seconds, self._started = {}, time.perf_counter()
        return seconds


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C (or TERM) asks to stop after the current step; a second one stops at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        log.warning("stopping after this step; press Ctrl-C again to stop at once")

    previous: dict[int, Any] = {}  # what signal.signal returns has no useful type
    try:
        for wanted in (signal.SIGINT, signal.SIGTERM):
            previous[wanted] = signal.signal(wanted, ask)
    except ValueError:
        log.debug("not in the main thread: Ctrl-C is left to the caller")
    try:
        yield lambda: asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
