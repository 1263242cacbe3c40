import itertools
import math

import msgspec
import numpy as np
import pytest

from turnwise.environments.navigation.generator import SceneOptions, make_scene
from turnwise.environments.navigation.geodesic import distance_field, floor_graph
from turnwise.environments.navigation.occupancy import Agent, OccupancyGrid, build_grid
from turnwise.environments.navigation.scenes import Mesh, Pose, estimate_floor
from turnwise.environments.navigation.world import World

MAZE = """
#######
#..#..#
#..#..#
#.....#
#######
"""


def maze_grid(cell_m: float = 1.0, radius_m: float = 0.0) -> OccupancyGrid:
    rows = MAZE.strip().splitlines()
    wall = np.array([[cell == "#" for cell in row] for row in rows])
    return OccupancyGrid((0.0, 0.0), cell_m, wall, np.ones_like(wall), radius_m)


def test_geodesic_distance_goes_around_the_wall() -> None:
    grid = maze_grid()
    goal = np.zeros(grid.shape, dtype=bool)
    goal[1, 5] = True
    field = distance_field(grid, floor_graph(grid), goal)
    assert field.at(1.5, 5.5) == 0.0
    assert field.at(2.5, 5.5) == 1.0
    assert field.at(2.5, 4.5) == pytest.approx(math.sqrt(2))
    # From (3, 3), in the gap below the wall: one cell aside, then a knight's move up.
    assert field.at(3.5, 3.5) == pytest.approx(1 + math.sqrt(5))
    # From the other side of the wall: a knight's move down, two aside under the wall, a knight's move up.
    assert field.at(1.5, 1.5) == pytest.approx(2 * math.sqrt(5) + 2)
    assert field.at(0.5, 0.5) == math.inf
    assert field.at(-3.0, 99.0) == math.inf


def test_the_path_is_pulled_tight_around_the_corner() -> None:
    grid = maze_grid()
    goal = np.zeros(grid.shape, dtype=bool)
    goal[1, 5] = True
    field = distance_field(grid, floor_graph(grid), goal)
    path = field.path(1.5, 1.5)
    assert path[0].tolist() == [1.5, 1.5]
    assert path[-1].tolist() == [1.5, 5.5]
    assert all(grid.sees(tuple(a), tuple(b)) for a, b in itertools.pairwise(path))
    assert field.path_length(1.5, 1.5) <= field.at(1.5, 1.5) + 1e-6


def test_distances_in_the_open_are_nearly_straight() -> None:
    wall = np.zeros((120, 120), dtype=bool)
    grid = OccupancyGrid((0.0, 0.0), 0.05, wall, ~wall, 0.0)
    goal = np.zeros(grid.shape, dtype=bool)
    goal[60, 60] = True
    field = distance_field(grid, floor_graph(grid), goal)
    for angle in range(0, 360, 7):
        x, y = 3.025 + 2 * math.cos(math.radians(angle)), 3.025 + 2 * math.sin(math.radians(angle))
        straight = math.dist(grid.center(*grid.cell(x, y)), grid.center(60, 60))
        assert straight <= field.at(x, y) + 1e-5 <= 1.03 * straight + 1e-5
        assert field.path_length(x, y) == pytest.approx(straight, abs=0.06)


def test_a_body_keeps_its_radius_from_the_wall() -> None:
    wall = np.zeros((40, 40), dtype=bool)
    wall[0] = True
    grid = OccupancyGrid((0.0, 0.0), 0.05, wall, np.ones_like(wall), 0.2)
    # The wall's face is at x = 0.05; a body of 0.2 m may not come nearer than 0.25.
    free = np.flatnonzero(grid.is_free_IJ[:, 20])
    assert grid.low[0] + free[0] * 0.05 >= 0.25 - 1e-9
    assert grid.low[0] + free[0] * 0.05 <= 0.35


