"""What one optimizer step sees, the packs of some samples with each token's share of the loss, and what it measures."""

# Dimensions: R trained tokens of one pack.

from __future__ import annotations

from collections.abc import Mapping
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
    """Of the whole minibatch: what the value head's mean error divides by."""


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
    num_turns = sum(len(sample.turns.positions_N) for pack in packs for sample in pack.samples)
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
        portions.append(Portion(pack=pack, terms=terms, sampled_logprobs_R=sampled_R, num_turns=num_turns))
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


class Tally:
    """Figures of one update, token by token, until they are averaged."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_packs = 0
        self.gap = 0.0
        self._losses: list[float] = []
        self._grad_norms: list[float] = []
        self._value_errors: list[float] = []
        self._figures: dict[str, list[Tensor]] = {}

    def add_figures(self, figures: Mapping[str, Tensor]) -> None:
        self.num_packs += 1
        for name, values_R in figures.items():
            self._figures.setdefault(name, []).append(values_R)

    def add_value_error(self, error: float) -> None:
        """A pack's share of the value head's mean squared error."""
        self._value_errors.append(error)

    def add_step(self, loss: float, grad_norm: float) -> None:
        self.num_steps += 1
        self._losses.append(loss)
        self._grad_norms.append(grad_norm)

    def metrics(self) -> dict[str, float]:
        joined = {name: torch.cat(values).float() for name, values in self._figures.items()}
        found = {name: float(values.mean()) for name, values in joined.items() if name != "ratio"}
        ratio = joined["ratio"].cpu().numpy()
        for name, share in (("min", 0.0), ("p05", 0.05), ("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
            found[f"ratio_{name}"] = float(np.quantile(ratio, share))
        found["loss"] = float(np.mean(self._losses))
        found["grad_norm"] = float(np.mean(self._grad_norms))
        found["grad_norm_max"] = float(np.max(self._grad_norms))
        found["logprob_gap"] = self.gap
        if self._value_errors:
            found["value_error"] = sum(self._value_errors) / self.num_steps
        return found


def _tensor(column: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(column)).to(device)
