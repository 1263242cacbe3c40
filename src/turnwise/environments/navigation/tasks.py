"""Makes tasks from scenes: stand somewhere, find an object; only tasks that the expert solves in time."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from turnwise.environment import Split
from turnwise.environments.navigation.actions import ActionLimits
from turnwise.environments.navigation.expert import Expert, ExpertMode, Situation
from turnwise.environments.navigation.render import Camera
from turnwise.environments.navigation.scenes import Pose, Scene, SceneObject
from turnwise.environments.navigation.world import World, WorldCache
from turnwise.errors import SceneError
from turnwise.types import Task


class GoalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which object-goal tasks are made."""

    min_distance_m: float = 0.5
    """Least way from the start to the goal region."""
    max_distance_m: float = 8.0
    max_turns: int = 10
    success_radius_m: float = 1.0
    """How near to the object's box counts as arrived."""
    solvable_by: ExpertMode = "shortest"
    """The expert that must reach the goal within `max_turns`."""
    starts_in_view: bool | None = None
    """True: the goal is in the first picture; False: it is not; None: as it comes."""
    limits: ActionLimits = ActionLimits()
    camera: Camera = Camera.with_view(128, 128, 90.0)
    pitch_degrees: float = 0.0


def object_goals(scene: Scene) -> list[SceneObject]:
    """Objects whose name fits no other object of the scene, so that a task is unambiguous."""
    names = [item.name for item in scene.objects]
    return [item for item in scene.objects if names.count(item.name) == 1]


def make_object_goal(world: World, task_id: str, seed: int, options: GoalOptions) -> Task | None:
    """An object-goal task in this scene from this seed, or None when the scene has none that fits."""
    rng = np.random.default_rng([seed, zlib.crc32(world.scene.scene_id.encode())])
    goals = object_goals(world.scene)
    for _ in range(40 if goals else 0):
        goal = goals[int(rng.integers(len(goals)))]
        field = world.goal_field(goal.uid, options.success_radius_m)
        distance_IJ = field.distance_IJ
        fits = (distance_IJ >= max(options.min_distance_m, 1e-6)) & (distance_IJ <= options.max_distance_m)
        if not (fits & world.grid.is_free_IJ).any():
            continue
        start = world.grid.random_pose(rng, fits)
        situation = Situation(
            world=world,
            pose=start,
            goal=goal,
            field=field,
            camera=options.camera,
            pitch_degrees=options.pitch_degrees,
        )
        if options.starts_in_view is not None and situation.sight().is_visible != options.starts_in_view:
            continue
        num_turns = count_expert_turns(situation, options)
        if num_turns is None:
            continue
        return goal_task(world, task_id, seed, start, goal, options.success_radius_m, num_turns)
    return None


def goal_task(
    world: World, task_id: str, seed: int, start: Pose, goal: SceneObject, radius_m: float, expert_turns: int | None = None
) -> Task:  # fmt: skip
    """The task to get from `start` to `goal`."""
    length = world.goal_field(goal.uid, radius_m).path_length(start.x, start.y)
    return Task(
        task_id=task_id,
        seed=seed,
        data={
            "kind": "object_goal",
            "scene_id": world.scene.scene_id,
            "goal_uid": goal.uid,
            "question": f"Find the {goal.name}.",
            "start": {"x": start.x, "y": start.y, "yaw_degrees": start.yaw_degrees},
            "success_radius_m": radius_m,
        },
        ground_truth={"shortest_path_m": round(length, 4), "expert_turns": expert_turns},
    )


def count_expert_turns(situation: Situation, options: GoalOptions) -> int | None:
    """How many turns the expert needs; None when it does not arrive in time."""
    expert = Expert(options.solvable_by, limits=options.limits)
    pose = situation.pose
    for turn in range(options.max_turns + 1):
        if situation.field.at(pose.x, pose.y) == 0.0:
            return turn
        command = expert.act(msgspec.structs.replace(situation, pose=pose)).command
        turned = pose.turned(command.rotation_degrees)
        move = situation.world.grid.move(turned, command.forward_m)
        pose = Pose(x=move.x, y=move.y, yaw_degrees=turned.yaw_degrees)
    return None


class ObjectGoalTasks:
    """Endless object-goal tasks over the scenes of a source; index and split fix the task."""

    def __init__(self, worlds: WorldCache, options: GoalOptions, *, seed: int = 0) -> None:
        self.worlds = worlds
        self.options = options
        self.seed = seed

    def num_tasks(self, split: Split) -> int | None:
        return None

    def task(self, index: int, split: Split) -> Task:
        scene_ids = self.worlds.source.scene_ids(split)
        if not scene_ids:
            raise SceneError(
                f"there are no scenes to make {split} tasks from; of captures on disk only fold Training trains and the rest "
                "evaluates (allow_test_scenes: true trains on any)"
            )
        return self._first_fitting(seed_of(self.seed, split, index), index, split, scene_ids)

    def _first_fitting(self, seed: int, index: int, split: Split, scene_ids: Sequence[str]) -> Task:
        for attempt in range(min(len(scene_ids), 20)):
            world = self.worlds.get(scene_ids[(index + attempt) % len(scene_ids)])
            task = make_object_goal(world, f"{split}-{index:06d}", seed, self.options)
            if task is not None:
                return task
        raise SceneError(
            f"no {split} task fits these options after {min(len(scene_ids), 20)} scenes; "
            f"widen min_distance_m .. max_distance_m ({self.options.min_distance_m} .. {self.options.max_distance_m}) or max_turns"
        )


def seed_of(seed: int, split: Split, index: int) -> int:
    """One number for each task of each split."""
    words: Any = np.random.SeedSequence([seed, 0 if split == "train" else 1, index]).generate_state(1)
    return int(words[0])
