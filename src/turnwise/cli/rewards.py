"""`turnwise score` and `turnwise lint-reward`: opinions about episodes that were lived already."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turnwise.cli.output import console, print_json
from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from turnwise.config import RewardsConfig
    from turnwise.rewards.lint import LintReport

RewardOption = Annotated[
    str, typer.Option("--reward", help="A built-in, file.py:function or package.module:function.")
]
ParamsOption = Annotated[
    list[str] | None, typer.Option("--param", help="key=value for the function; may be repeated.")
]
SandboxOption = Annotated[str, typer.Option(help="auto, bubblewrap, landlock or none.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]


def register(app: typer.Typer) -> None:
    app.command()(score)
    app.command("lint-reward")(lint_reward)


def score(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    reward: RewardOption,
    name: Annotated[str | None, typer.Option(help="What to call the scores; the function's name.")] = None,
    param: ParamsOption = None,
    sandbox: SandboxOption = "auto",
    timeout_s: Annotated[float, typer.Option(help="Deadline of one call.")] = 10.0,
    workers: Annotated[int, typer.Option(help="Calls at once.")] = 2,
    as_json: JsonOption = False,
) -> None:
    """Score the stored episodes of a run with another reward; the episodes stay as they are."""
    import msgspec

    from turnwise.rescore import count_episodes, rescore_run
    from turnwise.rewards.score import build_rewards
    from turnwise.store.run import read_config

    read_config(run)
    config = _rewards_config(reward, param, sandbox, label=name, timeout_s=timeout_s, num_workers=workers)
    with build_rewards(config) as rewards, _counter("scoring", count_episodes(run)) as advance:
        found = asyncio.run(rescore_run(run, rewards, on_episodes=advance))
    if as_json:
        print_json({**msgspec.to_builtins(found), "speedup": found.speedup})
        return
    if found.mean is not None:
        console.print(
            f"{found.reward}: mean {found.mean:.4f} ± {found.std:.4f}, from {found.lowest:.4f} to {found.highest:.4f}",
            highlight=False,
        )
    console.print(
        f"scored {found.num_scored} of {found.num_episodes} episodes in {found.seconds:.2f} s "
        f"({found.speedup:,.0f} times as fast as they were lived), sandbox {found.sandbox}; wrote {found.path}",
        highlight=False,
    )
    for error, count in found.errors.items():
        console.print(f"unscored, {count} episodes: {error}", highlight=False)


def lint_reward(
    reward: Annotated[str, typer.Argument(help="A built-in, file.py:function or package.module:function.")],
    run: Annotated[Path | None, typer.Option(help="Take episodes of this run instead of samples.")] = None,
    episodes: Annotated[int, typer.Option(help="How many of them.")] = 20,
    ground_truth: Annotated[str | None, typer.Option(help="Truth of the samples, as JSON.")] = None,
    param: ParamsOption = None,
    sandbox: SandboxOption = "auto",
    timeout_s: Annotated[float, typer.Option(help="Deadline of one call.")] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Audit a reward: what it pays for spoilt episodes, whether it crashes, repeats itself, is slow.

    Exit code 1 when there is a finding. It audits; it does not promise.
    """
    from itertools import islice

    import msgspec

    from turnwise.rewards import lint
    from turnwise.rewards.score import build_rewards
    from turnwise.store.episodes import read_episodes
    from turnwise.store.run import read_config

    if run is not None:
        read_config(run)
        alive = (episode for episode in read_episodes(run) if episode.failure is None and episode.turns)
        chosen = list(islice(alive, episodes))
    else:
        chosen = lint.sample_episodes(_parse(ground_truth) if ground_truth is not None else None)
    if not chosen:
        raise ConfigError(f"{run} holds no finished episode to lint with")
    with build_rewards(_rewards_config(reward, param, sandbox, timeout_s=timeout_s)) as rewards:
        report = asyncio.run(lint.lint_reward(rewards, chosen))
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        _show(report, from_run=run is not None)
    if report.findings:
        raise typer.Exit(1)


@contextmanager
def _counter(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing when piped."""
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    bar = Progress(
        *Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )
    line = bar.add_task(description, total=total)
    if console.is_terminal:
        bar.start()
    try:
        yield lambda count: bar.advance(line, count)
    finally:
        bar.stop()


def _show(report: LintReport, *, from_run: bool) -> None:
    from rich.table import Table

    mean = "none" if report.mean_score is None else f"{report.mean_score:.4f}"
    console.print(
        f"{report.reward}: {report.num_calls} calls on {report.num_episodes} "
        f"{'episodes of the run' if from_run else 'samples'}, mean score {mean}, "
        f"{report.ms_per_call:.1f} ms a call (slowest {report.max_ms_per_call:.1f}), sandbox {report.sandbox}",
        highlight=False,
    )
    if not report.findings:
        console.print("no finding; that is an audit, not a promise")
        return
    table = Table("finding", "episodes were", "count", "gain", "detail")
    for finding in report.findings:
        gain = "" if finding.gain is None else f"+{finding.gain:.4g}"
        table.add_row(finding.kind, finding.mutation, str(finding.count), gain, finding.detail)
    console.print(table)


def _rewards_config(
    reward: str, params: list[str] | None, sandbox: str, *, label: str | None = None, **limits: Any
) -> RewardsConfig:
    from pydantic import ValidationError

    from turnwise.config import RewardConfig, RewardsConfig

    values: dict[str, Any] = {}
    for param in params or ():
        key, separator, text = param.partition("=")
        if not separator or not key:
            raise ConfigError(f"--param {param!r} is not of the form key=value")
        values[key] = _parse(text)
    try:
        function = RewardConfig(name=reward, label=label, params=values)
        return RewardsConfig.model_validate({"functions": (function,), "sandbox": sandbox, **limits})
    except ValidationError as error:
        item = error.errors()[0]
        raise ConfigError(f"{'.'.join(map(str, item['loc']))} is {item['input']!r}: {item['msg']}") from None


def _parse(text: str) -> Any:
    """A value as YAML reads it: 3, true, [a, b], or the text itself."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
