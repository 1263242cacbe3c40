"""Draws tokens from logits, and says from which distribution each was really drawn.

The order is: banned ids and grammar out, divide by the temperature, top-k, top-p, min-p. What is left is normalised, and one
uniform number per token picks from it by inverse CDF in float64, so that a draw depends on its own row and seed only.

Dimensions: R rows of the batch, V vocabulary, C candidates, N blocks of the vocabulary, W their width.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from turnwise.errors import PolicyError
from turnwise.types import FloatArray, IntArray, SamplingParams

_BLOCK = 128
# How many candidates to look at before sorting the vocabulary, for top-p without top-k.
_FIRST_CANDIDATES = 256
# Logits up to which numpy is quicker than torch.
_SMALL = 65_536
_NOTHING_CUT = np.empty(0, dtype=np.int32)


class Draw(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One token per row, with the log-probability it had and the ids it was chosen among."""

    token_ids: npt.NDArray[np.int64]
    logprobs: FloatArray
    kept: list[IntArray]
    """Empty rows mean that nothing but the banned ids was cut."""


def uniforms(seed: Sequence[int], count: int) -> npt.NDArray[np.float64]:
    """The numbers in [0, 1) that decide a completion's tokens; a longer request begins with the same ones."""
    entropy = [part & 0xFFFF_FFFF_FFFF_FFFF for part in seed]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy))).random(count)


def draw_tokens(
    logits_RV: torch.Tensor,
    sampling: SamplingParams,
    uniforms_R: npt.NDArray[np.float64],
    *,
    banned_ids: torch.Tensor | None = None,
    allowed_RV: torch.Tensor | None = None,
) -> Draw:
    """Draw one token for each row of logits (which are overwritten).

    `allowed_RV` is what a grammar lets through. With temperature 0 the best token is certain: log-probability 0, kept set of one.
    """
    logits_RV = logits_RV.float()
    if banned_ids is not None and len(banned_ids):
        logits_RV.index_fill_(1, banned_ids, float("-inf"))
    if allowed_RV is not None:
        logits_RV.masked_fill_(~allowed_RV, float("-inf"))
    has_top_k = 0 < sampling.top_k < logits_RV.shape[1]
    is_cut = has_top_k or sampling.top_p < 1 or sampling.min_p > 0
    if (
        logits_RV.numel() <= _SMALL
        and logits_RV.device.type == "cpu"
        and (sampling.temperature == 0 or not is_cut)
    ):
        return _draw_small(logits_RV.numpy(), sampling.temperature, uniforms_R, allowed_RV)
    top_R = logits_RV.amax(dim=-1)
    if not bool(torch.isfinite(top_R).all()):
        raise PolicyError(_explain_unusable(top_R))
    if sampling.temperature == 0:
        return _certain(logits_RV.argmax(dim=-1).cpu().numpy())
    if sampling.temperature != 1:
        logits_RV.div_(sampling.temperature)
        top_R = top_R / sampling.temperature
    uniforms_t_R = torch.from_numpy(np.asarray(uniforms_R, dtype=np.float64)).to(logits_RV.device)
    if not is_cut:
        kept = None if allowed_RV is None else _finite_ids(logits_RV, allowed_RV.all(dim=-1).tolist())
        return _draw_from_all(logits_RV, top_R, uniforms_t_R, kept)
    if has_top_k:
        values_RC, ids_RC = top_candidates(logits_RV, sampling.top_k)
        return _draw_from_candidates(values_RC, ids_RC, None, sampling, uniforms_t_R)
    return _draw_without_top_k(logits_RV, top_R, sampling, uniforms_t_R)


def _certain(best_R: npt.NDArray[np.int64]) -> Draw:
    return Draw(
        token_ids=best_R,
        logprobs=np.zeros(len(best_R), dtype=np.float32),
        kept=list(best_R.astype(np.int32)[:, None]),
    )


def _draw_small(
    logits_RV: npt.NDArray[np.float32],
    temperature: float,
    uniforms_R: npt.NDArray[np.float64],
    allowed_RV: torch.Tensor | None,
) -> Draw:
    """`_draw_from_all` in numpy: for small vocabularies starting torch's kernels costs more than running them."""
    rows = np.arange(len(logits_RV))
    best_R = logits_RV.argmax(axis=-1)
    top_R = logits_RV[rows, best_R]
    if not np.isfinite(top_R).all():
        raise PolicyError(_explain_unusable(torch.from_numpy(top_R)))
    if temperature == 0:
        return _certain(best_R)
    scaled_RV = (logits_RV - top_R[:, None]) / np.float32(temperature)
    ends_RV = np.exp(scaled_RV).cumsum(axis=-1, dtype=np.float64)
    totals_R = ends_RV[:, -1]
    picked_R = (ends_RV <= (uniforms_R * totals_R)[:, None]).sum(axis=-1)
    # Rounding may put the target on the total; the last id that has any weight ends at the total.
    picked_R = np.minimum(picked_R, (ends_RV < totals_R[:, None]).sum(axis=-1))
    kept = [_NOTHING_CUT] * len(rows)
    if allowed_RV is not None:
        kept = _finite_ids(torch.from_numpy(logits_RV), allowed_RV.all(dim=-1).tolist())
    logprobs_R = scaled_RV[rows, picked_R] - np.log(totals_R)
    return Draw(token_ids=picked_R, logprobs=logprobs_R.astype(np.float32), kept=kept)


