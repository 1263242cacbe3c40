"""Gymnasium environments as turnwise environments: observations become text, JSON actions become gym actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import gymnasium
import numpy as np

from turnwise.environment import Environment, Split
from turnwise.errors import ConfigError
from turnwise.types import Action, Json, Message, Observation, Role, Task, Transition

# Gymnasium leaves the types of observations and actions to each environment.
GymEnv: TypeAlias = Any


class GymEnvironment:
    """Plays one Gymnasium environment; what is special about a game comes in as three functions."""

    def __init__(
        self,
        make: Callable[[Task], GymEnv],
        *,
        describe: Callable[[GymEnv, Any], str],
        action_schema: dict[str, Json],
        read_action: Callable[[dict[str, Json]], Any],
        state_key: Callable[[GymEnv, Any], Json] | None = None,
        is_success: Callable[[float, bool], bool] = lambda reward, terminated: terminated and reward > 0,
        instructions: str = "",
        invalid_reward: float = 0.0,
        bonus: Callable[[GymEnv, Any, Any], float] | None = None,
    ) -> None:
        """
        `describe(env, observation)` is what the agent reads; `read_action(value)` turns its JSON object into the
        gym action and raises ValueError when it cannot; `state_key(env, observation)` names the situation;
        `invalid_reward` is paid for an action that cannot be carried out, `bonus(env, before, after)` on top of the
        game's own reward for one that was.
        """
        self._make = make
        self._describe = describe
        self._read_action = read_action
        self._state_key = state_key
        self._is_success = is_success
        self._instructions = instructions
        self._invalid_reward = invalid_reward
        self._bonus = bonus
        self._schema = action_schema
        self._env: GymEnv | None = None
        self._last: Any = None  # the gym observation the agent is looking at

    @property
    def action_schema(self) -> dict[str, Json]:
        return self._schema

    def reset(self, task: Task) -> Observation:
        self.close()
        self._env = self._make(task)
        self._last, _ = self._env.reset(seed=task.seed)
        return self._observe(self._instructions)

    def step(self, action: Action) -> Transition:
        assert self._env is not None, "step before reset"
        try:
            if action.value is None:
                raise ValueError("there was no JSON action")
            move = self._read_action(action.value)
        except ValueError as error:
            return Transition(
                observation=self._observe(f"Invalid action: {error}."),
                reward=self._invalid_reward,
                is_action_valid=False,
                metrics={"success": 0.0},
            )
        before = self._last
        self._last, reward, terminated, truncated, _ = self._env.step(move)
        success = self._is_success(float(reward), bool(terminated))
        bonus = 0.0 if self._bonus is None else self._bonus(self._env, before, self._last)
        return Transition(
            observation=self._observe(),
            reward=float(reward) + bonus,
            is_terminal=bool(terminated or truncated),
            metrics={"success": float(success)},
        )

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _observe(self, preface: str = "") -> Observation:
        assert self._env is not None
        text = self._describe(self._env, self._last)
        content = f"{preface}\n{text}" if preface else text
        key = None if self._state_key is None else self._state_key(self._env, self._last)
        return Observation(messages=(Message(role=Role.USER, content=content),), state_key=key)


class SeededTasks:
    """Endless tasks that differ only in their seed; evaluation seeds are never training seeds."""

    def __init__(self, name: str) -> None:
        self._name = name

    def num_tasks(self, split: Split) -> int | None:
        return None

    def task(self, index: int, split: Split) -> Task:
        # Even seeds train, odd seeds evaluate.
        seed = 2 * index + (split == "eval")
        return Task(task_id=f"{self._name}-{split}-{index}", seed=seed)


class GymSpec:
    """A way to make environments of one kind, and their seeded tasks."""

    def __init__(self, name: str, make: Callable[[], Environment]) -> None:
        self.tasks = SeededTasks(name)
        self._make = make

    def make(self) -> Environment:
        return self._make()


def build_gym(env_id: str, **kwargs: Any) -> GymSpec:
    """Any Gymnasium id with a discrete or box action space; the action is `{"action": …}`."""
    try:
        probe = gymnasium.make(env_id, **kwargs)
    except gymnasium.error.Error as error:
        raise ConfigError(f"environment gym:{env_id} cannot be made: {error}") from None
    space = probe.action_space
    probe.close()
    schema: dict[str, Json]
    if isinstance(space, gymnasium.spaces.Discrete):
        low, high = int(space.start), int(space.start + space.n - 1)
        value_schema: dict[str, Json] = {"type": "integer", "minimum": low, "maximum": high}
        hint = f"an integer from {low} to {high}"
    elif isinstance(space, gymnasium.spaces.Box):
        size = int(np.prod(space.shape))
        value_schema = {"type": "array", "items": {"type": "number"}, "minItems": size, "maxItems": size}
        hint = f"a list of {size} numbers from {space.low.min():g} to {space.high.max():g}"
    else:
        raise ConfigError(
            f"environment gym:{env_id} has action space {space}; wrap it with GymEnvironment and your own `read_action`"
        )
    schema = {
        "type": "object",
        "properties": {"action": value_schema},
        "required": ["action"],
        "additionalProperties": False,
    }

    def read_action(value: dict[str, Json]) -> Any:
        try:
            array = np.asarray(value["action"], dtype=space.dtype).reshape(space.shape)
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ValueError(f'"action" must be {hint}') from None
        move = int(array) if isinstance(space, gymnasium.spaces.Discrete) else array
        if not space.contains(move):
            raise ValueError(f'"action" must be {hint}')
        return move

    def make() -> Environment:
        return GymEnvironment(
            lambda task: gymnasium.make(env_id, **kwargs),
            describe=lambda env, observation: f"Observation: {np.asarray(observation).tolist()}",
            action_schema=schema,
            read_action=read_action,
            state_key=lambda env, observation: np.asarray(observation).tolist(),
            instructions=f'Answer with {{"action": …}}, {hint}.',
        )

    return GymSpec(f"gym:{env_id}", make)
