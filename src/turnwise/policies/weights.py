"""Puts delivered tensors into a network, and refuses those that do not belong there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from turnwise.errors import PolicyError


def load_into(network: Any, weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Copy `weights` into the network's tensors of the same names and return those, under the given names.

    Names are those of `network.state_dict()`; for an adapter the names that PEFT saves, without the adapter's own, do too.
    """
    if not weights:
        raise PolicyError("load_weights got no tensors; the sampler would go on with the old ones")
    own = dict(network.state_dict(keep_vars=True))
    adapter = getattr(network, "active_adapter", None)
    chosen: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        target = own.get(name)
        if target is None and isinstance(adapter, str):
            target = own.get(_with_adapter(name, adapter))
        if target is None:
            raise PolicyError(f"load_weights got {name!r}, which {type(network).__name__} does not have")
        if target.shape != tensor.shape:
            raise PolicyError(
                f"load_weights got {name!r} of shape {tuple(tensor.shape)}; the network's is {tuple(target.shape)}"
            )
        chosen[name] = target.data
    with torch.no_grad():
        for name, tensor in weights.items():
            chosen[name].copy_(torch.as_tensor(tensor))
    return chosen


def _with_adapter(name: str, adapter: str) -> str:
    """`….lora_A.weight` is `….lora_A.default.weight` inside a PEFT model."""
    head, _, tail = name.rpartition(".")
    return f"{head}.{adapter}.{tail}"
