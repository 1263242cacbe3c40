"""Pictures of runs: what is drawn is what was recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import PIL.Image

from turnwise.plots import _smooth, draw_comparison, draw_run
from turnwise.store.run import Run
from turnwise.templates import get_debug_config


def make_run(folder: Path, success: list[float]) -> Path:
    run = Run.create(folder, get_debug_config())
    for step, value in enumerate(success):
        run.record_metrics(step, {"environment/success": value, "reward/mean": value - 0.1, "time/step": 1.0})
    figures = {"reward": 0.5, "metrics": {"success": 0.5}, "intervals": {"success": [0.4, 0.6]}}
    run.record_evaluation(len(success), figures)
    run.close()
    return folder


def test_a_run_is_drawn_with_a_panel_for_each_figure_it_has(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0.1, 0.4, 0.7])
    picture = PIL.Image.open(draw_run(folder, tmp_path / "curves.png"))
    # Three figures were recorded: one row of three panels.
    assert picture.width > 2.5 * picture.height
    colors = {tuple(color) for _, color in picture.convert("RGB").getcolors(1_000_000)}
    assert (0xC8, 0x55, 0x3D) in colors, "the evaluation's mark is missing"


def test_a_run_without_updates_still_gives_a_picture(tmp_path: Path) -> None:
    assert draw_run(make_run(tmp_path / "run", []), tmp_path / "curves.png").stat().st_size > 1000


def test_runs_of_unequal_length_are_compared_over_what_they_share(tmp_path: Path) -> None:
    runs = {
        "a": [make_run(tmp_path / "a0", [0.0, 0.5]), make_run(tmp_path / "a1", [0.2, 0.3, 0.4])],
        "b": [make_run(tmp_path / "b0", [1.0])],
    }
    assert PIL.Image.open(draw_comparison(runs, tmp_path / "c.png")).width > 500


def test_smoothing_keeps_the_ends_and_the_mean_of_a_line() -> None:
    np.testing.assert_allclose(_smooth([0.0, 1.0, 2.0, 3.0], span=3), [0.5, 1.0, 2.0, 2.5])
