"""Feeds images to Qwen3-VL in the middle of an episode: pixels of the new ones, M-RoPE positions of the whole stream.

An image of h x w merged patches takes h * w tokens but only max(h, w) positions; what follows it continues from there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence as Many
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from turnwise.errors import ModelError, PolicyError
from turnwise.policies.prefixes import image_spans
from turnwise.policy import Request
from turnwise.types import Image, IntArray

_Positions = npt.NDArray[np.int64]
Grid = tuple[int, int, int]
"""Frames, rows and columns of patches."""
# Pixels are large, and needed again only by a stream that lost its cache; the sizes of old images are needed in every turn.
_MAX_PREPARED = 1024
_MAX_GRIDS = 2**17


class PreparedImage(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An image as the vision tower reads it."""

    pixel_values: torch.Tensor
    grid_thw: Grid


class PreparedPrompt(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a prompt with images needs besides its ids."""

    positions: _Positions
    """[3, T], of the whole stream."""
    next_position: int
    spans: list[tuple[int, int]]
    images: tuple[Image, ...]
    inputs: ImageInputs

    def images_from(self, start: int) -> list[PreparedImage]:
        """The images whose placeholders begin at `start` or later, as the vision tower reads them."""
        return [
            self.inputs.prepare_image(image)
            for image, span in zip(self.images, self.spans, strict=True)
            if span[0] >= start
        ]


class ImageInputs:
    """Prepares prompts with images; each image is processed once. Callable from any thread, so that sampling need not wait."""

    def __init__(
        self, network: Any, image_processor: Any
    ) -> None:  # transformers objects without a light base
        config = network.config
        self.image_token_id = int(config.image_token_id)
        self._merge_size = int(config.vision_config.spatial_merge_size)
        self._processor = image_processor
        self._prepared: OrderedDict[str, Future[PreparedImage]] = OrderedDict()
        self._grids: OrderedDict[str, Grid] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, request: Request) -> PreparedPrompt:
        spans = image_spans(request.prompt_ids, self.image_token_id)
        if len(spans) != len(request.images):
            raise PolicyError(
                f"stream {request.stream_id} has {len(spans)} runs of image placeholders but {len(request.images)} images; "
                "each image needs its own run"
            )
        positions, next_position = mrope_positions(
            request.prompt_ids, spans, [self._grid(image) for image in request.images], self._merge_size
        )
        return PreparedPrompt(
            positions=positions, next_position=next_position, spans=spans, images=request.images, inputs=self
        )

    def _grid(self, image: Image) -> Grid:
        """How many patches an image has; it is processed when it is first seen, and not again for this."""
        with self._lock:
            known = self._grids.get(image.sha256)
        if known is not None:
            return known
        grid = self.prepare_image(image).grid_thw
        with self._lock:
            self._grids[image.sha256] = grid
            if len(self._grids) > _MAX_GRIDS:
                self._grids.popitem(last=False)
        return grid

    def prepare_image(self, image: Image) -> PreparedImage:
        """Process the image, or wait for whoever does already."""
        with self._lock:
            future = self._prepared.get(image.sha256)
            is_mine = future is None
            if future is None:
                future = self._prepared[image.sha256] = Future()
                if len(self._prepared) > _MAX_PREPARED:
                    self._prepared.popitem(last=False)
            else:
                self._prepared.move_to_end(image.sha256)
        if is_mine:
            try:
                future.set_result(self._process(image))
            except Exception as error:  # noqa: BLE001  # goes to everyone who waits for the image
                future.set_exception(error)
        return future.result()

    def _process(self, image: Image) -> PreparedImage:
        if self._processor is None:
            raise ModelError("a prompt has images but the policy was given no image processor")
        features = self._processor(images=[image.pixels], return_tensors="pt")
        frames, height, width = (int(side) for side in features["image_grid_thw"][0])
        return PreparedImage(pixel_values=features["pixel_values"], grid_thw=(frames, height, width))


def pack_images(images: Many[PreparedImage], device: torch.device) -> dict[str, torch.Tensor]:
    """The model's keyword arguments for images in the order of their placeholders."""
    if not images:
        return {}
    return {
        "pixel_values": torch.cat([image.pixel_values for image in images]).to(device),
        "image_grid_thw": torch.tensor([image.grid_thw for image in images]).to(device),
    }


def mrope_positions(
    ids: IntArray, spans: Many[tuple[int, int]], grids: Many[Grid], merge_size: int
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
