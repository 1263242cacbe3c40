"""Log-probs in chunks: exact over kept sets and temperatures, and never a [tokens, vocabulary] tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from turnwise.logprobs import LanguageHead
from turnwise.packs import HeadRows

VOCABULARY, WIDTH = 211, 16


def make_rows(
    rng: np.random.Generator, lengths: list[int], *, banned: bool = False, temperature: float = 1.0
) -> HeadRows:
    """Head rows with kept sets of these lengths (0: none), each read by one or two loss rows."""
    kept = [np.sort(rng.choice(np.arange(4, VOCABULARY), length, replace=False)) for length in lengths]
    counts = rng.integers(1, 3, len(lengths))
    rows_R = np.repeat(np.arange(len(lengths)), counts)
    targets = [rng.choice(kept[row] if len(kept[row]) else np.arange(4, VOCABULARY)) for row in rows_R]
    return HeadRows(
        positions_U=np.arange(len(lengths)),
        temperatures_U=np.full(len(lengths), temperature, dtype=np.float32),
        banned_U=np.arange(len(lengths)) % 2 if banned else np.zeros(len(lengths), dtype=np.int64),
        banned_sets=(np.array([0, 2], np.int32), np.array([1], np.int32))
        if banned
        else (np.empty(0, np.int32),),
        kept_offsets_U1=np.concatenate([[0], np.cumsum(lengths)]),
        kept_ids=np.concatenate([np.empty(0), *kept]).astype(np.int32),
        rows_R=rows_R,
        target_ids_R=np.array(targets, dtype=np.int64),
    )


def plain(
    hidden_UD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, rows: HeadRows
) -> tuple[Tensor, Tensor]:
    logits_UV = hidden_UD @ weight_VD.t()
    if bias_V is not None:
        logits_UV = logits_UV + bias_V
    logits_UV = logits_UV / torch.from_numpy(rows.temperatures_U)[:, None]
    blocked_UV = torch.zeros_like(logits_UV, dtype=torch.bool)
    for row in range(len(logits_UV)):
        kept = rows.kept_ids[rows.kept_offsets_U1[row] : rows.kept_offsets_U1[row + 1]]
        blocked_UV[row, rows.banned_sets[rows.banned_U[row]].astype(np.int64)] = True
        if len(kept):
            blocked_UV[row] = True
            blocked_UV[row, kept.astype(np.int64)] = False
    logprobs_UV = torch.log_softmax(logits_UV.masked_fill(blocked_UV, -torch.inf), -1)
    entropies_U = -(logprobs_UV.exp() * logprobs_UV.masked_fill(blocked_UV, 0)).sum(-1)
    return logprobs_UV[rows.rows_R, rows.target_ids_R], entropies_U[rows.rows_R]


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_values_and_gradients_equal_the_plain_softmax(chunk: int, with_bias: bool, fused: bool) -> None:
    rng = np.random.default_rng(0)
    rows = make_rows(rng, [1, 5, 9, 26, 100, 205, 0, 0, 0, 0], banned=True, temperature=0.8)
    torch.manual_seed(0)
    hidden_UD = torch.randn(10, WIDTH, dtype=torch.float64, requires_grad=True)
    weight_VD = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, requires_grad=True)
    bias_V = torch.randn(VOCABULARY, dtype=torch.float64, requires_grad=True) if with_bias else None
    leaves = [leaf for leaf in (hidden_UD, weight_VD, bias_V) if leaf is not None]
    pull_R, spread_R = torch.randn(len(rows.rows_R)).double(), torch.randn(len(rows.rows_R)).double()

    expected_R, expected_entropies_R = plain(hidden_UD, weight_VD, bias_V, rows)
    (pull_R @ expected_R.square() + spread_R @ expected_entropies_R).backward()
    wanted = [leaf.grad.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None

    head = LanguageHead(weight_VD, bias_V, chunk=chunk)
    if fused:
        done = head.backward(
            hidden_UD, rows, lambda rows, logprobs, entropies: pull_R[rows] @ logprobs.square() + spread_R[rows] @ entropies
        )  # fmt: skip
        logprobs_R, entropies_R = done.logprobs_R, done.entropies_R
        hidden_UD.grad = done.grad_UD
    else:
        logprobs_R, entropies_R = head.logprobs(hidden_UD, rows)
        (pull_R @ logprobs_R.square() + spread_R @ entropies_R).backward()
    # Temperatures are stored in float32.
    torch.testing.assert_close(logprobs_R, expected_R, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(entropies_R, expected_entropies_R, rtol=1e-7, atol=1e-7)
    for got, want in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(got.grad, want, rtol=1e-6, atol=1e-7)


def test_a_lone_kept_id_is_certain() -> None:
    rows = make_rows(np.random.default_rng(0), [1])
    head = LanguageHead(torch.randn(VOCABULARY, WIDTH), chunk=8)
    logprobs_R, entropies_R = head.logprobs(torch.randn(1, WIDTH), rows)
    assert logprobs_R.tolist() == [0.0] * len(rows.rows_R)
    assert entropies_R.tolist() == [0.0] * len(rows.rows_R)


class LargestAllocation(TorchDispatchMode):
    """The largest tensor any operation gives back, in numbers."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("length", [0, 20])
def test_no_tensor_is_larger_than_the_chunk(length: int) -> None:
    rng = np.random.default_rng(0)
    rows = make_rows(rng, [length] * 64)
    weight_VD = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    hidden_UD = torch.randn(64, WIDTH, requires_grad=True)
    head = LanguageHead(weight_VD, chunk=4)
    with LargestAllocation() as seen:
        head.backward(hidden_UD, rows, lambda rows, logprobs, entropies: logprobs.sum())
        logprobs_R, _ = head.logprobs(hidden_UD, rows)
        logprobs_R.sum().backward()
    # The head's own gradient is 211 · 16 numbers; a chunk's logits are 4 · 211.
    assert seen.largest <= max(VOCABULARY * WIDTH, 4 * VOCABULARY)
    assert seen.largest < 64 * VOCABULARY


def test_autocast_multiplies_in_bfloat16_and_sums_in_float32() -> None:
    rows = make_rows(np.random.default_rng(0), [0] * 6)
    torch.manual_seed(0)
    hidden_UD, weight_VD = torch.randn(6, WIDTH), torch.randn(VOCABULARY, WIDTH)
    exact_R, _ = LanguageHead(weight_VD).logprobs(hidden_UD, rows)
    rough_R, _ = LanguageHead(weight_VD, amp=True).logprobs(hidden_UD, rows)
    assert rough_R.dtype == torch.float32
    assert 0 < float((exact_R - rough_R).abs().max()) < 0.2
