"""Gathers a server's tokens into a completion: tracks the action, stops there, recovers kept sets."""

from __future__ import annotations

import codecs
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from turnwise.environment import action_keys
from turnwise.errors import PolicyError
from turnwise.masking import ActionTracker, TokenBytes
from turnwise.policy import Request, TokenEvent
from turnwise.types import Completion, FinishReason, IntArray, KeptSets

log = logging.getLogger(__name__)


class ServerVocabulary:
    """What is known of a server's tokens from its tokenizer."""

    def __init__(self, tokenizer: Any, image_token_id: int | None = None) -> None:  # a Hugging Face tokenizer
        self.tokenizer = tokenizer
        self.image_token_id = image_token_id
        self.bytes = TokenBytes(tokenizer)
        self.end_ids: frozenset[int] = (
            frozenset() if tokenizer.eos_token_id is None else frozenset({int(tokenizer.eos_token_id)})
        )
        self.banned_ids: IntArray = np.array(sorted(self.bytes.special_ids - self.end_ids), dtype=np.int32)
        plain = (i for i in range(len(self.bytes)) if i not in self.bytes.special_ids)
        self.probe_id = next(plain, 0)


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One token as a server reports it."""

    token_id: int
    logprob: float
    kept: IntArray | None
    """None when the server does not say."""
    finish_reason: str | None = None
    """On the last token of an answer."""


class Answer:
    """One completion as it comes in."""

    def __init__(
        self, request: Request, vocabulary: ServerVocabulary, on_token: Callable[[TokenEvent], None] | None
    ) -> None:
        self._request = request
        self._vocabulary = vocabulary
        self._on_token = on_token
        self._tracker = ActionTracker(vocabulary.bytes, action_keys(request.action_schema))
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._pieces: list[Piece] = []
        self._finish_reason: FinishReason | None = None

    def push(self, piece: Piece) -> bool:
        """Take one token; True when nothing after it is wanted."""
        was_open = self._tracker.is_open
        is_closed = self._tracker.push(piece.token_id)
        self._pieces.append(piece)
        if piece.token_id in self._vocabulary.end_ids:
            self._finish_reason = FinishReason.END
        elif is_closed and self._request.sampling.stop_at_action:
            self._finish_reason = FinishReason.ACTION
        elif piece.finish_reason is not None:
            self._finish_reason = FinishReason.LENGTH if piece.finish_reason == "length" else FinishReason.END
        if self._on_token is not None:
            text = self._text.decode(
                self._vocabulary.bytes[piece.token_id], final=self._finish_reason is not None
            )
            is_open = self._tracker.is_open and not was_open
            self._on_token(
                TokenEvent(
                    token_id=piece.token_id, text=text, is_action_open=is_open, is_action_closed=is_closed
                )
            )
        return self._finish_reason is not None

    def completion(self, version: int) -> Completion:
        if self._finish_reason is None:
            raise PolicyError(
                f"the server's answer to stream {self._request.stream_id} broke off after {len(self._pieces)} tokens"
            )
        ids = [piece.token_id for piece in self._pieces]
        kept, is_known = self._kept()
        return Completion(
            completion_ids=np.array(ids, dtype=np.int32),
            logprobs=np.array([piece.logprob for piece in self._pieces], dtype=np.float32),
            text=self._text_of(ids),
            finish_reason=self._finish_reason,
            policy_version=version,
            kept=kept,
            banned_ids=self._vocabulary.banned_ids,
            is_token_exact=is_known,
        )

    def from_text(self, text: str, finish_reason: str | None, version: int) -> Completion:
        """The completion of a server that speaks text only: tokens are a guess, so it is marked not exact."""
        ids = [int(i) for i in self._vocabulary.tokenizer.encode(text, add_special_tokens=False)]
        for token_id in ids:
            if self.push(Piece(token_id=token_id, logprob=0.0, kept=None)):
                break
        if self._finish_reason is None:
            self._finish_reason = FinishReason.LENGTH if finish_reason == "length" else FinishReason.END
        completion = self.completion(version)
        return msgspec.structs.replace(completion, kept=None, is_token_exact=False)

    def _kept(self) -> tuple[KeptSets | None, bool]:
        """The kept sets, and whether they are known where something was cut."""
        sampling = self._request.sampling
        if sampling.temperature == 0:
            return KeptSets.from_rows([np.array([p.token_id], dtype=np.int32) for p in self._pieces]), True
        if sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0:
            return None, True
        rows = [piece.kept for piece in self._pieces if piece.kept is not None]
        if len(rows) == len(self._pieces):
            return KeptSets.from_rows(rows), True
        log.warning(
            "the server does not say which ids top-p or min-p kept, so this completion cannot be trained on; "
            "set top_k, or start vLLM with --return-sampling-mask"
        )
        return None, False

    def _text_of(self, ids: list[int]) -> str:
        if ids and ids[-1] in self._vocabulary.end_ids:
            ids = ids[:-1]
        tokenizer = self._vocabulary.tokenizer
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
