"""Losses of policies: tensors in, one loss per trained token out, and the metrics that go with it.

Every loss is a sum over trained tokens, `Σ weight · loss`; the weights carry the mean over tokens, turns or episodes.
That makes gradients add up over packs to exactly those of one big batch.
"""

# Dimensions: R trained tokens.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.config import LOSS_AGGREGATION, LossConfig

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True)
class TokenTerms:
    """What is known about the trained tokens before the model is asked again."""

    old_logprobs_R: Tensor
    """The policy that the ratio is taken against."""
    advantages_R: Tensor
    weights_R: Tensor
    """Share of each token in the loss; see `token_weights`."""
    turns_R: Tensor
    """Numbers the turn of each token, from 0; gspo's ratio is that of a turn."""
    reference_logprobs_R: Tensor | None = None
    importance_R: Tensor | None = None
    """Truncated importance weights of episodes that an older policy sampled."""

    def part(self, rows: slice) -> TokenTerms:
        """The terms of some rows only."""
        return TokenTerms(
            old_logprobs_R=self.old_logprobs_R[rows],
            advantages_R=self.advantages_R[rows],
            weights_R=self.weights_R[rows],
            turns_R=self.turns_R[rows],
            reference_logprobs_R=None
            if self.reference_logprobs_R is None
            else self.reference_logprobs_R[rows],
            importance_R=None if self.importance_R is None else self.importance_R[rows],
        )


def importance_ratio(logprobs_R: Tensor, old_logprobs_R: Tensor) -> Tensor:
    """r = exp(clip(logp - logp_old, -20, 20))"""
    return (logprobs_R - old_logprobs_R).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def turn_ratio(logprobs_R: Tensor, old_logprobs_R: Tensor, turns_R: Tensor) -> Tensor:
    """s = exp(mean over the turn's tokens of (logp - logp_old)), given to each of them"""
    num_turns = int(turns_R.max()) + 1 if len(turns_R) else 0
    sums = logprobs_R.new_zeros(num_turns).index_add(0, turns_R, logprobs_R - old_logprobs_R)
    counts = torch.bincount(turns_R, minlength=num_turns).clamp_min(1)
    return (sums / counts).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()[turns_R]


def reinforce_loss(logprobs_R: Tensor, advantages_R: Tensor) -> Tensor:
    """-A logp"""
    return -advantages_R * logprobs_R


