"""Draws the figures of runs as PNG pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.store.run import read_evaluations, read_metrics

_PANELS = (
    ("environment/success", "success"),
    ("environment/spl", "SPL"),
    ("reward/mean", "reward"),
    ("actions/invalid_share", "invalid actions"),
    ("tokens/rate", "sampled tokens/s"),
    ("time/step", "seconds a step"),
)
_COLORS = ("#1f6f8b", "#c8553d", "#588157", "#8e6c8a")


def draw_run(folder: Path, out: Path, title: str = "") -> Path:
    """One panel per figure, over the updates of a run; what was measured on held-out tasks with its interval."""
    rows = [_with_rate(row) for row in read_metrics(folder)]
    panels = [(key, label) for key, label in _PANELS if any(key in row for row in rows)]
    figure, axes = _make_panels(max(1, len(panels)))
    for axis, (key, label) in zip(axes, panels, strict=False):
        steps = [row["step"] + 1 for row in rows if key in row]
        values = [row[key] for row in rows if key in row]
        axis.plot(steps, values, color=_COLORS[0], alpha=0.35, linewidth=1)
        axis.plot(steps, _smooth(values), color=_COLORS[0], linewidth=2, label="training tasks")
        _draw_evaluations(axis, folder, key.removeprefix("environment/"))
        axis.set_title(label)
        axis.set_xlabel("updates")
    figure.suptitle(title or folder.name)
    return _save(figure, out)


def draw_comparison(
    runs: Mapping[str, Sequence[Path]], out: Path, metric: str = "environment/success", label: str = "success"
) -> Path:
    """The same figure of several kinds of run: each run thin, the mean of its kind thick."""
    figure, axes = _make_panels(1)
    for color, (name, folders) in zip(_COLORS * 3, runs.items(), strict=False):
        curves = []
        for folder in folders:
            rows = [row for row in read_metrics(folder) if metric in row]
            curves.append(_smooth([row[metric] for row in rows]))
            axes[0].plot(range(1, len(rows) + 1), curves[-1], color=color, alpha=0.35, linewidth=1)
        shortest = min(len(curve) for curve in curves)
        mean = np.mean([curve[:shortest] for curve in curves], axis=0)
        axes[0].plot(
            range(1, shortest + 1), mean, color=color, linewidth=2.5, label=f"{name}, {len(curves)} seeds"
        )
    axes[0].set_xlabel("updates")
    axes[0].set_ylabel(f"{label} on training tasks")
    axes[0].legend(frameon=False)
    return _save(figure, out)


def _with_rate(row: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(row)
    if "tokens/sampled" in row and row.get("time/rollout"):
        found["tokens/rate"] = row["tokens/sampled"] / row["time/rollout"]
    return found


def _draw_evaluations(axis: Any, folder: Path, name: str) -> None:  # matplotlib has no static types
    for evaluation in read_evaluations(folder):
        value = evaluation["reward"] if name == "reward/mean" else evaluation["metrics"].get(name)
        if value is None:
            continue
        low, high = evaluation["intervals"].get(name, (value, value))
        axis.errorbar(
            evaluation["step"], value, yerr=[[max(0.0, value - low)], [max(0.0, high - value)]], fmt="o", capsize=4,
            color=_COLORS[1],
        )  # fmt: skip
        axis.annotate(
            f"{value:.2f}", (evaluation["step"], value), (6, 6), textcoords="offset points", fontsize=8
        )


def _smooth(values: Sequence[float], span: int = 7) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The mean of each value and its neighbours, fewer at the ends."""
    reach = span // 2
    return np.array([np.mean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))])


def _make_panels(count: int) -> tuple[Any, list[Any]]:
    # Imported here: it is slow, and only pictures need it. A Figure of its own opens no window.
    from matplotlib.figure import Figure

    columns = min(3, count)
    rows = -(-count // columns)
    size = (4.2 * columns, 3.1 * rows) if count > 1 else (7.0, 4.2)
    figure = Figure(figsize=size, layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(rows, columns)).ravel())
    for axis in axes[:count]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, axes[:count]


def _save(figure: Any, out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    return out
