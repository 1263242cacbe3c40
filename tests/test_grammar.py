"""Actions under a grammar: always valid, and the stored sets are the ones that were sampled from."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from tests.engine_models import make_qwen3, make_request, make_tokenizer, random_ids
from tests.test_policies_local import teacher_forced

from turnwise.errors import PolicyError
from turnwise.grammar import ActionGrammars
from turnwise.masking import ActionTokenMasker, TokenBytes
from turnwise.policies.local import LocalPolicy
from turnwise.types import FinishReason

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "move": {"type": "string", "enum": ["north", "south"]},
        "steps": {"type": "integer", "minimum": 1, "maximum": 3},
    },
    "required": ["move", "steps"],
}


@pytest.fixture(scope="module")
def grammars() -> ActionGrammars:
    tokenizer = make_tokenizer()
    return ActionGrammars(tokenizer, TokenBytes(tokenizer), vocab_size=320, end_ids=frozenset({0}))


def test_text_is_free_until_half_of_the_completion_then_an_action_must_open(grammars: ActionGrammars) -> None:
    constraint = grammars.compile(SCHEMA).start(max_new_tokens=4)
    word = 100
    assert constraint.allowed() is None
    assert not constraint.push(word)
    assert constraint.allowed() is None
    assert not constraint.push(word)
    tokenizer = make_tokenizer()
    allowed = constraint.allowed()
    assert allowed is not None
    # Only tokens that can begin {"move": …
    assert {tokenizer.decode([i]).strip() for i in np.flatnonzero(allowed)} == {"{", '{"'}


def test_tokens_that_open_no_action_are_banned(grammars: ActionGrammars) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(['{"x', '{"mo'])
    wide = ActionGrammars(tokenizer, TokenBytes(tokenizer), vocab_size=320, end_ids=frozenset({0}))
    banned = wide.compile(SCHEMA).banned_ids.tolist()
    assert tokenizer.convert_tokens_to_ids('{"x') in banned
    assert tokenizer.convert_tokens_to_ids('{"mo') not in banned
    assert 0 in banned


def test_the_same_schema_is_compiled_once(grammars: ActionGrammars) -> None:
    assert grammars.compile(SCHEMA) is grammars.compile(dict(SCHEMA))


def test_a_schema_that_is_none_is_named(grammars: ActionGrammars) -> None:
    with pytest.raises(PolicyError, match="banana"):
        grammars.compile({"type": "banana"})


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 50}])
async def test_sampled_actions_are_valid_and_logprobs_exact(settings: dict[str, Any]) -> None:
    tokenizer = make_tokenizer()
    policy = LocalPolicy(make_qwen3(), tokenizer, kv_budget_mb=16)
    masker = ActionTokenMasker(tokenizer, min_action_tokens=1)
    prompts = [random_ids(i, 10 + i) for i in range(12)]
    requests = [
        make_request(
            prompt,
            stream=f"s{i}",
            seed=(0, i, 0),
            action_schema=SCHEMA,
            use_grammar=True,
            max_new_tokens=64,
            **settings,
        )
        for i, prompt in enumerate(prompts)
    ]
    answers = await asyncio.gather(*(policy.complete(request) for request in requests))
    for prompt, request, answer in zip(prompts, requests, answers, strict=True):
        assert answer.finish_reason is FinishReason.ACTION
        action = masker.mask(answer.completion_ids, frozenset({"move", "steps"})).action.value
        assert action is not None
        assert action["move"] in ("north", "south")
        assert action["steps"] in (1, 2, 3)
        expected = teacher_forced(policy._network, prompt, answer, request.sampling)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
    await policy.close()


async def test_constrained_and_free_requests_share_a_batch() -> None:
    policy = LocalPolicy(make_qwen3(), make_tokenizer(), kv_budget_mb=16)
    plain = make_request(random_ids(1, 12), stream="plain", seed=(5, 5, 5))
    alone = await policy.complete(plain)
    await policy.release("plain")
    bound = make_request(
        random_ids(2, 12), stream="bound", action_schema=SCHEMA, use_grammar=True, max_new_tokens=64
    )
    together, _ = await asyncio.gather(policy.complete(plain), policy.complete(bound))
    assert together.completion_ids.tolist() == alone.completion_ids.tolist()
    assert together.kept is None
    await policy.close()
