"""What the scoring code sees of the sandbox: an evaluator with a few zygotes of one reward function."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from turnwise.errors import RewardError, SandboxError
from turnwise.rewards.arguments import Arguments, Declaration, check_params
from turnwise.rewards.evaluators import Outcome
from turnwise.rewards.interface import EvaluateResult
from turnwise.rewards.sandbox.client import CallError, Limits, RewardCode, Zygote, ZygoteDied
from turnwise.types import Json

_MAX_ATTEMPTS = 3


class SandboxEvaluator:
    """Runs one user reward in up to `num_workers` zygotes; a call that goes wrong costs that call and no other."""

    def __init__(
        self,
        code: RewardCode,
        params: Mapping[str, Json],
        *,
        tier: str,
        limits: Limits | None = None,
        num_workers: int = 2,
    ) -> None:
        self._code = code
        self._tier = tier
        self._limits = limits or Limits()
        self._idle: list[Zygote] = []
        self._lock = threading.Lock()
        self._is_closed = False
        first = Zygote(code, tier, self._limits)
        try:
            check_params(first.declaration, params)
        except BaseException:
            first.kill()
            raise
        self._declaration = first.declaration
        self._idle.append(first)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="turnwise-reward")

    @property
    def declaration(self) -> Declaration:
        return self._declaration

    @property
    def tier(self) -> str:
        return self._tier

    async def evaluate(self, calls: Sequence[Arguments]) -> list[Outcome]:
        loop = asyncio.get_running_loop()
        running = [loop.run_in_executor(self._threads, self.call, call) for call in calls]
        return list(await asyncio.gather(*running))

    def call(self, arguments: Arguments) -> Outcome:
        """One call, in whichever zygote is free."""
        started = time.perf_counter()
        num_results = len(arguments.messages) if self._declaration.mode == "batch" else 1
        content = msgspec.json.encode({"messages": arguments.messages, "keywords": arguments.keywords})
        payload = struct.pack("<Q", len(content)) + content
        error = "the sandbox died"
        for _ in range(_MAX_ATTEMPTS):
            try:
                results = self._call_once(payload, num_results)
                return Outcome(results=tuple(results), seconds=time.perf_counter() - started)
            except ZygoteDied:
                error = f"its sandbox died {_MAX_ATTEMPTS} times in a row"
            except CallError as reason:
                error = str(reason)
                break
            except (SandboxError, RewardError) as reason:
                error = f"could not be started again: {reason}"
                break
        return Outcome(
            error=f"reward {self._declaration.name} {error}", seconds=time.perf_counter() - started
        )

    def _call_once(self, payload: bytes, num_results: int) -> list[EvaluateResult]:
        with self._lock:
            if self._is_closed:
                raise SandboxError("the rewards were closed")
            zygote = self._idle.pop() if self._idle else None
        if zygote is None:
            zygote = Zygote(self._code, self._tier, self._limits)
        try:
            results = zygote.call(payload, num_results=num_results)
        except CallError:
            self._give_back(zygote)
            raise
        except BaseException:
            zygote.kill()
            raise
        self._give_back(zygote)
        return results

    def _give_back(self, zygote: Zygote) -> None:
        with self._lock:
            if zygote.is_alive and not self._is_closed:
                self._idle.append(zygote)
                return
        zygote.kill()

    def close(self) -> None:
        """End every process of this reward."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for zygote in idle:
            zygote.kill()
