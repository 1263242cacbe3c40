"""The task stream: the same step always gets the same tasks."""

import pytest

from turnwise.environments.gym import SeededTasks
from turnwise.errors import ConfigError
from turnwise.tasks import TaskStream
from turnwise.types import Task


class FiveTasks:
    def num_tasks(self, split):
        return 5 if split == "train" else 0

    def task(self, index, split):
        return Task(task_id=f"{split}-{index}")


def test_a_step_has_the_same_tasks_whenever_it_is_asked_for():
    first = TaskStream(SeededTasks("x"), tasks_per_step=3, seed=1)
    second = TaskStream(SeededTasks("x"), tasks_per_step=3, seed=1)
    first.batch(0)
    assert first.batch(7) == second.batch(7)


def test_one_pass_over_a_finite_source_visits_every_task_once():
    stream = TaskStream(FiveTasks(), tasks_per_step=2, seed=0)
    names = [task.task_id for step in range(5) for task in stream.batch(step)]
    assert sorted(names[:5]) == sorted(names[5:]) == [f"train-{i}" for i in range(5)]


def test_another_seed_gives_another_order():
    orders = {
        tuple(task.task_id for task in TaskStream(FiveTasks(), tasks_per_step=5, seed=seed).batch(0))
        for seed in range(8)
    }
    assert len(orders) > 1


def test_evaluation_seeds_are_never_training_seeds():
    source = SeededTasks("x")
    train = {source.task(i, "train").seed for i in range(100)}
    evaluation = {source.task(i, "eval").seed for i in range(100)}
    assert train & evaluation == set()


def test_an_empty_split_is_refused():
    with pytest.raises(ConfigError, match="no tasks in its eval split"):
        TaskStream(FiveTasks(), tasks_per_step=1, seed=0, split="eval")
