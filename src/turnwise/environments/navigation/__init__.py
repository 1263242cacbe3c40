"""The navigation world: 3-D scenes rendered on a CPU, from ARKitScenes or made to order, and tasks to solve in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.environment import EnvironmentSpec, TaskSource
from turnwise.environments.navigation.environment import NavigationEnvironment
from turnwise.environments.navigation.expert import Expert, ExpertTurn, Situation, describe
from turnwise.environments.navigation.params import NavigationParams, read_params
from turnwise.environments.navigation.sources import open_source
from turnwise.environments.navigation.tasks import ObjectGoalTasks
from turnwise.environments.navigation.world import World, WorldCache

__all__ = [
    "Expert", "ExpertTurn", "NavigationEnvironment", "NavigationParams", "NavigationSpec", "Situation", "World", "WorldCache",
    "build_navigation", "describe",
]  # fmt: skip


class NavigationSpec:
    """Environments that share their scenes, and the tasks to start them from."""

    def __init__(self, params: NavigationParams) -> None:
        self.params = params
        self.worlds = WorldCache(
            open_source(params.dataset_path, params.generate), params.agent(), cell_m=params.cell_m,
            max_scenes=params.max_cached_scenes,
        )  # fmt: skip
        self.tasks: TaskSource = ObjectGoalTasks(self.worlds, params.goal_options(), seed=params.seed)

    def make(self) -> NavigationEnvironment:
        return NavigationEnvironment(worlds=self.worlds, params=self.params)


def build_navigation(params: Mapping[str, Any]) -> EnvironmentSpec:
    """The environment `navigation` with these settings (see `NavigationParams`)."""
    return NavigationSpec(read_params(dict(params)))
