"""The streams whose keys and values are in memory: who gets a slot, who keeps it, who has to make room."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Many

from turnwise.errors import PolicyError
from turnwise.policies.prefixes import MIN_SHARED_TOKENS, Tokens, common_prefix
from turnwise.policies.sequences import Sequence
from turnwise.policies.slots import Slot, SlotStore

log = logging.getLogger(__name__)


class Stream:
    """A stream that may ask again: its slot, and its request while one waits or runs."""

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.slot: Slot | None = None
        self.sequence: Sequence | None = None
        self.last_used = time.monotonic()


class Residents:
    """All live streams of a policy and their slots."""

    def __init__(self, store: SlotStore, image_token_id: int | None) -> None:
        self._store = store
        self._image_token_id = image_token_id
        self._streams: dict[str, Stream] = {}
        self._left_behind: list[Slot] = []
        self._has_warned = False

    def join(self, sequence: Sequence) -> None:
        """A stream asks for a completion."""
        request = sequence.request
        stream = self._streams.setdefault(request.stream_id, Stream(request.group_id))
        if stream.sequence is not None:
            raise PolicyError(
                f"stream {request.stream_id} asked for a completion while its last one is still being sampled; "
                "await each turn before asking for the next"
            )
        stream.sequence = sequence

    def leave(self, sequence: Sequence) -> None:
        """The stream has its answer, or wants none any more; its slot stays for the next turn."""
        stream = self._streams.get(sequence.request.stream_id)
        if stream is not None and stream.sequence is sequence:
            stream.sequence = None
            stream.last_used = time.monotonic()

    def sequence_of(self, stream_id: str) -> Sequence | None:
        stream = self._streams.get(stream_id)
        return None if stream is None else stream.sequence

    def release(self, stream_id: str) -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is not None and stream.slot is not None:
            self._store.give_back(stream.slot)

    def forget(self, store: SlotStore) -> None:
        """Every slot is void; start over with an empty store."""
        self._store = store
        self._left_behind.clear()
        for stream in self._streams.values():
            stream.slot = None

    def has_slot(self, sequence: Sequence) -> bool:
        return self._streams[sequence.request.stream_id].slot is not None

    def place(self, sequence: Sequence) -> bool:
        """Give the sequence a slot that holds its prompt and completion, with what is cached of the prompt; False if memory is full."""
        stream = self._streams[sequence.request.stream_id]
        cached = self._cached(stream, sequence)
        needed = sequence.num_tokens_needed
        if stream.slot is None or stream.slot.num_tokens < needed:
            slot = self._store.take(needed)
            if slot is None:
                return False
            if stream.slot is not None:
                self._store.copy_prefix(stream.slot, slot, cached)
                # Given back only when the whole batch has moved, so that neighbours stay neighbours.
                self._left_behind.append(stream.slot)
            stream.slot = slot
        stream.slot.length = cached
        sequence.slot = stream.slot
        return True

    def settle(self) -> None:
        """Free the slots that streams moved out of."""
        for slot in self._left_behind:
            self._store.give_back(slot)
        self._left_behind.clear()

    def make_room(self, sequence: Sequence, waiting: Many[Sequence], *, idle_s: float) -> bool:
        """Place a sequence at the cost of others: streams idle for `idle_s`, then those last in the queue, then its own cache."""
        now = time.monotonic()
        idle = [s for s in self._streams.values() if s.sequence is None and now - s.last_used >= idle_s]
        queued = [self._streams[other.request.stream_id] for other in reversed(waiting)]
        own = self._streams[sequence.request.stream_id]
        for victim in [*sorted(idle, key=lambda stream: stream.last_used), *queued, own]:
            if victim.slot is None:
                continue
            self._evict(victim)
            if self.place(sequence):
                return True
        return False

    def _evict(self, stream: Stream) -> None:
        if not self._has_warned:
            log.warning(
                "cache memory is full: streams lose their caches and compute them again; raise kv_budget_mb (now %d tokens) "
                "or run fewer episodes at once",
                self._store.memory.num_tokens,
            )
            self._has_warned = True
        assert stream.slot is not None
        self._store.give_back(stream.slot)
        stream.slot = None

    def best_source(self, sequence: Sequence) -> tuple[Slot, int] | None:
        """A slot of the same group that holds the longest beginning of this prompt."""
        best: tuple[Slot, int] | None = None
        for stream in self._streams.values():
            slot = stream.slot
            if slot is None or slot is sequence.slot or stream.group_id != sequence.request.group_id:
                continue
            if slot.length < MIN_SHARED_TOKENS:
                continue
            length = common_prefix(slot.tokens, sequence.prompt, self._image_token_id)
            if length >= MIN_SHARED_TOKENS and (best is None or length > best[1]):
                best = (slot, length)
        return best

    def _cached(self, stream: Stream, sequence: Sequence) -> int:
        """How many prompt tokens the stream's slot holds; one is always left to compute, for its logits."""
        if stream.slot is None:
            return 0
        asked = sequence.prompt
        asked_but_last = Tokens(ids=asked.ids[:-1], images=asked.images)
        return common_prefix(stream.slot.tokens, asked_but_last, self._image_token_id)
