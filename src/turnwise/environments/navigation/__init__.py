"""The navigation world: 3-D scenes rendered on a CPU, from ARKitScenes or made to order, and tasks to solve in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.environment import EnvironmentSpec, Split, TaskSource
from turnwise.environments.navigation.environment import NavigationEnvironment
from turnwise.environments.navigation.expert import Expert, ExpertTurn, Situation, describe
from turnwise.environments.navigation.params import NavigationParams, read_params
from turnwise.environments.navigation.questions import QuestionTasks, RouteTasks
from turnwise.environments.navigation.sources import open_source
from turnwise.environments.navigation.tasks import ObjectGoalTasks
from turnwise.environments.navigation.vsibench import QUESTION_TYPES, Question, read_questions
from turnwise.environments.navigation.world import World, WorldCache
from turnwise.errors import ConfigError
from turnwise.types import Task

__all__ = [
    "Expert", "ExpertTurn", "NavigationEnvironment", "NavigationParams", "NavigationSpec", "Situation", "World", "WorldCache",
    "build_navigation", "describe",
]  # fmt: skip


class NavigationSpec:
    """Environments that share their scenes, and the tasks to start them from."""

    def __init__(self, params: NavigationParams) -> None:
        self.params = params
        questions = _chosen_questions(params)
        # Every scene the benchmark asks about is spared, whichever questions are used.
        source = open_source(
            params, None if questions is None else {item.scene_name for item in questions[0]}
        )
        self.worlds = WorldCache(
            source, params.agent(), cell_m=params.cell_m, max_scenes=params.max_cached_scenes
        )
        made: TaskSource = RouteTasks(self.worlds, seed=params.seed)
        if params.train_tasks == "object_goal":
            made = ObjectGoalTasks(self.worlds, params.goal_options(), seed=params.seed)
        self.tasks: TaskSource = made
        if questions is not None:
            self.tasks = _SplitTasks(train=made, evaluation=QuestionTasks(self.worlds, questions[1]))

    def make(self) -> NavigationEnvironment:
        return NavigationEnvironment(worlds=self.worlds, params=self.params)


class _SplitTasks:
    """Training tasks from one source, evaluation tasks from another."""

    def __init__(self, *, train: TaskSource, evaluation: TaskSource) -> None:
        self._sources = {"train": train, "eval": evaluation}

    def num_tasks(self, split: Split) -> int | None:
        return self._sources[split].num_tasks(split)

    def task(self, index: int, split: Split) -> Task:
        return self._sources[split].task(index, split)


def _chosen_questions(params: NavigationParams) -> tuple[tuple[Question, ...], tuple[Question, ...]] | None:
    """All questions of the file, and those of the chosen types."""
    if params.questions_path is None:
        return None
    questions = read_questions(Path(params.questions_path))
    unknown = sorted(set(params.question_types or ()) - set(QUESTION_TYPES))
    if unknown:
        raise ConfigError(f"unknown question type {unknown[0]!r}; known: {', '.join(QUESTION_TYPES)}")
    chosen = tuple(
        q for q in questions if params.question_types is None or q.question_type in params.question_types
    )
    return questions, chosen


def build_navigation(params: Mapping[str, Any] | None = None, /, **settings: Any) -> EnvironmentSpec:
    """The environment `navigation` with these settings (see `NavigationParams`)."""
    return NavigationSpec(read_params({**(params or {}), **settings}))