def clipped_loss(
    ratio_R: Tensor,
    advantages_R: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """max(-A r, -A clip(r, 1 - low, 1 + high)); where A < 0 at most -A c"""
    clipped_R = ratio_R.clamp(1 - clip_low, 1 + clip_high)
    loss_R = torch.maximum(-advantages_R * ratio_R, -advantages_R * clipped_R)
    if dual_clip is None:
        return loss_R
    return torch.where(advantages_R < 0, torch.minimum(loss_R, -advantages_R * dual_clip), loss_R)


def cispo_loss(logprobs_R: Tensor, ratio_R: Tensor, advantages_R: Tensor, *, clip_high: float) -> Tensor:
    """-stop_gradient(min(r, high)) A logp"""
    return -ratio_R.detach().clamp_max(clip_high) * advantages_R * logprobs_R


def divergence(logprobs_R: Tensor, reference_logprobs_R: Tensor, kind: str) -> Tensor:
    """k1 = logp - ref; k2 = (logp - ref)² / 2; k3 = exp(d) - d - 1 with d = clip(ref - logp, ±20), itself clipped to ±10"""
    difference_R = logprobs_R - reference_logprobs_R
    if kind == "k1":
        return difference_R
    if kind == "k2":
        return difference_R.square() / 2
    gap_R = (-difference_R).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return (gap_R.exp() - gap_R - 1).clamp(-10.0, 10.0)


def truncated_importance(logprobs_R: Tensor, sampled_logprobs_R: Tensor, cap: float) -> Tensor:
    """w = min(exp(logp before the update - logp when sampled), cap), without gradient"""
    return importance_ratio(logprobs_R.detach(), sampled_logprobs_R).clamp_max(cap)


def is_separable(loss: LossConfig) -> bool:
    """True when a token's loss depends on no other token, so that chunks need not wait for each other."""
    return loss.name != "gspo"


def policy_loss(logprobs_R: Tensor, terms: TokenTerms, loss: LossConfig) -> Tensor:
    """The loss of each token, before weights, entropy and divergence."""
    advantages_R = terms.advantages_R
    if loss.name == "reinforce":
        loss_R = reinforce_loss(logprobs_R, advantages_R)
    elif loss.name == "cispo":
        assert loss.clip_high is not None, "the config fills it in"
        ratio_R = importance_ratio(logprobs_R, terms.old_logprobs_R)
        loss_R = cispo_loss(logprobs_R, ratio_R, advantages_R, clip_high=loss.clip_high)
    else:
        assert loss.clip_low is not None, "the config fills it in"
        assert loss.clip_high is not None, "the config fills it in"
        ratio_R = policy_ratio(logprobs_R, terms, loss)
        loss_R = clipped_loss(
            ratio_R,
            advantages_R,
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            dual_clip=loss.dual_clip,
        )
    return loss_R if terms.importance_R is None else terms.importance_R * loss_R


def policy_ratio(logprobs_R: Tensor, terms: TokenTerms, loss: LossConfig) -> Tensor:
    """The ratio that the loss clips: per token, or per turn for gspo."""
    if loss.name == "gspo":
        return turn_ratio(logprobs_R, terms.old_logprobs_R, terms.turns_R)
    return importance_ratio(logprobs_R, terms.old_logprobs_R)


def total_loss(
    logprobs_R: Tensor, entropies_R: Tensor, terms: TokenTerms, loss: LossConfig, *, kl_coefficient: float
) -> Tensor:
    """Σ weight · (policy loss - c_H entropy + β KL), one number."""
    loss_R = policy_loss(logprobs_R, terms, loss)
    if loss.entropy_coefficient:
        loss_R = loss_R - loss.entropy_coefficient * entropies_R
    if terms.reference_logprobs_R is not None and loss.kl_place == "loss":
        assert loss.kl_kind is not None, "the config fills it in"
        loss_R = loss_R + kl_coefficient * divergence(logprobs_R, terms.reference_logprobs_R, loss.kl_kind)
    total: Tensor = (terms.weights_R * loss_R).sum()
    return total


def token_weights(loss: LossConfig, turns_R: Tensor, episodes_R: Tensor, max_new_tokens_R: Tensor) -> Tensor:
    """Each token's share of the loss: `turns_R` and `episodes_R` number what it belongs to, over the whole minibatch."""
    unit, joined = LOSS_AGGREGATION[loss.name]
    unit = loss.aggregate or unit
    if unit == "token":
        return torch.full(turns_R.shape, 1.0 / max(len(turns_R), 1), device=turns_R.device)
    units_R = turns_R if unit == "turn" else episodes_R
    _, inverse_R, counts = torch.unique(units_R, return_inverse=True, return_counts=True)
    weights_R = torch.full(turns_R.shape, 1.0 / max(len(counts), 1), device=turns_R.device)
    if joined == "mean":
        weights_R = weights_R / counts[inverse_R]
    if joined == "constant":
        weights_R = weights_R / max_new_tokens_R
    return weights_R


def measure(
    logprobs_R: Tensor, entropies_R: Tensor, terms: TokenTerms, loss: LossConfig
) -> dict[str, Tensor]:
    """Per-token figures whose mean (for ratios also quantiles) the learner reports."""
    ratio_R = policy_ratio(logprobs_R, terms, loss)
    advantages_R = terms.advantages_R
    figures = {
        "ratio": ratio_R,
        "approx_kl": terms.old_logprobs_R - logprobs_R,
        "entropy": entropies_R,
        "clip_fraction": _is_clipped(ratio_R, advantages_R, loss).float(),
    }
    if loss.dual_clip is not None:
        worst_R = torch.maximum(
            -advantages_R * ratio_R,
            -advantages_R * ratio_R.clamp(1 - (loss.clip_low or 0), 1 + (loss.clip_high or 0)),
        )
        figures["clip_fraction_dual"] = (
            (advantages_R < 0) & (worst_R > -advantages_R * loss.dual_clip)
        ).float()
    if terms.reference_logprobs_R is not None:
        figures["kl"] = divergence(logprobs_R, terms.reference_logprobs_R, loss.kl_kind or "k3")
    if terms.importance_R is not None:
        figures["importance"] = terms.importance_R
    return figures


def _is_clipped(ratio_R: Tensor, advantages_R: Tensor, loss: LossConfig) -> Tensor:
    if loss.name == "reinforce":
        return torch.zeros_like(ratio_R, dtype=torch.bool)
    assert loss.clip_high is not None, "the config fills it in"
    if loss.name == "cispo":
        return ratio_R > loss.clip_high
    assert loss.clip_low is not None, "the config fills it in"
    clipped_R = ratio_R.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    return -advantages_R * clipped_R > -advantages_R * ratio_R
