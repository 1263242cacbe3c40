"""Frames per second of the ray caster on a scan-like scene, with two processes, beside Open3D where it can be imported.

python benchmarks/render.py --json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from typing import Any

import numpy as np

from turnwise.environments.navigation.generator import SceneOptions, make_scene
from turnwise.environments.navigation.occupancy import Agent
from turnwise.environments.navigation.render import Camera, RayCaster
from turnwise.environments.navigation.scenes import Mesh, Scene
from turnwise.environments.navigation.world import World

SIZES = ((128, 128), (320, 240), (640, 480))


def scan_like(num_triangles: int, seed: int = 0) -> Scene:
    """A made scene cut into small triangles with uneven vertex colours, as a scan has them."""
    import msgspec

    scene = make_scene("bench", seed, SceneOptions(min_rooms=3, max_rooms=3))
    vertices, faces = scene.mesh.vertices_V3, scene.mesh.faces_F3
    corners, colors = vertices[faces], scene.mesh.colors_V3[faces].astype(np.float32)
    while len(corners) < num_triangles:
        # The longest edges are halved, so that triangles become alike in size.
        lengths = np.stack(
            [np.linalg.norm(corners[:, (k + 1) % 3] - corners[:, k], axis=1) for k in range(3)], axis=1
        )
        longest = lengths.argmax(axis=1)
        chosen = lengths.max(axis=1) >= np.quantile(
            lengths.max(axis=1), max(0.0, 2 - num_triangles / len(corners))
        )
        rows, first = np.flatnonzero(chosen), longest[chosen]
        a, b, c = (corners[rows, (first + k) % 3] for k in range(3))
        p, q, r = (colors[rows, (first + k) % 3] for k in range(3))
        middle, tint = (a + b) / 2, (p + q) / 2
        corners[rows], colors[rows] = np.stack([a, middle, c], axis=1), np.stack([p, tint, r], axis=1)
        corners = np.concatenate([corners, np.stack([middle, b, c], axis=1)])
        colors = np.concatenate([colors, np.stack([tint, q, r], axis=1)])
    noise = np.random.default_rng(seed).normal(0, 8, colors.shape)
    mesh = Mesh(
        vertices_V3=corners.reshape(-1, 3), faces_F3=np.arange(len(corners) * 3, dtype=np.int32).reshape(-1, 3),
        colors_V3=np.clip(colors + noise, 0, 255).astype(np.uint8).reshape(-1, 3),
    )  # fmt: skip
    return msgspec.structs.replace(scene, mesh=mesh)


def camera_path(scene: Scene, count: int) -> list[Any]:
    grid_world = World(make_scene("bench", 0, SceneOptions(min_rooms=3, max_rooms=3)), Agent())
    rng = np.random.default_rng(0)
    return [grid_world.camera_matrix(grid_world.grid.random_pose(rng)) for _ in range(count)]


def embree_worker(scene: Scene, size: tuple[int, int], seconds: float, ready: Any, results: Any) -> None:
    caster, camera = RayCaster(scene.mesh), Camera.with_view(*size, 90.0)
    matrices = camera_path(scene, 32)
    caster.render(camera, matrices[0])
    _count(lambda index: caster.render(camera, matrices[index % 32]), seconds, ready, results)


def open3d_worker(scene: Scene, size: tuple[int, int], seconds: float, ready: Any, results: Any) -> None:
    import open3d as o3d

    mesh, camera = scene.mesh, Camera.with_view(*size, 90.0)
    casting = o3d.t.geometry.RaycastingScene(nthreads=1)
    casting.add_triangles(mesh.vertices_V3, mesh.faces_F3.astype(np.uint32))
    corners = mesh.colors_V3[mesh.faces_F3].astype(np.float32)
    parts = np.stack([corners[:, 0], corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]], axis=1)
    columns, rows = np.meshgrid(np.arange(camera.width), np.arange(camera.height))
    directions = np.stack(
        [(columns - camera.cx) / camera.fx, (rows - camera.cy) / camera.fy, np.ones_like(rows)], axis=-1
    )
    flat = directions.reshape(-1, 3).astype(np.float32)
    matrices = camera_path(scene, 32)

    def render(index: int) -> None:
        matrix = matrices[index % 32].astype(np.float32)
        rays = np.empty((len(flat), 6), dtype=np.float32)
        rays[:, :3], rays[:, 3:] = matrix[:3, 3], flat @ matrix[:3, :3].T
        hits = casting.cast_rays(o3d.core.Tensor(rays))
        faces, uv = hits["primitive_ids"].numpy(), hits["primitive_uvs"].numpy()
        is_miss = faces == o3d.t.geometry.RaycastingScene.INVALID_ID
        chosen = parts[np.where(is_miss, 0, faces)]
        mixed = chosen[:, 0] + uv[:, :1] * chosen[:, 1] + uv[:, 1:] * chosen[:, 2]
        mixed[is_miss] = 180
        mixed.astype(np.uint8)
        np.where(is_miss, 0, hits["t_hit"].numpy())

    render(0)
    _count(render, seconds, ready, results)


def _count(render: Any, seconds: float, ready: Any, results: Any) -> None:
    ready.wait()
    start, start_cpu, frames = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - start < seconds:
        render(frames)
        frames += 1
    results.put((frames / (time.perf_counter() - start), frames / (time.process_time() - start_cpu)))


def measure(
    worker: Any, scene: Scene, size: tuple[int, int], num_processes: int, seconds: float
) -> tuple[float, float]:
    """Frames per second of all processes, and per second of one core, which other work on the machine hardly changes."""
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(num_processes), context.Queue()
    arguments = (scene, size, seconds, ready, results)
    processes = [context.Process(target=worker, args=arguments) for _ in range(num_processes)]
    for process in processes:
        process.start()
    rates = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    return sum(rate for rate, _ in rates), sum(rate for _, rate in rates) / len(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--triangles", type=int, default=200_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    scene = scan_like(options.triangles)
    started = time.perf_counter()
    RayCaster(scene.mesh).hit_distance(np.zeros(3), np.array([0.0, 0.0, -1.0]))
    report: dict[str, Any] = {
        "triangles": len(scene.mesh.faces_F3), "processes": options.processes, "build_s": time.perf_counter() - started,
    }  # fmt: skip
    try:
        import open3d

        peer = str(open3d.__version__)
    except (ImportError, OSError):
        peer = None
    for width, height in SIZES:
        workers = {"turnwise": embree_worker, **({} if peer is None else {"open3d": open3d_worker})}
        row = {}
        for name, worker in workers.items():
            rates = measure(worker, scene, (width, height), options.processes, options.seconds)
            row[f"{name}_fps"], row[f"{name}_fps_per_core"] = rates
        report[f"{width}x{height}"] = row
    report["open3d"] = peer
    for width, height in SIZES:
        row = report[f"{width}x{height}"]
        print(f"{width}×{height}: " + ", ".join(f"{name} {value:.1f}" for name, value in row.items()))
    if options.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
