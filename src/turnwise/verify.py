"""`turnwise verify`: derives everything that can be derived from a stored run again, and says what does not hold.

Per episode: hashes of records, tensors and images; the tokens that the template gives; every mask and action; and
the log-probability of every sampled token under the weights of its policy version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from turnwise.audit import EpisodeAudit, Findings
from turnwise.fingerprint import fingerprint
from turnwise.models.loading import LoadedModel, load_model
from turnwise.models.lora import adapt
from turnwise.policies.weights import load_into
from turnwise.store.checkpoints import load_checkpoint
from turnwise.store.episodes import EPISODES
from turnwise.store.log import read_records
from turnwise.store.run import WEIGHTS, read_config
from turnwise.teacher_forcing import IMPOSSIBLE, ScoreJob, TeacherForcing
from turnwise.types import Episode

_EPISODES_AT_ONCE = 256
# What a float32 forward may differ by when it is cut into turns or not, with room; other types round more.
_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
_COUNTS = (
    "episodes", "turns", "sampled_tokens", "unscored_tokens", "inexact_episodes", "hash_mismatches",
    "turn_mismatches", "token_mismatches", "mask_mismatches", "logprob_mismatches",
)  # fmt: skip


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What was derived again, and what did not agree."""

    run: str
    episodes: int
    turns: int
    sampled_tokens: int
    rescored_tokens: int
    unscored_tokens: int
    """Tokens of policy versions whose weights are gone, so that nothing can be said about them."""
    inexact_episodes: int
    """Episodes from servers that return text only; they are never trained on and not re-scored."""
    hash_mismatches: int
    """Records, tensor files, images and weights that are not what was written."""
    turn_mismatches: int
    """Episodes whose turns do not cover their sampled tokens one to one."""
    token_mismatches: int
    """Turns whose given tokens or text do not follow from their messages and sampled tokens."""
    mask_mismatches: int
    """Turns whose mask or action does not follow from their tokens."""
    logprob_mismatches: int
    """Tokens whose log-probability is off by more than `tolerance`."""
    max_logprob_gap: float | None
    """None when nothing could be re-scored."""
    p999_logprob_gap: float | None
    tolerance: float
    problems: tuple[str, ...]
    """The first of them, in words."""

    @property
    def is_verified(self) -> bool:
        wrong = self.hash_mismatches + self.turn_mismatches + self.token_mismatches + self.mask_mismatches
        return wrong + self.logprob_mismatches + self.unscored_tokens == 0


def verify_run(
    folder: Path, *, tolerance: float | None = None, on_episode: Callable[[Episode], None] | None = None
) -> Verification:
    """Check a whole run folder. Raises only when it cannot be read as a run at all."""
    config = read_config(folder)
    model = load_model(config.model)
    network = adapt(model.network, config.model.lora, seed=config.training.seed).eval()
    model = msgspec.structs.replace(model, network=network)
    findings = Findings()
    audit = EpisodeAudit(folder, model, findings)
    scoring = _Scoring(
        folder, model, findings, _TOLERANCES[config.model.dtype] if tolerance is None else tolerance
    )
    waiting: list[Episode] = []
    for episode in audit.read_episodes():
        audit.check(episode)
        waiting.append(episode)
        if on_episode is not None:
            on_episode(episode)
        if len(waiting) == _EPISODES_AT_ONCE:
            scoring.rescore(waiting)
            waiting = []
    scoring.rescore(waiting)
    audit.check_completeness()
    gaps = np.concatenate(scoring.gaps) if scoring.gaps else np.empty(0)
    return Verification(
        run=str(folder),
        **{name: findings.counts[name] for name in _COUNTS},
        rescored_tokens=len(gaps),
        max_logprob_gap=float(gaps.max()) if len(gaps) else None,
        p999_logprob_gap=float(np.quantile(gaps, 0.999)) if len(gaps) else None,
        tolerance=scoring.tolerance,
        problems=tuple(findings.problems),
    )


def count_episodes(folder: Path) -> int:
    """How many records a run has, damaged ones included."""
    with (folder / EPISODES).open("rb") as file:
        return sum(1 for _ in file)


