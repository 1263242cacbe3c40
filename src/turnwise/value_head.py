"""The value head: what a turn is expected to bring, read off the hidden state before the first answered token."""

# Dimensions: N turns of one pack, T tokens, D hidden width.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.packs import Pack
from turnwise.samples import Sample, Samples, TurnStarts
from turnwise.token_tree import Int64Array
from turnwise.types import FloatArray, Group, StopReason, TokenStream


class ValueHead(nn.Module):
    """One linear layer; starts at 0, so that the first advantages are plain returns."""

    def __init__(self, hidden_width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_width, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """[N]"""
        values_N: Tensor = self.linear(hidden_ND.float())[:, 0]
        return values_N


def turn_positions(pack: Pack) -> tuple[Int64Array, FloatArray]:
    """Where the turns of a pack begin in its tree, and what each returned."""
    positions = [
        path[sample.turns.positions_N] for sample, path in zip(pack.samples, pack.tree.paths, strict=True)
    ]
    returns = [sample.turns.returns_N for sample in pack.samples]
    return np.concatenate(positions), np.concatenate(returns)


def value_loss(values_N: Tensor, returns_N: Tensor, num_turns: int) -> Tensor:
    """Σ (V - G)² / number of turns in the minibatch, over turns whose return is known"""
    is_known_N = torch.isfinite(returns_N)
    gaps_N = torch.where(is_known_N, values_N - torch.where(is_known_N, returns_N, 0.0), 0.0)
    total: Tensor = gaps_N.square().sum() / num_turns
    return total


def value_samples(groups: Sequence[Group], *, tokens_per_pack: int, use_trees: bool = True) -> Samples:
    """Every turn of every finished episode, nothing to be trained: what `Learner.values` reads."""
    samples: list[Sample] = []
    for group in groups:
        for episode in group.episodes:
            if episode.stop_reason in (StopReason.FAILED, StopReason.CANCELLED) or not episode.turns:
                continue
            streams: dict[int, tuple[TokenStream, list[tuple[int, int]]]] = {}
            for turn in episode.turns:
                found = streams.setdefault(id(turn.stream), (turn.stream, []))
                found[1].append((turn.turn_index, turn.completion_start - 1))
            samples.extend(
                _bare_sample(group.group_id, episode.episode_id, stream, turns)
                for stream, turns in streams.values()
            )
    return Samples(samples=tuple(samples), tokens_per_pack=tokens_per_pack, use_trees=use_trees)


def _bare_sample(group_id: str, episode_id: str, stream: TokenStream, turns: list[tuple[int, int]]) -> Sample:
    nothing = np.empty(0, dtype=np.int64)
    columns = np.array(turns, dtype=np.int64)
    starts = TurnStarts(
        turn_indices_N=columns[:, 0],
        positions_N=columns[:, 1],
        returns_N=np.full(len(turns), np.nan, dtype=np.float32),
    )
    return Sample(
        group_id=group_id,
        episode_id=episode_id,
        stream=stream,
        targets_R=nothing,
        advantages_R=np.empty(0, dtype=np.float32),
        turn_indices_R=nothing,
        policy_versions_R=nothing,
        turns=starts,
        temperature=1.0,
        max_new_tokens=1,
    )
