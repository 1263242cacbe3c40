"""Shows how work goes: a live bar on a terminal, plain lines when piped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from turnwise.cli.output import console
from turnwise.types import Episode

_SECONDS_BETWEEN_LINES = 10.0


class _LiveBar:
    """One bar, shown while a `with` block runs."""

    def __init__(self, description: str, total: int, completed: int = 0) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console,
        )  # fmt: skip
        self._line = self._bar.add_task(description, total=total, completed=completed, figures="")
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        if console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class TrainingProgress(_LiveBar):
    """Watches a training run: steps, reward, success, tokens per second, time of each stage, time left."""

    def __init__(self, num_steps: int, *, first_step: int = 0) -> None:
        super().__init__("training", num_steps, first_step)
        self._num_steps = num_steps
        self._first_step = first_step
        self._episodes = 0
        self._figures = ""

    def on_episode(self, episode: Episode) -> None:
        self._episodes += 1
        self._bar.update(self._line, figures=f"{self._figures}  episode {self._episodes}")

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._first_step:
            # Loading and a first evaluation are no part of the rate.
            self._started = time.monotonic() - metrics["time/step"]
        self._figures = describe_step(metrics)
        self._episodes = 0
        self._bar.update(self._line, completed=step + 1, figures=self._figures)
        if not console.is_terminal:
            done = step + 1 - self._first_step
            left = (time.monotonic() - self._started) / done * (self._num_steps - step - 1)
            console.print(
                f"step {step + 1}/{self._num_steps}  {self._figures}  {left:.0f} s left",
                highlight=False,
                soft_wrap=True,
            )


class EpisodeProgress(_LiveBar):
    """Counts episodes towards a known number."""

    def __init__(self, description: str, total: int) -> None:
        super().__init__(description, total)
        self._tokens = 0

    def on_episode(self, episode: Episode) -> None:
        self._tokens += episode.num_sampled_tokens
        rate = self._tokens / max(1e-9, time.monotonic() - self._started)
        self._bar.update(self._line, advance=1, figures=f"{rate:,.0f} tokens/s")

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        return None


class WorkProgress(_LiveBar):
    """Follows work that says what it is doing and how much of it is done."""

    def __init__(self) -> None:
        super().__init__("", 1)
        self._last_line = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        self._bar.update(self._line, description=what, completed=done, total=total)
        now = time.monotonic()
        if not console.is_terminal and (done == total or now - self._last_line > _SECONDS_BETWEEN_LINES):
            self._last_line = now
            console.print(f"{what}: {done} of {total}", highlight=False, soft_wrap=True)


def describe_step(metrics: Mapping[str, float]) -> str:
    """`reward 0.41  success 0.41  5,210 tokens/s  rollout 2.1 s  update 1.3 s`."""
    figures = []
    if "reward/mean" in metrics:
        figures.append(f"reward {metrics['reward/mean']:.2f}")
    if "environment/success" in metrics:
        figures.append(f"success {metrics['environment/success']:.2f}")
    if "environment/spl" in metrics:
        figures.append(f"SPL {metrics['environment/spl']:.2f}")
    rate = metrics["tokens/sampled"] / max(1e-9, metrics["time/rollout"])
    figures.append(f"{rate:,.0f} tokens/s")
    figures += [
        f"{stage} {metrics[f'time/{stage}']:.1f} s"
        for stage in ("rollout", "update")
        if f"time/{stage}" in metrics
    ]
    return "  ".join(figures)
