"""Where an agent can stand: a grid over the floor, read off the mesh, and moves that stop at what is in the way."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from scipy import ndimage

from turnwise.environments.navigation.scenes import Bools, Doubles, Floats, Ints, Mesh, Pose, Scene
from turnwise.errors import SceneError

# Dimensions: I cells along x, J cells along y, N points.


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    """The body that moves through a scene."""

    height_m: float = 1.5
    radius_m: float = 0.2
    step_height_m: float = 0.1
    """What is lower can be stepped on."""
    camera_height_m: float = 1.2
    """Above the floor."""


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step forward ended."""

    x: float
    y: float
    travelled_m: float
    is_blocked: bool


class OccupancyGrid:
    """Cells of the floor, free where the whole agent fits; cell (i, j) covers `low + (i, j) * cell_m`."""

    def __init__(
        self,
        low: tuple[float, float],
        cell_m: float,
        is_obstacle_IJ: Bools,
        is_floor_IJ: Bools,
        radius_m: float,
    ) -> None:
        self.low = np.array(low)
        self.cell_m = cell_m
        self.is_obstacle_IJ = is_obstacle_IJ
        self.is_floor_IJ = is_floor_IJ
        blocked = is_obstacle_IJ | ~is_floor_IJ
        padded = np.pad(blocked, 1, constant_values=True)
        self.clearance_IJ: Floats = (
            ndimage.distance_transform_edt(~padded)[1:-1, 1:-1].astype(np.float32) * cell_m
        )
        # The distance is between centres; half a cell more keeps the body clear of the obstacle's edge.
        self.is_free_IJ: Bools = self.clearance_IJ > radius_m + cell_m / 2
        self.is_free_IJ = _largest_regions(self.is_free_IJ)

    @property
    def shape(self) -> tuple[int, int]:
        return self.is_free_IJ.shape[0], self.is_free_IJ.shape[1]

    def cell(self, x: float, y: float) -> tuple[int, int]:
        return math.floor((x - self.low[0]) / self.cell_m), math.floor((y - self.low[1]) / self.cell_m)

    def center(self, i: int, j: int) -> tuple[float, float]:
        return float(self.low[0] + (i + 0.5) * self.cell_m), float(self.low[1] + (j + 0.5) * self.cell_m)

    def centers_IJ2(self) -> Doubles:
        i, j = np.mgrid[0 : self.shape[0], 0 : self.shape[1]]
        return np.stack(
            [self.low[0] + (i + 0.5) * self.cell_m, self.low[1] + (j + 0.5) * self.cell_m], axis=-1
        )

    def is_free(self, x: float, y: float) -> bool:
        i, j = self.cell(x, y)
        return 0 <= i < self.shape[0] and 0 <= j < self.shape[1] and bool(self.is_free_IJ[i, j])

    def are_free(self, points_N2: Doubles) -> Bools:
        """For each point, whether the agent can stand there."""
        cells = np.floor((points_N2 - self.low) / self.cell_m).astype(int)
        inside = ((cells >= 0) & (cells < self.shape)).all(axis=-1)
        clipped = np.clip(cells, 0, np.array(self.shape) - 1)
        return np.asarray(inside & self.is_free_IJ[clipped[..., 0], clipped[..., 1]])

    def random_pose(self, rng: np.random.Generator, among_IJ: Bools | None = None) -> Pose:
        """A pose where the agent fits, anywhere or among the given cells."""
        choices = np.argwhere(self.is_free_IJ if among_IJ is None else self.is_free_IJ & among_IJ)
        if len(choices) == 0:
            raise SceneError(
                "there is no free floor for the agent; check the floor height and the agent's radius"
            )
        i, j = choices[int(rng.integers(len(choices)))]
        x, y = self.center(int(i), int(j))
        return Pose(x=round(x, 4), y=round(y, 4), yaw_degrees=float(rng.integers(24)) * 15.0 - 165.0)

    def move(self, pose: Pose, forward_m: float, *, slide: bool = False) -> Move:
        """Walk straight ahead until something is in the way; with `slide`, go on along the wall."""
        cosine, sine = pose.heading
        steps = max(1, math.ceil(forward_m / (self.cell_m / 2)))
        x, y, stride = pose.x, pose.y, forward_m / steps
        travelled, is_blocked = 0.0, False
        for _ in range(steps if forward_m > 0 else 0):
            ways = [(cosine * stride, sine * stride)]
            if slide:
                ways += sorted(
                    [(cosine * stride, 0.0), (0.0, sine * stride)], key=lambda way: -math.hypot(*way)
                )
            step = next((way for way in ways if self.is_free(x + way[0], y + way[1])), None)
            is_blocked = is_blocked or step != ways[0]
            if step is None:
                break
            x, y, travelled = x + step[0], y + step[1], travelled + math.hypot(*step)
        return Move(x=x, y=y, travelled_m=travelled, is_blocked=is_blocked)

    def sees(self, start: tuple[float, float], end: tuple[float, float]) -> bool:
        """Whether the agent could walk straight from one point to the other."""
        count = max(2, math.ceil(math.dist(start, end) / (self.cell_m / 2)) + 1)
        line = np.array(start) + np.linspace(0.0, 1.0, count)[:, None] * (np.array(end) - np.array(start))
        return bool(self.are_free(line).all())


