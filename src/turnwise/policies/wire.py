"""HTTP to a model server: retries with limits and back-off, deadlines, and the server's own words when it refuses."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from turnwise.errors import ContextOverflowError, PolicyError
from turnwise.types import Json

log = logging.getLogger(__name__)

_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class ServerBusy(PolicyError):
    """The server may well answer if asked again."""

    def __init__(self, message: str, *, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class Wire:
    """Requests to one server."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        max_retries: int,
        timeout_s: float,
        first_wait_s: float = 0.5,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.AsyncClient(
            base_url=self.base_url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )
        self._max_retries = max_retries
        self._first_wait_s = first_wait_s

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> Json:
        return await self.retry(lambda: self._ask("GET", path, None))

    async def post(self, path: str, body: dict[str, Any]) -> Json:
        return await self.retry(lambda: self._ask("POST", path, body))

    async def retry(self, attempt: Any) -> Any:  # a coroutine function without arguments, and what it returns
        """Try until it works, is refused for good, or `max_retries` more attempts have failed."""
        for num_failed in range(self._max_retries + 1):
            try:
                return await attempt()
            except (ServerBusy, httpx.TransportError) as error:
                reason = str(error) or type(error).__name__
                if num_failed == self._max_retries:
                    raise PolicyError(
                        f"{self.base_url} did not answer in {num_failed + 1} attempts; the last said: {reason}"
                    ) from error
                # Jitter, so that episodes that failed together do not come back together.
                wait_s = self._first_wait_s * 2**num_failed * random.uniform(0.8, 1.2)
                if isinstance(error, ServerBusy) and error.wait_s is not None:
                    wait_s = error.wait_s
                log.warning("%s: %s; trying again in %.1f s", self.base_url, reason, wait_s)
                await asyncio.sleep(wait_s)
        raise AssertionError("unreachable")

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Json:
        response = await self._client.request(method, path, json=body)
        check(response, response.text)
        try:
            return response.json() if response.content else None
        except json.JSONDecodeError:
            return response.text

    @asynccontextmanager
    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[Json]]:
        """The JSON events of a streamed answer; leaving early tells the server to stop."""
        async with self._client.stream("POST", path, json=body) as response:
            if response.status_code >= 400:
                check(response, (await response.aread()).decode(errors="replace"))
            yield _events(response)


async def _events(response: httpx.Response) -> AsyncIterator[Json]:
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        text = line[5:].strip()
        if text == "[DONE]":
            return
        event = json.loads(text)
        if isinstance(event, dict) and "error" in event:
            kind = ContextOverflowError if _is_overflow(text) else PolicyError
            raise kind(f"the server stopped in the middle of an answer: {_words(text)}")
        yield event


def check(response: httpx.Response, text: str) -> None:
    """Raise what a bad status means, with the server's own words."""
    status = response.status_code
    if status < 400:
        return
    message = f"{response.request.url} answered {status}: {_words(text)}"
    if status in _PASSING:
        after = response.headers.get("Retry-After", "")
        raise ServerBusy(message, wait_s=float(after) if after.isdigit() else None)
    if status == 400 and _is_overflow(text):
        raise ContextOverflowError(message)
    raise PolicyError(message)


def _is_overflow(text: str) -> bool:
    return any(words in text for words in ("maximum context length", "maximum model length", "max_model_len"))


def _words(text: str) -> str:
    """The message inside an error body, if it is JSON of a known shape; else the body itself."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError:
        return text[:500] or "(nothing)"
    inner = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(inner, dict):
        inner = inner.get("message") or inner.get("detail") or inner
    return str(inner)[:500]
