"""A toy world for tests: walk along a line to the goal; one version can be restored, one cannot be repeated."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from turnwise.config import ModelConfig
from turnwise.environment import Environment, Split
from turnwise.policy import Request, TokenEvent
from turnwise.types import (
    Action,
    Completion,
    FinishReason,
    Json,
    Message,
    Observation,
    Role,
    Task,
    Transition,
)

SCHEMA: dict[str, Json] = {
    "type": "object",
    "properties": {"move": {"enum": ["left", "right"]}},
    "required": ["move"],
}


class LineWorld:
    """Start at 0; each move costs 0.1, the goal at 2 pays 1."""

    def __init__(self) -> None:
        self.position = 0

    @property
    def action_schema(self) -> dict[str, Json]:
        return SCHEMA

    def reset(self, task: Task) -> Observation:
        self.position = 0
        return self._observe()

    def step(self, action: Action) -> Transition:
        move = (action.value or {}).get("move")
        self.position += {"right": 1, "left": -1}.get(str(move), 0)
        is_there = self.position == 2
        return Transition(
            observation=self._observe(),
            reward=1.0 if is_there else -0.1,
            is_terminal=is_there,
            metrics={"success": float(is_there)},
        )

    def close(self) -> None:
        return None

    def _observe(self) -> Observation:
        message = Message(role=Role.USER, content=f"You are at {self.position}.")
        return Observation(messages=(message,), state_key=self.position)


class RestorableLineWorld:
    """The same, with snapshots; counts how often it was really stepped."""

    num_steps = 0

    def __init__(self) -> None:
        self._world = LineWorld()

    @property
    def action_schema(self) -> dict[str, Json]:
        return SCHEMA

    def reset(self, task: Task) -> Observation:
        return self._world.reset(task)

    def step(self, action: Action) -> Transition:
        type(self).num_steps += 1
        return self._world.step(action)

    def close(self) -> None:
        return None

    def snapshot(self) -> bytes:
        return str(self._world.position).encode()

    def restore(self, snapshot: bytes) -> None:
        self._world.position = int(snapshot)


class RestlessLineWorld(LineWorld):
    """Never shows the same thing twice."""

    count = 0

    def _observe(self) -> Observation:
        type(self).count += 1
        message = Message(role=Role.USER, content=f"You are at {self.position}. Look {self.count}.")
        return Observation(messages=(message,), state_key=self.position)


class OneTask:
    def num_tasks(self, split: Split) -> int | None:
        return 1

    def task(self, index: int, split: Split) -> Task:
        return Task(task_id="line", seed=7, ground_truth="right")


class LineSpec:
    def __init__(self, world: Callable[[], Environment] = LineWorld) -> None:
        self.tasks = OneTask()
        self._world = world

    def make(self) -> Environment:
        return self._world()


def build_line() -> LineSpec:
    return LineSpec()


class DicePolicy:
    """Moves left or right by the throw of a die that the request's seed fixes; log-probs are those of the die."""

    def __init__(self, tokenizer: Any, right: float = 0.5) -> None:
        self.version = 3
        self.num_asked = 0
        self._tokenizer = tokenizer
        self._right = right

    async def complete(
        self, request: Request, *, on_token: Callable[[TokenEvent], None] | None = None
    ) -> Completion:
        self.num_asked += 1
        is_right = np.random.default_rng(request.seed).random() < self._right
        text = json.dumps({"move": "right" if is_right else "left"})
        ids = np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
        logprobs = np.zeros(len(ids), dtype=np.float32)
        logprobs[0] = np.log(self._right if is_right else 1 - self._right)
        return Completion(
            completion_ids=ids, logprobs=logprobs, text=text, finish_reason=FinishReason.ACTION, policy_version=self.version
        )  # fmt: skip

    async def release(self, stream_id: str) -> None:
        return None

    async def load_weights(self, weights: Mapping[str, Any], version: int) -> str:
        raise NotImplementedError("a die has no weights")

    async def close(self) -> None:
        return None


def load_tiny_tokenizer() -> Any:
    import transformers

    from turnwise.models.loading import find_model

    return transformers.AutoTokenizer.from_pretrained(find_model(ModelConfig().path))