def top_candidates(logits_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest logits of each row, descending, and their ids: `torch.topk`, without looking at most of the row.

    A block whose maximum is not among the `count` largest maxima cannot hold any of the `count` largest values.
    """
    num_rows, vocab_size = logits_RV.shape
    num_blocks = vocab_size // _BLOCK
    if count * 2 > num_blocks:
        return torch.topk(logits_RV, min(count, vocab_size), dim=-1)
    whole = num_blocks * _BLOCK
    blocks_RNW = logits_RV[:, :whole].view(num_rows, num_blocks, _BLOCK)
    chosen_RC = torch.topk(blocks_RNW.amax(dim=-1), count, dim=-1, sorted=False).indices
    inside_RCW = blocks_RNW.gather(1, chosen_RC[:, :, None].expand(-1, -1, _BLOCK))
    values_RM = torch.cat([inside_RCW.flatten(1), logits_RV[:, whole:]], dim=1)
    values_RC, places_RC = torch.topk(values_RM, count, dim=-1)
    in_block_RC = places_RC < count * _BLOCK
    block_RC = chosen_RC.gather(1, torch.where(in_block_RC, places_RC // _BLOCK, 0))
    ids_RC = torch.where(
        in_block_RC, block_RC * _BLOCK + places_RC % _BLOCK, places_RC - count * _BLOCK + whole
    )
    return values_RC, ids_RC


def _draw_from_all(
    scaled_RV: torch.Tensor, top_R: torch.Tensor, uniforms_R: torch.Tensor, kept: list[IntArray] | None
) -> Draw:
    """Inverse CDF in two levels: first the block, then the token inside it; only the sum runs over the vocabulary."""
    num_rows, vocab_size = scaled_RV.shape
    weights_RV = torch.exp(scaled_RV.sub_(top_R[:, None]))
    num_blocks = -(-vocab_size // _BLOCK)
    whole = vocab_size // _BLOCK * _BLOCK
    sums = [weights_RV[:, :whole].view(num_rows, -1, _BLOCK).sum(dim=-1)]
    if whole < vocab_size:
        sums.append(weights_RV[:, whole:].sum(dim=-1, keepdim=True))
    ends_RN = torch.cat(sums, dim=1).double().cumsum(dim=-1)
    totals_R = ends_RN[:, -1]
    targets_R1 = (uniforms_R * totals_R)[:, None]
    # Rounding may put the target on the total; the last block that has any weight ends at the total.
    last_R1 = (ends_RN < totals_R[:, None]).sum(dim=-1, keepdim=True).clamp_(max=num_blocks - 1)
    block_R1 = torch.minimum((ends_RN <= targets_R1).sum(dim=-1, keepdim=True), last_R1)
    before_R1 = torch.where(block_R1 > 0, ends_RN.gather(1, (block_R1 - 1).clamp(min=0)), 0.0)
    places_RW = block_R1 * _BLOCK + torch.arange(_BLOCK, device=scaled_RV.device)
    inside_RW = weights_RV.gather(1, places_RW.clamp(max=vocab_size - 1)).double()
    inside_RW = torch.where(places_RW < vocab_size, inside_RW, 0.0)
    picked_R1 = _pick(inside_RW, targets_R1 - before_R1)
    ids_R1 = places_RW.gather(1, picked_R1)
    logprobs_R = scaled_RV.gather(1, ids_R1)[:, 0].double() - totals_R.log()
    return Draw(
        token_ids=ids_R1[:, 0].cpu().numpy(),
        logprobs=logprobs_R.float().cpu().numpy(),
        kept=[_NOTHING_CUT] * num_rows if kept is None else kept,
    )


def _draw_without_top_k(
    scaled_RV: torch.Tensor, top_R: torch.Tensor, sampling: SamplingParams, uniforms_R: torch.Tensor
) -> Draw:
    """Top-p and min-p: try few candidates first; when the cut lies beyond them, find the logit to cut at."""
    scaled_RV.sub_(top_R[:, None])
    zeros_R = torch.zeros_like(top_R)
    if sampling.top_p < 1:
        values_RC, ids_RC = top_candidates(scaled_RV, min(_FIRST_CANDIDATES, scaled_RV.shape[1]))
        totals_R = torch.exp(scaled_RV).sum(dim=-1, dtype=torch.float64)
        shares_R = torch.exp(values_RC.double()).sum(dim=-1) / totals_R
        if bool((shares_R >= sampling.top_p).all()):
            return _draw_from_candidates(values_RC, ids_RC, totals_R, sampling, uniforms_R)
    cuts_R = torch.full_like(top_R, float(np.log(sampling.min_p)) if sampling.min_p > 0 else float("-inf"))
    if sampling.top_p < 1:
        cuts_R = torch.maximum(cuts_R, _top_p_cut(scaled_RV, sampling.top_p))
    scaled_RV.masked_fill_(scaled_RV < cuts_R[:, None], float("-inf"))
    kept = _finite_ids(scaled_RV, [False] * len(scaled_RV))
    return _draw_from_all(scaled_RV, zeros_R, uniforms_R, kept)


def _top_p_cut(scaled_RV: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest logit of each row that top-p keeps; the largest of each row is 0."""
    # numpy sorts floats several times faster than torch does on a CPU.
    ascending = np.sort(scaled_RV.cpu().numpy(), axis=-1)
    values_RV = torch.from_numpy(ascending[:, ::-1].copy()).to(scaled_RV.device)
    weights_RV = torch.exp(values_RV).double()
    ends_RV = weights_RV.cumsum(dim=-1)
    num_kept_R1 = (ends_RV - weights_RV < top_p * ends_RV[:, -1:]).sum(dim=-1, keepdim=True)
    return values_RV.gather(1, num_kept_R1 - 1)[:, 0]


def _draw_from_candidates(
    values_RC: torch.Tensor,
    ids_RC: torch.Tensor,
    totals_R: torch.Tensor | None,
    sampling: SamplingParams,
    uniforms_R: torch.Tensor,
) -> Draw:
    """Cut descending candidates by top-p and min-p, then draw from the rest. `totals_R` is the mass top-p is a share of."""
    weights_RC = torch.exp((values_RC - values_RC[:, :1]).double())
    ends_RC = weights_RC.cumsum(dim=-1)
    mass_R1 = ends_RC[:, -1:] if totals_R is None else totals_R[:, None]
    is_kept_RC = weights_RC > 0
    if sampling.top_p < 1:
        # Keep the fewest tokens that hold the share: those before which the share is not reached yet.
        is_kept_RC &= ends_RC - weights_RC < sampling.top_p * mass_R1
    if sampling.min_p > 0:
        is_kept_RC &= weights_RC >= sampling.min_p
    weights_RC = weights_RC * is_kept_RC
    totals_R1 = weights_RC.sum(dim=-1, keepdim=True)
    picked_R1 = _pick(weights_RC, uniforms_R[:, None] * totals_R1)
    logprobs_R = (weights_RC.gather(1, picked_R1) / totals_R1).log()[:, 0]
    counts = is_kept_RC.sum(dim=-1).tolist()
    ids = ids_RC.int().cpu().numpy()
    return Draw(
        token_ids=ids_RC.gather(1, picked_R1)[:, 0].cpu().numpy(),
        logprobs=logprobs_R.float().cpu().numpy(),
        kept=[np.sort(row[:count]) for row, count in zip(ids, counts, strict=True)],
    )


def _pick(weights_RW: torch.Tensor, targets_R1: torch.Tensor) -> torch.Tensor:
    """The first place whose cumulative weight exceeds the target; never a place without weight."""
    ends_RW = weights_RW.cumsum(dim=-1)
    places = torch.arange(weights_RW.shape[1], device=weights_RW.device)
    last_R1 = torch.where(weights_RW > 0, places, 0).amax(dim=-1, keepdim=True)
    return torch.minimum((ends_RW <= targets_R1).sum(dim=-1, keepdim=True), last_R1)


def _finite_ids(scaled_RV: torch.Tensor, is_free: list[bool]) -> list[IntArray]:
    rows = (scaled_RV > float("-inf")).cpu().numpy()
    return [
        _NOTHING_CUT if free else np.flatnonzero(row).astype(np.int32)
        for row, free in zip(rows, is_free, strict=True)
    ]


def _explain_unusable(top_R: torch.Tensor) -> str:
    row = int((~torch.isfinite(top_R)).nonzero()[0])
    if torch.isnan(top_R[row]) or top_R[row] > 0:
        return f"row {row} of the logits holds {float(top_R[row])}; the weights or the inputs are not finite"
    return f"row {row} of the logits leaves no token to sample; the grammar and the banned ids exclude all of them"
