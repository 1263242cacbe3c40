"""Attention over slots.

A forward pass of `LocalPolicy` carries a `Plan`: where the new keys and values go, and which slots each query may look at. Models hand
keywords through to the attention function that their config names; that function is wrapped here, so that it serves slots when a plan
is there and does what it always did when not. Others may use the same network at the same time.

Dimensions: R decoding rows, T packed prompt tokens, H query heads, G key-value heads, L cached tokens, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from turnwise.errors import ModelError
from turnwise.policies.slots import Slot, SlotStore

# Tokens of padding that cost less than another call.
_CHEAP_PADDING = 256
# Models skip building a mask of their own when they are given one of four dimensions; slots need none.
NO_MASK = torch.zeros(1, 1, 1, 1)


class DecodePlan:
    """One new token for each of some slots. `advance` makes the plan of the next step."""

    def __init__(self, store: SlotStore, slots: Sequence[Slot]) -> None:
        self.store = store
        self._runs = _find_runs(slots, store)
        rows = torch.cat([store.rows(slot, slot.length, 1) for slot in slots])
        self.write_rows = rows.flatten().to(store.keys[0].device)

    def advance(self) -> None:
        self.write_rows += 1
        for run in self._runs:
            run.advance()

    def attend(self, layer: int, query_RHTD: torch.Tensor, scaling: float | None) -> torch.Tensor:
        store = self.store
        num_rows, num_heads, _, head_dim = query_RHTD.shape
        # Query heads that share a key head become its queries: no key is ever repeated.
        query_RGQD = query_RHTD.reshape(num_rows, store.num_heads, num_heads // store.num_heads, head_dim)
        outputs = []
        for run in self._runs:
            shape = (run.start, run.slot_tokens, run.stop_row - run.first_row, run.length)
            outputs.append(
                F.scaled_dot_product_attention(
                    query_RGQD[run.first_row : run.stop_row],
                    store.run_view(store.keys[layer], *shape),
                    store.run_view(store.values[layer], *shape),
                    attn_mask=run.mask(query_RGQD),
                    scale=scaling,
                )
            )
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.reshape(num_rows, 1, num_heads, head_dim)


class _Run:
    """Neighbouring slots of one size, attended to in one call."""

    def __init__(self, first_row: int, slot: Slot) -> None:
        self.first_row = first_row
        self.stop_row = first_row + 1
        self.start = slot.start
        self.slot_tokens = slot.num_tokens
        self.lengths = [slot.length + 1]
        self.length = slot.length + 1
        self._mask: torch.Tensor | None = None

    def takes(self, slot: Slot) -> bool:
        """Whether the slot lies right behind and is about as long: shorter rows are padded to the longest."""
        num_rows = self.stop_row - self.first_row
        if slot.num_tokens != self.slot_tokens or slot.start != self.start + num_rows * self.slot_tokens:
            return False
        longest = max(self.length, slot.length + 1)
        used = sum(self.lengths) + slot.length + 1
        return longest * (num_rows + 1) - used <= max(_CHEAP_PADDING, used // 4)

    def extend(self, slot: Slot) -> None:
        self.stop_row += 1
        self.lengths.append(slot.length + 1)
        self.length = max(self.length, slot.length + 1)

    def advance(self) -> None:
        self.length += 1
        self.lengths = [length + 1 for length in self.lengths]
        if self._mask is not None:
            for row, length in enumerate(self.lengths):
                self._mask[row, 0, 0, length - 1] = 0

    def mask(self, query_RGQD: torch.Tensor) -> torch.Tensor | None:
        if min(self.lengths) == self.length:
            return None
        if self._mask is None:
            num_rows = self.stop_row - self.first_row
            hidden = torch.full((num_rows, 1, 1, self.slot_tokens), float("-inf"), dtype=query_RGQD.dtype)
            for row, length in enumerate(self.lengths):
                hidden[row, 0, 0, :length] = 0
            self._mask = hidden.to(query_RGQD.device)
        return self._mask[..., : self.length].expand(-1, 1, query_RGQD.shape[2], -1)


def _find_runs(slots: Sequence[Slot], store: SlotStore) -> list[_Run]:
    runs: list[_Run] = []
    for row, slot in enumerate(slots):
        if runs and runs[-1].takes(slot):
            runs[-1].extend(slot)
        else:
            runs.append(_Run(row, slot))
    return runs


class PrefillPlan:
    """New prompt tokens of some slots, packed one after the other into a single row."""

    def __init__(self, store: SlotStore, parts: Sequence[tuple[Slot, int]]) -> None:
        """`parts` are slots and how many new tokens each gets."""
        self.store = store
        self._parts = list(parts)
        rows = torch.cat([store.rows(slot, slot.length, count) for slot, count in parts])
        self.write_rows = rows.flatten().to(store.keys[0].device)
        shapes = [(slot.length, count) for slot, count in parts]
        masks = {shape: self._causal_mask(*shape) for shape in set(shapes)}
        self._masks = [masks[shape] for shape in shapes]

    def _causal_mask(self, cached: int, count: int) -> torch.Tensor | None:
        """0 where a new token may look, minus infinity behind it."""
        if cached == 0 or count == 1:
            return None
        buffer = self.store.keys[0]
        hidden = torch.full((count, cached + count), float("-inf"), dtype=buffer.dtype, device=buffer.device)
        return hidden.triu_(cached + 1)

    def attend(self, layer: int, query_RHTD: torch.Tensor, scaling: float | None) -> torch.Tensor:
        store, first, outputs = self.store, 0, []
        for (slot, count), mask in zip(self._parts, self._masks, strict=True):
            length = slot.length + count
            outputs.append(
                F.scaled_dot_product_attention(
                    query_RHTD[:, :, first : first + count],
                    store.view(store.keys[layer], slot, length),
                    store.view(store.values[layer], slot, length),
                    attn_mask=mask,
                    is_causal=mask is None and count > 1,
                    scale=scaling,
                    enable_gqa=query_RHTD.shape[1] != store.num_heads,
                )
            )
            first += count
        return torch.cat(outputs, dim=2).transpose(1, 2)


Plan = DecodePlan | PrefillPlan


def attend_to_slots(
    module: torch.nn.Module,
    query_RHTD: torch.Tensor,
    key_RGTD: torch.Tensor,
    value_RGTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    slot_plan: Plan,
    scaling: float | None = None,
    **ignored: Any,  # what other attention functions need: dropout, window, positions
) -> tuple[torch.Tensor, None]:
    """Store the new keys and values, then attend to everything each query's slot holds."""
    store = slot_plan.store
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # every attention module of transformers has one
    for buffer, new in ((store.keys[layer], key_RGTD), (store.values[layer], value_RGTD)):
        new_rows = new.transpose(1, 2).reshape(-1, store.head_dim)
        buffer.view(-1, store.head_dim).index_copy_(0, slot_plan.write_rows, new_rows)
    return slot_plan.attend(layer, query_RHTD, scaling), None


