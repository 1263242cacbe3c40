"""A seeded stream of tasks: step k always gets the same tasks, so a resumed run skips and repeats none."""

from __future__ import annotations

import numpy as np

from turnwise.environment import Split, TaskSource
from turnwise.errors import ConfigError
from turnwise.types import Task


class TaskStream:
    """Hands out `tasks_per_step` tasks for each step; its only state is the step's number.

    A finite source is shuffled anew for each pass over it; an endless one is simply counted through.
    """

    def __init__(self, source: TaskSource, *, tasks_per_step: int, seed: int, split: Split = "train") -> None:
        self._source = source
        self._tasks_per_step = tasks_per_step
        self._seed = seed
        self._split: Split = split
        self._size = source.num_tasks(split)
        if self._size == 0:
            raise ConfigError(f"the environment has no tasks in its {split} split; check its params")

    def batch(self, step: int) -> list[Task]:
        """The tasks of step `step`, counted from 0."""
        first = step * self._tasks_per_step
        return [self._source.task(self._index(first + i), self._split) for i in range(self._tasks_per_step)]

    def _index(self, position: int) -> int:
        if self._size is None:
            # Each seed walks its own stretch of the endless tasks.
            return position + (self._seed % 1000) * 1_000_000
        epoch, offset = divmod(position, self._size)
        return int(np.random.default_rng([self._seed, epoch]).permutation(self._size)[offset])
