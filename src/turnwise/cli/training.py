"""`turnwise init`, `train` and `eval`: from a config file to a trained run."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnwise.cli.output import console, print_json
from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from turnwise.evaluate import Evaluation

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]


def register(app: typer.Typer) -> None:
    app.command()(init)
    app.command()(train)
    app.command("eval")(evaluate)


def init(
    template: Annotated[str, typer.Option(help="debug, small, navigation, adapter or full.")] = "small",
    out: Annotated[Path | None, typer.Option(help="Where to write it (.yaml or .json).")] = None,
    stdout: Annotated[bool, typer.Option("--stdout", help="Print it instead.")] = False,
) -> None:
    """Write a config file to start from."""
    from turnwise.templates import TEMPLATES

    if template not in TEMPLATES:
        raise ConfigError(f"template {template!r} is unknown; choose one of {', '.join(TEMPLATES)}")
    config = TEMPLATES[template]()
    if stdout or out is None:
        print(config.to_yaml(), end="")
        return
    if out.exists():
        raise ConfigError(f"{out} exists; choose another name or remove it first")
    if out.suffix == ".json":
        config.to_json(out)
    else:
        config.to_yaml(out)
    console.print(f"wrote {out}; `turnwise train --config {out}` starts a run")


def train(
    overrides: Annotated[list[str] | None, typer.Argument(help="stage.field=value …")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML or JSON file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/<time> by default.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this run folder.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train an agent, or continue a run that was stopped."""
    from turnwise import trainer
    from turnwise.cli.progress import TrainingProgress
    from turnwise.config import Config
    from turnwise.objective import describe_objective
    from turnwise.store.run import Run
    from turnwise.tracking import start_logging

    if (config is None) == (resume is None):
        raise ConfigError("give either --config FILE to start a run or --resume RUN to continue one")
    if resume is not None:
        if overrides:
            raise ConfigError(f"a resumed run keeps its config; remove {' '.join(overrides)}")
        run = Run.open(resume)
        stages = trainer.build_stages(run.config)
        first_step = trainer.restore(run, stages)
    else:
        assert config is not None
        settings = Config.from_file(config, overrides or ())
        stages = trainer.build_stages(settings)
        run = Run.create(out or Path("runs") / time.strftime("%Y%m%d-%H%M%S"), settings)
        first_step = 0
    start_logging(run.folder, run.config.tracking.log_level)
    console.print(describe_objective(run.config.loss, run.config.credit), highlight=False)
    with TrainingProgress(run.config.training.num_steps, first_step=first_step) as watch:
        num_updates = asyncio.run(trainer.train(run, stages, watch, first_step=first_step))
    figures = None
    if num_updates == run.config.training.num_steps:
        evaluation = asyncio.run(trainer.evaluate_now(run, stages, "final"))
        figures = evaluation.figures()
        run.record_evaluation(num_updates, figures)
        print_evaluation(evaluation)
        console.print(f"run folder: {run.folder}")
    else:
        console.print(f"stopped after {num_updates} updates; `turnwise train --resume {run.folder}` goes on")
    asyncio.run(trainer.close(run, stages))
    if as_json:
        print_json({"run": str(run.folder), "num_updates": num_updates, "evaluation": figures})


def evaluate(
    run_folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder; its newest checkpoint is evaluated.")
    ],
    num_tasks: Annotated[
        int | None, typer.Option(help="Held-out tasks; the run's own number by default.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 acts greedily.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a trained agent on held-out tasks."""
    from turnwise import trainer
    from turnwise.cli.progress import EpisodeProgress
    from turnwise.store.run import read_config

    given = {"num_tasks": num_tasks, "temperature": temperature}
    overrides = [f"evaluation.{name}={value}" for name, value in given.items() if value is not None]
    config = read_config(run_folder).with_overrides(overrides)
    with EpisodeProgress("evaluating", config.evaluation.num_tasks) as watch:
        evaluation = asyncio.run(trainer.evaluate_run(run_folder, config, watch))
    print_evaluation(evaluation)
    if as_json:
        print_json({"run": str(run_folder), **evaluation.figures()})


def print_evaluation(evaluation: Evaluation) -> None:
    """A line per figure, with its 95 % interval where there is one."""
    for name, value in evaluation.metrics.items():
        interval = evaluation.intervals.get(name)
        bounds = f"   [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""
        console.print(f"{name:24s} {value:8.3f}{bounds}", highlight=False)