def build_grid(scene: Scene, agent: Agent, cell_m: float = 0.05) -> OccupancyGrid:
    """The grid of a scene: floor near its height, obstacles between step height and the agent's height."""
    points_N3 = sample_surface(scene.mesh, 0.8 * cell_m, scene.floor_z + agent.height_m)
    heights = points_N3[:, 2] - scene.floor_z
    low = np.floor(points_N3[:, :2].min(axis=0) / cell_m) * cell_m - 2 * cell_m
    shape = np.ceil((points_N3[:, :2].max(axis=0) - low) / cell_m).astype(int) + 3
    if shape.prod() > 25_000_000:
        raise SceneError(
            f"scene {scene.scene_id} spans {shape * cell_m} m; is it in metres? The grid would need {shape.prod()} cells"
        )
    cells = np.floor((points_N3[:, :2] - low) / cell_m).astype(np.int64)
    flat = cells[:, 0] * shape[1] + cells[:, 1]
    is_floor_level = np.abs(heights) <= agent.step_height_m
    is_in_the_way = (heights > agent.step_height_m) & (heights < agent.height_m)
    floor = np.bincount(flat[is_floor_level], minlength=shape.prod()).reshape(shape) > 0
    # Scans have holes in the floor; gaps of up to 0.3 m are taken for floor, larger ones are left out.
    reach = max(1, round(0.15 / cell_m))
    floor = ndimage.binary_closing(np.pad(floor, reach), iterations=reach)[reach:-reach, reach:-reach] | floor
    obstacle = np.bincount(flat[is_in_the_way], minlength=shape.prod()).reshape(shape) > 0
    grid = OccupancyGrid((float(low[0]), float(low[1])), cell_m, obstacle, floor, agent.radius_m)
    if not grid.is_free_IJ.any():
        raise SceneError(
            f"scene {scene.scene_id} has no floor the agent fits on (floor at z = {scene.floor_z:.2f}); "
            "check the mesh, or give a smaller agent radius"
        )
    return grid


def _largest_regions(is_free_IJ: Bools, min_share: float = 0.05) -> Bools:
    """Without the pockets of free floor that nobody can walk into, such as the space under a table."""
    labels, count = ndimage.label(is_free_IJ, structure=np.ones((3, 3)))
    if count <= 1:
        return is_free_IJ
    sizes = np.bincount(labels.ravel())[1:]
    keep = np.flatnonzero(sizes >= min_share * sizes.max()) + 1
    return np.asarray(np.isin(labels, keep))


def sample_surface(mesh: Mesh, spacing_m: float, max_z: float) -> Floats:
    """Points on the mesh at most `spacing_m` apart along two sides of each face, of the faces that reach below `max_z`."""
    corners = mesh.corners_F33()
    corners = corners[corners[:, :, 2].min(axis=1) < max_z]
    lengths = np.stack(
        [np.linalg.norm(corners[:, (k + 2) % 3] - corners[:, (k + 1) % 3], axis=1) for k in range(3)], axis=1
    )
    # The corner opposite the longest side comes first, so that both sampled sides are short.
    first = np.argmax(lengths, axis=1)
    rows = np.arange(len(corners))
    a, b, c = (corners[rows, (first + k) % 3] for k in range(3))
    counts = np.stack([_round_up(np.linalg.norm(side - a, axis=1) / spacing_m) for side in (b, c)], axis=1)
    sizes, group = np.unique(counts, axis=0, return_inverse=True)
    clouds = [np.zeros((0, 3), dtype=np.float32)]
    for index, (m, n) in enumerate(sizes.tolist()):
        i, j = (part.ravel() for part in np.mgrid[0 : m + 1, 0 : n + 1])
        inside = i * n + j * m <= m * n
        weights = np.stack([i[inside] / m, j[inside] / n], axis=1).astype(np.float32)
        chosen = np.flatnonzero(group.ravel() == index)
        sides = np.stack([b[chosen] - a[chosen], c[chosen] - a[chosen]], axis=1)
        clouds.append((a[chosen][:, None] + weights @ sides).reshape(-1, 3))
    points = np.concatenate(clouds)
    return points[points[:, 2] < max_z]


_SIZES = np.array(
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192]
)


def _round_up(counts: Floats) -> Ints:
    # Few sizes, because faces of one size are sampled in one vectorised step.
    return np.asarray(
        _SIZES[np.minimum(np.searchsorted(_SIZES, np.ceil(counts)), len(_SIZES) - 1)], dtype=np.int32
    )
