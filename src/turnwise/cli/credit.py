"""`turnwise credit` and `turnwise view`: look at stored episodes and at who deserves what."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turnwise.cli.output import console, print_json
from turnwise.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from rich.console import Console

    from turnwise.credit_report import Disagreement, EstimatorSummary
    from turnwise.types import Advantages, Group, Score, TurnCredit
    from turnwise.view import EpisodeView

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]


def register(app: typer.Typer) -> None:
    app.command()(credit)
    app.command()(view)


def credit(
    run: RunArgument,
    overrides: Annotated[list[str] | None, typer.Argument(help="field=value of the estimator …")] = None,
    estimator: Annotated[
        str | None,
        typer.Option(help="rloo, grpo, gigpo, reinforce_plus_plus or gae; the run's own by default."),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Several estimators side by side: rloo,grpo,gigpo,gae.")
    ] = None,
    reward: Annotated[str | None, typer.Option(help="Whose scores to use, when the run has several.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many turns to show.")] = 20,
    save: Annotated[bool, typer.Option(help="Store the estimator's credits in the run folder.")] = True,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log every quantity of every turn.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Credit stored episodes again: a table per turn, where estimators disagree, and where there is no signal."""
    from turnwise import credit_report as report
    from turnwise.store.run import read_config, read_groups

    _set_log_level(verbose)
    own = read_config(run).credit
    names = list(dict.fromkeys(_split(compare))) or [estimator or own.estimator]
    if estimator is not None and estimator not in names:
        names.insert(0, estimator)
    chosen = estimator or (own.estimator if own.estimator in names else names[0])
    values = _read_overrides(overrides or [])
    configs = [report.choose_credit(own, name, values if name == chosen else {}) for name in names]
    groups = read_groups(run)
    if not groups:
        raise StoreError(f"{run} has no episodes to credit")
    scores = report.load_scores(run, (episode for group in groups for episode in group.episodes), reward)
    several = [report.recompute(groups, scores, config) for config in configs]
    summaries = [report.summarize(groups, advantages) for advantages in several]
    disagreements = report.find_disagreements(several, limit)
    num_saved = report.save_advantages(run, several[names.index(chosen)]) if save and compare is None else 0
    out = _stdout()
    _print_turns(groups, several, limit, out)
    _print_summaries(summaries, out)
    _print_disagreements(disagreements, names, out)
    if num_saved:
        console.print(f"stored the credits of {num_saved} episodes in {run}/advantages/{chosen}.jsonl")
    if as_json:
        print_json(_describe(run, groups, several, summaries, disagreements, scores, limit))


