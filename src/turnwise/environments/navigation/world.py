"""A scene one can act in: mesh ready to render, floor ready to walk on, distances ready to look up."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from turnwise.environment import Split
from turnwise.environments.navigation.geodesic import DistanceField, distance_field, floor_graph
from turnwise.environments.navigation.occupancy import Agent, build_grid, sample_surface
from turnwise.environments.navigation.render import Camera, Frame, RayCaster, camera_to_world, project
from turnwise.environments.navigation.scenes import Bools, Doubles, Pose, Scene, SceneObject

_KeyT = TypeVar("_KeyT")
_ValueT = TypeVar("_ValueT")


class SceneSource(Protocol):
    """Where scenes come from; the splits share none."""

    def scene_ids(self, split: Split) -> tuple[str, ...]: ...

    def load(self, scene_id: str) -> Scene: ...


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """How an object lies to an agent, and whether the agent's camera sees it."""

    is_visible: bool
    bearing_degrees: float
    """To its middle, positive to the left."""
    distance_m: float
    """To its nearest side over the floor."""


class World:
    """One scene with everything that is computed from it once."""

    def __init__(self, scene: Scene, agent: Agent, cell_m: float = 0.05) -> None:
        self.scene = scene
        self.agent = agent
        self.grid = build_grid(scene, agent, cell_m)
        self._fields: LruCache[tuple[str, float], DistanceField] = LruCache(64)

    @cached_property
    def caster(self) -> RayCaster:
        return RayCaster(self.scene.mesh)

    @cached_property
    def is_wall_IJ(self) -> Bools:
        """Cells with something at door height: walls, hardly ever furniture."""
        points = sample_surface(self.scene.mesh, 0.8 * self.grid.cell_m, self.scene.floor_z + 2.0)
        points = points[points[:, 2] > self.scene.floor_z + 1.85]
        cells = np.floor((points[:, :2] - self.grid.low) / self.grid.cell_m).astype(int)
        cells = cells[((cells >= 0) & (cells < self.grid.shape)).all(axis=1)]
        walls = np.zeros(self.grid.shape, dtype=bool)
        walls[cells[:, 0], cells[:, 1]] = True
        return walls

    @cached_property
    def _graph(self) -> Any:  # scipy's sparse matrices are untyped
        return floor_graph(self.grid)

    def render(self, pose: Pose, camera: Camera, pitch_degrees: float = 0.0) -> Frame:
        return self.caster.render(camera, self.camera_matrix(pose, pitch_degrees))

    def camera_matrix(self, pose: Pose, pitch_degrees: float = 0.0) -> Doubles:
        return camera_to_world(pose, self.scene.floor_z + self.agent.camera_height_m, pitch_degrees)

    def goal_field(self, uid: str, radius_m: float) -> DistanceField:
        """Distances to where the agent stands within `radius_m` of an object, with nothing but the object between."""
        return self._fields.get(
            (uid, radius_m), lambda: distance_field(self.grid, self._graph, self.goal_cells(uid, radius_m))
        )

    def point_field(self, x: float, y: float, radius_m: float) -> DistanceField:
        """Distances to a place on the floor."""
        near = np.linalg.norm(self.grid.centers_IJ2() - [x, y], axis=-1) <= radius_m
        return distance_field(self.grid, self._graph, near)

    def goal_cells(self, uid: str, radius_m: float) -> Bools:
        item = self.scene.find(uid)
        centers = self.grid.centers_IJ2()
        distance_IJ = item.floor_distance(centers.reshape(-1, 2)).reshape(self.grid.shape)
        near = np.argwhere((distance_IJ <= radius_m) & self.grid.is_free_IJ)
        # What stands between: obstacles other than the object itself, which reaches one cell beyond its box.
        is_between = self.grid.is_obstacle_IJ & (distance_IJ > 1.5 * self.grid.cell_m)
        points = centers[near[:, 0], near[:, 1]]
        targets = _nearest_in_footprint(item, points)
        shares = np.linspace(0.0, 1.0, max(2, int(np.ceil(radius_m / self.grid.cell_m)) * 2))
        lines = points[:, None] + shares[None, :, None] * (targets - points)[:, None]
        cells = np.floor((lines - self.grid.low) / self.grid.cell_m).astype(int)
        cells = np.clip(cells, 0, np.array(self.grid.shape) - 1)
        is_clear = ~is_between[cells[..., 0], cells[..., 1]].any(axis=1)
        goal = np.zeros(self.grid.shape, dtype=bool)
        goal[near[is_clear, 0], near[is_clear, 1]] = True
        return goal

    def sight(self, pose: Pose, item: SceneObject, camera: Camera, pitch_degrees: float = 0.0) -> Sighting:
        """Whether any of a few points of the object is in the picture with nothing in front of it."""
        matrix = self.camera_matrix(pose, pitch_degrees)
        center = np.array(item.centroid)
        corners = item.corners()
        sides = center + (corners[[1, 2, 4, 6, 5, 3]] + corners[[7, 7, 7, 0, 0, 0]] - 2 * center) / 2 * 0.9
        points = np.concatenate([center[None], center + (corners - center) * 0.8, sides])
        pixels = project(points, camera, matrix)
        in_picture = (pixels[:, 2] > 0.05) & (np.abs(pixels[:, 0] - camera.cx) < camera.width / 2)
        in_picture &= np.abs(pixels[:, 1] - camera.cy) < camera.height / 2
        eye = matrix[:3, 3]
        is_visible = any(self._reaches(eye, point, item) for point in points[in_picture])
        distance = float(item.floor_distance(np.array([[pose.x, pose.y]]))[0])
        bearing = pose.bearing_to(item.centroid[0], item.centroid[1])
        return Sighting(is_visible=is_visible, bearing_degrees=bearing, distance_m=distance)

    def _reaches(self, eye: Doubles, point: Doubles, item: SceneObject) -> bool:
        """The ray from the eye meets the object before anything else, or nothing at all before the point."""
        along = self.caster.hit_distance(eye, point - eye)
        if along is None or along >= 1.0:
            return True
        axes = np.array(item.axes).reshape(3, 3)
        hit = axes @ (eye + along * (point - eye) - np.array(item.centroid))
        return bool((np.abs(hit) <= np.array(item.size) / 2 + 0.03).all())


