"""The run folder: everything one run wrote, and where it can be continued."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from turnwise.config import Config
from turnwise.errors import StoreError
from turnwise.store.checkpoints import (
    list_checkpoints,
    load_checkpoint,
    remove_old_checkpoints,
    save_checkpoint,
)
from turnwise.store.episodes import EPISODES, read_episodes, write_batch
from turnwise.store.log import RecordLog, read_records, sync_folder, write_atomically
from turnwise.types import Advantages, Episode, Group, Score

if TYPE_CHECKING:
    import torch

METRICS = "metrics.jsonl"
WEIGHTS = "weights.jsonl"
BRANCHES = "branches"
"""Continuations of stored episodes; they are not part of the run that a checkpoint continues."""
EVALUATIONS = "evaluations.jsonl"


class Run:
    """One run folder, opened for writing by one process."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder = folder
        self.config = config
        self._logs: dict[str, RecordLog] = {}
        self._best: tuple[float, int] | None = None

    @classmethod
    def create(cls, folder: Path, config: Config) -> Run:
        """Start a new run; the folder must be new or empty."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise StoreError(
                f"{folder} is not empty; choose another folder, or `turnwise train --resume {folder}` to continue it"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make run folder {folder}: {error.strerror}") from None
        write_atomically(
            folder / "environment.json", json.dumps(describe_environment(config), indent=2).encode()
        )
        write_atomically(folder / "config.yaml", config.to_yaml().encode())
        run = cls(folder, config)
        run._log(EPISODES)
        return run

    @classmethod
    def open(cls, folder: Path) -> Run:
        """Open a run to continue it or add opinions to it."""
        return cls(folder, read_config(folder))

    def record_groups(self, name: str, groups: Sequence[Group]) -> None:
        """Store episodes; when this returns they are on disk (durability `batch` or `episode`)."""
        self.record_episodes(name, [episode for group in groups for episode in group.episodes])

    def record_episodes(self, name: str, episodes: Sequence[Episode]) -> None:
        log = self._log(EPISODES)
        for record in write_batch(self.folder, name, episodes):
            log.append(record)
        if self.config.storage.durability != "none":
            log.sync()

    def record_scores(self, scores: Iterable[Score]) -> None:
        for score in scores:
            self._log(f"scores/{file_name(score.reward_name)}.jsonl").append(msgspec.to_builtins(score))

    def record_advantages(self, advantages: Advantages) -> None:
        log = self._log(f"advantages/{file_name(advantages.estimator)}.jsonl")
        for episode_id, turns in advantages.turns.items():
            log.append({"episode_id": episode_id, "turns": [msgspec.to_builtins(turn) for turn in turns]})

    def record_step(
        self, step: int, scores: Iterable[Score], advantages: Advantages, metrics: Mapping[str, float]
    ) -> None:
        """Store what was thought of a step's episodes and what became of it."""
        self.record_scores(scores)
        self.record_advantages(advantages)
        self.record_metrics(step, metrics)

    def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(METRICS).append({"step": step, "time": time.time(), **metrics})

    def record_evaluation(self, num_updates: int, evaluation: Mapping[str, Any]) -> None:
        """Figures on held-out tasks after `num_updates` updates."""
        self._log(EVALUATIONS).append({"step": num_updates, "time": time.time(), **evaluation})

    def save_weights(self, version: int, weights: Mapping[str, torch.Tensor], fingerprint: str) -> None:
        """Note which weights are this policy version; keep them for `turnwise verify` when they are small enough."""
        self._log(WEIGHTS).append({"version": version, "fingerprint": fingerprint})
        size_mb = sum(tensor.numel() * tensor.element_size() for tensor in weights.values()) / 2**20
        if size_mb > self.config.storage.keep_weights_mb:
            return
        from safetensors.torch import save

        path = self.folder / "weights" / f"version-{version:06d}.safetensors"
        path.parent.mkdir(exist_ok=True)
        content = save(
            {name: tensor.contiguous() for name, tensor in weights.items()}, {"fingerprint": fingerprint}
        )
        write_atomically(path, content)

    def save_checkpoint(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        *,
        score: float | None = None,
    ) -> Path:
        """Publish a checkpoint that also remembers how far each log had come."""
        for log in self._logs.values():
            log.sync()
        if score is not None and (self._best is None or score > self._best[0]):
            self._best = (score, step)
        sizes = {name: log.size for name, log in self._logs.items()}
        full_state = {"step": step, "log_sizes": sizes, "best": self._best, **state}
        path = save_checkpoint(self.folder, step, tensors, full_state)
        remove_old_checkpoints(
            self.folder, self.config.storage.keep_checkpoints, None if self._best is None else self._best[1]
        )
        return path

    def rewind_to_checkpoint(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The newest checkpoint; what the logs hold beyond it is moved aside, for it will happen again."""
        checkpoints = list_checkpoints(self.folder)
        if not checkpoints:
            raise StoreError(f"{self.folder} has no checkpoint; start it again in a new folder")
        tensors, state = load_checkpoint(checkpoints[-1][1])
        self._best = None if state["best"] is None else (state["best"][0], state["best"][1])
        present = [
            str(path.relative_to(self.folder))
            for path in self.folder.glob("**/*.jsonl")
            if not {"superseded", BRANCHES} & set(path.relative_to(self.folder).parts)
        ]
        for name in sorted({*present, *state["log_sizes"]}):
            aside = self.folder / "superseded" / name.replace("/", "-")
            aside.parent.mkdir(exist_ok=True)
            self._log(name).rewind(state["log_sizes"].get(name, 0), aside)
        return tensors, state

    def close(self) -> None:
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    def _log(self, name: str) -> RecordLog:
        if name not in self._logs:
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            sync = self.config.storage.durability == "episode" and name == EPISODES
            self._logs[name] = RecordLog(path, sync_every_record=sync)
            sync_folder(path.parent)
        return self._logs[name]


def read_config(folder: Path) -> Config:
    """The config a run was started with."""
    if not (folder / "config.yaml").is_file():
        raise StoreError(f"{folder} is not a run folder: it has no config.yaml")
    return Config.from_file(folder / "config.yaml")


def read_groups(folder: Path) -> list[Group]:
    """All stored episodes, in their groups."""
    members: dict[str, list[Episode]] = {}
    for episode in read_episodes(folder):
        members.setdefault(episode.group_id, []).append(episode)
    return [
        Group(group_id=group_id, task=episodes[0].task, episodes=tuple(episodes))
        for group_id, episodes in members.items()
    ]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / METRICS
    return list(read_records(path)) if path.exists() else []


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    path = folder / EVALUATIONS
    return list(read_records(path)) if path.exists() else []


def read_scores(folder: Path, reward_name: str) -> dict[str, Score]:
    """One reward's scores by episode id; a later score replaces an earlier one."""
    path = folder / "scores" / f"{file_name(reward_name)}.jsonl"
    if not path.exists():
        known = sorted(found.stem for found in path.parent.glob("*.jsonl"))
        raise StoreError(f"{folder} has no scores of {reward_name!r}; it has: {', '.join(known) or 'none'}")
    scores = {}
    for record in read_records(path):
        score = msgspec.convert(record, Score)
        scores[score.episode_id] = score
    return scores


def file_name(name: str) -> str:
    """A name from outside as a file name: `my/file.py:fn` becomes `my_file.py_fn`."""
    safe = "".join(letter if letter.isalnum() or letter in "-._+" else "_" for letter in name).lstrip(".")
    return safe or "unnamed"


def describe_environment(config: Config) -> dict[str, Any]:
    """Versions, commit and seed: what somebody needs to repeat the run."""
    packages = ("turnwise", "torch", "transformers", "peft", "numpy", "gymnasium")
    return {
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seed": config.training.seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in packages},
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit turnwise was run from, when it was run from a checkout."""
    try:
        shown = subprocess.run(
            ["git", "rev-parse", "HEAD"],  # noqa: S607  (whichever git the user has)
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return shown.stdout.strip() or None
