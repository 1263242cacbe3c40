"""`EpisodeBatchCollector`: plays many episodes and keeps them on disk, so that memory does not grow with their number.

output_dir/
  episodes.jsonl                    one line per episode (also under the name episode_manifest.jsonl)
  tensors/<batch>.safetensors       tokens, masks, log-probs of the batch
  tensors/<episode>/turn_00.pt      with save_format full or both: generated_ids, action_token_mask, …
  <episode>_tensors.pt              the same, all turns of an episode in one file
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from turnwise.environment import Environment
from turnwise.errors import StoreError
from turnwise.simulator import EpisodeSimulator, PlannedEpisode, make_task
from turnwise.store.episodes import EPISODES, read_episode, write_batch
from turnwise.store.log import RecordLog, decode_record, read_records
from turnwise.tally import Tally
from turnwise.types import Episode, Turn

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs

MANIFEST = "episode_manifest.jsonl"
SaveFormat = Literal["jsonl", "full", "both"]


class EpisodeBatchCollector:
    """Collects episodes one by one, or a batch at a time.

    collector = EpisodeBatchCollector(simulator=simulator, output_dir="rl_data", save_format="both")
    episode = collector.collect_episode(env, env.get_random_pose())

    collector = EpisodeBatchCollector(simulator=simulator, env=env, output_dir="episodes", num_episodes=100)
    episodes = collector.collect_batch(scene_id="42445173")

    Up to `max_concurrent` episodes are played at once when `env` is a function that makes environments, or an
    environment with a method `clone`; otherwise one after the other.
    """

    def __init__(
        self,
        simulator: EpisodeSimulator,
        env: Environment | Callable[[], Environment] | None = None,
        output_dir: Path | str = "episodes",
        num_episodes: int = 100,
        save_format: SaveFormat = "jsonl",
        *,
        max_concurrent: int = 16,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> None:
        if save_format not in ("jsonl", "full", "both"):
            raise ValueError(f"save_format is {save_format!r}; use jsonl, full or both")
        self.simulator = simulator
        self.env = env
        self.output_dir = Path(output_dir)
        self.num_episodes = num_episodes
        self.save_format = save_format
        self._max_concurrent = max_concurrent
        self._on_episode = on_episode
        self._log: RecordLog | None = None
        self._tally = Tally()
        self._offsets: dict[str, int] = {}
        self._read_earlier_episodes()

    def collect_episode(
        self,
        env: Environment | None = None,
        initial_pose: Any = None,  # whatever the environment calls a pose, or a Task
        episode_id: str | None = None,
        *,
        seed: int | None = None,
    ) -> Episode:
        """Play one episode and store it; when this returns it is on disk."""
        env = self._given_environment(env)
        episode_id = next(self._free_ids("episode_{:03d}", 0)) if episode_id is None else episode_id
        if _checked(episode_id) in self._offsets:
            raise StoreError(f"{self.output_dir} already has an episode {episode_id!r}; choose another id")
        episode = self.simulator.run_episode(env, initial_pose, episode_id, seed=seed)
        self._store(episode_id, [episode])
        return episode

    def collect_batch(
        self,
        scene_id: str | None = None,
        num_episodes: int | None = None,
        *,
        initial_poses: Sequence[Any] | None = None,
        show_progress: bool | None = None,
    ) -> StoredEpisodes:
        """Play `num_episodes` episodes (of one scene, from random poses unless given) and store them.

        The result reads episodes from disk when they are looked at. A bar is shown on a terminal unless told otherwise.
        """
        total = len(initial_poses) if initial_poses is not None else num_episodes or self.num_episodes
        environments = self._environments(min(total, self._max_concurrent))
        for environment in environments:
            if scene_id is not None:
                _load_scene(environment, scene_id)
        episode_ids: list[str] = []
        with _Progress(total, show_progress) as progress:
            while len(episode_ids) < total:
                wave = environments[: total - len(episode_ids)]
                planned = self._plan(wave, initial_poses, len(episode_ids))
                episodes = self.simulator.run_episodes(planned)
                self._store(planned[0].episode_id, episodes)
                episode_ids += [item.episode_id for item in planned]
                progress.advance(episodes)
        return StoredEpisodes(self, episode_ids)

    def get_statistics(self) -> dict[str, Any]:
        """Counts and means over all episodes in the folder."""
        return self._tally.figures()

    def iter_episodes_jsonl(self) -> Iterator[dict[str, Any]]:
        """The line of each stored episode, oldest first."""
        if (self.output_dir / EPISODES).exists():
            yield from read_records(self.output_dir / EPISODES)

    def load_episode(self, episode_id: str) -> Episode:
        """A stored episode, its tensors checked against their hash."""
        if episode_id not in self._offsets:
            raise StoreError(
                f"{self.output_dir} has no episode {episode_id!r}; it has {len(self._offsets)} others"
            )
        with (self.output_dir / EPISODES).open("rb") as file:
            file.seek(self._offsets[episode_id])
            record = decode_record(file.readline()[:-1])
        return read_episode(self.output_dir, record)

    def load_episode_tensors(self, episode_id: str, turn_index: int) -> dict[str, torch.Tensor | int]:
        """One turn's tensors: generated_ids, action_token_mask, logprobs, context_input_ids, input_token_length."""
        path = self._turn_path(episode_id, turn_index)
        if path.exists():
            import torch

            tensors: dict[str, Any] = torch.load(path, weights_only=True)
            return tensors
        turns = self.load_episode(episode_id).turns
        if not 0 <= turn_index < len(turns):
            raise StoreError(f"episode {episode_id!r} has {len(turns)} turns; there is no turn {turn_index}")
        return _turn_tensors(turns[turn_index])

    def close(self) -> None:
        """Let other processes write to the folder."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read_earlier_episodes(self) -> None:
        path = self.output_dir / EPISODES
        if not path.exists():
            return
        offset = 0
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break  # a record that was being written when an earlier session died; opening the log cuts it off
                record = decode_record(line[:-1])
                self._offsets[record["episode_id"]] = offset
                self._tally.add(record)
                offset += len(line)

    def _open_log(self) -> RecordLog:
        if self._log is None:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self._log = RecordLog(self.output_dir / EPISODES)
            if not (self.output_dir / MANIFEST).exists():
                os.symlink(EPISODES, self.output_dir / MANIFEST)
        return self._log

    def _store(self, name: str, episodes: Sequence[Episode]) -> None:
        log = self._open_log()
        for episode, record in zip(episodes, write_batch(self.output_dir, name, episodes), strict=True):
            if self.save_format != "jsonl":
                self._save_tensors(episode)
            self._offsets[episode.episode_id] = log.size
            log.append(record)
            self._tally.add(record)
            if self._on_episode is not None:
                self._on_episode(episode)
        log.sync()

    def _save_tensors(self, episode: Episode) -> None:
        import torch

        turns = [_turn_tensors(turn) for turn in episode.turns]
        for index, tensors in enumerate(turns):
            path = self._turn_path(episode.episode_id, index)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(tensors, path)
        torch.save({"turns": turns}, self.output_dir / f"{_checked(episode.episode_id)}_tensors.pt")

    def _turn_path(self, episode_id: str, turn_index: int) -> Path:
        return self.output_dir / "tensors" / _checked(episode_id) / f"turn_{turn_index:02d}.pt"

    def _plan(
        self, environments: Sequence[Environment], poses: Sequence[Any] | None, done: int
    ) -> list[PlannedEpisode]:
        planned = []
        # One environment draws for all: copies of it would draw the same poses.
        drawer = environments[0]
        episode_ids = self._free_ids("ep{:03d}", 1)
        for offset, (environment, episode_id) in enumerate(zip(environments, episode_ids, strict=False)):
            if poses is not None:
                pose = poses[done + offset]
            else:
                pose = drawer.get_random_pose() if hasattr(drawer, "get_random_pose") else None
            task = make_task(drawer, pose, episode_id)
            planned.append(PlannedEpisode(environment=environment, task=task, episode_id=episode_id))
        return planned

    def _environments(self, count: int) -> list[Environment]:
        if self.env is None:
            raise StoreError("collect_batch needs an environment; pass env= to the collector")
        if _is_environment(self.env):
            clone = getattr(self.env, "clone", None)
            return [self.env, *(clone() for _ in range(count - 1))] if clone is not None else [self.env]
        return [self.env() for _ in range(count)]

    def _given_environment(self, env: Environment | None) -> Environment:
        given = self.env if env is None else env
        if given is None:
            raise StoreError("collect_episode needs an environment; pass one to it or env= to the collector")
        return given if _is_environment(given) else given()

    def _free_ids(self, pattern: str, first: int) -> Iterator[str]:
        """Ids that are not taken; numbers go on after those of an earlier session in the same folder."""
        for number in itertools.count(first + self._tally.num_episodes):
            if pattern.format(number) not in self._offsets:
                yield pattern.format(number)


class StoredEpisodes(Sequence[Episode]):
    """Episodes on disk, read one at a time."""

    def __init__(self, collector: EpisodeBatchCollector, episode_ids: Sequence[str]) -> None:
        self._collector = collector
        self.episode_ids = tuple(episode_ids)

    def __len__(self) -> int:
        return len(self.episode_ids)

    @overload
    def __getitem__(self, index: int) -> Episode: ...

    @overload
    def __getitem__(self, index: slice) -> StoredEpisodes: ...

    def __getitem__(self, index: int | slice) -> Episode | StoredEpisodes:
        if isinstance(index, slice):
            return StoredEpisodes(self._collector, self.episode_ids[index])
        return self._collector.load_episode(self.episode_ids[index])


class _Progress:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, total: int, is_shown: bool | None) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._bar = Progress(
            console=console, disable=not (console.is_terminal if is_shown is None else is_shown)
        )
        self._line = self._bar.add_task("collecting", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def advance(self, episodes: Sequence[Episode]) -> None:
        self._bar.advance(self._line, len(episodes))


def _is_environment(
    given: Environment | Callable[[], Environment],
) -> TypeIs[Environment]:
    # A class of environments has all the methods of one; called, it makes one.
    return isinstance(given, Environment) and not isinstance(given, type)


def _turn_tensors(turn: Turn) -> dict[str, torch.Tensor | int]:
    import torch

    return {
        "generated_ids": torch.tensor(turn.generated_ids, dtype=torch.long),
        "action_token_mask": torch.tensor(turn.action_token_mask),
        "logprobs": torch.tensor(turn.logprobs),
        "context_input_ids": torch.tensor(turn.context_input_ids, dtype=torch.long),
        "input_token_length": turn.input_token_length,
    }


def _load_scene(environment: Environment, scene_id: str) -> None:
    if not hasattr(environment, "load_scene"):
        raise StoreError(f"{type(environment).__name__} has no scenes; leave scene_id out")
    environment.load_scene(scene_id)


def _checked(episode_id: str) -> str:
    """An episode id as a part of a path; ids come from outside."""
    if not episode_id or episode_id != Path(episode_id).name or episode_id.startswith("."):
        raise StoreError(f"episode id {episode_id!r} cannot be a file name; use letters, digits, - and _")
    return episode_id
