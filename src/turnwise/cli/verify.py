"""`turnwise verify`: proves a stored run, or says what does not hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.output import console, print_json


def register(app: typer.Typer) -> None:
    app.command()(verify)


def verify(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    tolerance: Annotated[
        float | None, typer.Option(help="Largest log-prob gap that counts as equal; by the model's dtype.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Derive every mask, hash, prompt and log-probability of a stored run again; exit code 1 when anything does not hold."""
    import msgspec

    from turnwise.cli.progress import EpisodeProgress
    from turnwise.store.run import read_config
    from turnwise.verify import count_episodes, verify_run

    read_config(run_folder)
    with EpisodeProgress("verifying", count_episodes(run_folder)) as watch:
        result = verify_run(run_folder, tolerance=tolerance, on_episode=watch.on_episode)
    for problem in result.problems:
        console.print(f"- {problem}", highlight=False, markup=False)
    console.print(
        f"{result.episodes:,} episodes, {result.turns:,} turns, {result.sampled_tokens:,} sampled tokens, "
        f"{result.rescored_tokens:,} scored again", highlight=False,
    )  # fmt: skip
    if result.max_logprob_gap is not None:
        console.print(
            f"log-prob gap: largest {result.max_logprob_gap:.3g}, 99.9th percentile {result.p999_logprob_gap:.3g} "
            f"(tolerance {result.tolerance:g})", highlight=False,
        )  # fmt: skip
    wrong = {
        "hashes": result.hash_mismatches,
        "turns": result.turn_mismatches,
        "prompts and texts": result.token_mismatches,
        "masks": result.mask_mismatches,
        "log-probs": result.logprob_mismatches,
    }
    console.print(", ".join(f"{name}: {count} wrong" for name, count in wrong.items()), highlight=False)
    if result.unscored_tokens:
        console.print(
            f"{result.unscored_tokens:,} tokens could not be scored: their weights were not kept "
            "(raise storage.keep_weights_mb)", highlight=False,
        )  # fmt: skip
    console.print("verified" if result.is_verified else "NOT verified", highlight=False)
    if as_json:
        print_json({**msgspec.to_builtins(result), "is_verified": result.is_verified})
    if not result.is_verified:
        raise typer.Exit(1)