def test_a_move_stops_at_the_wall_and_says_so() -> None:
    grid = maze_grid()
    move = grid.move(Pose(x=1.5, y=1.5, yaw_degrees=90.0), 5.0)
    assert move.is_blocked
    assert move.y < 3.0
    assert grid.cell(move.x, move.y) == (1, 2)
    free = grid.move(Pose(x=1.5, y=1.5, yaw_degrees=0.0), 1.0)
    assert not free.is_blocked
    assert (free.x, free.y) == pytest.approx((2.5, 1.5))


def test_sliding_goes_on_along_the_wall() -> None:
    grid = maze_grid()
    pose = Pose(x=1.5, y=1.5, yaw_degrees=60.0)
    stopped, slid = grid.move(pose, 2.0), grid.move(pose, 2.0, slide=True)
    assert stopped.is_blocked
    assert slid.is_blocked
    assert slid.x > stopped.x
    assert grid.is_free(slid.x, slid.y)


@pytest.mark.parametrize("slide", [False, True])
def test_a_thousand_random_walks_never_pass_through_a_wall(slide: bool) -> None:
    scene = make_scene("s", 11, SceneOptions(min_rooms=3, max_rooms=3))
    world = World(scene, Agent())
    rng = np.random.default_rng(0)
    eye = scene.floor_z + 0.5
    for _ in range(1000):
        pose = world.grid.random_pose(rng)
        for _ in range(4):
            pose = pose.turned(float(rng.uniform(-180, 180)))
            move = world.grid.move(pose, float(rng.uniform(0, 2)), slide=slide)
            assert world.grid.is_free(move.x, move.y)
            step = np.array([move.x - pose.x, move.y - pose.y, 0.0])
            if not slide and np.linalg.norm(step) > 1e-6:
                # A ray at knee height over the way just walked meets nothing.
                hit = world.caster.hit_distance(np.array([pose.x, pose.y, eye]), step)
                assert hit is None or hit > 1.0
            pose = Pose(x=move.x, y=move.y, yaw_degrees=pose.yaw_degrees)


def test_every_room_can_be_reached_through_its_door() -> None:
    for seed in range(6):
        scene = make_scene("s", seed, SceneOptions(min_rooms=4, max_rooms=4))
        grid = build_grid(scene, Agent())
        start = grid.random_pose(np.random.default_rng(0))
        goal = np.zeros(grid.shape, dtype=bool)
        goal[grid.cell(start.x, start.y)] = True
        field = distance_field(grid, floor_graph(grid), goal)
        assert np.isfinite(field.distance_IJ[grid.is_free_IJ]).mean() > 0.97


def test_the_floor_is_found_under_a_capture_whose_origin_is_at_head_height() -> None:
    for seed in range(8):
        scene = make_scene("s", seed)
        lowest = float(scene.mesh.vertices_V3[:, 2].min())
        assert estimate_floor(scene.mesh) == pytest.approx(lowest, abs=0.01)


def test_a_rough_scan_with_holes_is_still_walkable() -> None:
    # As a fused iPad scan: small triangles, uneven by a centimetre, one in eight missing, no ceiling.
    scene = make_scene("s", 4, SceneOptions(has_ceiling=False, tile_m=0.1, max_rooms=1))
    rng = np.random.default_rng(0)
    corners = scene.mesh.corners_F33() + rng.normal(0, 0.01, (len(scene.mesh.faces_F3), 3, 3))
    colors = scene.mesh.colors_V3[scene.mesh.faces_F3]
    kept = rng.random(len(corners)) > 0.125
    count = int(kept.sum())
    mesh = Mesh(
        vertices_V3=corners[kept].reshape(-1, 3).astype(np.float32),
        faces_F3=np.arange(3 * count, dtype=np.int32).reshape(-1, 3),
        colors_V3=colors[kept].reshape(-1, 3),
    )
    rough = msgspec.structs.replace(scene, mesh=mesh, floor_z=estimate_floor(mesh))
    assert rough.floor_z == pytest.approx(scene.floor_z, abs=0.02)
    free, rough_free = build_grid(scene, Agent()).is_free_IJ, build_grid(rough, Agent()).is_free_IJ
    assert rough_free.sum() > 0.8 * free.sum()
