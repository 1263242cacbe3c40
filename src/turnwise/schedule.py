"""The learning rate as a function of the update's number, so that a resumed run needs no schedule state."""

from __future__ import annotations

import math

from turnwise.config import TrainingConfig


def learning_rate(training: TrainingConfig, update: int) -> float:
    """The rate of update 0, 1, …: a linear warm-up, then constant, linear or cosine decay to 0 at `num_steps`."""
    if update < training.warmup_steps:
        return training.learning_rate * (update + 1) / training.warmup_steps
    if training.schedule == "constant":
        return training.learning_rate
    length = max(training.num_steps - training.warmup_steps, 1)
    done = min((update - training.warmup_steps) / length, 1.0)
    share = 1.0 - done if training.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return training.learning_rate * share