class _Scoring:
    """Scores sampled tokens again, version by version, and notes those that are off."""

    def __init__(self, folder: Path, model: LoadedModel, findings: Findings, tolerance: float) -> None:
        self._findings = findings
        self._weights = _Weights(folder, model)
        self._teacher_forcing = TeacherForcing(model.network, model.image_processor)
        self.tolerance = tolerance
        self.gaps: list[npt.NDArray[np.float64]] = []

    def rescore(self, episodes: Sequence[Episode]) -> None:
        """Score the sampled tokens of some episodes under the weights of their policy versions."""
        by_version: dict[int, list[tuple[Episode, ScoreJob]]] = {}
        for episode in episodes:
            if not episode.is_token_exact:
                continue
            for version, job in _score_jobs(episode):
                by_version.setdefault(version, []).append((episode, job))
        for version, items in sorted(by_version.items()):
            problem = self._weights.load(version)
            if problem is not None:
                self._findings.note("hash_mismatches", problem)
            if not self._weights.is_loaded(version):
                missing = sum(len(job.places) for _, job in items)
                self._findings.note(
                    "unscored_tokens", f"the run keeps no weights of policy version {version}", missing
                )
                continue
            gaps = self._teacher_forcing.gaps([job for _, job in items])
            for (episode, job), gap in zip(items, gaps, strict=True):
                self.gaps.append(gap)
                self._note_gaps(episode, job, gap, version)

    def _note_gaps(
        self, episode: Episode, job: ScoreJob, gaps: npt.NDArray[np.float64], version: int
    ) -> None:
        wrong = np.flatnonzero(gaps > self.tolerance)
        if len(wrong):
            place, gap = int(job.places[wrong[0]]), float(gaps[wrong[0]])
            how = "could not have been sampled" if gap >= IMPOSSIBLE else f"is off by {gap:.4g}"
            self._findings.note(
                "logprob_mismatches",
                f"episode {episode.episode_id}: token {place} {how} under policy version {version}",
                len(wrong),
            )


class _Weights:
    """Puts the weights of a policy version into the network, from whatever the run kept of them."""

    def __init__(self, folder: Path, model: LoadedModel) -> None:
        self._folder = folder
        self._network = model.network
        self._current: int | None = None
        self._problems: dict[int, str | None] = {}
        path = folder / WEIGHTS
        known = read_records(path) if path.exists() else iter(())
        self._fingerprints = {int(record["version"]): str(record["fingerprint"]) for record in known}
        self._own = {
            name: tensor.detach().clone()
            for name, tensor in self._network.named_parameters()
            if tensor.requires_grad
        }

    def is_loaded(self, version: int) -> bool:
        return self._current == version

    def load(self, version: int) -> str | None:
        """Load a version; the sentence says what is wrong with what was kept, once."""
        if self._current == version:
            return None
        self._current = None
        weights = self._find(version)
        if weights is None:
            return None
        load_into(self._network, weights)
        self._current = version
        if version in self._problems:
            return None
        expected, found = self._fingerprints.get(version), fingerprint(weights)
        self._problems[version] = problem = (
            None
            if expected in (None, found)
            else f"the weights kept for policy version {version} are {found[:12]}, delivered were {str(expected)[:12]}"
        )
        return problem

    def _find(self, version: int) -> dict[str, Any] | None:
        from safetensors.torch import load_file

        kept = self._folder / "weights" / f"version-{version:06d}.safetensors"
        if kept.exists():
            return dict(load_file(kept))
        checkpoint = self._folder / "checkpoints" / f"step-{version:06d}"
        if checkpoint.exists():
            tensors, _ = load_checkpoint(checkpoint)
            return {
                name.removeprefix("model/"): tensor
                for name, tensor in tensors.items()
                if name.removeprefix("model/") in self._own
            }
        # Version 0 is the model a run starts from; its fingerprint says whether it still is the same.
        return self._own if version == 0 else None


def _score_jobs(episode: Episode) -> Iterator[tuple[int, ScoreJob]]:
    for stream in episode.streams:
        row_of = np.cumsum(stream.is_sampled) - 1
        turns = [turn for turn in episode.turns if turn.stream is stream]
        for version in sorted({turn.policy_version for turn in turns}):
            spans = [
                np.arange(turn.completion_start, turn.completion_end)
                for turn in turns
                if turn.policy_version == version
            ]
            places = np.concatenate(spans)
            if not len(places):
                continue
            kept = stream.kept
            rows = (
                tuple(np.empty(0, dtype=np.int32) for _ in places)
                if kept is None
                else tuple(kept.row(int(row)) for row in row_of[places])
            )
            yield version, ScoreJob(
                stream=stream, places=places, kept_rows=rows, temperature=episode.sampling.temperature,
                use_grammar=episode.sampling.use_grammar,
            )  # fmt: skip
