"""Checks of one stored episode: hashes, turns, masks, and the tokens that follow from its messages."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.errors import TurnwiseError
from turnwise.masking import ActionTokenMasker
from turnwise.models.loading import LoadedModel
from turnwise.renderer import Renderer
from turnwise.store.episodes import EPISODES, read_episode
from turnwise.store.log import decode_record
from turnwise.store.run import read_metrics
from turnwise.streams import Conversation
from turnwise.types import Completion, Episode, Image, Turn

_MAX_PROBLEMS = 50


class Findings:
    """Counts of what was seen and of what did not hold, and the first problems in words."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def note(self, count: str, problem: str, number: int = 1) -> None:
        self.counts[count] += number
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(problem)


class EpisodeAudit:
    """Reads the episodes of a run and checks each by itself; what does not hold goes into `findings`."""

    def __init__(self, folder: Path, model: LoadedModel, findings: Findings) -> None:
        self._folder = folder
        self._model = model
        self._findings = findings
        self._masker = ActionTokenMasker(model.tokenizer)
        self._renderers: dict[str, Renderer] = {}
        self._seen_images: set[str] = set()
        self._episodes_of_step: Counter[str] = Counter()
        self._files: dict[tuple[str, str], bool] = {}

    def read_episodes(self) -> Iterator[Episode]:
        """Every episode that is what was written; the others are counted."""
        for number, record in self._read_records():
            self._episodes_of_step[str(record["episode_id"]).partition("-")[0]] += 1
            if not self._is_file_whole(record["tensors"]):
                continue
            try:
                episode = read_episode(self._folder, record)
            except (TurnwiseError, ValueError, KeyError, IndexError) as error:
                self._findings.note(
                    "turn_mismatches", f"record {number} does not describe an episode: {error}"
                )
                continue
            self._check_record(record, episode)
            yield episode

    def _is_file_whole(self, tensors: Mapping[str, Any]) -> bool:
        """Whether a tensor file is what was written; read anew, for what was read earlier may have been changed since."""
        name, expected = str(tensors["file"]), str(tensors["sha256"])
        if (name, expected) not in self._files:
            try:
                with (self._folder / name).open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                problem = None if found == expected else "does not have the content it was written with"
            except OSError as error:
                problem = f"cannot be read: {error.strerror}"
            self._files[name, expected] = problem is None
            if problem is not None:
                self._findings.note("hash_mismatches", f"{name} {problem}")
        return self._files[name, expected]

    def _read_records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        with (self._folder / EPISODES).open("rb") as file:
            for number, line in enumerate(file):
                try:
                    record = decode_record(line.rstrip(b"\n"))
                except ValueError as error:
                    self._findings.note("hash_mismatches", f"{EPISODES}: record {number} is damaged: {error}")
                    continue
                if record.get("seq") != number:
                    self._findings.note(
                        "turn_mismatches",
                        f"{EPISODES}: record {number} says it is number {record.get('seq')}",
                    )
                yield number, record

    def check_completeness(self) -> None:
        """Every episode that a finished step counted must still be there."""
        for record in read_metrics(self._folder):
            expected = int(record.get("episodes/count", 0))
            found = self._episodes_of_step[f"s{record['step']:06d}"]
            if found < expected:
                self._findings.note(
                    "turn_mismatches",
                    f"step {record['step']} had {expected} episodes, the log holds {found} of them",
                )

    def _check_record(self, record: Mapping[str, Any], episode: Episode) -> None:
        """What a record says twice must agree."""
        indices = [turn.turn_index for turn in episode.turns]
        if record["num_turns"] != len(indices) or indices != list(range(len(indices))):
            self._findings.note(
                "turn_mismatches",
                f"episode {episode.episode_id} should have {record['num_turns']} turns but holds turns {indices}",
            )
        for name in ("action_token_start_index", "action_token_end_index", "num_action_tokens"):
            for turn, turn_record in zip(episode.turns, record["turns"], strict=True):
                if turn_record[name] != getattr(turn, name):
                    self._findings.note(
                        "mask_mismatches",
                        f"{_place(episode, turn)}: {name} is {turn_record[name]}, the mask says {getattr(turn, name)}",
                    )

    def check(self, episode: Episode) -> None:
        """Derive again what follows from the episode's own tokens and messages."""
        self._findings.counts["episodes"] += 1
        self._findings.counts["turns"] += episode.num_turns
        self._findings.counts["sampled_tokens"] += sum(
            int(stream.is_sampled.sum()) for stream in episode.streams
        )
        self._findings.counts["inexact_episodes"] += not episode.is_token_exact
        self._check_images(episode)
        self._check_spans(episode)
        self._check_masks(episode)
        self._check_given_tokens(episode)

    def _check_images(self, episode: Episode) -> None:
        for stream in episode.streams:
            for image in stream.images:
                if image.sha256 in self._seen_images:
                    continue
                self._seen_images.add(image.sha256)
                try:
                    is_same = Image.from_pixels(np.array(image.pixels)).sha256 == image.sha256
                except (OSError, ValueError) as error:
                    self._findings.note("hash_mismatches", f"image {image.sha256} cannot be read: {error}")
                    continue
                if not is_same:
                    self._findings.note(
                        "hash_mismatches", f"image {image.sha256} does not show what its name says"
                    )

    def _check_spans(self, episode: Episode) -> None:
        """Every sampled token belongs to exactly one turn; a failed episode may have sampled one turn more."""
        for index, stream in enumerate(episode.streams):
            covered = np.zeros(len(stream.ids), dtype=np.int64)
            turns = [turn for turn in episode.turns if turn.stream is stream]
            for turn in turns:
                covered[turn.completion_start : turn.completion_end] += 1
            expected = stream.is_sampled.astype(np.int64)
            if episode.failure is not None and index == len(episode.streams) - 1:
                last = max((turn.completion_end for turn in turns), default=0)
                expected[last:] = 0
            if not np.array_equal(covered, expected):
                where = int(np.flatnonzero(covered != expected)[0])
                self._findings.note(
                    "turn_mismatches",
                    f"episode {episode.episode_id}: token {where} of stream {index} was "
                    f"{'sampled' if stream.is_sampled[where] else 'given'} but lies in {covered[where]} turns",
                )
            kept = None if stream.kept is None else len(stream.kept)
            if kept not in (None, int(stream.is_sampled.sum())):
                self._findings.note(
                    "turn_mismatches",
                    f"episode {episode.episode_id}: stream {index} has {kept} kept sets for {int(stream.is_sampled.sum())} sampled tokens",
                )

    def _check_masks(self, episode: Episode) -> None:
        for turn in episode.turns:
            found = self._masker.mask(turn.generated_ids, frozenset(episode.action_keys))
            differing = [
                name
                for name, stored, now in (
                    ("mask", turn.action_token_mask.tolist(), found.action_token_mask.tolist()),
                    ("method", turn.masking_method, found.method),
                    ("confidence", turn.masking_confidence, found.confidence),
                    ("action", turn.action.value, found.action.value),
                )
                if stored != now
            ]
            if differing:
                self._findings.note(
                    "mask_mismatches",
                    f"{_place(episode, turn)}: {' and '.join(differing)} do not follow from the tokens",
                )

    def _check_given_tokens(self, episode: Episode) -> None:
        if not episode.is_token_exact:
            return
        renderer = self._renderer(episode.history)
        conversation = Conversation(renderer)
        for turn in episode.turns:
            try:
                conversation.observe(turn.observation.messages)
                is_same = np.array_equal(conversation.prompt_ids, turn.context_input_ids)
                conversation.answer(_completion_of(turn))
            except TurnwiseError as error:
                self._findings.note(
                    "token_mismatches", f"{_place(episode, turn)} cannot be rendered again: {error}"
                )
                return
            if not is_same or not self._is_text_of(turn):
                what = (
                    "text is not what was sampled" if is_same else "prompt does not follow from its messages"
                )
                self._findings.note("token_mismatches", f"{_place(episode, turn)}: its {what}")
                return

    def _is_text_of(self, turn: Turn) -> bool:
        ids = turn.generated_ids.tolist()
        decode = self._model.tokenizer.decode
        readings = {
            decode(part, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            for part in (ids, ids[:-1] if ids and ids[-1] in self._masker.token_bytes.special_ids else ids)
            for skip in (True, False)
        }
        return turn.text in readings or turn.text == self._masker.token_bytes.text(ids)

    def _renderer(self, history: str) -> Renderer:
        if history not in self._renderers:
            self._renderers[history] = Renderer(
                self._model.tokenizer,
                image_processor=self._model.image_processor,
                history=history,  # type: ignore[arg-type]  # the renderer itself refuses other words
            )
        return self._renderers[history]


def _completion_of(turn: Turn) -> Completion:
    return Completion(
        completion_ids=turn.generated_ids,
        logprobs=turn.logprobs,
        text=turn.text,
        finish_reason=turn.finish_reason,
        policy_version=turn.policy_version,
        banned_ids=turn.stream.banned_ids,
    )


def _place(episode: Episode, turn: Turn) -> str:
    return f"episode {episode.episode_id}, turn {turn.turn_index}"
