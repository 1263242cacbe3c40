"""`EndpointPolicy`: samples from a server.

Three ways to ask, best first: `generate` (vLLM: token ids and images in, token ids and log-probs out), `completions` (token ids in, token
ids and log-probs out, text only) and `chat` (text in, text out: good for collecting and evaluating, never for training).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from turnwise.errors import ConfigError, PolicyError
from turnwise.policies.answers import Answer, ServerVocabulary
from turnwise.policies.delivery import Delivery
from turnwise.policies.payloads import (
    chat_body,
    completions_body,
    generate_body,
    read_completions,
    read_generate,
)
from turnwise.policies.wire import Wire
from turnwise.policy import Request, TokenEvent
from turnwise.types import Completion, SamplingParams

log = logging.getLogger(__name__)

Api = Literal["auto", "generate", "completions", "chat"]
_PATHS = {"generate": "/inference/v1/generate", "completions": "/v1/completions"}


class EndpointPolicy:
    """Samples from an OpenAI-compatible server; exact tokens and log-probs when it gives them."""

    def __init__(
        self,
        base_url: str,
        model: str,
        tokenizer: Any,  # a Hugging Face tokenizer, the same as the server's
        *,
        image_token_id: int | None = None,
        api: Api = "auto",
        api_key: str | None = None,
        version: int = 0,
        max_retries: int = 4,
        timeout_s: float = 600.0,
        delivery: Delivery | None = None,
    ) -> None:
        self.version = version
        self._model = model
        self._tokenizer = tokenizer
        self._vocabulary = ServerVocabulary(tokenizer, image_token_id)
        self._api: Api = api
        self._wire = Wire(base_url, api_key=api_key, max_retries=max_retries, timeout_s=timeout_s)
        self._delivery = delivery
        self._has_processed_logprobs: bool | None = None
        self._lock = asyncio.Lock()

    async def complete(
        self, request: Request, *, on_token: Callable[[TokenEvent], None] | None = None
    ) -> Completion:
        """Sample the next turn of a stream; retried while the server is busy, within the request's deadline."""
        if request.sampling.use_grammar:
            raise ConfigError(
                "use_grammar needs the local policy: a server does not say which tokens its grammar allowed"
            )
        try:
            async with asyncio.timeout(request.deadline_s):
                return await self._complete(request, on_token)
        except TimeoutError:
            raise PolicyError(
                f"{self._wire.base_url} had not answered stream {request.stream_id} when its deadline of "
                f"{request.deadline_s:g} s passed; raise the deadline, or ask for fewer tokens or fewer episodes at once"
            ) from None

    async def release(self, stream_id: str) -> None:
        """Nothing is kept here; the server forgets on its own."""

    async def load_weights(self, weights: Mapping[str, Any], version: int) -> str:
        """Hand tensors to the server and return the fingerprint of what it was given, read back and checked."""
        if self._delivery is None:
            raise PolicyError(
                f"the policy at {self._wire.base_url} was given no way to deliver weights; pass `delivery=` with a folder "
                "that the server can read"
            )
        async with self._lock:
            self._model, digest = await self._delivery.deliver(self._wire, self._model, weights, version)
            self.version = version
        return digest

    async def close(self) -> None:
        await self._wire.close()

    async def _complete(self, request: Request, on_token: Callable[[TokenEvent], None] | None) -> Completion:
        api = await self._settle_api()
        if api == "chat":
            return await self._wire.retry(lambda: self._chat(request))  # type: ignore[no-any-return]
        if api == "completions" and request.images:
            raise PolicyError(
                f"stream {request.stream_id} has images, but {self._wire.base_url} takes token ids with text only; "
                "use a server with /inference/v1/generate (vLLM), or api='chat' to collect without training"
            )
        await self._check_logprobs(request.sampling)
        return await self._wire.retry(lambda: self._sample(api, request, on_token))  # type: ignore[no-any-return]

    async def _settle_api(self) -> Api:
        """Find out once what the server can do."""
        async with self._lock:
            if self._api == "auto":
                self._api = await self._find_api()
                log.info("%s is asked through %s", self._wire.base_url, self._api)
        return self._api

    async def _find_api(self) -> Api:
        try:
            paths = (await self._wire.get("/openapi.json")).get("paths", {})
        except (PolicyError, AttributeError):
            paths = {}
        if _PATHS["generate"] in paths:
            return "generate"
        probe = {
            "model": self._model,
            "prompt": [self._vocabulary.probe_id],
            "max_tokens": 1,
            "return_token_ids": True,
        }
        try:
            answer = await self._wire.post(_PATHS["completions"], probe)
            if answer["choices"][0].get("token_ids") is not None:
                return "completions"
        except (PolicyError, KeyError, IndexError, TypeError) as error:
            log.info("%s does not take token ids: %s", self._wire.base_url, error)
        log.warning(
            "%s speaks text only: its episodes are marked not token-exact and will not be trained on",
            self._wire.base_url,
        )
        return "chat"

    async def _sample(
        self, api: Api, request: Request, on_token: Callable[[TokenEvent], None] | None
    ) -> Completion:
        answer = Answer(request, self._vocabulary, on_token)
        make_body, read = (
            (generate_body, read_generate) if api == "generate" else (completions_body, read_completions)
        )
        body = make_body(request, self._model, self._vocabulary)
        version = self.version
        async with self._wire.events(_PATHS[api], body) as events:
            async for event in events:
                for piece in read(event, request):
                    if answer.push(piece):
                        return answer.completion(version)
        return answer.completion(version)

    async def _chat(self, request: Request) -> Completion:
        body = chat_body(request, self._model)
        answer = await self._wire.post("/v1/chat/completions", body)
        choice = answer["choices"][0]
        return Answer(request, self._vocabulary, None).from_text(
            choice["message"]["content"] or "", choice.get("finish_reason"), self.version
        )

    async def _check_logprobs(self, sampling: SamplingParams) -> None:
        """Under a temperature or cuts, log-probs must be those after them; a server may report those before."""
        if sampling.temperature in (0.0, 1.0) and not is_cut(sampling):
            return
        async with self._lock:
            if self._has_processed_logprobs is None:
                raw, cold = [await self._best_logprob(temperature) for temperature in (1.0, 0.5)]
                self._has_processed_logprobs = not np.isclose(raw, cold, atol=1e-6)
        if not self._has_processed_logprobs:
            raise PolicyError(
                f"{self._wire.base_url} reports log-probs from before temperature, top-k and top-p; start it with "
                "`--logprobs-mode processed_logprobs`, or sample at temperature 1 without cuts"
            )

    async def _best_logprob(self, temperature: float) -> float:
        """The log-prob of the likeliest first token after a one-token prompt."""
        body = {
            "model": self._model, "prompt": [self._vocabulary.probe_id], "max_tokens": 1, "temperature": temperature,
            "logprobs": 1, "seed": 0,
        }  # fmt: skip
        answer = await self._wire.post(_PATHS["completions"], body)
        return float(max(answer["choices"][0]["logprobs"]["top_logprobs"][0].values()))


def is_cut(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
