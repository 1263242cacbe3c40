"""Where the keys and values of token streams live: one slot per stream, cut from memory that is reserved once.

Memory is counted in tokens. A slot holds a power of two of them, so that freed neighbours join again (a buddy allocator) and
slots of one size that lie side by side can be attended to as one batch without copying.

    layer buffer    [ slot A: 4 heads x 256 tokens | slot B: 4 x 256 | free 512 | slot C: 4 x 1024 | … ]
"""

from __future__ import annotations

import bisect

import numpy as np
import torch

from turnwise.policies.prefixes import Tokens
from turnwise.types import Image, IntArray

MIN_SLOT_TOKENS = 64
# Larger slots than needed save moves, but spread what is written over more memory, and memory touched for the first time is slow.
_HEADROOM = 2


class TokenMemory:
    """Hands out power-of-two ranges of `num_tokens` tokens, lowest address first."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens // MIN_SLOT_TOKENS * MIN_SLOT_TOKENS
        self.num_free = self.num_tokens
        self._free: dict[int, list[int]] = {}
        start = 0
        while start < self.num_tokens:
            size = MIN_SLOT_TOKENS
            while start % (size * 2) == 0 and start + size * 2 <= self.num_tokens:
                size *= 2
            self._free.setdefault(size, []).append(start)
            start += size

    @staticmethod
    def slot_size(num_tokens: int) -> int:
        """The smallest slot that holds so many tokens."""
        return max(MIN_SLOT_TOKENS, 1 << (num_tokens - 1).bit_length())

    @property
    def largest_free(self) -> int:
        return max((size for size, starts in self._free.items() if starts), default=0)

    def take(self, size: int) -> int | None:
        """The start of a free range of this size, or None when there is none."""
        fitting = [(starts[0], found) for found, starts in self._free.items() if starts and found >= size]
        if not fitting:
            return None
        # The smallest range that fits keeps large ones whole.
        found = min(found for _, found in fitting)
        start = self._free[found].pop(0)
        while found > size:
            found //= 2
            bisect.insort(self._free.setdefault(found, []), start + found)
        self.num_free -= size
        return start

    def give_back(self, start: int, size: int) -> None:
        self.num_free += size
        while True:
            buddy = start ^ size
            starts = self._free.setdefault(size, [])
            place = bisect.bisect_left(starts, buddy)
            if place == len(starts) or starts[place] != buddy:
                bisect.insort(starts, start)
                return
            starts.pop(place)
            start = min(start, buddy)
            size *= 2


class Slot:
    """The cached tokens of one stream: which they are and where their keys and values lie."""

    __slots__ = ("ids", "images", "length", "num_tokens", "start")

    def __init__(self, start: int, num_tokens: int) -> None:
        self.start = start
        self.num_tokens = num_tokens
        self.ids: IntArray = np.empty(num_tokens, dtype=np.int32)
        self.length = 0
        """How many tokens have their keys and values here."""
        self.images: tuple[Image, ...] = ()

    @property
    def tokens(self) -> Tokens:
        return Tokens(ids=self.ids[: self.length], images=self.images)

    def append(self, ids: IntArray) -> None:
        self.ids[self.length : self.length + len(ids)] = ids
        self.length += len(ids)


class SlotStore:
    """The key and value memory of all layers. Addresses are rows of `[-1, head_dim]` views."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        budget_bytes: int,
    ) -> None:
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.bytes_per_token = 2 * num_layers * num_heads * head_dim * dtype.itemsize
        self._num_tokens = budget_bytes // self.bytes_per_token
        self.memory = TokenMemory(self._num_tokens)
        num_elements = self.memory.num_tokens * num_heads * head_dim
        self.keys = [_lazy_zeros(num_elements, dtype, device) for _ in range(num_layers)]
        self.values = [_lazy_zeros(num_elements, dtype, device) for _ in range(num_layers)]

    def clear(self) -> None:
        """Every slot is void. What was written stays where it is: memory touched for the first time is slow."""
        self.memory = TokenMemory(self._num_tokens)

    def take(self, num_tokens: int) -> Slot | None:
        """A slot for at least so many tokens, or None while memory is full.

        With memory to spare it is larger, so that later turns need not move; memory that nothing was written to costs nothing.
        """
        size = TokenMemory.slot_size(num_tokens)
        sizes = [size]
        if self.memory.num_free - _HEADROOM * size > self.memory.num_tokens // 2:
            sizes.insert(0, _HEADROOM * size)
        for wanted in sizes:
            start = self.memory.take(wanted)
            if start is not None:
                return Slot(start, wanted)
        return None

    def give_back(self, slot: Slot) -> None:
        self.memory.give_back(slot.start, slot.num_tokens)

    def copy_prefix(self, source: Slot, target: Slot, num_tokens: int) -> None:
        """Fill the beginning of `target` with what `source` holds."""
        for buffer in (*self.keys, *self.values):
            self.view(buffer, target, num_tokens).copy_(self.view(buffer, source, num_tokens))
        target.ids[:num_tokens] = source.ids[:num_tokens]
        target.length = num_tokens
        target.images = source.images

    def view(self, buffer: torch.Tensor, slot: Slot, length: int) -> torch.Tensor:
        """The first tokens of one slot: [1, heads, length, head_dim]."""
        return self.run_view(buffer, slot.start, slot.num_tokens, 1, length)

    def run_view(
        self, buffer: torch.Tensor, start: int, slot_tokens: int, num_slots: int, length: int
    ) -> torch.Tensor:
        """Neighbouring slots of one size as a batch: [num_slots, heads, length, head_dim]."""
        heads, dim = self.num_heads, self.head_dim
        strides = (heads * slot_tokens * dim, slot_tokens * dim, dim, 1)
        return buffer.as_strided((num_slots, heads, length, dim), strides, start * heads * dim)

    def rows(self, slot: Slot, start: int, length: int) -> torch.Tensor:
        """Addresses of tokens start … start + length - 1 of a slot: [length, heads]."""
        heads = torch.arange(self.num_heads) * slot.num_tokens + slot.start * self.num_heads
        return torch.arange(start, start + length)[:, None] + heads[None, :]


def _lazy_zeros(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take memory when they are first written. Zeros, because masked garbage could be NaN."""
    if device.type != "cpu":
        return torch.zeros(num_elements, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(num_elements * dtype.itemsize, dtype=np.uint8)).view(dtype)
