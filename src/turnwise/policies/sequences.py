"""One turn being sampled: what was asked, what came so far, and who waits for it."""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from turnwise.environment import action_keys
from turnwise.grammar import ActionGrammar, ActionGrammars
from turnwise.masking import ActionTracker, TokenBytes
from turnwise.policies.prefixes import Tokens
from turnwise.policies.slots import Slot
from turnwise.policies.vision import PreparedPrompt
from turnwise.policy import Request, TokenEvent
from turnwise.sampling import uniforms
from turnwise.types import Completion, FinishReason, IntArray, KeptSets


class Vocabulary:
    """What sampling needs to know about a tokenizer: the bytes of tokens, which end a turn, which are never sampled."""

    def __init__(
        self, tokenizer: Any, network: Any
    ) -> None:  # Hugging Face objects without a common light base
        self.tokenizer = tokenizer
        self.bytes = TokenBytes(tokenizer)
        self.end_ids = _end_ids(tokenizer, network)
        self.size = int(network.config.get_text_config().vocab_size)
        self.banned_ids = _banned_ids(tokenizer, network, self.end_ids, self.size)
        self._grammars: ActionGrammars | None = None
        self._banned_under: dict[ActionGrammar, IntArray] = {}

    def grammar(self, request: Request) -> ActionGrammar | None:
        """The grammar a request asks for; compiled when it is first asked for."""
        if not request.sampling.use_grammar:
            return None
        if self._grammars is None:
            self._grammars = ActionGrammars(
                self.tokenizer, self.bytes, vocab_size=self.size, end_ids=self.end_ids
            )
        return self._grammars.compile(request.action_schema)

    def banned_under(self, grammar: ActionGrammar | None) -> IntArray:
        """Every id that cannot be sampled anywhere in a completion."""
        if grammar is None:
            return self.banned_ids
        if grammar not in self._banned_under:
            self._banned_under[grammar] = np.union1d(self.banned_ids, grammar.banned_ids)
        return self._banned_under[grammar]

    def text(self, ids: list[int]) -> str:
        """The completion as people read it, without the token that ended the turn."""
        if ids and ids[-1] in self.end_ids:
            ids = ids[:-1]
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class Sequence:
    """The tokens of one request as they are sampled. Lives on the engine's thread; `resolve` reports to the caller's loop."""

    def __init__(
        self,
        request: Request,
        vocabulary: Vocabulary,
        loop: asyncio.AbstractEventLoop,
        on_token: Callable[[TokenEvent], None] | None,
    ) -> None:
        self.request = request
        self.future: asyncio.Future[Completion] = loop.create_future()
        self.deadline = time.monotonic() + request.deadline_s
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.slot: Slot | None = None
        self.preparation: Future[PreparedPrompt] | None = None
        """Images and positions under way; None for text models."""
        self.next_position = 0
        """The rotary position of the next token; behind the token count when there are images."""
        self._vocabulary = vocabulary
        self._loop = loop
        self._on_token = on_token
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._uniforms = uniforms(request.seed, request.sampling.max_new_tokens)
        self._logprobs: list[float] = []
        self._kept: list[IntArray] = []
        self.grammar = vocabulary.grammar(request)
        self.constraint = (
            None if self.grammar is None else self.grammar.start(request.sampling.max_new_tokens)
        )
        self._tracker = ActionTracker(vocabulary.bytes, action_keys(request.action_schema))

    @property
    def order(self) -> tuple[tuple[int, ...], str]:
        """Fixes a sequence's place among others, whoever came first."""
        return (self.request.seed, self.request.stream_id)

    @property
    def prompt(self) -> Tokens:
        return Tokens(ids=self.request.prompt_ids, images=self.request.images)

    @property
    def num_tokens_needed(self) -> int:
        # The last sampled token is never fed back within its own turn.
        return len(self.request.prompt_ids) + self.request.sampling.max_new_tokens - 1

    @property
    def next_uniform(self) -> float:
        return float(self._uniforms[len(self.ids)])

    @property
    def slot_start(self) -> int:
        return -1 if self.slot is None else self.slot.start

    def take_in_last_token(self) -> None:
        """The last token's keys and values are in the slot now."""
        assert self.slot is not None
        self.slot.ids[self.slot.length] = self.ids[-1]
        self.slot.length += 1
        self.next_position += 1

    def push(self, token_id: int, logprob: float, kept: IntArray) -> None:
        """Take one sampled token and decide whether the completion ends with it."""
        self.ids.append(token_id)
        self._logprobs.append(logprob)
        self._kept.append(kept)
        was_open, sampling = self._tracker.is_open, self.request.sampling
        is_closed = self._tracker.push(token_id)
        is_complete = self.constraint is not None and self.constraint.push(token_id)
        if token_id in self._vocabulary.end_ids:
            self.finish_reason = FinishReason.END
        elif is_complete or (is_closed and sampling.stop_at_action):
            self.finish_reason = FinishReason.ACTION
        elif len(self.ids) == sampling.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH
        if self._on_token is not None:
            self._report(token_id, self._tracker.is_open and not was_open, is_closed)

    def _report(self, token_id: int, is_action_open: bool, is_action_closed: bool) -> None:
        piece = self._vocabulary.bytes[token_id]
        text = self._text.decode(piece, final=self.finish_reason is not None)
        event = TokenEvent(
            token_id=token_id, text=text, is_action_open=is_action_open, is_action_closed=is_action_closed
        )
        assert self._on_token is not None
        self._loop.call_soon_threadsafe(self._on_token, event)

    def completion(self, policy_version: int) -> Completion:
        assert self.finish_reason is not None
        is_cut = any(len(kept) for kept in self._kept)
        return Completion(
            completion_ids=np.array(self.ids, dtype=np.int32),
            logprobs=np.array(self._logprobs, dtype=np.float32),
            text=self._vocabulary.text(self.ids),
            finish_reason=self.finish_reason,
            policy_version=policy_version,
            kept=KeptSets.from_rows(self._kept) if is_cut else None,
            banned_ids=self._vocabulary.banned_under(self.grammar),
        )

    def resolve(self, outcome: Completion | BaseException) -> None:
        """Hand the outcome to whoever waits, on their loop; nobody may be waiting any more."""

        def settle() -> None:
            if self.future.done():
                return
            if isinstance(outcome, BaseException):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(settle)


def _end_ids(tokenizer: Any, network: Any) -> frozenset[int]:
    generation = getattr(network, "generation_config", None)
    configured = getattr(generation, "eos_token_id", None)
    ends = configured if isinstance(configured, list) else [configured]
    return frozenset(int(end) for end in [tokenizer.eos_token_id, *ends] if end is not None)


def _banned_ids(tokenizer: Any, network: Any, end_ids: frozenset[int], vocab_size: int) -> IntArray:
    special = {int(index) for index in tokenizer.all_special_ids}
    special |= {int(index) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    config = network.config
    for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        if getattr(config, name, None) is not None:
            special.add(int(getattr(config, name)))
    # Models often have more rows than the tokenizer has tokens.
    special |= set(range(len(tokenizer), vocab_size))
    return np.array(sorted(index for index in special - end_ids if index < vocab_size), dtype=np.int32)
