"""A policy that says what a function tells it to: for tests, experts and baselines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from turnwise.errors import PolicyError
from turnwise.policy import Request, TokenEvent
from turnwise.types import Completion, FinishReason, Message


class ScriptedPolicy:
    """`answer(messages)` gives the text of each completion; log-probabilities are 0, for nothing was left to chance."""

    def __init__(self, tokenizer: Any, answer: Callable[[Sequence[Message]], str]) -> None:
        # `tokenizer` is a Hugging Face tokenizer, whose classes share no type.
        self.version = 0
        self._tokenizer = tokenizer
        self._answer = answer

    async def complete(
        self, request: Request, *, on_token: Callable[[TokenEvent], None] | None = None
    ) -> Completion:
        text = self._answer(request.messages)
        ids = np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
        if len(ids) > request.sampling.max_new_tokens:
            ids = ids[: request.sampling.max_new_tokens]
            text = self._tokenizer.decode(ids)
        if on_token is not None:
            for token_id in ids:
                on_token(TokenEvent(token_id=int(token_id), text=self._tokenizer.decode([int(token_id)])))
        return Completion(
            completion_ids=ids,
            logprobs=np.zeros(len(ids), dtype=np.float32),
            text=text,
            finish_reason=FinishReason.END,
            policy_version=self.version,
        )

    async def release(self, stream_id: str) -> None:
        return None

    async def load_weights(self, weights: Mapping[str, Any], version: int) -> str:
        raise PolicyError("a scripted policy has no weights; use LocalPolicy or EndpointPolicy to train")

    async def close(self) -> None:
        return None
