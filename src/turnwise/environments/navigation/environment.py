"""The navigation environment: an agent with a camera in a 3-D scene, one JSON action a turn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from turnwise.environments.navigation.actions import Command, action_schema, read_command
from turnwise.environments.navigation.expert import Situation
from turnwise.environments.navigation.geodesic import DistanceField
from turnwise.environments.navigation.params import NavigationParams, read_params
from turnwise.environments.navigation.prompts import instruct, observe_text
from turnwise.environments.navigation.render import Frame
from turnwise.environments.navigation.scenes import Pose, SceneObject
from turnwise.environments.navigation.sources import open_source
from turnwise.environments.navigation.tasks import goal_task, object_goals
from turnwise.environments.navigation.world import World, WorldCache
from turnwise.errors import EnvironmentFailure, SceneError
from turnwise.rewards.vsibench import score_answer
from turnwise.types import Action, Image, Json, Message, Observation, Role, Task, Transition


class _State(msgspec.Struct, kw_only=True):
    """What changes during an episode."""

    pose: Pose
    turn: int = 0
    path_m: float = 0.0
    collisions: int = 0
    invalid_actions: int = 0
    distance_m: float = 0.0
    start_distance_m: float = 0.0
    is_over: bool = False
    is_success: bool = False
    answer_score: float = 0.0
    official_score: float = 0.0


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    task: Task
    state: _State


class NavigationEnvironment:
    """Find an object or answer a question by moving through a scene.

    env = NavigationEnvironment("ARKitScenes/3dod")
    env.load_scene("42445173")
    observation = env.reset(env.task_from_pose(env.get_random_pose(), "ep001"))
    transition = env.step(Action(value={"rotation_angle_degrees": 30, "forward_meters": 0.5}))
    """

    def __init__(
        self, dataset_path: Path | str | None = None, *, worlds: WorldCache | None = None, params: NavigationParams | None = None,
        **settings: Any,  # the fields of NavigationParams, checked there
    ) -> None:  # fmt: skip
        if params is None:
            path = {} if dataset_path is None else {"dataset_path": str(dataset_path)}
            params = read_params({**path, **settings})
        self.params = params
        self.worlds = worlds or WorldCache(
            open_source(params), params.agent(), cell_m=params.cell_m,
            max_scenes=params.max_cached_scenes,
        )  # fmt: skip
        self._camera = params.camera()
        self._limits = params.limits()
        self._rng = np.random.default_rng(params.seed)
        self._world: World | None = None
        self._task: Task | None = None
        self._state: _State | None = None
        self._goal: SceneObject | None = None
        self._field: DistanceField | None = None

    @property
    def action_schema(self) -> dict[str, Json]:
        has_answer = self._is_question() or self.params.questions_path is not None
        return action_schema(
            self._limits, has_answer=has_answer, has_done=has_answer or self.params.require_done
        )

    @property
    def world(self) -> World:
        if self._world is None:
            raise EnvironmentFailure("no scene is loaded; call load_scene or reset first")
        return self._world

    @property
    def pose(self) -> Pose:
        return self._running().pose

    def load_scene(self, scene_id: str) -> World:
        """Make a scene the current one."""
        self._world = self.worlds.get(scene_id)
        return self._world

    def clone(self) -> NavigationEnvironment:
        """Another agent in the same scenes, which are shared; it stands in the same one."""
        other = NavigationEnvironment(worlds=self.worlds, params=self.params)
        other._world = self._world
        return other

    def get_random_pose(self, seed: int | None = None) -> Pose:
        """A pose in the current scene where the agent fits; reproducible when given a seed."""
        return self.world.grid.random_pose(self._rng if seed is None else np.random.default_rng(seed))

    def task_from_pose(self, pose: Pose, task_id: str, goal: str | None = None) -> Task:
        """The task to find `goal` (a uid or a name such as `red chair`; None draws one) from a pose of the current scene."""
        world = self.world
        choices = [
            item
            for item in object_goals(world.scene)
            if goal is None or goal in (item.uid, item.name, item.label)
        ]
        radius = self.params.success_radius_m
        reachable = [
            item for item in choices if math.isfinite(world.goal_field(item.uid, radius).at(pose.x, pose.y))
        ]
        if not reachable:
            raise SceneError(
                f"scene {world.scene.scene_id} has no {goal or 'object'} that can be reached from ({pose.x:.2f}, {pose.y:.2f}); "
                f"it has {', '.join(sorted({item.name for item in world.scene.objects})) or 'no annotated objects'}"
            )
        chosen = reachable[int(self._rng.integers(len(reachable)))]
        return goal_task(world, task_id, 0, pose, chosen, radius)

    def reset(self, task: Task) -> Observation:
        self._prepare(task)
        start = task.data.get("start")
        pose = Pose(**start) if start else self.world.grid.random_pose(np.random.default_rng(task.seed))
        if not self.world.grid.is_free(pose.x, pose.y):
            raise EnvironmentFailure(
                f"task {task.task_id} starts at ({pose.x:.2f}, {pose.y:.2f}), where the agent does not fit in {self.world.scene.scene_id}"
            )
        distance = self._distance(pose)
        if not math.isfinite(distance):
            raise EnvironmentFailure(
                f"task {task.task_id} cannot be solved: its goal is out of reach from the start"
            )
        self._state = _State(pose=pose, distance_m=distance, start_distance_m=distance)
        messages = self._messages(note="")
        if self.params.instructions:
            text = instruct(self._limits, task.data.get("kind") == "question", self.params.require_done)
            messages = (Message(role=Role.SYSTEM, content=text), *messages)
        return self._observation(messages)

    def step(self, action: Action) -> Transition:
        state = self._running()
        if state.is_over:
            raise EnvironmentFailure("the episode is over; call reset before the next step")
        command = read_command(action, self._limits)
        before = state.distance_m
        state.turn += 1
        note, reward = "", 0.0
        if isinstance(command, str):
            state.invalid_actions += 1
            note = f"Invalid action: {command}." if self.params.instructions else "Invalid action."
        else:
            is_blocked = self._walk(state, command)
            note = "Blocked." if is_blocked else ""
            reward -= self.params.collision_penalty * is_blocked
            self._judge(state, command)
            if state.start_distance_m > 0:
                reward += self.params.progress_reward * (before - state.distance_m) / state.start_distance_m
        state.is_over = state.is_over or state.turn >= self.params.max_turns
        if state.is_over:
            reward += self.params.success_reward * (
                state.answer_score if self._is_question() else state.is_success
            )
        return Transition(
            observation=self._observation(self._messages(note)), reward=float(reward), is_terminal=state.is_over,
            is_action_valid=not isinstance(command, str), metrics=self.metrics(),
        )  # fmt: skip

    def metrics(self) -> dict[str, float]:
        """Figures of the episode so far, as Habitat defines them."""
        state = self._running()
        found: dict[str, float] = {
            "collisions": float(state.collisions), "invalid_actions": float(state.invalid_actions), "path_m": state.path_m,
        }  # fmt: skip
        if self._is_question():
            found |= {"score": state.answer_score, "score_official": state.official_score}
            found |= {"success": float(state.is_success)}
        if self._field is not None:
            found["distance_to_goal"] = state.distance_m
        if self._field is not None and not self._is_question():
            found |= self._path_metrics(state)
        return found

    def _path_metrics(self, state: _State) -> dict[str, float]:
        assert self._task is not None
        shortest = float((self._task.ground_truth or {}).get("shortest_path_m", state.start_distance_m))
        longest = max(shortest, state.path_m)
        share = shortest / longest if longest > 0 else 1.0
        start = state.start_distance_m
        nearer = max(0.0, 1.0 - state.distance_m / start) if start > 0 else 1.0
        return {
            "success": float(state.is_success),
            "spl": state.is_success * share,
            "soft_spl": nearer * share,
        }

    def situation(self) -> Situation:
        """What an expert needs to choose the next turn."""
        if self._goal is None or self._field is None:
            raise EnvironmentFailure(
                "this task has no goal object, so there is nothing for an expert to walk to"
            )
        return Situation(
            world=self.world, pose=self._running().pose, goal=self._goal, field=self._field, camera=self._camera,
            pitch_degrees=self.params.pitch_degrees,
        )  # fmt: skip

    def render(self) -> Frame:
        """What the agent sees now."""
        return self.world.render(self._running().pose, self._camera, self.params.pitch_degrees)

    def snapshot(self) -> bytes:
        assert self._task is not None
        return msgspec.msgpack.encode(_Snapshot(task=self._task, state=self._running()))

    def restore(self, snapshot: bytes) -> None:
        saved = msgspec.msgpack.decode(snapshot, type=_Snapshot)
        self._prepare(saved.task)
        self._state = saved.state

    def close(self) -> None:
        """Worlds are shared with other environments, so there is nothing of its own to release."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Worlds cannot be pickled: the copy builds its own, and goes on where this episode is.
        return _rebuild, (self.params, self.worlds, None if self._state is None else self.snapshot())

    def _prepare(self, task: Task) -> None:
        self._task = task
        world = self.load_scene(str(task.data["scene_id"]))
        uid = task.data.get("goal_uid")
        self._goal = world.scene.find(uid) if uid is not None else None
        radius = float(task.data.get("success_radius_m", self.params.success_radius_m))
        self._field = world.goal_field(uid, radius) if uid is not None else None

    def _running(self) -> _State:
        if self._state is None:
            raise EnvironmentFailure("no episode is running; call reset first")
        return self._state

    def _is_question(self) -> bool:
        return self._task is not None and self._task.data.get("kind") == "question"

    def _distance(self, pose: Pose) -> float:
        return 0.0 if self._field is None else self._field.at(pose.x, pose.y)

    def _walk(self, state: _State, command: Command) -> bool:
        turned = state.pose.turned(command.rotation_degrees)
        move = self.world.grid.move(turned, command.forward_m, slide=self.params.slide)
        state.pose = Pose(x=move.x, y=move.y, yaw_degrees=turned.yaw_degrees)
        state.path_m += move.travelled_m
        state.collisions += move.is_blocked
        state.distance_m = self._distance(state.pose)
        return move.is_blocked

    def _judge(self, state: _State, command: Command) -> None:
        """Decide whether this turn ended the episode, and how well."""
        if self._is_question():
            if command.answer is not None and self._task is not None:
                data = self._task.data
                found = score_answer(
                    command.answer,
                    str(self._task.ground_truth["answer"]),
                    str(data["question_type"]),
                    data["options"] or (),
                )
                state.answer_score, state.official_score = found.score, found.official
                state.is_success = found.score == 1.0
            state.is_over = command.answer is not None or command.is_done
            return
        has_arrived = self._field is not None and state.distance_m == 0.0
        state.is_success = has_arrived and (command.is_done or not self.params.require_done)
        state.is_over = state.is_success or command.is_done

    def _messages(self, note: str) -> tuple[Message, ...]:
        assert self._task is not None
        state = self._running()
        frame = self.render()
        images = [Image.from_pixels(frame.pixels)]
        if self.params.show_depth:
            images.append(Image.from_pixels(_grey(frame)))
        text = observe_text(
            self._task, state.turn, self.params.max_turns, note, state.pose if self.params.show_pose else None
        )
        return (Message(role=Role.USER, content=(*images, text)),)

    def _observation(self, messages: tuple[Message, ...]) -> Observation:
        state = self._running()
        pose = state.pose
        cell, sector = self.params.state_cell_m, self.params.state_heading_degrees
        key = [
            self.world.scene.scene_id, math.floor(pose.x / cell), math.floor(pose.y / cell),
            round(pose.yaw_degrees / sector) % round(360 / sector),
        ]  # fmt: skip
        info = {
            "scene_id": self.world.scene.scene_id, "turn": state.turn,
            "pose": {"x": pose.x, "y": pose.y, "yaw_degrees": pose.yaw_degrees},
            "distance_to_goal": state.distance_m,
        }  # fmt: skip
        return Observation(messages=messages, state_key=key, info=info)


def _rebuild(params: NavigationParams, worlds: WorldCache, snapshot: bytes | None) -> NavigationEnvironment:
    env = NavigationEnvironment(worlds=worlds, params=params)
    if snapshot is not None:
        env.restore(snapshot)
    return env


def _grey(frame: Frame, reach_m: float = 8.0) -> Any:  # uint8 pixels
    near = np.where(frame.depth > 0, 1.0 - np.minimum(frame.depth, reach_m) / reach_m, 0.0)
    return np.repeat((near * 255).astype(np.uint8)[..., None], 3, axis=-1)
