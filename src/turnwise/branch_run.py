"""Branches episodes of a stored run, and keeps the continuations and the value they show beside it.

RUN/branches/values.jsonl          one value estimate per branched turn
RUN/branches/EPISODE-tK/           a run folder of its own with the continuations
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import msgspec

from turnwise.branching import ValueEstimate, branch_episode, estimate_value, preference_pairs
from turnwise.errors import StoreError
from turnwise.policy import Policy
from turnwise.rewards.score import score_groups
from turnwise.store.checkpoints import list_checkpoints, load_checkpoint
from turnwise.store.episodes import find_episode
from turnwise.store.log import RecordLog, read_records
from turnwise.store.run import BRANCHES, Run, file_name, read_config
from turnwise.trainer import Stages, build_stages
from turnwise.types import Episode, Group, Json

VALUES = "values.jsonl"


class BranchReport(msgspec.Struct, frozen=True, kw_only=True):
    """What branching one turn showed."""

    estimate: ValueEstimate
    branches: Group
    weights: str
    """Which weights sampled the continuations."""
    folder: str
    """Where the continuations are stored."""
    pairs: tuple[dict[str, Json], ...]
    """Better and worse answers at the branched turn."""


async def branch_run(
    folder: Path,
    episode_id: str,
    *,
    turn: int,
    num: int,
    weights: Literal["episode", "newest"] = "episode",
    overrides: tuple[str, ...] = (),
) -> BranchReport:
    """Sample `num` continuations of a stored episode from turn `turn` on, score and store them.

    `weights` are those that sampled the episode, or the run's newest.
    """
    config = read_config(folder).with_overrides(overrides)
    episode = find_episode(folder, episode_id)
    place = _find_place(folder, episode_id, turn)
    stages = build_stages(config)
    policy = stages.rollouts.agent.policy
    try:
        used = await _load_weights(folder, episode, stages, policy, weights)
        group, is_restored = await branch_episode(
            episode, stages.rollouts, turn=turn, num=num, label=place.name
        )
        original = Group(group_id=episode.group_id, task=episode.task, episodes=(episode,))
        scores = await score_groups([group, original], stages.rewards)
    finally:
        await policy.close()
        stages.rewards.close()
    estimate = estimate_value(episode, group, scores, config.credit, turn=turn, is_restored=is_restored)
    stored = Run.create(place, config)
    stored.record_groups("branches", [group])
    stored.record_scores(scores[branch.episode_id] for branch in group.episodes)
    stored.close()
    _append_value(folder, estimate)
    return BranchReport(
        estimate=estimate,
        branches=group,
        weights=used,
        folder=str(place),
        pairs=tuple(preference_pairs(episode, group, estimate)),
    )


def read_values(folder: Path) -> dict[tuple[str, int], ValueEstimate]:
    """Stored estimates by episode id and turn; a later one replaces an earlier one."""
    path = folder / BRANCHES / VALUES
    if not path.exists():
        return {}
    found = (msgspec.convert(record, ValueEstimate) for record in read_records(path))
    return {(estimate.episode_id, estimate.turn_index): estimate for estimate in found}


def append_pairs(path: Path, pairs: tuple[dict[str, Json], ...]) -> None:
    """Add preference pairs to a JSONL file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(pair, ensure_ascii=False, allow_nan=False) + "\n" for pair in pairs)


async def _load_weights(
    folder: Path, episode: Episode, stages: Stages, policy: Policy, weights: Literal["episode", "newest"]
) -> str:
    version = max((turn.policy_version for turn in episode.turns), default=0)
    path = folder / "weights" / f"version-{version:06d}.safetensors"
    if weights == "episode" and path.is_file():
        from safetensors.torch import load_file

        await policy.load_weights(load_file(path), version)
        return f"version {version}, which sampled the episode"
    checkpoints = list_checkpoints(folder)
    if weights == "episode" and (version > 0 or checkpoints):
        raise StoreError(
            f"{folder} did not keep the weights of version {version} that sampled {episode.episode_id}; "
            "use --weights newest, or raise storage.keep_weights_mb in the next run"
        )
    if not checkpoints:
        return "the model as it was loaded"
    tensors, state = load_checkpoint(checkpoints[-1][1])
    stages.learner.load_state(tensors, state["learner"])
    await policy.load_weights(stages.learner.weights(), state["step"])
    return f"the checkpoint of step {state['step']}"


def _find_place(folder: Path, episode_id: str, turn: int) -> Path:
    """A folder that is not yet taken; its name also labels the continuations, so that each call samples others."""
    name = f"{file_name(episode_id)}-t{turn}"
    taken = len(list((folder / BRANCHES).glob(f"{name}*")))
    return folder / BRANCHES / (f"{name}-{taken}" if taken else name)


def _append_value(folder: Path, estimate: ValueEstimate) -> None:
    log = RecordLog(folder / BRANCHES / VALUES)
    log.append(msgspec.to_builtins(estimate))
    log.sync()
    log.close()
