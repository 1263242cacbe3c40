"""Shows how a run goes: a live bar on a terminal, plain lines when piped."""

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


class TrainingProgress:
    """Watches a training run: steps, reward, success, tokens per second, time left."""

    def __init__(self, num_steps: int, *, first_step: int = 0) -> None:
        self._num_steps = num_steps
        self._first_step = first_step
        self._started = time.monotonic()
        self._episodes = 0
        self._bar = _make_bar()
        self._line = self._bar.add_task("training", total=num_steps, completed=first_step, figures="")

    def __enter__(self) -> Self:
        if console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def on_episode(self, episode: Episode) -> None:
        self._episodes += 1

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        figures = describe_step(metrics)
        self._bar.update(self._line, completed=step + 1, figures=figures)
        if not console.is_terminal:
            done = step + 1 - self._first_step
            left = (time.monotonic() - self._started) / done * (self._num_steps - step - 1)
            console.print(f"step {step + 1}/{self._num_steps}  {figures}  {left:.0f} s left", highlight=False)


class EpisodeProgress:
    """Counts episodes towards a known number."""

    def __init__(self, description: str, total: int) -> None:
        self._bar = _make_bar()
        self._line = self._bar.add_task(description, total=total, figures="")
        self._tokens = 0
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        if console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def on_episode(self, episode: Episode) -> None:
        self._tokens += episode.num_sampled_tokens
        rate = self._tokens / max(1e-9, time.monotonic() - self._started)
        self._bar.update(self._line, advance=1, figures=f"{rate:,.0f} tokens/s")

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        return None


def describe_step(metrics: Mapping[str, float]) -> str:
    """`reward 0.41  success 0.41  5,210 tokens/s`."""
    figures = []
    if "reward/mean" in metrics:
        figures.append(f"reward {metrics['reward/mean']:.2f}")
    if "environment/success" in metrics:
        figures.append(f"success {metrics['environment/success']:.2f}")
    if "environment/spl" in metrics:
        figures.append(f"SPL {metrics['environment/spl']:.2f}")
    rate = metrics["tokens/sampled"] / max(1e-9, metrics["time/rollout"])
    figures.append(f"{rate:,.0f} tokens/s")
    return "  ".join(figures)


def _make_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )
