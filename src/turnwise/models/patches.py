"""Cuts images into patches as a matrix product: the same numbers as the convolution, several times faster on CPUs."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class _PatchProduct(nn.Conv3d):
    """A convolution whose input is exactly one kernel large, so that it has one output position."""

    def forward(self, input: Tensor) -> Tensor:
        product_PC = functional.linear(input.flatten(1), self.weight.flatten(1), self.bias)
        return product_PC[:, :, None, None, None]


def quicken_patches(network: nn.Module) -> None:
    """Replace a Qwen vision tower's patch convolution; weights and their names stay as they are."""
    for name, module in network.named_modules():
        if (
            name.endswith("patch_embed.proj")
            and type(module) is nn.Conv3d
            and module.kernel_size == module.stride
        ):
            # A patch reaches this layer alone, which is what makes the convolution a product.
            module.__class__ = _PatchProduct