def view(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a saved steps file.")],
    episode: Annotated[
        str | None, typer.Argument(metavar="[EPISODE]", help="Its id; without one, a list.")
    ] = None,
    estimator: Annotated[
        str | None, typer.Option(help="Whose stored credits to show; the run's own by default.")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="Whose scores to show, when the run has several.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many episodes to list.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Print a saved episode turn by turn: observation, action, reward, return, advantage."""
    import msgspec

    from turnwise import view as viewing

    out = _stdout()
    if run.is_file():
        steps = [step for step in viewing.read_steps(run) if episode in (None, step.episode_id)]
        if not as_json:
            viewing.print_steps(steps, out)
        else:
            print_json({"file": str(run), "steps": msgspec.to_builtins(steps)})
        return
    if not (run / "episodes.jsonl").is_file():
        raise StoreError(f"{run} is neither a run folder with episodes nor a saved steps file")
    if episode is None:
        views, total = _list_episodes(run, reward, limit)
        if as_json:
            print_json(
                {"run": str(run), "num_episodes": total, "episodes": [_outline(found) for found in views]}
            )
            return
        viewing.print_episodes(views, out)
        console.print(f"{len(views)} of {total} episodes; `turnwise view {run} EPISODE` shows one")
        return
    found = _find_view(run, episode, estimator, reward)
    if as_json:
        print_json({"run": str(run), **msgspec.to_builtins(found)})
    else:
        viewing.print_episode(found, out)


def _list_episodes(run: Path, reward: str | None, limit: int) -> tuple[list[EpisodeView], int]:
    from turnwise.credit_report import load_scores
    from turnwise.store.episodes import read_episodes
    from turnwise.view import view_episode

    episodes = list(read_episodes(run))
    scores = load_scores(run, episodes, reward)
    return [view_episode(episode, scores[episode.episode_id]) for episode in episodes[:limit]], len(episodes)


def _find_view(run: Path, episode_id: str, estimator: str | None, reward: str | None) -> EpisodeView:
    from turnwise.credit_report import load_scores, read_advantages
    from turnwise.store.episodes import find_episode
    from turnwise.store.run import read_config
    from turnwise.view import view_episode

    episode = find_episode(run, episode_id)
    name = estimator or read_config(run).credit.estimator
    stored = read_advantages(run, name)
    if estimator is not None and not stored:
        raise StoreError(
            f"{run} has no credits of {name!r}; `turnwise credit {run} --estimator {name}` makes them"
        )
    score = load_scores(run, [episode], reward)[episode_id]
    return view_episode(episode, score, stored.get(episode_id, ()), estimator=name)


def _outline(found: EpisodeView) -> dict[str, Any]:
    import msgspec

    outline: dict[str, Any] = msgspec.to_builtins(found)
    return {**outline, "steps": len(found.steps)}


def _stdout() -> Console:
    from rich.console import Console

    # Piped output is for grep: no colours, and no line is broken to fit an imagined screen.
    return Console() if sys.stdout.isatty() else Console(width=10_000, no_color=True, highlight=False)


def _set_log_level(verbose: bool) -> None:
    import logging

    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    # Groups without signal are part of the summary, so the warnings about them would say it twice.
    logging.getLogger("turnwise.credit").setLevel(logging.DEBUG if verbose else logging.ERROR)


def _split(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def _read_overrides(overrides: list[str]) -> dict[str, Any]:
    import yaml

    values = {}
    for override in overrides:
        name, separator, text = override.removeprefix("credit.").partition("=")
        if not separator or not name:
            raise ConfigError(f"override {override!r} is not of the form field=value, such as gamma=0.9")
        values[name] = yaml.safe_load(text)
    return values


def _print_turns(groups: list[Group], several: list[Advantages], limit: int, out: Console) -> None:
    from rich.table import Table

    is_single = len(several) == 1
    columns = (
        ["r", "G_k", "A_E", "A_S", "advantage", "anchor"] if is_single else [one.estimator for one in several]
    )
    table = Table(title="advantage per turn", box=None)
    for heading in ("group", "episode", "turn", *columns):
        table.add_column(
            heading, justify="left" if heading in ("group", "episode", "anchor") else "right", no_wrap=True
        )
    rows = [
        (episode.group_id, episode.episode_id, turn.turn_index)
        for group in groups
        for episode in group.episodes
        for turn in episode.turns
    ]
    for group_id, episode_id, turn_index in rows[:limit]:
        credits = [one.turns[episode_id][turn_index] for one in several]
        cells = _explain(credits[0]) if is_single else [_number(credit.advantage) for credit in credits]
        table.add_row(group_id, episode_id, str(turn_index), *cells)
    out.print(table)
    if len(rows) > limit:
        console.print(f"{limit} of {len(rows)} turns; --limit shows more")


def _explain(credit: TurnCredit) -> list[str]:
    anchor = "" if credit.anchor is None else f"{credit.anchor} ({credit.anchor_size})"
    quantities = (
        credit.step_reward, credit.step_return, credit.episode_advantage, credit.step_advantage, credit.advantage
    )  # fmt: skip
    return [*(_number(quantity) for quantity in quantities), anchor]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}"


def _print_summaries(summaries: list[EstimatorSummary], out: Console) -> None:
    for summary in summaries:
        anchors = summary.singleton_anchor_share
        states = "" if anchors is None else f", {anchors:.0%} of turns in a state nobody else was in"
        out.print(
            f"{summary.estimator}: {summary.num_turns} turns, mean {summary.mean:+.3f}, deviation {summary.deviation:.3f}, "
            f"{summary.positive_share:.0%} above 0, {summary.zero_share:.0%} exactly 0; "
            f"{summary.num_groups_without_signal} of {summary.num_groups} groups without signal; "
            f"{summary.num_left_out} turns take no part{states}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def _print_disagreements(disagreements: list[Disagreement], names: list[str], out: Console) -> None:
    from rich.table import Table

    if not disagreements:
        return
    table = Table(title="where the estimators disagree most (in their own deviations)", box=None)
    for heading in ("episode", "turn", "spread", *names):
        table.add_column(heading, justify="left" if heading == "episode" else "right", no_wrap=True)
    for found in disagreements[:10]:
        cells = [_number(found.advantages[name]) for name in names]
        table.add_row(found.episode_id, str(found.turn_index), f"{found.spread:.2f}", *cells)
    out.print(table)


def _describe(
    run: Path,
    groups: list[Group],
    several: list[Advantages],
    summaries: list[EstimatorSummary],
    disagreements: list[Disagreement],
    scores: dict[str, Score],
    limit: int,
) -> dict[str, Any]:
    import itertools

    import msgspec

    from turnwise.credit_report import opposite_share

    names = [one.estimator for one in several]
    episode_ids = [episode.episode_id for group in groups for episode in group.episodes]
    return {
        "run": str(run),
        "reward": next(iter(scores.values())).reward_name if scores else None,
        "estimators": {summary.estimator: msgspec.to_builtins(summary) for summary in summaries},
        "opposite_share": {
            f"{left.estimator}/{right.estimator}": opposite_share(left, right)
            for left, right in itertools.combinations(several, 2)
        },
        "disagreements": msgspec.to_builtins(disagreements),
        "groups_without_signal": {
            name: [
                group.group_id
                for group in groups
                if not any(
                    turn.advantage for episode in group.episodes for turn in one.turns[episode.episode_id]
                )
            ]
            for name, one in zip(names, several, strict=True)
        },
        "turns": {
            name: [
                msgspec.to_builtins(turn)
                for turn in itertools.islice(
                    (turn for found in episode_ids for turn in one.turns[found]), limit
                )
            ]
            for name, one in zip(names, several, strict=True)
        },
    }
