"""What a policy is: something that continues token ids, and can be given new weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from turnwise.types import Completion, Image, IntArray, Json, Message, SamplingParams


class Request(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One turn's question to a policy."""

    stream_id: str
    """Names the token stream; a policy may keep its cache from turn to turn under this name."""
    group_id: str
    """Streams of one group usually share their first prompt."""
    prompt_ids: IntArray
    """The whole context, images already expanded to placeholders."""
    images: tuple[Image, ...] = ()
    """In the order of their placeholders in `prompt_ids`."""
    messages: tuple[Message, ...] = ()
    """The same context as messages, for servers that speak text only."""
    sampling: SamplingParams
    seed: tuple[int, ...]
    """(run seed, episode, turn): fixes the draw whatever else is in the batch."""
    action_schema: dict[str, Json] | None = None
    deadline_s: float = 600.0


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled token, for streaming callbacks."""

    token_id: int
    text: str
    is_action_open: bool = False
    is_action_closed: bool = False


class Policy(Protocol):
    """Samples completions. Many `complete` calls may wait at once; the policy batches them as it likes."""

    @property
    def version(self) -> int:
        """Which weights it samples with; on every completion."""
        ...

    async def complete(
        self, request: Request, *, on_token: Callable[[TokenEvent], None] | None = None
    ) -> Completion: ...

    async def release(self, stream_id: str) -> None:
        """The stream will not be extended again; forget what was kept for it."""
        ...

    async def load_weights(self, weights: Mapping[str, Any], version: int) -> str:
        """Take over these tensors and return their fingerprint as they now are on the policy's side."""
        ...

    async def close(self) -> None: ...
