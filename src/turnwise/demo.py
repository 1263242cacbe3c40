"""The demonstration: the tiny model learns FrozenLake by reinforcement, measured before and after on new maps."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from turnwise import trainer
from turnwise.config import Config
from turnwise.evaluate import Evaluation
from turnwise.store.run import Run
from turnwise.templates import get_small_scale_config
from turnwise.tracking import start_logging


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the demonstration showed."""

    before: Evaluation
    after: Evaluation
    seconds: float
    run: str


def frozenlake_config(*, num_steps: int | None = None, seed: int = 0) -> Config:
    """The small template, with the demonstration's length and seed."""
    overrides = [f"training.seed={seed}"]
    if num_steps is not None:
        overrides.append(f"training.num_steps={num_steps}")
    return get_small_scale_config().with_overrides(overrides)


async def run_demo(config: Config, folder: Path, watch: trainer.Watch) -> DemoResult:
    """Evaluate, train, evaluate again; everything lands in the run folder."""
    started = time.monotonic()
    stages = trainer.build_stages(config)
    run = Run.create(folder, config)
    start_logging(folder, config.tracking.log_level)
    try:
        await trainer.deliver_weights(run, stages, version=0)
        before = await trainer.evaluate_now(run, stages, "before")
        run.record_evaluation(0, before.figures())
        await trainer.train(run, stages, watch)
        after = await trainer.evaluate_now(run, stages, "after")
        run.record_evaluation(config.training.num_steps, after.figures())
    finally:
        await trainer.close(run, stages)
    return DemoResult(before=before, after=after, seconds=time.monotonic() - started, run=str(folder))
