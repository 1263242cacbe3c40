"""What the `scenes` commands do: write made scenes, save frames, maps and contact sheets, and run the expert."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
import PIL.Image

from turnwise.environment import Split
from turnwise.environments.navigation.arkitscenes import CapturedFrame, write_capture
from turnwise.environments.navigation.environment import NavigationEnvironment
from turnwise.environments.navigation.expert import Expert
from turnwise.environments.navigation.generator import SceneOptions
from turnwise.environments.navigation.maps import draw_task
from turnwise.environments.navigation.occupancy import Agent
from turnwise.environments.navigation.params import read_params
from turnwise.environments.navigation.questions import find_named
from turnwise.environments.navigation.render import Camera, Frame
from turnwise.environments.navigation.scenes import Bytes, Pose
from turnwise.environments.navigation.sources import CaptureFolder, GeneratedScenes, open_source
from turnwise.environments.navigation.tasks import ObjectGoalTasks, object_goals
from turnwise.environments.navigation.world import World, WorldCache
from turnwise.errors import SceneError
from turnwise.types import Action


def write_scenes(
    out: Path, options: SceneOptions, *, seed: int, num_train: int, num_eval: int, num_frames: int
) -> list[Path]:
    """Write made scenes as captures; the environment makes the same ones in memory from the same seed and options."""
    source = GeneratedScenes(options, seed=seed, num_train=num_train, num_eval=num_eval)
    splits: tuple[Split, ...] = ("train", "eval")
    return [
        _write_scene(out, source, scene_id, num_frames)
        for split in splits
        for scene_id in source.scene_ids(split)
    ]


def _write_scene(out: Path, source: GeneratedScenes, scene_id: str, num_frames: int) -> Path:
    scene = source.load(scene_id)
    frames = []
    if num_frames:
        world, camera = World(scene, Agent()), Camera.with_view(256, 192, 62.0)
        rng = np.random.default_rng(0)
        for index in range(num_frames):
            matrix = world.camera_matrix(world.grid.random_pose(rng))
            frame = world.caster.render(camera, matrix)
            frames.append(
                CapturedFrame(timestamp=index / 10, camera=camera, world_from_camera=matrix, frame=frame)
            )
    return write_capture(scene, out, frames=frames)


def open_world(dataset: Path, scene_id: str) -> World:
    return World(CaptureFolder(dataset).load(scene_id), Agent())


def read_pose(text: str | None, world: World, seed: int) -> Pose:
    """`1.5,2,90` as a pose; for None a free one from the seed, the one with the widest view of a dozen."""
    if text is None:
        rng, camera = np.random.default_rng(seed), Camera.with_view(32, 32, 90.0)
        poses = [world.grid.random_pose(rng) for _ in range(12)]
        return max(poses, key=lambda pose: float(np.median(world.render(pose, camera).depth)))
    try:
        x, y, yaw = (float(part) for part in text.split(","))
    except ValueError:
        raise SceneError(f"pose {text!r} is not x,y,yaw such as 1.5,2,90") from None
    return Pose(x=x, y=y, yaw_degrees=yaw)


def save_frame(
    world: World, pose: Pose, size: tuple[int, int], fov_degrees: float, pitch_degrees: float, out: Path, depth_out: Path | None
) -> None:  # fmt: skip
    frame = world.render(pose, Camera.with_view(*size, fov_degrees), pitch_degrees)
    out.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(frame.pixels).save(out)
    if depth_out is not None:
        depth_out.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(np.round(frame.depth * 1000).clip(0, 65535).astype(np.uint16)).save(depth_out)


def save_map(world: World, goal: str | None, pose: Pose, out: Path) -> float | None:
    """Draw the map; with a goal also the shortest way to it, whose length is returned."""
    item = (
        None
        if goal is None
        else next((o for o in world.scene.objects if o.uid == goal), find_named(world.scene, goal))
    )
    if goal is not None and item is None:
        names = ", ".join(sorted(o.name for o in world.scene.objects))
        raise SceneError(
            f"scene {world.scene.scene_id} has no single {goal!r}; it has {names or 'no annotated objects'}"
        )
    path = None if item is None else world.goal_field(item.uid, 1.0).path(pose.x, pose.y)
    out.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(draw_task(world, item, [pose], path, pixels_per_m=90.0, fov_degrees=90.0)).save(out)
    return None if path is None else float(np.linalg.norm(np.diff(path, axis=0), axis=1).sum())


def save_sheet(out: Path, dataset: Path | None, num_scenes: int, seed: int) -> None:
    """Per scene one row: three frames towards objects, their depth, and the map with the shortest way to the first."""
    params = read_params({} if dataset is None else {"dataset_path": str(dataset)})
    source = open_source(params)
    scene_ids = (*source.scene_ids("train"), *source.scene_ids("eval"))[:num_scenes]
    rows = [_sheet_row(World(source.load(scene_id), params.agent()), seed) for scene_id in scene_ids]
    width = max(row.shape[1] for row in rows)
    padded = [np.pad(row, ((0, 6), (0, width - row.shape[1]), (0, 0)), constant_values=255) for row in rows]
    out.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(np.concatenate(padded)).save(out, optimize=True)


def _sheet_row(world: World, seed: int, side: int = 192) -> Bytes:
    rng, camera = np.random.default_rng(seed), Camera.with_view(side, side, 90.0)
    goals = object_goals(world.scene) or list(world.scene.objects)
    cells: list[Bytes] = []
    first: tuple[Pose, str] | None = None
    for index in range(3):
        pose, goal = world.grid.random_pose(rng), goals[index % len(goals)] if goals else None
        for _ in range(60):
            if goal is None:
                break
            pose = world.grid.random_pose(rng)
            pose = pose.turned(pose.bearing_to(*goal.centroid[:2]))
            sighting = world.sight(pose, goal, camera, -10.0)
            if sighting.is_visible and 1.0 < sighting.distance_m < 3.5:
                break
        if (
            first is None
            and goal is not None
            and np.isfinite(world.goal_field(goal.uid, 1.0).at(pose.x, pose.y))
        ):
            first = (pose, goal.uid)
        frame = world.render(pose, camera, -10.0)
        cells.append(np.concatenate([frame.pixels, _depth_colors(frame)], axis=0))
    if first is not None:
        pose, goal_item = first[0], world.scene.find(first[1])
        path = world.goal_field(goal_item.uid, 1.0).path(pose.x, pose.y)
        picture = PIL.Image.fromarray(draw_task(world, goal_item, [pose], path, fov_degrees=90.0))
    else:
        picture = PIL.Image.fromarray(draw_task(world, None, []))
    picture.thumbnail((3 * side, 2 * side))
    cells.append(
        np.pad(np.asarray(picture), ((0, 2 * side - picture.height), (0, 0), (0, 0)), constant_values=255)
    )
    gap = np.full((2 * side, 6, 3), 255, dtype=np.uint8)
    return np.concatenate([part for cell in cells for part in (cell, gap)], axis=1)


def _depth_colors(frame: Frame, reach_m: float = 6.0) -> Bytes:
    """Near is warm, far is cold, nothing is black."""
    share = np.clip(frame.depth / reach_m, 0.0, 1.0)[..., None]
    near, middle, far = np.array([250, 200, 80.0]), np.array([170, 60, 110.0]), np.array([25, 25, 90.0])
    mixed = np.where(
        share < 0.5, near + (middle - near) * share * 2, middle + (far - middle) * (share * 2 - 1)
    )
    return np.where(frame.depth[..., None] > 0, mixed, 0.0).astype(np.uint8)


def run_expert(
    num_episodes: int, mode: Literal["shortest", "sighted"] | str, dataset: Path | None, seed: int
) -> dict[str, float]:
    """Success, SPL, turns and memory growth of the expert over tasks in many scenes."""
    settings = {"instructions": False, "solvable_by": mode, "seed": seed, "max_cached_scenes": 16}
    params = read_params({**settings, **({} if dataset is None else {"dataset_path": str(dataset)})})
    worlds = WorldCache(open_source(params), params.agent(), max_scenes=params.max_cached_scenes)
    tasks, env = (
        ObjectGoalTasks(worlds, params.goal_options(), seed=seed),
        NavigationEnvironment(worlds=worlds, params=params),
    )
    expert = Expert(params.solvable_by, limits=params.limits())
    found: list[dict[str, float]] = []
    memory: list[float] = []
    start = time.perf_counter()
    for index in range(num_episodes):
        env.reset(tasks.task(index, "train"))
        expert.reset()
        while True:
            transition = env.step(Action(value=expert.act(env.situation()).command.as_value()))
            if transition.is_terminal:
                break
        found.append({**transition.metrics, "turns": float(transition.observation.info["turn"])})
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return {
        "episodes": float(num_episodes),
        **{
            name: fmean(item[name] for item in found)
            for name in ("success", "spl", "soft_spl", "turns", "collisions")
        },
        "seconds": time.perf_counter() - start,
        "memory_mb_at_half": memory[len(memory) // 2],
        "memory_mb_at_end": memory[-1],
    }
