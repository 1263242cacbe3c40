"""What an environment is: something an agent can act in, one JSON action at a time."""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

from turnwise.types import Action, Json, Observation, Task, Transition

Split = Literal["train", "eval"]


@runtime_checkable
class Environment(Protocol):
    """One situation at a time. Calls are synchronous CPU work; rollouts run them off the event loop.

    `step` gets an `Action` whose `value` is None when the completion held no action. The environment
    decides what that means; most answer with a hint and let the turn count.
    """

    @property
    def action_schema(self) -> dict[str, Json] | None:
        """JSON schema of an action; None when any object will do. Its required keys tell an action from other JSON."""
        ...

    def reset(self, task: Task) -> Observation: ...

    def step(self, action: Action) -> Transition: ...

    def close(self) -> None: ...


@runtime_checkable
class Restorable(Protocol):
    """An environment that can go back to an earlier moment of the episode."""

    def snapshot(self) -> bytes: ...

    def restore(self, snapshot: bytes) -> None: ...


class TaskSource(Protocol):
    """Where tasks come from. The same index and split always give the same task; splits never overlap."""

    def num_tasks(self, split: Split) -> int | None:
        """None when there is no end to them."""
        ...

    def task(self, index: int, split: Split) -> Task: ...


class EnvironmentSpec(Protocol):
    """What a name in the config stands for: a way to make environments, and the tasks they can start from."""

    @property
    def tasks(self) -> TaskSource: ...

    def make(self) -> Environment: ...


def action_keys(action_schema: dict[str, Any] | None) -> frozenset[str]:
    """The keys that tell an action from any other JSON object: the required ones, else all the schema names."""
    if action_schema is None:
        return frozenset()
    return frozenset(action_schema.get("required") or action_schema.get("properties") or ())
