"""What-if credit: several estimators on the same stored episodes, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from turnwise.config import CreditConfig
from turnwise.credit import assign_advantages, is_without_signal
from turnwise.errors import ConfigError, StoreError
from turnwise.store.log import read_records
from turnwise.store.run import Run, file_name, read_scores
from turnwise.types import Advantages, Episode, Group, Score, TurnCredit

ESTIMATORS = ("rloo", "grpo", "gigpo", "reinforce_plus_plus", "gae")


class Disagreement(msgspec.Struct, frozen=True, kw_only=True):
    """One turn that estimators see differently, most so first."""

    episode_id: str
    turn_index: int
    spread: float
    """Largest minus smallest advantage, each in units of its estimator's own deviation."""
    advantages: Mapping[str, float]


class EstimatorSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one estimator made of a run."""

    estimator: str
    num_turns: int
    num_left_out: int
    """Turns of episodes that failed or were not scored."""
    mean: float
    deviation: float
    positive_share: float
    zero_share: float
    num_groups: int
    num_groups_without_signal: int
    singleton_anchor_share: float | None = None
    """Share of turns whose state nobody else of the group was in; None when states are not compared."""


def choose_credit(own: CreditConfig, estimator: str, overrides: Mapping[str, Any]) -> CreditConfig:
    """The run's own credit section when it names this estimator, else that estimator's defaults; then the overrides."""
    if estimator not in ESTIMATORS:
        raise ConfigError(f"estimator {estimator!r} is unknown; choose one of {', '.join(ESTIMATORS)}")
    values: dict[str, Any] = {"estimator": estimator, "invalid_action_penalty": own.invalid_action_penalty}
    if estimator == own.estimator:
        values = own.model_dump(mode="json", exclude_none=True)
    elif estimator not in ("rloo", "grpo"):
        values["default_step_reward"] = own.default_step_reward
    try:
        return CreditConfig.model_validate({**values, **overrides})
    except ValueError as error:
        raise ConfigError(str(error)) from None


def recompute(groups: Sequence[Group], scores: Mapping[str, Score], config: CreditConfig) -> Advantages:
    """One estimator's advantages for a whole run, batch by batch as they were collected."""
    turns: dict[str, tuple[TurnCredit, ...]] = {}
    for _, batch in groupby(groups, key=_batch_of):
        turns.update(assign_advantages(list(batch), scores, config).turns)
    return Advantages(estimator=config.estimator, turns=turns)


def _batch_of(group: Group) -> str:
    # Group ids are `<label of the batch>-g<number>`; whitening never reaches over batches.
    return group.group_id.rpartition("-g")[0]


def summarize(groups: Sequence[Group], advantages: Advantages) -> EstimatorSummary:
    """Counts and shares of one estimator."""
    credits = [credit for row in advantages.turns.values() for credit in row]
    given = np.array([credit.advantage for credit in credits if credit.advantage is not None])
    sizes = [credit.anchor_size for credit in credits if credit.anchor_size is not None]
    return EstimatorSummary(
        estimator=advantages.estimator,
        num_turns=len(given),
        num_left_out=len(credits) - len(given),
        mean=float(given.mean()) if len(given) else 0.0,
        deviation=float(given.std()) if len(given) else 0.0,
        positive_share=float((given > 0).mean()) if len(given) else 0.0,
        zero_share=float((given == 0).mean()) if len(given) else 0.0,
        num_groups=len(groups),
        num_groups_without_signal=sum(is_without_signal(group, advantages.turns) for group in groups),
        singleton_anchor_share=sum(size == 1 for size in sizes) / len(sizes) if sizes else None,
    )


def find_disagreements(several: Sequence[Advantages], limit: int) -> list[Disagreement]:
    """The turns on which the estimators differ most, each measured in its own deviation."""
    columns = {
        advantages.estimator: {
            (credit.episode_id, credit.turn_index): credit.advantage
            for row in advantages.turns.values()
            for credit in row
            if credit.advantage is not None
        }
        for advantages in several
    }
    shared = [
        key for key in next(iter(columns.values())) if all(key in column for column in columns.values())
    ]
    if not shared or len(columns) < 2:
        return []
    table = np.array([[column[key] for column in columns.values()] for key in shared])
    deviation = table.std(axis=0)
    scaled = table / np.where(deviation > 0, deviation, 1.0)
    spread = scaled.max(axis=1) - scaled.min(axis=1)
    order = np.argsort(-spread, kind="stable")[:limit].tolist()
    return [
        Disagreement(
            episode_id=shared[row][0],
            turn_index=shared[row][1],
            spread=float(spread[row]),
            advantages=dict(zip(columns, table[row].tolist(), strict=True)),
        )
        for row in order
        if spread[row] > 0
    ]


def opposite_share(left: Advantages, right: Advantages) -> float:
    """Share of turns that one estimator raises and the other lowers."""
    pairs = [
        (one.advantage, other.advantage)
        for name, row in left.turns.items()
        for one, other in zip(row, right.turns[name], strict=True)
        if one.advantage is not None and other.advantage is not None
    ]
    return sum(one * other < 0 for one, other in pairs) / len(pairs) if pairs else 0.0


def load_scores(folder: Path, episodes: Iterable[Episode], reward: str | None) -> dict[str, Score]:
    """Stored scores of `reward`; of the run's only reward when None; what the environment paid when nothing was scored."""
    found = sorted(path.stem for path in (folder / "scores").glob("*.jsonl"))
    if reward is None and not found:
        return {episode.episode_id: environment_score(episode) for episode in episodes}
    if reward is None:
        if len(found) > 1 and "combined" not in found:
            raise StoreError(f"{folder} has scores of {', '.join(found)}; choose one with --reward")
        reward = found[0] if len(found) == 1 else "combined"
    scores = read_scores(folder, reward)
    missing = {
        episode.episode_id: Score(
            episode_id=episode.episode_id, reward_name=reward, score=None, error="not scored"
        )
        for episode in episodes
        if episode.episode_id not in scores
    }
    return {**scores, **missing}


def environment_score(episode: Episode) -> Score:
    """What the environment itself paid; None for an episode that failed."""
    is_scored = episode.failure is None and bool(episode.turns)
    return Score(
        episode_id=episode.episode_id,
        reward_name="environment",
        score=episode.final_reward if is_scored else None,
        step_rewards=tuple(turn.reward for turn in episode.turns) if is_scored else (),
        error=None if is_scored else "the episode failed",
    )


def read_advantages(folder: Path, estimator: str) -> dict[str, tuple[TurnCredit, ...]]:
    """Stored credits by episode id, empty when there are none; a later record replaces an earlier one."""
    path = folder / "advantages" / f"{file_name(estimator)}.jsonl"
    if not path.exists():
        return {}
    return {
        record["episode_id"]: tuple(msgspec.convert(turn, TurnCredit) for turn in record["turns"])
        for record in read_records(path)
    }


def save_advantages(folder: Path, advantages: Advantages) -> int:
    """Store the credits that differ from the stored ones, and return of how many episodes."""
    known = read_advantages(folder, advantages.estimator)
    changed = {name: row for name, row in advantages.turns.items() if known.get(name) != row}
    if changed:
        run = Run.open(folder)
        run.record_advantages(Advantages(estimator=advantages.estimator, turns=changed))
        run.close()
    return len(changed)
