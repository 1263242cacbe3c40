"""What several test modules share: the tiny model, and a counting game that needs no model."""

from typing import ClassVar

import pytest

from turnwise.config import ModelConfig, RolloutConfig
from turnwise.masking import ActionTokenMasker, TokenBytes
from turnwise.policies.scripted import ScriptedPolicy
from turnwise.renderer import Renderer
from turnwise.rollout import Agent, Rollouts
from turnwise.types import Message, Observation, Role, Task, Transition


@pytest.fixture(scope="session")
def tiny():
    from turnwise.models.loading import load_model

    return load_model(ModelConfig(path="tiny"))


class CountingGame:
    """Say `{"add": n}` until the sum reaches the task's target; pays 1 at the target, 0 beyond it."""

    action_schema: ClassVar = {
        "type": "object",
        "properties": {"add": {"type": "integer"}},
        "required": ["add"],
    }

    def reset(self, task):
        self.total, self.target = 0, task.data.get("target", 3)
        return self._observe()

    def step(self, action):
        if action.value is None or not isinstance(action.value.get("add"), int):
            return Transition(observation=self._observe(), is_action_valid=False, metrics={"success": 0.0})
        self.total += action.value["add"]
        success = float(self.total == self.target)
        return Transition(
            observation=self._observe(),
            reward=success,
            is_terminal=self.total >= self.target,
            metrics={"success": success, "total": float(self.total)},
        )

    def close(self):
        self.is_closed = True

    def _observe(self):
        text = f"sum {self.total} target {self.target}"
        return Observation(messages=(Message(role=Role.USER, content=text),), state_key=self.total)


class CountingTasks:
    def num_tasks(self, split):
        return 4

    def task(self, index, split):
        return Task(task_id=f"{split}-{index}", seed=index, data={"target": 2 + index})


class CountingSpec:
    """A spec whose environments can be swapped for ones that misbehave."""

    def __init__(self, make=CountingGame):
        self.tasks = CountingTasks()
        self._make = make

    def make(self):
        return self._make()


@pytest.fixture
def make_rollouts(tiny):
    """Rollouts of a scripted agent: `make_rollouts(answer, make=Game, group_size=2, …)`."""

    def make(answer, *, make=CountingGame, seed=0, environment_timeout_s=5.0, **config):
        config = RolloutConfig(**{"group_size": 2, "max_turns": 4, "max_new_tokens": 64, **config})
        agent = Agent(
            policy=ScriptedPolicy(tiny.tokenizer, answer),
            renderer=Renderer(tiny.tokenizer, history=config.history),
            masker=ActionTokenMasker(
                TokenBytes(tiny.tokenizer),
                min_action_tokens=config.min_action_tokens,
                max_action_tokens=config.max_action_tokens,
            ),
        )
        return Rollouts(
            agent=agent,
            environment=CountingSpec(make),
            config=config,
            seed=seed,
            environment_timeout_s=environment_timeout_s,
        )

    return make


def pytest_terminal_summary(terminalreporter):
    """Say which sandbox tiers the run has tried, and why others were not."""
    import sys

    probe = sys.modules.get("turnwise.rewards.sandbox.probe")
    for found in probe._found.values() if probe else ():
        state = "ran" if found.holds else f"not run ({found.reason})"
        terminalreporter.write_line(f"sandbox tier {found.tier}: {state}")
