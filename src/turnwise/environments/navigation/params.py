"""The settings of the environment `navigation`, checked where they enter."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnwise.environments.navigation.actions import ActionLimits
from turnwise.environments.navigation.furniture import COLORS
from turnwise.environments.navigation.generator import SceneOptions
from turnwise.environments.navigation.occupancy import Agent
from turnwise.environments.navigation.render import Camera
from turnwise.environments.navigation.scenes import CLASSES
from turnwise.environments.navigation.tasks import GoalOptions
from turnwise.errors import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class GenerateParams(_Section):
    """Made-to-order rooms."""

    num_train_scenes: int = Field(256, ge=1)
    num_eval_scenes: int = Field(64, ge=1)
    seed: int = Field(0, ge=0)
    min_rooms: int = 1
    max_rooms: int = 3
    min_room_m: float = 3.4
    max_room_m: float = 5.0
    min_objects: int = 4
    max_objects: int = 7
    classes: tuple[str, ...] = CLASSES
    colors: tuple[str, ...] = tuple(COLORS)
    distinct_colors: bool = False

    def scene_options(self) -> SceneOptions:
        return SceneOptions(
            min_rooms=self.min_rooms, max_rooms=self.max_rooms, min_room_m=self.min_room_m, max_room_m=self.max_room_m,
            min_objects=self.min_objects, max_objects=self.max_objects, classes=self.classes, colors=self.colors,
            distinct_colors=self.distinct_colors,
        )  # fmt: skip


class NavigationParams(_Section):
    """Everything a navigation environment can be told."""

    dataset_path: str | None = None
    """A folder of ARKitScenes, ScanNet or ScanNet++ captures; None uses made-to-order rooms."""
    generate: GenerateParams | None = None
    questions_path: str | None = None
    """A VSI-Bench file (jsonl or parquet); its rows become the eval tasks."""
    question_types: tuple[str, ...] | None = None
    """Which VSI-Bench question types to use; None takes all."""
    train_tasks: Literal["object_goal", "route"] = "object_goal"
    """What is generated from the scenes."""
    allow_test_scenes: bool = False
    """Train on scenes that VSI-Bench tests on."""
    strict_classes: bool = True
    """Refuse ARKitScenes annotations with classes other than its 17."""
    seed: int = Field(0, ge=0)
    """Fixes the tasks."""
    width: int = Field(128, ge=32)
    height: int = Field(128, ge=32)
    fov_degrees: float = Field(90.0, gt=0, lt=180)
    pitch_degrees: float = Field(-10.0, ge=-60, le=60)
    """Negative looks down."""
    show_depth: bool = False
    """Add the depth as a second, grey image: nearer is brighter."""
    show_pose: bool = False
    """Write position and heading into the observation's text."""
    instructions: bool = True
    """Explain actions and goal in a system message; a model trained on the short form needs none."""
    max_turns: int = Field(10, ge=1)
    max_rotation_degrees: float = Field(180.0, gt=0, le=180)
    max_forward_m: float = Field(1.0, gt=0)
    slide: bool = False
    """Slide along walls instead of stopping."""
    success_radius_m: float = Field(1.0, gt=0)
    require_done: bool = False
    """Arriving counts only when the agent says `done`."""
    success_reward: float = 1.0
    progress_reward: float = 0.0
    """Paid for the share of the initial distance that a turn gains, taken back when it loses."""
    collision_penalty: float = Field(0.0, ge=0)
    min_distance_m: float = Field(0.5, ge=0)
    max_distance_m: float = Field(8.0, gt=0)
    solvable_by: Literal["shortest", "sighted"] = "shortest"
    starts_in_view: bool | None = None
    agent_radius_m: float = Field(0.2, gt=0)
    agent_height_m: float = Field(1.5, gt=0)
    camera_height_m: float = Field(1.2, gt=0)
    step_height_m: float = Field(0.1, ge=0)
    cell_m: float = Field(0.05, gt=0.005)
    max_cached_scenes: int = Field(64, ge=1)
    state_cell_m: float = Field(0.5, gt=0)
    """Poses in the same square and heading sector are one state for GiGPO."""
    state_heading_degrees: float = Field(30.0, gt=0, le=360)

    def scene_orders(self) -> GenerateParams:
        return self.generate or GenerateParams()

    def agent(self) -> Agent:
        return Agent(
            height_m=self.agent_height_m, radius_m=self.agent_radius_m, step_height_m=self.step_height_m,
            camera_height_m=self.camera_height_m,
        )  # fmt: skip

    def camera(self) -> Camera:
        return Camera.with_view(self.width, self.height, self.fov_degrees)

    def limits(self) -> ActionLimits:
        return ActionLimits(max_rotation_degrees=self.max_rotation_degrees, max_forward_m=self.max_forward_m)

    def goal_options(self) -> GoalOptions:
        return GoalOptions(
            min_distance_m=self.min_distance_m, max_distance_m=self.max_distance_m, max_turns=self.max_turns,
            success_radius_m=self.success_radius_m, solvable_by=self.solvable_by, starts_in_view=self.starts_in_view,
            limits=self.limits(), camera=self.camera(), pitch_degrees=self.pitch_degrees,
        )  # fmt: skip


def read_params(values: dict[str, Any]) -> NavigationParams:  # the caller's JSON
    """The checked settings; every mistake is named with its value."""
    try:
        return NavigationParams.model_validate(values)
    except ValidationError as error:
        mistakes = [
            f"{'.'.join(str(part) for part in item['loc'])} = {item['input']!r}: {item['msg']}"
            for item in error.errors()
        ]
        raise ConfigError(f"environment.params of navigation: {'; '.join(mistakes)}") from None