def _nearest_in_footprint(item: SceneObject, points_N2: Doubles) -> Doubles:
    corners = item.footprint()
    across, along = corners[1] - corners[0], corners[3] - corners[0]
    lengths = np.maximum([np.linalg.norm(across), np.linalg.norm(along)], 1e-9)
    basis = np.stack([across / lengths[0], along / lengths[1]])
    middle = corners.mean(axis=0)
    local = np.clip((points_N2 - middle) @ basis.T, -lengths / 2, lengths / 2)
    return np.asarray(middle + local @ basis)


class LruCache(Generic[_KeyT, _ValueT]):
    """The values used last, built on demand; one thread builds at a time."""

    def __init__(self, max_items: int) -> None:
        self._items: OrderedDict[_KeyT, _ValueT] = OrderedDict()
        self._max_items = max_items
        self._lock = threading.RLock()

    def get(self, key: _KeyT, build: Callable[[], _ValueT]) -> _ValueT:
        with self._lock:
            if key not in self._items:
                self._items[key] = build()
                while len(self._items) > self._max_items:
                    self._items.popitem(last=False)
            self._items.move_to_end(key)
            return self._items[key]


class WorldCache:
    """Worlds by scene id, built when first asked for; shared by the environments of one process."""

    def __init__(
        self, source: SceneSource, agent: Agent, *, cell_m: float = 0.05, max_scenes: int = 64
    ) -> None:
        self.source = source
        self.agent = agent
        self.cell_m = cell_m
        self.max_scenes = max_scenes
        self._worlds: LruCache[str, World] = LruCache(max_scenes)

    def get(self, scene_id: str) -> World:
        return self._worlds.get(scene_id, lambda: self._build(scene_id))

    def _build(self, scene_id: str) -> World:
        world = World(self.source.load(scene_id), self.agent, self.cell_m)
        # Built here, under the cache's lock: the threads of a group all want it at once.
        _ = world.caster
        return world

    def __reduce__(self) -> tuple[Any, ...]:
        # An Embree scene cannot be pickled: each process builds its own worlds.
        return _build_cache, (self.source, self.agent, self.cell_m, self.max_scenes)


def _build_cache(source: SceneSource, agent: Agent, cell_m: float, max_scenes: int) -> WorldCache:
    return WorldCache(source, agent, cell_m=cell_m, max_scenes=max_scenes)
