"""Names two operators that torchvision's Python code expects of its compiled part, which PyPI has for CUDA only.

The image processors that vLLM uses need none of the compiled part.
"""

import torch

_operators = torch.library.Library("torchvision", "DEF")
_operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
