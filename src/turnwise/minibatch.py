"""What one optimizer step sees: the packs of some samples, with each token's share of the loss."""

# Dimensions: R trained tokens of one pack.

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from turnwise.config import LossConfig
from turnwise.losses import TokenTerms, divergence, token_weights, truncated_importance
from turnwise.packs import Pack, build_packs
from turnwise.samples import Samples


@dataclass
class Portion:
    """One pack and the terms of its tokens."""

    pack: Pack
    terms: TokenTerms
    sampled_logprobs_R: Tensor
    """As stored with the episodes, whatever the ratio is taken against."""
    num_turns: int
    """Of the whole minibatch: what a mean over turns divides by."""


def build_portions(
    samples: Samples, loss: LossConfig, *, image_token_id: int | None, device: torch.device
) -> list[Portion]:
    """The packs of a minibatch; weights are shares of the whole minibatch, so gradients of packs simply add up."""
    packs = build_packs(samples, image_token_id=image_token_id)
    turns: dict[tuple[str, int], int] = {}
    episodes: dict[str, int] = {}
    turns_R, episodes_R, limits_R = [], [], []
    for pack in packs:
        for owner, turn in zip(pack.sample_R.tolist(), pack.turn_indices_R.tolist(), strict=True):
            sample = pack.samples[owner]
            turns_R.append(turns.setdefault((sample.episode_id, turn), len(turns)))
            episodes_R.append(episodes.setdefault(sample.episode_id, len(episodes)))
            limits_R.append(sample.max_new_tokens)
    all_turns_R = torch.tensor(turns_R, device=device)
    weights_R = token_weights(
        loss, all_turns_R, torch.tensor(episodes_R, device=device), torch.tensor(limits_R, device=device)
    )
    sizes = [pack.num_rows for pack in packs]
    portions = []
    for pack, weights, turns_of in zip(
        packs, torch.split(weights_R.to(device), sizes), torch.split(all_turns_R, sizes), strict=True
    ):
        sampled_R = _tensor(pack.old_logprobs_R, device)
        terms = TokenTerms(
            old_logprobs_R=sampled_R,
            advantages_R=_tensor(pack.advantages_R, device),
            weights_R=weights,
            turns_R=turns_of,
        )
        portions.append(Portion(pack=pack, terms=terms, sampled_logprobs_R=sampled_R, num_turns=len(turns)))
    return portions


def add_reference(
    portion: Portion, reference_logprobs_R: Tensor, loss: LossConfig, coefficient: float
) -> None:
    """Tell the tokens what the reference thinks; with `kl_place: reward` the divergence is taken from the advantage."""
    terms = replace(portion.terms, reference_logprobs_R=reference_logprobs_R)
    if loss.kl_place == "reward":
        penalty_R = divergence(portion.sampled_logprobs_R, reference_logprobs_R, loss.kl_kind or "k1")
        terms = replace(terms, advantages_R=terms.advantages_R - coefficient * penalty_R)
    portion.terms = terms


def add_importance(portion: Portion, logprobs_R: Tensor, cap: float) -> None:
    """Take the ratio against the model as it is now, and weigh what an older policy sampled."""
    weights_R = truncated_importance(logprobs_R, portion.sampled_logprobs_R, cap)
    portion.terms = replace(portion.terms, old_logprobs_R=logprobs_R, importance_R=weights_R)


def _tensor(column: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(column)).to(device)
