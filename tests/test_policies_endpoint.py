"""EndpointPolicy against a real server on loopback: exact tokens, refusals in the server's words, retries, deadlines."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from tests.engine_models import make_qwen3, make_request, make_tokenizer, random_ids
from tests.test_policies_local import teacher_forced
from tests.test_policies_scheduler import memorise
from tests.tiny_server import TinyServer

from turnwise.errors import ConfigError, ContextOverflowError, PolicyError
from turnwise.policies.endpoint import EndpointPolicy
from turnwise.policy import Request, TokenEvent
from turnwise.types import FinishReason, Message, Role, SamplingParams


@pytest.fixture
def server() -> Iterator[TinyServer]:
    # The tokenizer names every row of the model, as a server's would.
    server = TinyServer(make_qwen3(vocab_size=303), make_tokenizer())
    yield server
    server.close()


@pytest.fixture
async def policy(server: TinyServer) -> AsyncIterator[EndpointPolicy]:
    policy = EndpointPolicy(server.url, "tiny", make_tokenizer(), version=7)
    policy._wire._first_wait_s = 0.01
    yield policy
    await policy.close()


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}]
)
async def test_token_ids_go_in_and_exact_tokens_come_out(
    server: TinyServer, policy: EndpointPolicy, settings: dict[str, Any]
) -> None:
    prompt = random_ids(3, 30)
    request = make_request(prompt, seed=(1, 2, 3), **settings)
    answer = await policy.complete(request)
    assert answer.is_token_exact
    assert answer.policy_version == 7
    assert server.requests[-1]["prompt"] == prompt
    expected = teacher_forced(server.network, prompt, answer, request.sampling)
    np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
    again = await policy.complete(request)
    assert again.completion_ids.tolist() == answer.completion_ids.tolist()


async def test_greedy_is_certain(policy: EndpointPolicy) -> None:
    answer = await policy.complete(make_request(random_ids(3, 30), temperature=0.0))
    assert set(answer.logprobs.tolist()) == {0.0}
    assert answer.kept is not None
    assert answer.kept.ids.tolist() == answer.completion_ids.tolist()


async def test_the_answer_is_left_at_the_closing_brace() -> None:
    text = 'I go {"move": "north"} and then I talk on and on'
    tokenizer = make_tokenizer()
    server = TinyServer(memorise(text), tokenizer)
    policy = EndpointPolicy(server.url, "tiny", tokenizer, api="completions")
    events: list[TokenEvent] = []
    request = make_request(tokenizer.encode("Q:"), temperature=0.0, max_new_tokens=60, stop_at_action=True)
    answer = await policy.complete(request, on_token=events.append)
    assert answer.text == 'I go {"move": "north"}'
    assert answer.finish_reason is FinishReason.ACTION
    assert "".join(event.text for event in events) == answer.text
    await policy.close()
    server.close()


async def test_cuts_that_the_server_does_not_show_are_not_trained_on(policy: EndpointPolicy) -> None:
    answer = await policy.complete(make_request(random_ids(3, 30), top_p=0.8))
    assert not answer.is_token_exact


async def test_raw_logprobs_under_a_temperature_are_refused(
    server: TinyServer, policy: EndpointPolicy
) -> None:
    server.has_processed_logprobs = False
    with pytest.raises(PolicyError, match="--logprobs-mode processed_logprobs"):
        await policy.complete(make_request(random_ids(3, 30), temperature=0.7))
    assert (await policy.complete(make_request(random_ids(3, 30)))).is_token_exact


async def test_a_busy_server_is_asked_again(server: TinyServer, policy: EndpointPolicy) -> None:
    await policy.complete(make_request(random_ids(3, 30)))
    server.failures = [503, 429, 500]
    assert (await policy.complete(make_request(random_ids(3, 30)))).is_token_exact


async def test_the_last_refusal_reaches_the_user(server: TinyServer, policy: EndpointPolicy) -> None:
    policy._api = "completions"
    server.failures = [503] * 5
    with pytest.raises(PolicyError, match=r"5 attempts.*out of sorts, come back later \(503\)"):
        await policy.complete(make_request(random_ids(3, 30)))
    server.failures = [422]
    with pytest.raises(PolicyError, match=r"422: out of sorts"):
        await policy.complete(make_request(random_ids(3, 30)))
    assert server.failures == []


async def test_a_deadline_holds_over_retries(server: TinyServer, policy: EndpointPolicy) -> None:
    policy._api = "completions"
    server.delay_s = 5.0
    started_at = time.monotonic()
    with pytest.raises(PolicyError, match=r"deadline of 0\.3 s"):
        await policy.complete(make_request(random_ids(3, 30), deadline_s=0.3))
    assert time.monotonic() - started_at < 3


async def test_a_context_that_is_too_long_is_its_own_error(policy: EndpointPolicy) -> None:
    policy._api = "completions"
    with pytest.raises(ContextOverflowError, match="maximum context length"):
        await policy.complete(make_request(random_ids(3, 2047)))


async def test_a_server_that_speaks_text_only_is_marked(server: TinyServer) -> None:
    server.gives_token_ids = False
    policy = EndpointPolicy(server.url, "tiny", make_tokenizer())
    request = Request(
        stream_id="s", group_id="g", prompt_ids=np.array([9, 10], dtype=np.int32), seed=(0, 0, 0),
        messages=(Message(role=Role.USER, content="go north"),),
        sampling=SamplingParams(max_new_tokens=8, stop_at_action=False),
    )  # fmt: skip
    answer = await policy.complete(request)
    assert not answer.is_token_exact
    assert server.requests[-1]["path"] == "/v1/chat/completions"
    assert server.requests[-1]["messages"] == [{"role": "user", "content": "go north"}]
    await policy.close()


async def test_an_unreachable_server_is_named() -> None:
    policy = EndpointPolicy("http://127.0.0.1:9", "tiny", make_tokenizer(), api="completions", max_retries=1)
    policy._wire._first_wait_s = 0.01
    with pytest.raises(PolicyError, match=r"http://127\.0\.0\.1:9 did not answer in 2 attempts"):
        await policy.complete(make_request(random_ids(3, 30)))
    await policy.close()


async def test_what_a_server_cannot_do_is_refused(policy: EndpointPolicy) -> None:
    with pytest.raises(ConfigError, match="use_grammar"):
        await policy.complete(make_request(random_ids(3, 30), use_grammar=True))
    with pytest.raises(PolicyError, match="no way to deliver weights"):
        await policy.load_weights({"a": np.zeros(1)}, 1)
