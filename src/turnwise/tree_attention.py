"""Attention over a token tree as a list of dense rectangles, without a [T, T] mask.

Queries of a segment see the segment itself (causally) and all of its ancestors (fully). Since tokens lie depth
first, the descendants of a segment are one range, so a tree of S segments needs at most 2 S kernel calls on views:

    rows [start, end)           x  columns [start, end)   causal
    rows [end, subtree_end)     x  columns [start, end)   full

The rectangles of one row are joined by their log-sum-exp; in backward every rectangle gets the joined output and
log-sum-exp, which makes its gradients the exact share of the whole softmax.
"""

# Dimensions: B batch (always 1), H query heads, K key-value heads, T tokens, D head width.

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from turnwise.errors import ModelError
from turnwise.token_tree import Segment

TREE_ATTENTION = "turnwise_tree"


@dataclass(frozen=True, kw_only=True)
class Rectangle:
    """Queries of one range looking at keys of another; a diagonal one is causal."""

    rows: slice
    columns: slice
    is_diagonal: bool
    copies: int = 1
    """How many equally long neighbouring segments a diagonal one holds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeLayout:
    """What attention needs to know about a tree."""

    segments: tuple[Segment, ...]
    rectangles: tuple[Rectangle, ...]

    @property
    def longest(self) -> int:
        return max((segment.subtree_end for segment in self.segments), default=0)


def plan_rectangles(segments: Sequence[Segment]) -> TreeLayout:
    """The rectangles that cover every (token, ancestor) pair exactly once."""
    diagonals: list[Rectangle] = []
    shared: list[Rectangle] = []
    for segment in segments:
        own = slice(segment.start, segment.end)
        last = diagonals[-1] if diagonals else None
        length = segment.end - segment.start
        if (
            last is not None
            and last.rows.stop == segment.start
            and last.rows.stop - last.rows.start == length * last.copies
        ):
            run = slice(last.rows.start, segment.end)
            diagonals[-1] = Rectangle(rows=run, columns=run, is_diagonal=True, copies=last.copies + 1)
        else:
            diagonals.append(Rectangle(rows=own, columns=own, is_diagonal=True))
        if segment.subtree_end > segment.end:
            below = slice(segment.end, segment.subtree_end)
            shared.append(Rectangle(rows=below, columns=own, is_diagonal=False))
    return TreeLayout(segments=tuple(segments), rectangles=(*diagonals, *shared))


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # torch's own context type is not public
        query_BHTD: torch.Tensor,
        key_BKTD: torch.Tensor,
        value_BKTD: torch.Tensor,
        layout: TreeLayout,
        scale: float,
    ) -> torch.Tensor:
        out_BHTD = torch.empty_like(query_BHTD)
        lse_BHT: torch.Tensor | None = None
        for rectangle in layout.rectangles:
            query, key, value = _views(rectangle, query_BHTD, key_BKTD, value_BKTD)
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, rectangle.is_diagonal, scale=scale
            )
            part, part_lse = _unstack(rectangle, part), _unstack(rectangle, part_lse)
            if lse_BHT is None:
                lse_BHT = part_lse.new_empty(query_BHTD.shape[:3])
            rows = rectangle.rows
            if rectangle.is_diagonal:
                out_BHTD[:, :, rows] = part
                lse_BHT[:, :, rows] = part_lse
            else:
                _join(out_BHTD[:, :, rows], lse_BHT[:, :, rows], part, part_lse)
        assert lse_BHT is not None, "a tree has at least one token"
        ctx.save_for_backward(query_BHTD, key_BKTD, value_BKTD, out_BHTD, lse_BHT)
        ctx.layout, ctx.scale = layout, scale
        return out_BHTD

    @staticmethod
    def backward(ctx: Any, grad_BHTD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_BHTD, key_BKTD, value_BKTD, out_BHTD, lse_BHT = ctx.saved_tensors
        grads = tuple(torch.empty_like(tensor) for tensor in (query_BHTD, key_BKTD, value_BKTD))
        for rectangle in ctx.layout.rectangles:
            query, key, value = _views(rectangle, query_BHTD, key_BKTD, value_BKTD)
            grad, out, lse = (
                _stack(rectangle, tensor, rectangle.rows) for tensor in (grad_BHTD, out_BHTD, lse_BHT)
            )
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, out, lse, 0.0, rectangle.is_diagonal, scale=ctx.scale
            )
            ranges = (rectangle.rows, rectangle.columns, rectangle.columns)
            for total, part, where in zip(grads, parts, ranges, strict=True):
                part = _unstack(rectangle, part)
                if rectangle.is_diagonal:
                    total[:, :, where] = part
                else:
                    total[:, :, where] += part
        return (*grads, None, None)


def _views(
    rectangle: Rectangle, query_BHTD: torch.Tensor, key_BKTD: torch.Tensor, value_BKTD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        _stack(rectangle, query_BHTD, rectangle.rows),
        _stack(rectangle, key_BKTD, rectangle.columns),
        _stack(rectangle, value_BKTD, rectangle.columns),
    )


def _stack(rectangle: Rectangle, tensor_BHT: torch.Tensor, where: slice) -> torch.Tensor:
    """[1, H, copies * L, …] as [copies, H, L, …]: equally long neighbours become a batch."""
    part = tensor_BHT[:, :, where]
    if rectangle.copies == 1:
        return part
    length = part.shape[2] // rectangle.copies
    return part[0].view(part.shape[1], rectangle.copies, length, *part.shape[3:]).transpose(0, 1)


def _unstack(rectangle: Rectangle, tensor: torch.Tensor) -> torch.Tensor:
    if rectangle.copies == 1:
        return tensor
    return tensor.transpose(0, 1).flatten(1, 2)[None]


def _join(
    out_BHTD: torch.Tensor, lse_BHT: torch.Tensor, part_BHTD: torch.Tensor, part_lse_BHT: torch.Tensor
) -> None:
    """Merge a second softmax over other keys into `out` and `lse`, in place."""
    joined = torch.logaddexp(lse_BHT, part_lse_BHT)
    out_BHTD.mul_((lse_BHT - joined).exp_()[..., None].to(out_BHTD.dtype))
    out_BHTD.add_(part_BHTD * (part_lse_BHT - joined).exp_()[..., None].to(out_BHTD.dtype))
    lse_BHT.copy_(joined)


def tree_attention(
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    layout: TreeLayout,
    scale: float,
) -> torch.Tensor:
    """Attention of every token to its ancestors and itself."""
    if query_BHTD.device.type == "cpu":
        out: torch.Tensor = _TreeAttention.apply(query_BHTD, key_BKTD, value_BKTD, layout, scale)  # type: ignore[no-untyped-call]
        return out
    if query_BHTD.device.type == "cuda":
        return flex_tree_attention(query_BHTD, key_BKTD, value_BKTD, layout, scale, is_compiled=True)
    return torch.nn.functional.scaled_dot_product_attention(
        query_BHTD,
        key_BKTD,
        value_BKTD,
        attn_mask=dense_mask(layout, query_BHTD.device),
        scale=scale,
        enable_gqa=True,
    )


def flex_tree_attention(
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    layout: TreeLayout,
    scale: float,
    *,
    is_compiled: bool,
) -> torch.Tensor:
    """The same through FlexAttention, which skips blocks of the mask that are empty."""
    out: torch.Tensor = _flex(is_compiled)(
        query_BHTD,
        key_BKTD,
        value_BKTD,
        block_mask=_block_mask(layout, query_BHTD.device),
        scale=scale,
        enable_gqa=True,
    )
    return out


@functools.cache
def _flex(is_compiled: bool) -> Any:  # what torch.compile returns has no useful type
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if is_compiled else flex_attention


@functools.lru_cache(maxsize=4)
def _block_mask(layout: TreeLayout, device: torch.device) -> Any:  # the import waits until it is needed
    """Kept between the layers of one forward pass; a tree is its own key."""
    from torch.nn.attention.flex_attention import create_block_mask

    ends_T = subtree_ends(layout, device)

    def sees(
        batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor
    ) -> torch.Tensor:
        return (column <= row) & (row < ends_T[column])

    return create_block_mask(sees, None, None, layout.longest, layout.longest, device=str(device))


def subtree_ends(layout: TreeLayout, device: torch.device) -> torch.Tensor:
    """[T]: token k is seen by exactly the tokens in `[k, subtree_ends[k])`."""
    lengths = torch.tensor([segment.end - segment.start for segment in layout.segments], device=device)
    ends = torch.tensor([segment.subtree_end for segment in layout.segments], device=device)
    return torch.repeat_interleave(ends, lengths)


def dense_mask(layout: TreeLayout, device: torch.device) -> torch.Tensor:
    """[T, T], true where attention is allowed."""
    places_T = torch.arange(layout.longest, device=device)
    ends_T = subtree_ends(layout, device)
    return (places_T[None] <= places_T[:, None]) & (places_T[:, None] < ends_T[None])


def tree_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    token_tree: TreeLayout | None = None,
    **kwargs: Any,  # whatever else transformers hands to attention functions
) -> tuple[torch.Tensor, None]:
    """What transformers calls for each layer: attention in a tree when one is given, the usual one when not."""
    if token_tree is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return plain
    if dropout:
        raise ModelError(
            f"attention dropout is {dropout}; tree attention has none, set attention_dropout to 0"
        )
    if sliding_window is not None and token_tree.longest > sliding_window:
        raise ModelError(
            f"a pack of {token_tree.longest} tokens meets a sliding window of {sliding_window}; "
            "lower training.tokens_per_pack to the window"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # Under autocast, rotary embeddings leave queries and keys in float32 while values are already bfloat16.
    query, key = query.to(value.dtype), key.to(value.dtype)
    out_BHTD = tree_attention(query, key, value, token_tree, scale)
    return out_BHTD.transpose(1, 2).contiguous(), None


def register_tree_attention() -> str:
    """Make the attention known to transformers and return its name; without a tree it is plain sdpa."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(TREE_ATTENTION, tree_attention_forward)
    AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
    return TREE_ATTENTION
