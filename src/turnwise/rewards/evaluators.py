"""How a reward function is reached: in this process for trusted code; the sandbox has its own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from turnwise.errors import RewardError
from turnwise.rewards.arguments import Arguments, Declaration, check_params
from turnwise.rewards.interface import EvaluateResult, RewardFunction
from turnwise.types import Json


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one call: a result per rollout, or the reason why there is none."""

    results: tuple[EvaluateResult, ...] = ()
    error: str | None = None
    seconds: float = 0.0


class Evaluator(Protocol):
    """Runs one reward function, wherever it lives."""

    @property
    def declaration(self) -> Declaration: ...

    @property
    def tier(self) -> str:
        """What confines it: bubblewrap, landlock, rlimits or none."""
        ...

    async def evaluate(self, calls: Sequence[Arguments]) -> list[Outcome]:
        """One outcome per call, in order; a call that fails does not disturb the others.

        The arguments belong to the call: a function may change what it was given.
        """
        ...

    def close(self) -> None: ...


class LocalEvaluator:
    """Runs a trusted function in this process, each call in a thread so that the event loop goes on."""

    tier = "none"

    def __init__(
        self, function: RewardFunction, params: Mapping[str, Json], *, timeout_s: float | None = None
    ) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._declaration = msgspec.convert(function.declare(), Declaration)
        check_params(self._declaration, params)

    @property
    def declaration(self) -> Declaration:
        return self._declaration

    async def evaluate(self, calls: Sequence[Arguments]) -> list[Outcome]:
        if inspect.iscoroutinefunction(self._function.function):
            return list(await asyncio.gather(*(self._call_async(call) for call in calls)))
        return await asyncio.to_thread(lambda: [self._call(call) for call in calls])

    def close(self) -> None:
        return

    def _call(self, call: Arguments) -> Outcome:
        try:
            value = self._function(call.messages, **call.keywords)
            return _outcome(value)
        except Exception as error:  # noqa: BLE001 - whatever an author's code raises is that episode's reason
            return Outcome(error=_sentence(self._function.name, error))

    async def _call_async(self, call: Arguments) -> Outcome:
        try:
            value = self._function(call.messages, **call.keywords)
            return _outcome(await asyncio.wait_for(value, self._timeout_s))
        except TimeoutError:
            return Outcome(error=f"reward {self._function.name} took longer than {self._timeout_s} s")
        except Exception as error:  # noqa: BLE001 - as above
            return Outcome(error=_sentence(self._function.name, error))


def _outcome(value: EvaluateResult | list[EvaluateResult]) -> Outcome:
    return Outcome(results=tuple(value) if isinstance(value, list) else (value,))


def _sentence(name: str, error: Exception) -> str:
    if isinstance(error, RewardError):
        return str(error)
    return f"reward {name} raised {type(error).__name__}: {error}"
