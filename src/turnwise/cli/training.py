"""`turnwise init`, `train` and `eval`: from a config file to a trained run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.output import console, print_json
from turnwise.errors import ConfigError

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]


def register(app: typer.Typer) -> None:
    app.command()(init)
    app.command()(train)
    app.command("eval")(evaluate)


def init(
    template: Annotated[str, typer.Option(help="debug, small or full.")] = "small",
    out: Annotated[Path | None, typer.Option(help="Where to write it (.yaml or .json).")] = None,
    stdout: Annotated[bool, typer.Option("--stdout", help="Print it instead.")] = False,
) -> None:
    """Write a config file to start from."""
    from turnwise.config import TEMPLATES

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
    import turnwise.trainer as trainer
    from turnwise.cli.progress import TrainingProgress
    from turnwise.config import Config
    from turnwise.program import run_async, start_logging
    from turnwise.store.run import Run

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
    console.print(stages.learner.objective, highlight=False)
    with TrainingProgress(run.config.training.num_steps, first_step=first_step) as watch:
        result = run_async(trainer.train_and_evaluate(run, stages, watch, first_step=first_step))
    if as_json:
        print_json(result)
    else:
        console.print(f"run folder: {run.folder}")


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
    from turnwise.cli.progress import EpisodeProgress
    from turnwise.program import evaluate_run, run_async

    with EpisodeProgress("evaluating", num_tasks or 0) as watch:
        result = run_async(
            evaluate_run(run_folder, num_tasks=num_tasks, temperature=temperature, watch=watch)
        )
    if as_json:
        print_json(result)
        return
    for name, value in result["metrics"].items():
        interval = result["intervals"].get(name)
        print(f"{name:24s} {value:8.3f}" + (f"   [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""))
