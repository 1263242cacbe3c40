"""Grammar-constrained actions: text is free until an action opens, and from there only tokens that fit its schema can be sampled.

Two things keep this exact and small. Tokens that would open an object the schema does not allow are banned throughout (they are few and
always the same), so free text needs no kept sets; inside the action the kept set of each token is what the grammar allowed.

    go  north  {"   move  ":  "n  "}
    free free  open allowed …       closed: the completion ends here
"""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np

from turnwise.errors import ConfigError, PolicyError
from turnwise.token_bytes import TokenBytes
from turnwise.types import BoolArray, IntArray, Json


class ActionGrammars:
    """Compiles action schemas for one tokenizer, each once."""

    def __init__(
        self, tokenizer: Any, token_bytes: TokenBytes, *, vocab_size: int, end_ids: frozenset[int]
    ) -> None:
        self._xgrammar = _import_xgrammar()
        self._token_bytes = token_bytes
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        # Which tokens end a turn is the policy's business, not the grammar's; one must be named.
        info = self._xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=sorted(end_ids) or [0]
        )
        self._compiler = self._xgrammar.GrammarCompiler(info)
        self._compiled: dict[str, ActionGrammar] = {}
        self._lock = threading.Lock()

    def compile(self, action_schema: dict[str, Json] | None) -> ActionGrammar:
        """The grammar of a schema; without one, any JSON object is an action."""
        schema = json.dumps(action_schema or {"type": "object"}, sort_keys=False)
        with self._lock:
            if schema not in self._compiled:
                self._compiled[schema] = ActionGrammar(
                    self._compile(schema), self._openers(), self._end_ids, self._vocab_size
                )
            return self._compiled[schema]

    def _compile(self, schema: str) -> Any:  # an xgrammar matcher factory
        try:
            compiled = self._compiler.compile_json_schema(
                schema, any_whitespace=False, separators=(", ", ": "), strict_mode=True
            )
        except RuntimeError as error:
            raise PolicyError(
                f"the action schema {schema} cannot be turned into a grammar: {error}"
            ) from error
        return lambda: self._xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)

    def _openers(self) -> dict[int, bytes]:
        """Tokens that hold an opening brace, and their bytes from it on."""
        found = {}
        for token_id in range(min(self._vocab_size, len(self._token_bytes))):
            piece = self._token_bytes[token_id]
            if b"{" in piece:
                found[token_id] = piece[piece.index(b"{") :]
        return found


class ActionGrammar:
    """What one action schema allows."""

    def __init__(
        self, make_matcher: Any, openers: dict[int, bytes], end_ids: frozenset[int], vocab_size: int
    ) -> None:
        self.make_matcher = make_matcher
        self.vocab_size = vocab_size
        self.openers: dict[int, bytes] = {}
        """Tokens that may open an action, and the part of them that belongs to it."""
        banned = set(end_ids)
        for token_id, opening in openers.items():
            if make_matcher().accept_string(opening):
                self.openers[token_id] = opening
            else:
                banned.add(token_id)
        self.banned_ids: IntArray = np.array(sorted(banned), dtype=np.int32)
        """Never sampled under this grammar: ends of turn (the action ends it) and braces that open no action."""
        if not self.openers:
            raise PolicyError(
                "no token of this tokenizer can open an action of this schema; use another tokenizer"
            )

    def start(self, max_new_tokens: int) -> ActionConstraint:
        return ActionConstraint(self, max_new_tokens)


class ActionConstraint:
    """The grammar along one completion."""

    def __init__(self, grammar: ActionGrammar, max_new_tokens: int) -> None:
        self._grammar = grammar
        self._matcher: Any = None  # an xgrammar matcher once the action is open
        self._num_free_left = max_new_tokens // 2
        """Text may take half of the completion; then the action has to open."""

    def allowed(self) -> BoolArray | None:
        """Which ids may come next; None while text is free."""
        if self._matcher is not None:
            return self._unpacked(self._matcher)
        if self._num_free_left > 0:
            return None
        opening = np.zeros(self._grammar.vocab_size, dtype=np.bool_)
        opening[list(self._grammar.openers)] = True
        return opening

    def push(self, token_id: int) -> bool:
        """Take the sampled token; True when it closed the action."""
        self._num_free_left -= 1
        if self._matcher is not None:
            is_accepted = self._matcher.accept_token(token_id)
        elif token_id in self._grammar.openers:
            self._matcher = self._grammar.make_matcher()
            is_accepted = self._matcher.accept_string(self._grammar.openers[token_id])
        else:
            return False
        assert is_accepted, f"token {token_id} was sampled but the grammar does not allow it"
        return bool(self._matcher.is_terminated())

    def _unpacked(self, matcher: Any) -> BoolArray:
        size = self._grammar.vocab_size
        bitmask = np.full((1, -(-size // 32)), -1, dtype=np.int32)
        matcher.fill_next_token_bitmask(_as_tensor(bitmask))
        return np.unpackbits(bitmask.view(np.uint8), bitorder="little")[:size].astype(np.bool_)


def _as_tensor(bitmask: Any) -> Any:
    import torch

    return torch.from_numpy(bitmask)


def _import_xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError:
        raise ConfigError(
            "use_grammar needs the package xgrammar; install it with `pip install 'turnwise[grammar]'`"
        ) from None
    return xgrammar
