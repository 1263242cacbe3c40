"""Log-probabilities and entropies at loss positions, over the distributions tokens were really drawn from.

The LM head is applied in chunks of positions; a chunk's logits live in one scratch buffer that the next chunk reuses, so no
[tokens, vocabulary] tensor exists. Where sampling kept a short set of ids, only those rows of the head are used.
Two ways lead to gradients: `LanguageHead.logprobs` recomputes the logits in backward; `LanguageHead.backward` asks
for the loss of a chunk while its logits are there and needs no second pass.
"""

# Dimensions: U distinct head rows, R loss rows, C rows of one chunk, V vocabulary (or kept ids), D hidden width.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.packs import HeadRows

# Far below any logit and finite, so that probability 0 times this is 0.
_NEVER = -1e30
_GATHER_LIMIT = 8
"""Kept sets up to 1 / this of the vocabulary are gathered; longer ones are masked."""

_CPU_CHUNK_NUMBERS = 2**23

RowLoss = Callable[[slice, Tensor, Tensor], Tensor]
"""(loss rows, their log-probs, their entropies) → the loss of these rows, a scalar."""


@dataclass(frozen=True, kw_only=True)
class HeadPass:
    """What one pass through the head gave."""

    loss: float
    logprobs_R: Tensor
    entropies_R: Tensor
    grad_UD: Tensor


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A chunk of head rows of one kind, with the loss rows that read them."""

    head: slice
    loss: slice
    ids_CV: Tensor | None
    """Kept ids, filled up with -1; None means the whole vocabulary."""


@dataclass(kw_only=True)
class _Distribution:
    """The softmax of one chunk, with its logits."""

    logits_CV: Tensor
    weights_CV: Tensor
    """exp(logits - maximum), not normalised."""
    sums_C: Tensor
    log_z_C: Tensor
    entropies_C: Tensor


class LanguageHead:
    """The last linear layer of a model, applied where losses are."""

    def __init__(
        self, weight_VD: Tensor, bias_V: Tensor | None = None, *, chunk: int = 1024, amp: bool = False
    ) -> None:
        self.weight_VD = weight_VD
        self.bias_V = bias_V
        self.chunk = chunk
        self.amp = amp

    def logprobs(self, hidden_UD: Tensor, rows: HeadRows) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the loss rows; differentiable, the logits are recomputed in backward."""
        result: tuple[Tensor, Tensor] = _Logprobs.apply(hidden_UD, self.weight_VD, self.bias_V, self, rows)  # type: ignore[no-untyped-call]
        return result

    def backward(self, hidden_UD: Tensor, rows: HeadRows, row_loss: RowLoss) -> HeadPass:
        """Loss and gradients in one pass; adds to the head's own gradient and returns that of the hidden states."""
        sums = _GradientSums(self, hidden_UD, into_parameters=True)
        dtype = torch.promote_types(hidden_UD.dtype, torch.float32)
        logprobs_R = hidden_UD.new_empty(len(rows.rows_R), dtype=dtype)
        entropies_R = torch.empty_like(logprobs_R)
        total = 0.0
        for block, chunk in self._chunks(hidden_UD, rows):
            logprobs, entropies = chunk.read()
            with torch.enable_grad():
                logprobs.requires_grad_()
                entropies.requires_grad_()
                loss = row_loss(block.loss, logprobs, entropies)
                grads = torch.autograd.grad(loss, (logprobs, entropies), allow_unused=True)
            logprobs_R[block.loss], entropies_R[block.loss] = logprobs.detach(), entropies.detach()
            total += float(loss.detach())
            sums.add(chunk, *grads)
        sums.store()
        return HeadPass(loss=total, logprobs_R=logprobs_R, entropies_R=entropies_R, grad_UD=sums.hidden_UD)

    def _chunks(self, hidden_UD: Tensor, rows: HeadRows) -> Iterator[tuple[_Block, _Chunk]]:
        # Under autocast the product runs in bfloat16, as every other linear layer of the model.
        weight_VD = self.weight_VD.detach()
        hidden_UD = hidden_UD.detach()
        if self.amp:
            weight_VD, hidden_UD = weight_VD.to(torch.bfloat16), hidden_UD.to(torch.bfloat16)
        scratch = _Scratch(weight_VD)
        chunk = self.chunk
        if weight_VD.device.type == "cpu":
            # Logits that stay in the last cache level are worth more than a longer product.
            chunk = min(chunk, max(32, _CPU_CHUNK_NUMBERS // len(weight_VD)))
        for block in _plan(rows, chunk, len(weight_VD), weight_VD.device):
            yield block, _Chunk(block, rows, hidden_UD[block.head], weight_VD, self.bias_V, scratch)


class _Scratch:
    """Two [C, V] buffers that every chunk reuses."""

    def __init__(self, weight_VD: Tensor) -> None:
        self._device = weight_VD.device
        self._dtype = torch.promote_types(weight_VD.dtype, torch.float32)
        self._buffers: list[Tensor] = []

    def take(self, index: int, num_rows: int, width: int) -> Tensor:
        while len(self._buffers) <= index:
            self._buffers.append(torch.empty(0, device=self._device, dtype=self._dtype))
        if self._buffers[index].numel() < num_rows * width:
            self._buffers[index] = torch.empty(num_rows * width, device=self._device, dtype=self._dtype)
        return self._buffers[index][: num_rows * width].view(num_rows, width)


class _Chunk:
    """One chunk's distribution and the way back from it."""

    def __init__(
        self,
        block: _Block,
        rows: HeadRows,
        hidden_CD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        scratch: _Scratch,
    ) -> None:
        device = weight_VD.device
        self.block = block
        self.hidden_CD = hidden_CD
        self.weight_VD = weight_VD
        self.temperatures_C1 = torch.from_numpy(rows.temperatures_U[block.head]).to(device)[:, None]
        self.rows_R = torch.from_numpy(rows.rows_R[block.loss] - block.head.start).to(device)
        targets_R = torch.from_numpy(rows.target_ids_R[block.loss]).to(device)
        if block.ids_CV is None:
            self.columns_R = targets_R
            logits_CV = _full_logits(block, rows, hidden_CD, weight_VD, bias_V, scratch)
        else:
            ids_CV = block.ids_CV
            self.columns_R = (ids_CV[self.rows_R] == targets_R[:, None]).int().argmax(1)
            logits_CV = _gathered_logits(ids_CV, hidden_CD, weight_VD, bias_V)
        if bool((self.temperatures_C1 != 1).any()):
            logits_CV.div_(self.temperatures_C1)
        if block.ids_CV is not None:
            logits_CV.masked_fill_(block.ids_CV < 0, _NEVER)
        self.softmax = _softmax(logits_CV, scratch)

    def read(self) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of this chunk's loss rows."""
        softmax = self.softmax
        logits_R = softmax.logits_CV[self.rows_R, self.columns_R]
        return logits_R - softmax.log_z_C[self.rows_R], softmax.entropies_C[self.rows_R]

    def grad_logits(self, grad_logprobs_R: Tensor | None, grad_entropies_R: Tensor | None) -> Tensor:
        """Overwrites the softmax with the gradient of the undivided logits, [C, V]."""
        softmax = self.softmax
        pull_C = softmax.sums_C.new_zeros(len(softmax.sums_C))
        if grad_logprobs_R is not None:
            pull_C.index_add_(0, self.rows_R, grad_logprobs_R.to(pull_C.dtype))
        if grad_entropies_R is None or not bool(grad_entropies_R.any()):
            grad_CV = softmax.weights_CV.mul_((-pull_C / softmax.sums_C)[:, None])
        else:
            spread_C = torch.zeros_like(pull_C).index_add_(0, self.rows_R, grad_entropies_R.to(pull_C.dtype))
            # d log p = 1[target] - p, and d entropy = -p (log p + entropy).
            grad_CV = softmax.logits_CV.sub_((softmax.log_z_C - softmax.entropies_C)[:, None])
            grad_CV.mul_(spread_C[:, None]).add_(pull_C[:, None]).mul_(softmax.weights_CV)
            grad_CV.div_(-softmax.sums_C[:, None])
        if grad_logprobs_R is not None:
            grad_CV.index_put_(
                (self.rows_R, self.columns_R), grad_logprobs_R.to(grad_CV.dtype), accumulate=True
            )
        if bool((self.temperatures_C1 != 1).any()):
            grad_CV.div_(self.temperatures_C1)
        return grad_CV


class _GradientSums:
    """Gradients of hidden states, head weight and bias, summed over chunks in float32 or better."""

    def __init__(self, head: LanguageHead, hidden_UD: Tensor, *, into_parameters: bool) -> None:
        self._head = head
        weight_VD, bias_V = head.weight_VD, head.bias_V
        self.hidden_UD = torch.zeros_like(hidden_UD)
        self.weight_VD: Tensor | None = None
        # The parameter's own gradient is the accumulator where its precision allows it.
        self._is_shared = into_parameters and weight_VD.dtype in (torch.float32, torch.float64)
        if weight_VD.requires_grad and self._is_shared:
            if weight_VD.grad is None:
                weight_VD.grad = torch.zeros_like(weight_VD)
            self.weight_VD = weight_VD.grad
        elif weight_VD.requires_grad:
            dtype = torch.promote_types(weight_VD.dtype, torch.float32)
            self.weight_VD = torch.zeros_like(weight_VD, dtype=dtype)
        self.bias_V = torch.zeros_like(bias_V) if bias_V is not None and bias_V.requires_grad else None

    def add(self, chunk: _Chunk, grad_logprobs_R: Tensor | None, grad_entropies_R: Tensor | None) -> None:
        grad_CV = chunk.grad_logits(grad_logprobs_R, grad_entropies_R)
        block = chunk.block
        hidden_CD = chunk.hidden_CD.to(grad_CV.dtype)
        if block.ids_CV is None:
            weight_VD = chunk.weight_VD
            self.hidden_UD[block.head] = (grad_CV.to(weight_VD.dtype) @ weight_VD).to(self.hidden_UD.dtype)
            if self.weight_VD is not None:
                self.weight_VD.addmm_(grad_CV.t(), hidden_CD)
            if self.bias_V is not None:
                self.bias_V.add_(grad_CV.sum(0))
            return
        ids_CV = block.ids_CV.clamp_min(0)
        rows_CVD = chunk.weight_VD[ids_CV].to(grad_CV.dtype)
        self.hidden_UD[block.head] = torch.bmm(grad_CV[:, None], rows_CVD)[:, 0].to(self.hidden_UD.dtype)
        if self.weight_VD is not None:
            outer_CVD = grad_CV[:, :, None] * hidden_CD[:, None]
            self.weight_VD.index_add_(0, ids_CV.flatten(), outer_CVD.flatten(0, 1))
        if self.bias_V is not None:
            self.bias_V.index_add_(0, ids_CV.flatten(), grad_CV.flatten())

    def store(self) -> None:
        """Add to the parameters' gradients what was not summed there already."""
        head = self._head
        if self.weight_VD is not None and not self._is_shared:
            _accumulate(head.weight_VD, self.weight_VD)
        if self.bias_V is not None and head.bias_V is not None:
            _accumulate(head.bias_V, self.bias_V)


def _accumulate(parameter: Tensor, grad: Tensor) -> None:
    grad = grad.to(parameter.dtype)
    parameter.grad = grad if parameter.grad is None else parameter.grad + grad


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # torch's own context type is not public
        hidden_UD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        head: LanguageHead,
        rows: HeadRows,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_UD.dtype, torch.float32)
        logprobs_R = hidden_UD.new_empty(len(rows.rows_R), dtype=dtype)
        entropies_R = torch.empty_like(logprobs_R)
        for block, chunk in head._chunks(hidden_UD, rows):
            logprobs_R[block.loss], entropies_R[block.loss] = chunk.read()
        ctx.save_for_backward(hidden_UD)
        ctx.head, ctx.rows = head, rows
        return logprobs_R, entropies_R

    @staticmethod
    def backward(ctx: Any, grad_logprobs_R: Tensor, grad_entropies_R: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_UD,) = ctx.saved_tensors
        sums = _GradientSums(ctx.head, hidden_UD, into_parameters=False)
        for block, chunk in ctx.head._chunks(hidden_UD, ctx.rows):
            sums.add(chunk, grad_logprobs_R[block.loss], grad_entropies_R[block.loss])
        weight_VD = None if sums.weight_VD is None else sums.weight_VD.to(ctx.head.weight_VD.dtype)
        return sums.hidden_UD, weight_VD, sums.bias_V, None, None


def _full_logits(
    block: _Block,
    rows: HeadRows,
    hidden_CD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    scratch: _Scratch,
) -> Tensor:
    logits_CV = scratch.take(0, len(hidden_CD), len(weight_VD))
    if weight_VD.dtype == logits_CV.dtype:
        torch.mm(hidden_CD, weight_VD.t(), out=logits_CV)
    else:
        logits_CV.copy_(hidden_CD @ weight_VD.t())
    if bias_V is not None:
        logits_CV.add_(bias_V.detach())
    banned_C = rows.banned_U[block.head]
    for index in np.unique(banned_C).tolist():
        ids = torch.from_numpy(rows.banned_sets[index].astype(np.int64)).to(logits_CV.device)
        if len(ids) and (banned_C == index).all():
            logits_CV.index_fill_(1, ids, _NEVER)
        elif len(ids):
            chosen = torch.from_numpy(np.flatnonzero(banned_C == index)).to(logits_CV.device)
            logits_CV[chosen[:, None], ids[None]] = _NEVER
    offsets = rows.kept_offsets_U1
    for row in range(block.head.start, block.head.stop):
        kept = rows.kept_ids[offsets[row] : offsets[row + 1]]
        if len(kept):
            ids = torch.from_numpy(kept.astype(np.int64)).to(logits_CV.device)
            line_V = logits_CV[row - block.head.start]
            values = line_V[ids]
            line_V.fill_(_NEVER)
            line_V[ids] = values
    return logits_CV


def _gathered_logits(ids_CV: Tensor, hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    ids_CV = ids_CV.clamp_min(0)
    dtype = torch.promote_types(weight_VD.dtype, torch.float32)
    logits_CV = torch.bmm(weight_VD[ids_CV].to(dtype), hidden_CD.to(dtype)[:, :, None])[:, :, 0]
    if bias_V is not None:
        logits_CV = logits_CV + bias_V.detach()[ids_CV]
    return logits_CV


def _softmax(logits_CV: Tensor, scratch: _Scratch) -> _Distribution:
    top_C1 = logits_CV.amax(1, keepdim=True)
    weights_CV = scratch.take(1, *logits_CV.shape)
    torch.sub(logits_CV, top_C1, out=weights_CV)
    weights_CV.exp_()
    sums_C = weights_CV.sum(1)
    log_z_C = top_C1[:, 0] + sums_C.log()
    # Rows that may be anything but a few ids hold _NEVER there, with weight 0: no NaN comes of it.
    means_C = torch.linalg.vecdot(weights_CV, logits_CV) / sums_C
    return _Distribution(
        logits_CV=logits_CV,
        weights_CV=weights_CV,
        sums_C=sums_C,
        log_z_C=log_z_C,
        entropies_C=log_z_C - means_C,
    )


def _plan(rows: HeadRows, chunk: int, vocabulary: int, device: torch.device) -> Iterator[_Block]:
    """Chunks of rows of one kind; gathered ones hold about as many numbers as a chunk of plain ones."""
    lengths_U = np.diff(rows.kept_offsets_U1)
    gathered = int(((lengths_U > 0) & (lengths_U <= vocabulary // _GATHER_LIMIT)).sum())
    start, total = 0, len(lengths_U)
    while start < total:
        if start < gathered:
            # Rows ascend in length, so the last row that fits decides the width.
            size = chunk
            while size > 1 and size * int(lengths_U[min(start + size, gathered) - 1]) > chunk * 64:
                size //= 2
            stop = min(start + size, gathered)
            ids_CV: Tensor | None = _padded_ids(rows, start, stop, device)
        else:
            stop, ids_CV = min(start + chunk, total), None
        loss = slice(*np.searchsorted(rows.rows_R, [start, stop]).tolist())
        yield _Block(head=slice(start, stop), loss=loss, ids_CV=ids_CV)
        start = stop


def _padded_ids(rows: HeadRows, start: int, stop: int, device: torch.device) -> Tensor:
    offsets = rows.kept_offsets_U1[start : stop + 1]
    lengths_C = np.diff(offsets)
    ids_CV = np.full((stop - start, int(lengths_C.max())), -1, dtype=np.int64)
    ids_CV[np.arange(ids_CV.shape[1]) < lengths_C[:, None]] = rows.kept_ids[offsets[0] : offsets[-1]]
    return torch.from_numpy(ids_CV).to(device)
