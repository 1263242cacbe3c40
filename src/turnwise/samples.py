"""Episodes and their advantages become samples: token streams with the positions that carry loss.

A sample is one stream of one episode. Its loss positions are the action tokens of turns that were given an
advantage. Everything that could make training wrong is refused here, with the episode's id.
"""

# Dimensions: R loss positions of one sample, N turns of one sample.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from turnwise.errors import SampleError
from turnwise.token_tree import Int64Array
from turnwise.types import (
    Advantages,
    BoolArray,
    Episode,
    FloatArray,
    Group,
    IntArray,
    MaskingMethod,
    TokenStream,
    Turn,
    TurnCredit,
)

TrainedTokens: TypeAlias = Literal["action", "completion"]


class TurnStarts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Where the turns of a sample begin, for a value head."""

    turn_indices_N: Int64Array
    positions_N: Int64Array
    """The last token that the model read before it answered."""
    returns_N: FloatArray
    """What the value should have been; NaN where the credit gave none."""


class Sample(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One token stream of one episode, with what each trained token is worth."""

    group_id: str
    episode_id: str
    stream: TokenStream
    targets_R: Int64Array
    """Indices into the stream: the trained tokens themselves. The token before each one predicts it."""
    advantages_R: FloatArray
    turn_indices_R: Int64Array
    policy_versions_R: Int64Array
    turns: TurnStarts
    temperature: float
    max_new_tokens: int

    @property
    def target_ids_R(self) -> IntArray:
        return self.stream.ids[self.targets_R]

    @property
    def logprobs_R(self) -> FloatArray:
        """As they were when the tokens were sampled."""
        return self.stream.logprobs[self.targets_R]

    @property
    def num_needed_tokens(self) -> int:
        """How many tokens of the stream must go through the model: the last target is never read."""
        last_start = int(self.turns.positions_N.max(initial=-1))
        return max(int(self.targets_R.max(initial=0)), last_start + 1)

    def kept_row(self, index: int) -> IntArray:
        """The ids that loss position `index` was chosen among; empty when nothing was cut."""
        if self.stream.kept is None:
            return np.empty(0, dtype=np.int32)
        return self.stream.kept.row(int(self.sampled_ordinals_R[index]))

    @property
    def sampled_ordinals_R(self) -> Int64Array:
        """Which sampled token of the stream each loss position is."""
        return np.cumsum(self.stream.is_sampled, dtype=np.int64)[self.targets_R] - 1


