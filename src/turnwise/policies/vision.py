"""Feeds images to Qwen3-VL in the middle of an episode: pixels of the new ones, M-RoPE positions of the whole stream.

An image of h x w merged patches takes h * w tokens but only max(h, w) positions; what follows it continues from there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence as Many
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from turnwise.errors import ModelError, PolicyError
from turnwise.policies.prefixes import image_spans
from turnwise.policies.sequences import Sequence
from turnwise.types import Image, IntArray

_Positions = npt.NDArray[np.int64]
_MAX_PREPARED = 1024


class PreparedImage(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An image as the vision tower reads it."""

    pixel_values: torch.Tensor
    grid_thw: tuple[int, int, int]


class ImageInputs:
    """Prepares images once each, and builds the inputs of a prefill that has some."""

    def __init__(
        self, network: Any, image_processor: Any
    ) -> None:  # transformers objects without a light base
        config = network.config
        self.image_token_id = int(config.image_token_id)
        self._merge_size = int(config.vision_config.spatial_merge_size)
        self._processor = image_processor
        self._device = next(network.parameters()).device
        self._prepared: OrderedDict[str, PreparedImage] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, images: Many[Image]) -> None:
        """Process images that are not prepared yet; callable from any thread, so that sampling need not wait for it."""
        for image in images:
            self._get(image)

    def _get(self, image: Image) -> PreparedImage:
        with self._lock:
            if image.sha256 in self._prepared:
                self._prepared.move_to_end(image.sha256)
                return self._prepared[image.sha256]
        if self._processor is None:
            raise ModelError("a prompt has images but the policy was given no image processor")
        features = self._processor(images=[image.pixels], return_tensors="pt")
        grid = tuple(int(side) for side in features["image_grid_thw"][0])
        prepared = PreparedImage(pixel_values=features["pixel_values"], grid_thw=(grid[0], grid[1], grid[2]))
        with self._lock:
            self._prepared[image.sha256] = prepared
            while len(self._prepared) > _MAX_PREPARED:
                self._prepared.popitem(last=False)
        return prepared

    def prefill_inputs(
        self, sequences: Many[Sequence], starts: Many[int]
    ) -> tuple[_Positions, dict[str, torch.Tensor]]:
        """Positions [3, 1, T] of the new tokens of all sequences, and the images among them."""
        positions: list[_Positions] = []
        new_images: list[PreparedImage] = []
        for sequence, start in zip(sequences, starts, strict=True):
            request = sequence.request
            spans = image_spans(request.prompt_ids, self.image_token_id)
            if len(spans) != len(request.images):
                raise PolicyError(
                    f"stream {request.stream_id} has {len(spans)} runs of image placeholders but {len(request.images)} images; "
                    "each image needs its own run"
                )
            prepared = [self._get(image) for image in request.images]
            grids = [image.grid_thw for image in prepared]
            whole, sequence.next_position = mrope_positions(
                request.prompt_ids, spans, grids, self._merge_size
            )
            positions.append(whole[:, start:])
            new_images.extend(image for image, span in zip(prepared, spans, strict=True) if span[0] >= start)
        extra: dict[str, torch.Tensor] = {}
        if new_images:
            extra["pixel_values"] = torch.cat([image.pixel_values for image in new_images]).to(self._device)
            extra["image_grid_thw"] = torch.tensor([image.grid_thw for image in new_images]).to(self._device)
        return np.concatenate(positions, axis=1)[:, None], extra


def mrope_positions(
    ids: IntArray, spans: Many[tuple[int, int]], grids: Many[tuple[int, int, int]], merge_size: int
) -> tuple[_Positions, int]:
    """Temporal, height and width positions [3, T] of a stream, and the position that comes next.

    Two text tokens, an image of 1 x 2 x 2, one text token: temporal 0 1 | 2 2 2 2 | 4, height 0 1 | 2 2 3 3 | 4, next 5.
    """
    positions = np.empty((3, len(ids)), dtype=np.int64)
    place, position = 0, 0
    for (start, end), (frames, height, width) in zip(spans, grids, strict=True):
        positions[:, place:start] = np.arange(position, position + start - place)
        position += start - place
        height, width = height // merge_size, width // merge_size
        if frames * height * width != end - start:
            raise PolicyError(
                f"an image of {height} x {width} merged patches has {end - start} placeholders in the prompt; "
                f"it needs {frames * height * width}"
            )
        grid = np.indices((frames, height, width)).reshape(3, -1)
        positions[:, start:end] = grid + position
        position += max(height, width)
        place = end
    positions[:, place:] = np.arange(position, position + len(ids) - place)
    return positions, position + len(ids) - place
