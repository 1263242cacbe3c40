"""The demonstrations: a tiny model learns by reinforcement, measured before and after on tasks it never trained on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from turnwise import trainer
from turnwise.config import Config
from turnwise.environments.navigation import NavigationSpec
from turnwise.environments.navigation.film import film_episode, save_gif, side_by_side
from turnwise.environments.navigation.world import WorldCache
from turnwise.evaluate import Evaluation
from turnwise.plots import draw_run
from turnwise.store.run import Run
from turnwise.templates import get_adapter_config, get_navigation_config, get_small_scale_config
from turnwise.tracking import start_logging

DEMOS: dict[str, Callable[[], Config]] = {
    "navigation": get_navigation_config,
    "frozenlake": get_small_scale_config,
    "smollm2": get_adapter_config,
}
_FILMED_TASKS = 3


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the demonstration showed."""

    before: Evaluation
    after: Evaluation
    seconds: float
    run: str
    pictures: tuple[str, ...]


def demo_config(
    name: str,
    *,
    num_steps: int | None = None,
    num_tasks: int | None = None,
    seed: int = 0,
    estimator: str | None = None,
) -> Config:
    """A demonstration's config, with another length, seed or estimator."""
    config = DEMOS[name]()
    changes = {"training.num_steps": num_steps, "evaluation.num_tasks": num_tasks}
    overrides = [f"{field}={value}" for field, value in changes.items() if value is not None]
    if estimator not in (None, config.credit.estimator):
        # The whole section: the knobs of one estimator are not those of another.
        overrides.append(f"credit={{estimator: {estimator}}}")
    return config.with_overrides([f"training.seed={seed}", *overrides])


async def run_demo(config: Config, folder: Path, watch: trainer.Watch) -> DemoResult:
    """Evaluate, train, evaluate again, draw; everything lands in the run folder."""
    started = time.monotonic()
    stages = trainer.build_stages(config)
    run = Run.create(folder, config)
    start_logging(folder, config.tracking.log_level)
    try:
        await trainer.deliver_weights(run, stages, version=0)
        before = await trainer.evaluate_now(run, stages, "before", watch)
        run.record_evaluation(0, before.figures())
        num_updates = await trainer.train(run, stages, watch)
        after = await trainer.evaluate_now(run, stages, "after", watch)
        run.record_evaluation(num_updates, after.figures())
    finally:
        await trainer.close(run, stages)
    pictures = [
        draw_run(folder, folder / "curves.png", f"{config.environment.name}, {config.credit.estimator}")
    ]
    if isinstance(stages.environment, NavigationSpec):
        film = film_learning(stages.environment.worlds, before, after, folder / "before-after.gif")
        pictures += [film] if film is not None else []
    return DemoResult(
        before=before, after=after, seconds=time.monotonic() - started, run=str(folder),
        pictures=tuple(str(picture) for picture in pictures),
    )  # fmt: skip


def film_learning(worlds: WorldCache, before: Evaluation, after: Evaluation, out: Path) -> Path | None:
    """The first held-out tasks, one after the other: before training on the left, after it on the right.

    None when no task has both episodes: one that failed before its first turn cannot be shown.
    """
    pairs = [
        (first.episodes[0], last.episodes[0])
        for first, last in zip(before.groups, after.groups, strict=True)
        if first.episodes[0].turns and last.episodes[0].turns
    ]
    pictures = []
    for first, last in pairs[:_FILMED_TASKS]:
        question = first.task.data["question"]
        pictures += side_by_side(
            film_episode(worlds, first, f"Before: {question}"),
            film_episode(worlds, last, f"After: {question}"),
        )
    if not pictures:
        return None
    save_gif(out, pictures)
    return out