class Samples(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one update learns from."""

    samples: tuple[Sample, ...]
    tokens_per_pack: int
    use_trees: bool = True
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)

    @property
    def episode_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(sample.episode_id for sample in self.samples))

    @property
    def num_loss_tokens(self) -> int:
        return sum(len(sample.targets_R) for sample in self.samples)

    def split(self, num_parts: int) -> tuple[Samples, ...]:
        """Parts of about equal size: whole groups while there are enough, else whole episodes."""
        if num_parts == 1:
            return (self,)
        units = _by_name(self.samples, [sample.group_id for sample in self.samples])
        if len(units) < num_parts:
            units = _by_name(self.samples, [sample.episode_id for sample in self.samples])
        if len(units) < num_parts:
            raise SampleError(
                f"training.num_minibatches is {num_parts} but the batch has {len(units)} trainable episodes; "
                "lower it or collect more episodes per step"
            )
        sizes = [sum(sample.num_needed_tokens for sample in unit) for unit in units]
        loads = [0] * num_parts
        members: list[list[int]] = [[] for _ in range(num_parts)]
        for index in sorted(range(len(units)), key=lambda index: (-sizes[index], index)):
            lightest = loads.index(min(loads))
            loads[lightest] += sizes[index]
            members[lightest].append(index)
        parts = [[sample for index in sorted(chosen) for sample in units[index]] for chosen in members]
        return tuple(msgspec.structs.replace(self, samples=tuple(part)) for part in parts)


def build_samples(
    groups: Sequence[Group],
    advantages: Advantages,
    *,
    tokens_per_pack: int,
    use_trees: bool = True,
    tokens: TrainedTokens = "action",
) -> Samples:
    """The samples of these groups; episodes without credit take no part. `tokens` says which ones carry loss."""
    samples: list[Sample] = []
    num_left_out = 0
    shares: list[float] = []
    for group in groups:
        for episode in group.episodes:
            credits = advantages.turns.get(episode.episode_id)
            if credits is None:
                raise SampleError(
                    f"episode {episode.episode_id} has no entry in the advantages ({advantages.estimator}); "
                    "credit and samples need the same groups"
                )
            if all(credit.advantage is None for credit in credits):
                num_left_out += 1
                continue
            samples.extend(_episode_samples(episode, credits, tokens))
            shares.append(_trained_share(episode, tokens))
    if not samples:
        raise SampleError(
            f"none of the {num_left_out} episodes can be trained on: all failed, were unscored or have no action tokens; "
            "look at their stop reasons and scores"
        )
    metrics = {
        "episodes": float(len(shares)),
        "episodes_left_out": float(num_left_out),
        "trained_token_share": float(np.mean(shares)),
    }
    return Samples(
        samples=tuple(samples), tokens_per_pack=tokens_per_pack, use_trees=use_trees, metrics=metrics
    )


def loss_mask(turn: Turn, tokens: TrainedTokens) -> BoolArray:
    """Which of a turn's sampled tokens carry loss.

    Where no action was found, all that was sampled took the action's place: without loss on it, nothing would ever
    hold an agent back from writing no action at all.
    """
    if tokens == "completion" or turn.masking_method is MaskingMethod.FAILED:
        return np.ones(len(turn.generated_ids), dtype=np.bool_)
    return turn.action_token_mask


def _by_name(samples: Sequence[Sample], names: Sequence[str]) -> list[list[Sample]]:
    units: dict[str, list[Sample]] = {}
    for sample, name in zip(samples, names, strict=True):
        units.setdefault(name, []).append(sample)
    return list(units.values())


def _episode_samples(
    episode: Episode, credits: tuple[TurnCredit, ...], tokens: TrainedTokens
) -> list[Sample]:
    name = episode.episode_id
    if not episode.is_token_exact:
        raise SampleError(
            f"episode {name} is not token-exact (a server returned text); collect with a policy that returns token ids"
        )
    if episode.sampling.temperature == 0:
        raise SampleError(
            f"episode {name} was sampled greedily (temperature 0), so its log-probs say nothing about the model; "
            "collect training episodes with a temperature above 0"
        )
    if len(credits) != len(episode.turns):
        raise SampleError(
            f"episode {name} has {len(episode.turns)} turns but {len(credits)} credits; credit it again"
        )
    trained = [
        (turn, credit)
        for turn, credit in zip(episode.turns, credits, strict=True)
        if credit.advantage is not None
    ]
    for turn, credit in trained:
        _check_turn(name, turn, credit, tokens)
    if not any(loss_mask(turn, tokens).any() for turn, _ in trained):
        raise SampleError(
            f"episode {name} has no action token in any of its {len(trained)} turns, so nothing of it could be trained; "
            "mark it invalid or mend the masking"
        )
    by_stream: dict[int, list[tuple[Turn, TurnCredit]]] = {}
    for turn, credit in trained:
        by_stream.setdefault(id(turn.stream), []).append((turn, credit))
    built = (_stream_sample(episode, turns, tokens) for turns in by_stream.values())
    return [sample for sample in built if len(sample.targets_R)]


def _check_turn(name: str, turn: Turn, credit: TurnCredit, tokens: TrainedTokens) -> None:
    where = f"turn {turn.turn_index} of episode {name}"
    if credit.turn_index != turn.turn_index:
        raise SampleError(
            f"{where} meets the credit of turn {credit.turn_index}; credits must follow the turns"
        )
    if credit.advantage is None or not np.isfinite(credit.advantage):
        raise SampleError(f"{where} has the advantage {credit.advantage}; it must be a finite number")
    if turn.completion_start == 0 and len(turn.generated_ids):
        raise SampleError(
            f"{where} was sampled from an empty prompt; its first token has no context to be predicted from"
        )
    is_sampled: BoolArray = turn.stream.is_sampled[turn.completion_start : turn.completion_end]
    if not is_sampled.all():
        raise SampleError(
            f"{where} has {int((~is_sampled).sum())} tokens that were given, not sampled; only sampled tokens are trained"
        )
    logprobs = turn.logprobs[loss_mask(turn, tokens)]
    if not np.isfinite(logprobs).all() or (logprobs > 1e-3).any():
        raise SampleError(
            f"{where} has log-probs between {logprobs.min()} and {logprobs.max()}; each must be finite and at most 0"
        )
    kept = turn.stream.kept
    if kept is not None and len(kept) != int(turn.stream.is_sampled.sum()):
        raise SampleError(
            f"{where}: the stream has {int(turn.stream.is_sampled.sum())} sampled tokens but {len(kept)} kept sets"
        )


def _stream_sample(episode: Episode, turns: list[tuple[Turn, TurnCredit]], tokens: TrainedTokens) -> Sample:
    targets, advantages, turn_indices, versions = [], [], [], []
    for turn, credit in turns:
        found = np.flatnonzero(loss_mask(turn, tokens)) + turn.completion_start
        targets.append(found)
        advantages.append(np.full(len(found), credit.advantage, dtype=np.float32))
        turn_indices.append(np.full(len(found), turn.turn_index, dtype=np.int64))
        versions.append(np.full(len(found), turn.policy_version, dtype=np.int64))
    starts = TurnStarts(
        turn_indices_N=np.array([turn.turn_index for turn, _ in turns], dtype=np.int64),
        positions_N=np.array([turn.completion_start - 1 for turn, _ in turns], dtype=np.int64),
        returns_N=np.array(
            [np.nan if credit.step_return is None else credit.step_return for _, credit in turns],
            dtype=np.float32,
        ),
    )
    return Sample(
        group_id=episode.group_id,
        episode_id=episode.episode_id,
        stream=turns[0][0].stream,
        targets_R=np.concatenate(targets).astype(np.int64),
        advantages_R=np.concatenate(advantages),
        turn_indices_R=np.concatenate(turn_indices),
        policy_versions_R=np.concatenate(versions),
        turns=starts,
        temperature=episode.sampling.temperature,
        max_new_tokens=episode.sampling.max_new_tokens,
    )


def _trained_share(episode: Episode, tokens: TrainedTokens) -> float:
    sampled = episode.num_sampled_tokens
    return sum(int(loss_mask(turn, tokens).sum()) for turn in episode.turns) / sampled if sampled else 0.0
