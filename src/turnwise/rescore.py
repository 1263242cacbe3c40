"""Scores the stored episodes of a run again, with another reward, and keeps the scores beside the first ones."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from turnwise.rewards.score import Rewards, score_run
from turnwise.store.episodes import EPISODES, read_episodes
from turnwise.store.log import read_records
from turnwise.store.run import Run, file_name
from turnwise.types import Episode, Score

_EPISODES_AT_ONCE = 128


class Rescoring(msgspec.Struct, frozen=True, kw_only=True):
    """What came of scoring a run again."""

    reward: str
    path: str
    sandbox: str
    num_episodes: int
    num_scored: int
    mean: float | None
    std: float | None
    lowest: float | None
    highest: float | None
    errors: dict[str, int]
    """Why episodes were left unscored, and how many."""
    seconds: float
    lived_seconds: float
    """How long the rollouts took, episodes that ran at the same time counted once."""

    @property
    def speedup(self) -> float:
        return self.lived_seconds / max(self.seconds, 1e-9)


async def rescore_run(
    folder: Path, rewards: Rewards, *, on_episodes: Callable[[int], None] | None = None
) -> Rescoring:
    """Score every stored episode and append the scores to `scores/<reward>.jsonl`; the episodes stay untouched."""
    started = time.perf_counter()
    needs_groups = any(term.evaluator.declaration.mode == "batch" for term in rewards.terms)
    run = Run.open(folder)
    scores: list[Score] = []
    spans: list[tuple[float, float]] = []
    try:
        for episodes in _batches(read_episodes(folder), None if needs_groups else _EPISODES_AT_ONCE):
            found = await score_run(episodes, rewards)
            run.record_scores(found)
            scores += found
            spans += [(episode.started_at, episode.started_at + episode.seconds) for episode in episodes]
            if on_episodes is not None:
                on_episodes(len(episodes))
    finally:
        run.close()
    return _summarize(folder, rewards.name, scores, spans, time.perf_counter() - started)


def count_episodes(folder: Path) -> int:
    """How many episodes a run holds."""
    return sum(1 for _ in read_records(folder / EPISODES))


def _batches(episodes: Iterable[Episode], size: int | None) -> Iterator[list[Episode]]:
    source = iter(episodes)
    while batch := list(islice(source, size)):
        yield batch


def _summarize(
    folder: Path, name: str, scores: list[Score], spans: list[tuple[float, float]], seconds: float
) -> Rescoring:
    known = [score.score for score in scores if score.score is not None]
    return Rescoring(
        reward=name,
        path=str(folder / "scores" / f"{file_name(name)}.jsonl"),
        sandbox="+".join(sorted({score.sandbox for score in scores})) or "none",
        num_episodes=len(scores),
        num_scored=len(known),
        mean=statistics.fmean(known) if known else None,
        std=statistics.pstdev(known) if known else None,
        lowest=min(known, default=None),
        highest=max(known, default=None),
        errors=dict(
            Counter(str(score.error)[:200] for score in scores if score.score is None).most_common(10)
        ),
        seconds=seconds,
        lived_seconds=_covered(spans),
    )


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union: `(0, 2), (1, 3), (5, 6)` cover 4."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
