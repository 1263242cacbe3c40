"""Names a set of weights by content, so that two sides can prove that they hold the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """sha256 over names, types, shapes and bytes, independent of order and device."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
