"""The words of the navigation world: meshes, annotated objects, scenes and poses.

Units are metres, the world is right-handed with +Z up, as ARKitScenes publishes it. A pose's yaw is measured from +X
towards +Y, so that a positive rotation turns left.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from turnwise.errors import SceneError

# Dimensions: V vertices, F faces, N points.
Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Bools: TypeAlias = npt.NDArray[np.bool_]

CLASSES = (
    "cabinet", "refrigerator", "shelf", "stove", "bed", "sink", "washer", "toilet", "bathtub", "oven", "dishwasher",
    "fireplace", "stool", "chair", "table", "tv_monitor", "sofa",
)  # fmt: skip
"""The 17 labels of ARKitScenes' 3-D boxes."""


class Mesh(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Triangles with a colour per vertex."""

    vertices_V3: Floats
    faces_F3: Ints
    colors_V3: Bytes

    def __post_init__(self) -> None:
        vertices, faces, colors = self.vertices_V3, self.faces_F3, self.colors_V3
        if len(vertices) == 0 or len(faces) == 0:
            raise SceneError(
                f"a mesh has {len(vertices)} vertices and {len(faces)} faces; a scene needs a triangle mesh, not points"
            )
        if colors.shape != vertices.shape:
            raise SceneError(
                f"a mesh has {len(vertices)} vertices but {len(colors)} colours; it needs one each"
            )
        if not np.isfinite(vertices).all():
            bad = int(np.flatnonzero(~np.isfinite(vertices).all(axis=1))[0])
            raise SceneError(
                f"vertex {bad} of the mesh is {vertices[bad].tolist()}; remove vertices that are not finite"
            )
        if faces.min() < 0 or faces.max() >= len(vertices):
            raise SceneError(
                f"faces name vertices {int(faces.min())} to {int(faces.max())} of {len(vertices)}; the mesh is damaged"
            )

    def corners_F33(self) -> Floats:
        """The three corners of each triangle."""
        return self.vertices_V3[self.faces_F3]


class SceneObject(msgspec.Struct, frozen=True, kw_only=True):
    """An annotated object: a label and an oriented box."""

    uid: str
    label: str
    centroid: tuple[float, float, float]
    size: tuple[float, float, float]
    """Full lengths along the box's own axes."""
    axes: tuple[float, float, float, float, float, float, float, float, float]
    """Row-major 3×3; the rows are the box's axes in the world."""
    color: str | None = None
    """A colour name, where the annotation knows one."""

    @classmethod
    def from_arrays(
        cls,
        uid: str,
        label: str,
        centroid: Doubles,
        size: Doubles,
        axes_33: Doubles,
        *,
        color: str | None = None,
    ) -> SceneObject:
        """The object of these arrays, rounded to a micrometre; the rows of `axes_33` are the box's axes."""
        x, y, z = (round(float(value), 6) for value in centroid)
        a, b, c = (round(float(value), 6) for value in size)
        p, q, r, s, t, u, v, w, o = (round(float(value), 12) + 0.0 for value in axes_33.ravel())
        return cls(
            uid=uid,
            label=label,
            centroid=(x, y, z),
            size=(a, b, c),
            axes=(p, q, r, s, t, u, v, w, o),
            color=color,
        )

    @property
    def name(self) -> str:
        """What a task calls it: `red chair`, `tv monitor`."""
        label = self.label.replace("_", " ")
        return f"{self.color} {label}" if self.color else label

    def corners(self) -> Doubles:
        """The eight corners, [8, 3]; bit 0, 1, 2 of the index choose the side along axis 0, 1, 2."""
        signs = np.array([[(i >> axis & 1) - 0.5 for axis in range(3)] for i in range(8)])
        axes = np.array(self.axes).reshape(3, 3)
        return np.asarray(np.array(self.centroid) + (signs * np.array(self.size)) @ axes)

    def footprint(self) -> Doubles:
        """The corners of the box seen from above, [4, 2], in order around it."""
        axes = np.array(self.axes).reshape(3, 3)
        up = int(np.argmax(np.abs(axes[:, 2])))
        first, second = (axis for axis in range(3) if axis != up)
        across = axes[first, :2] * self.size[first] / 2
        along = axes[second, :2] * self.size[second] / 2
        center = np.array(self.centroid[:2])
        return np.stack(
            [
                center - across - along,
                center + across - along,
                center + across + along,
                center - across + along,
            ]
        )

    def floor_distance(self, points_N2: Doubles) -> Doubles:
        """How far points of the floor are from the box's footprint; 0 inside."""
        corners = self.footprint()
        across, along = corners[1] - corners[0], corners[3] - corners[0]
        # An upright box has perpendicular sides; a leaning one is treated as its two footprint sides.
        lengths = np.maximum([np.linalg.norm(across), np.linalg.norm(along)], 1e-9)
        offsets = points_N2 - corners.mean(axis=0)
        local = np.stack([offsets @ (across / lengths[0]), offsets @ (along / lengths[1])], axis=-1)
        outside = np.maximum(np.abs(local) - lengths / 2, 0.0)
        return np.asarray(np.linalg.norm(outside, axis=-1))


class Scene(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A mesh, what is in it, and where its floor is."""

    scene_id: str
    mesh: Mesh
    objects: tuple[SceneObject, ...]
    floor_z: float
    fold: str = ""
    """Training or Validation, where the source has folds."""
    dataset: str = "arkitscenes"

    def find(self, uid: str) -> SceneObject:
        for item in self.objects:
            if item.uid == uid:
                return item
        raise SceneError(
            f"scene {self.scene_id} has no object {uid!r}; it has {sorted(o.uid for o in self.objects)}"
        )


class Pose(msgspec.Struct, frozen=True, kw_only=True):
    """Where the agent stands and which way it looks."""

    x: float
    y: float
    yaw_degrees: float

    def turned(self, degrees: float) -> Pose:
        """Turned left by `degrees`; the yaw stays within (-180, 180]."""
        return Pose(x=self.x, y=self.y, yaw_degrees=wrap_degrees(self.yaw_degrees + degrees))

    @property
    def heading(self) -> tuple[float, float]:
        return math.cos(math.radians(self.yaw_degrees)), math.sin(math.radians(self.yaw_degrees))

    def bearing_to(self, x: float, y: float) -> float:
        """By how many degrees to turn left to face a point."""
        return wrap_degrees(math.degrees(math.atan2(y - self.y, x - self.x)) - self.yaw_degrees)


def wrap_degrees(degrees: float) -> float:
    """The same angle within (-180, 180]."""
    wrapped = degrees % 360.0
    return wrapped - 360.0 if wrapped > 180.0 else wrapped


def estimate_floor(mesh: Mesh, bin_m: float = 0.05) -> float:
    """Height of the floor: the lowest level that holds a good share of the level surface.

    The origin of a scan is near its first camera position, so the floor is not at z = 0.
    """
    corners = mesh.corners_F33().astype(np.float64)
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    areas = np.linalg.norm(normals, axis=1) / 2
    is_level = np.abs(normals[:, 2]) > 0.9 * 2 * np.maximum(areas, 1e-12)
    if not is_level.any():
        return float(np.percentile(mesh.vertices_V3[:, 2], 1))
    heights, weights = corners[is_level, :, 2].mean(axis=1), areas[is_level]
    start = heights.min()
    levels = np.floor((heights - start) / bin_m).astype(int)
    histogram = np.bincount(levels, weights=weights)
    # A floor may straddle two bins, so neighbours are counted together.
    spread = np.convolve(histogram, [1, 1, 1], mode="same")
    lowest = int(np.flatnonzero(spread >= 0.3 * spread.max())[0])
    near = np.abs(heights - (start + (lowest + 1.0) * bin_m)) <= 1.5 * bin_m
    order = np.argsort(heights[near])
    running = np.cumsum(weights[near][order])
    middle = int(np.searchsorted(running, running[-1] / 2))
    return float(heights[near][order][middle])
