"""`turnwise branch`: what would have happened from a turn of a stored episode on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from turnwise.cli.output import console, print_json
from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from turnwise.branch_run import BranchReport


def register(app: typer.Typer) -> None:
    app.command()(branch)


def branch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    episode: Annotated[str, typer.Argument(metavar="EPISODE", help="A stored episode's id.")],
    turn: Annotated[int, typer.Option(min=0, help="The turn to go back to; it is answered anew.")],
    num: Annotated[int, typer.Option(min=1, help="How many continuations to sample.")] = 8,
    weights: Annotated[
        str, typer.Option(help="episode: those that sampled it; newest: the run's last checkpoint.")
    ] = "episode",
    dpo: Annotated[
        Path | None,
        typer.Option(help="Append better and worse answers as preference pairs to this JSONL file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Restore an episode at a turn, sample continuations, and store their mean return as the turn's value."""
    from turnwise.branch_run import append_pairs, branch_run

    if weights not in ("episode", "newest"):
        raise ConfigError(f"--weights is {weights!r}; use episode or newest")
    chosen: Literal["episode", "newest"] = "episode" if weights == "episode" else "newest"
    report = asyncio.run(branch_run(run, episode, turn=turn, num=num, weights=chosen))
    _print_report(report)
    if dpo is not None:
        append_pairs(dpo, report.pairs)
        console.print(f"added {len(report.pairs)} preference pairs to {dpo}")
    if as_json:
        import msgspec

        print_json(
            {
                "run": str(run),
                **msgspec.to_builtins(report.estimate),
                "weights": report.weights,
                "folder": report.folder,
                "num_pairs": len(report.pairs),
            }
        )


def _print_report(report: BranchReport) -> None:
    estimate = report.estimate
    returns = dict(zip(estimate.branch_ids, estimate.returns, strict=True))
    for found in report.branches.episodes:
        if found.num_turns <= estimate.turn_index:
            print(f"{found.episode_id}: {found.stop_reason}, no turn {estimate.turn_index}")
            continue
        worth = f"{returns[found.episode_id]:+.3f}" if found.episode_id in returns else "not scored"
        answer = " ".join(found.turns[estimate.turn_index].text.split())
        print(
            f"{found.episode_id}: {answer[:60]}  …  {found.num_turns} turns, {found.stop_reason}, return {worth}"
        )
    how = "restored from a snapshot" if estimate.is_restored else "reached by taking the stored actions again"
    print(f"turn {estimate.turn_index} was {how}; sampled by {report.weights}")
    if estimate.value is None:
        print("no branch could be scored")
    else:
        error = "" if estimate.standard_error is None else f" ± {estimate.standard_error:.3f}"
        own = (
            ""
            if estimate.original_return is None
            else f"; the stored episode got {estimate.original_return:+.3f}"
        )
        print(f"value {estimate.value:+.3f}{error} over {len(estimate.returns)} returns{own}")
    console.print(f"continuations are in {report.folder}")