def serve_slots(network: Any) -> None:  # a transformers model or a PEFT wrapper of one
    """Make the attention function that the network's text layers use serve slots, whichever it is."""
    config = network.config.get_text_config()
    name = config._attn_implementation
    functions = AttentionInterface()
    if name not in functions:
        # `eager` is each model's own code and cannot be wrapped.
        config._attn_implementation_internal = name = "sdpa"
    usual = functions[name]
    if getattr(usual, "serves_slots", False):
        return

    @functools.wraps(usual)
    def attend(
        module: torch.nn.Module, *args: Any, slot_plan: Plan | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # A vision tower is handed the plan too, but its layers have no index: nothing of it is cached.
        if slot_plan is None or not hasattr(module, "layer_idx"):
            return usual(module, *args, **kwargs)  # type: ignore[no-any-return]
        return attend_to_slots(module, *args, slot_plan=slot_plan, **kwargs)

    attend.serves_slots = True  # type: ignore[attr-defined]  # so that it is wrapped once
    AttentionInterface.register(name, attend)


def make_store(network: Any, budget_bytes: int) -> SlotStore:  # as above
    """A slot store that fits the network; raises when its attention is not of the kind slots can serve."""
    config = network.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    base = network.get_base_model() if hasattr(network, "get_base_model") else network
    if kinds != {"full_attention"} or not getattr(base, "_supports_attention_backend", False):
        raise ModelError(
            f"{type(base).__name__} has attention of the kinds {sorted(kinds)}; the local engine keeps its own cache and "
            "needs full attention through the transformers attention interface; serve this model and use an endpoint policy"
        )
    parameter = next(network.parameters())
    return SlotStore(
        num_layers=config.num_hidden_layers,
        num_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        dtype=parameter.dtype,
        device=parameter.device,
        budget_bytes=budget_bytes,
    )
