"""Finds tokens that are computed already: the common beginning of two token streams, images included."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from turnwise.types import Image, IntArray

# Copying fewer tokens than this is not worth a phase of its own.
MIN_SHARED_TOKENS = 16


class Tokens(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Token ids, and the images their placeholders stand for."""

    ids: IntArray
    images: tuple[Image, ...] = ()


def image_spans(ids: npt.NDArray[np.integer], image_token_id: int | None) -> list[tuple[int, int]]:
    """Where each image's placeholders begin and end.

    >>> image_spans(np.array([5, 9, 9, 9, 6, 9, 9, 6]), 9)
    [(1, 4), (5, 7)]
    """
    if image_token_id is None:
        return []
    is_image = np.concatenate([[False], ids == image_token_id, [False]])
    edges = np.flatnonzero(is_image[1:] != is_image[:-1])
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def common_prefix(known: Tokens, asked: Tokens, image_token_id: int | None) -> int:
    """How many first tokens both have; never ends inside an image, and ends before the first image that differs."""
    length = min(len(known.ids), len(asked.ids))
    differing = np.flatnonzero(known.ids[:length] != asked.ids[:length])
    if len(differing):
        length = int(differing[0])
    if not asked.images and not known.images:
        return length
    for index, (start, end) in enumerate(image_spans(asked.ids, image_token_id)):
        if start >= length:
            break
        is_known = index < len(known.images) and known.images[index] == asked.images[index]
        if not is_known or end > length:
            return start
    return length
