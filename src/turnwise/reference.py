"""What the divergence is measured against: the weights at the start, a moving average of them, or the model without its adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.config import LossConfig
from turnwise.errors import ConfigError, TrainingError


class Reference:
    """Holds a second set of the trainable weights, never a second model; with `adapter_off` not even that."""

    def __init__(self, network: nn.Module, *, kind: str, ema_decay: float = 0.0, ema_every: int = 1) -> None:
        self.kind = kind
        self._network = network
        self._decay = ema_decay
        self._every = ema_every
        self._shadow: dict[str, Tensor] = {}
        if kind == "adapter_off":
            if not hasattr(network, "disable_adapter"):
                raise ConfigError(
                    "loss.reference is adapter_off but the model has no adapter; use frozen or add LoRA"
                )
        else:
            self._shadow = {name: tensor.detach().clone() for name, tensor in trainable(network).items()}

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside, the network computes as the reference does."""
        if self.kind == "adapter_off":
            adapted: Any = self._network  # PEFT's classes are not annotated
            with adapted.disable_adapter():
                yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def follow(self, num_updates: int) -> None:
        """Move towards the trained weights: ref ← d ref + (1 - d) weights, every `ema_every` updates."""
        if self.kind != "ema" or num_updates % self._every:
            return
        with torch.no_grad():
            for name, tensor in trainable(self._network).items():
                self._shadow[name].lerp_(tensor, 1.0 - self._decay)

    def state(self) -> dict[str, Tensor]:
        return dict(self._shadow)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        if set(tensors) != set(self._shadow):
            raise TrainingError(
                f"the checkpoint's reference has {len(tensors)} tensors but this one needs {len(self._shadow)}; "
                "resume with the same loss.reference"
            )
        for name, tensor in tensors.items():
            self._shadow[name].copy_(tensor)

    def _swap(self) -> None:
        for name, tensor in trainable(self._network).items():
            tensor.data, self._shadow[name] = self._shadow[name], tensor.data


class KlController:
    """The divergence's coefficient: fixed, or raised and lowered so that the divergence stays near a target."""

    _RATE = 0.1
    """By at most this share per update."""

    def __init__(self, coefficient: float, target: float | None = None) -> None:
        self.coefficient = coefficient
        self._target = target

    def observe(self, kl: float) -> None:
        """β ← β (1 + 0.1 clip(KL / target - 1, -1, 1))"""
        if self._target is None:
            return
        error = min(max(kl / self._target - 1.0, -1.0), 1.0)
        self.coefficient *= 1.0 + self._RATE * error


def trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that updates change, by name; tied ones once."""
    return {name: tensor for name, tensor in network.named_parameters() if tensor.requires_grad}


def build_reference(network: nn.Module, loss: LossConfig) -> Reference | None:
    """The reference the config asks for; None when no divergence is measured."""
    if loss.kl_coefficient == 0.0:
        return None
    kind = loss.reference or ("adapter_off" if hasattr(network, "disable_adapter") else "frozen")
    return Reference(network, kind=kind, ema_decay=loss.ema_decay or 0.0, ema_every=loss.ema_every or 1)
