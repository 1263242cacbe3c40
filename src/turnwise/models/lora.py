"""Adapters through PEFT: put on, saved alone, merged for export. Which layers get one follows from the architecture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.config import LoraConfig
from turnwise.errors import ModelError


def find_targets(network: nn.Module) -> tuple[str, ...]:
    """Names of the linear layers of the language model's blocks; the LM head and a vision tower are left alone."""
    base: Any = network  # transformers' classes are not annotated
    decoder = base.get_decoder()
    head = base.get_output_embeddings()
    found = {
        name.rpartition(".")[2]
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    if not found:
        raise ModelError(
            f"{type(network).__name__} has no linear layer in its decoder; name lora.targets yourself"
        )
    return tuple(sorted(found))


def add_adapter(network: nn.Module, lora: LoraConfig, *, seed: int = 0) -> nn.Module:
    """The network with a fresh adapter, the only thing that is trained; it starts as the network was.

    The same seed gives the same adapter, so that two sides can each make theirs.
    """
    import peft

    base: Any = network
    targets = lora.targets or find_targets(network)
    present = {name.rpartition(".")[2] for name, _ in network.named_modules()}
    missing = [name for name in targets if name.rpartition(".")[2] not in present]
    if missing:
        known = ", ".join(find_targets(network))
        raise ModelError(
            f"lora.targets names {', '.join(missing)}, which the model does not have; its layers: {known}"
        )
    # A pattern rather than names: a vision tower may use the same names.
    decoder = base.get_decoder()
    prefix = next((name for name, module in network.named_modules() if module is decoder), "")
    inside = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith(f"{prefix}." if prefix else "")
        and any(name == target or name.endswith(f".{target}") for target in targets)
    ]
    if not inside:
        raise ModelError(f"lora.targets {targets} match no linear layer of the language model")
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=inside,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted: nn.Module = peft.get_peft_model(base, settings)
    return adapted


def adapt(network: nn.Module, lora: LoraConfig | None, *, seed: int = 0) -> nn.Module:
    """The network with the adapter that the config asks for, or as it is."""
    return network if lora is None else add_adapter(network, lora, seed=seed)


def adapter_weights(network: nn.Module) -> dict[str, Tensor]:
    """The adapter's tensors by parameter name."""
    return {name: tensor.detach() for name, tensor in network.named_parameters() if "lora_" in name}


def load_adapter_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy adapter tensors into a network that has such an adapter."""
    own = adapter_weights(network)
    if set(own) != set(weights):
        strange = sorted(set(own) ^ set(weights))[:3]
        raise ModelError(f"the adapter does not fit the network: {', '.join(strange)} … are on one side only")
    for name, tensor in weights.items():
        if own[name].shape != tensor.shape:
            raise ModelError(
                f"adapter tensor {name} is {tuple(tensor.shape)} but the network's is {tuple(own[name].shape)}"
            )
        own[name].copy_(tensor)


def save_adapter(network: nn.Module, folder: Path | str) -> Path:
    """Write the adapter alone, as PEFT reads it (adapter_config.json, adapter_model.safetensors)."""
    adapted: Any = network
    if not hasattr(adapted, "peft_config"):
        raise ModelError("the model has no adapter to save; train with model.lora set")
    adapted.save_pretrained(str(folder), safe_serialization=True)
    return Path(folder)


def save_merged(network: nn.Module, folder: Path | str) -> Path:
    """Write the model with its adapter merged in, as an ordinary model folder; the network itself stays as it is."""
    import copy

    adapted: Any = network
    if not hasattr(adapted, "peft_config"):
        raise ModelError("the model has no adapter to merge; save it as it is")
    merged = copy.deepcopy(adapted).merge_and_unload()
    # The learner's attention is its own business; a saved model takes the library's default.
    merged.config._attn_implementation = "sdpa"
    merged.save_pretrained(str(folder), safe_serialization=True)
    return Path(folder)
