"""Two ways to give credit on the same task with the same budget: curves and a table over several seeds.

    python examples/compare_estimators.py [--estimators rloo gigpo] [--seeds 0 1 2] [--steps N] [--out runs/estimators]

A run that is already in the output folder is not repeated, so the comparison can be stopped and gone on with.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from turnwise.plots import draw_comparison


def main() -> None:
    options = _read_options()
    cells = [(estimator, seed) for estimator in options.estimators for seed in options.seeds]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda cell: run_cell(options, *cell), cells))
    runs = {name: [_folder(options.out, name, seed) for seed in options.seeds] for name in options.estimators}
    draw_comparison(runs, options.out / "success.png")
    print(make_table(cells, results))
    print(json.dumps({"picture": str(options.out / "success.png"), "cells": len(cells)}))


def run_cell(options: argparse.Namespace, estimator: str, seed: int) -> dict[str, Any]:
    """One demonstration in a process of its own; its JSON line is kept beside the run."""
    folder = _folder(options.out, estimator, seed)
    kept = folder.with_suffix(".json")
    if kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    command = [sys.executable, "-m", "turnwise", "demo", options.task, "--json", "--out", str(folder)]
    command += ["--estimator", estimator, "--seed", str(seed)]
    command += ["--steps", str(options.steps)] if options.steps else []
    print(f"{estimator}, seed {seed} …", flush=True)
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    if shown.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed: {shown.stderr.strip()[-500:]}")
    line = shown.stdout.strip().splitlines()[-1]
    kept.write_text(line, encoding="utf-8")
    result: dict[str, Any] = json.loads(line)
    return result


def make_table(cells: list[tuple[str, int]], results: list[dict[str, Any]]) -> str:
    """A Markdown row for each run, and the mean of each estimator."""
    rows = [
        "| estimator | seed | success before | success after (95 % interval) | SPL after | seconds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (estimator, seed), result in zip(cells, results, strict=True):
        low, high = result["after"]["intervals"]["success"]
        spl = result["after"]["metrics"].get("spl")
        rows.append(
            f"| {estimator} | {seed} | {result['before']['success']:.3f} | {result['after']['success']:.3f} "
            f"({low:.2f}–{high:.2f}) | {'–' if spl is None else f'{spl:.3f}'} | {result['seconds']:.0f} |"
        )
    for estimator in dict.fromkeys(name for name, _ in cells):
        after = [
            result["after"]["success"]
            for (name, _), result in zip(cells, results, strict=True)
            if name == estimator
        ]
        rows.append(f"| **{estimator}** | mean | | **{sum(after) / len(after):.3f}** | | |")
    return "\n".join(rows)


def _folder(out: Path, estimator: str, seed: int) -> Path:
    return out / f"{estimator}-{seed}"


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="navigation", help="a demonstration of turnwise")
    parser.add_argument("--estimators", nargs="+", default=["rloo", "gigpo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--steps", type=int, help="updates of each run; the demonstration's own number by default"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--out", type=Path, default=Path("runs/estimators"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
