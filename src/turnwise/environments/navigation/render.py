"""Renders scenes by ray casting on the CPU: RGB and planar depth from any pinhole camera.

Cameras follow OpenCV: X right, Y down, Z forward, and pixel (0, 0) has its centre at u = v = 0. Depth is metres along
the optical axis; 0 means that the ray hit nothing, as in ARKitScenes' own depth images. A `RayCaster` holds an Embree
scene, which cannot be pickled: build it inside the process that uses it.
"""

from __future__ import annotations

import math
from functools import lru_cache

import msgspec
import numpy as np

from turnwise.environments.navigation.scenes import Bytes, Doubles, Floats, Ints, Mesh, Pose
from turnwise.errors import SceneError

# Dimensions: P pixels (height × width), F faces.
_BACKGROUND = (176, 186, 198)
_LIGHT = np.array([0.38, 0.25, 0.89])
_BLOCK = 16


class Camera(msgspec.Struct, frozen=True, kw_only=True):
    """A pinhole camera in pixels."""

    width: int
    height: int
    fx: float
    fy: float
    cx: float
    cy: float

    def __post_init__(self) -> None:
        if self.width < 1 or self.height < 1 or not (self.fx > 0 and self.fy > 0):
            raise SceneError(
                f"a camera of {self.width}×{self.height} pixels with focal lengths {self.fx}, {self.fy} sees nothing; "
                "all four must be positive"
            )

    @classmethod
    def with_view(cls, width: int, height: int, fov_degrees: float) -> Camera:
        """A camera with square pixels, its axis in the middle, that sees `fov_degrees` from left to right."""
        if not 0 < fov_degrees < 180:
            raise SceneError(f"a field of view of {fov_degrees} degrees is not between 0 and 180")
        focal = width / 2 / math.tan(math.radians(fov_degrees) / 2)
        return cls(width=width, height=height, fx=focal, fy=focal, cx=(width - 1) / 2, cy=(height - 1) / 2)


class Frame(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a camera saw."""

    pixels: Bytes
    """[height, width, 3]."""
    depth: Floats
    """[height, width], metres along the optical axis; 0 where nothing was hit."""


def camera_to_world(pose: Pose, eye_z: float, pitch_degrees: float = 0.0) -> Doubles:
    """The 4×4 pose of a camera at height `eye_z`; a positive pitch looks up."""
    yaw, pitch = math.radians(pose.yaw_degrees), math.radians(pitch_degrees)
    cos_yaw, sin_yaw, cos_pitch, sin_pitch = math.cos(yaw), math.sin(yaw), math.cos(pitch), math.sin(pitch)
    # Columns: right, down, forward, position.
    return np.array(
        [
            [sin_yaw, sin_pitch * cos_yaw, cos_yaw * cos_pitch, pose.x],
            [-cos_yaw, sin_pitch * sin_yaw, sin_yaw * cos_pitch, pose.y],
            [0.0, -cos_pitch, sin_pitch, eye_z],
            [0.0, 0.0, 0.0, 1.0],
        ]
    )


def project(points_N3: Doubles, camera: Camera, world_from_camera: Doubles) -> Doubles:
    """Pixel u, v and planar depth of world points, [N, 3]; points behind the camera have a negative depth."""
    local = (points_N3 - world_from_camera[:3, 3]) @ world_from_camera[:3, :3]
    depth = local[:, 2]
    safe = np.where(np.abs(depth) < 1e-9, 1e-9, depth)
    return np.stack(
        [local[:, 0] / safe * camera.fx + camera.cx, local[:, 1] / safe * camera.fy + camera.cy, depth],
        axis=1,
    )


class RayCaster:
    """A mesh ready to be looked at."""

    def __init__(self, mesh: Mesh) -> None:
        from embreex.mesh_construction import TriangleMesh
        from embreex.rtcore_scene import EmbreeScene

        self._scene = EmbreeScene(robust=True)
        # Embree reads these arrays for as long as the scene lives.
        self._vertices = np.ascontiguousarray(mesh.vertices_V3, dtype=np.float32)
        self._faces = np.ascontiguousarray(mesh.faces_F3, dtype=np.int32)
        self._geometry = TriangleMesh(self._scene, self._vertices, self._faces)
        self._is_flat, self._colors = _shade(mesh)

    def render(self, camera: Camera, world_from_camera: Doubles) -> Frame:
        """RGB and planar depth from a 4×4 camera-to-world matrix."""
        order, directions_P3 = _camera_rays(camera)
        rotation = world_from_camera[:3, :3].astype(np.float32)
        # The camera's directions have z = 1, so the distance along a ray is the planar depth itself.
        hits = self._cast(world_from_camera[:3, 3].astype(np.float32), directions_P3 @ rotation.T)
        colors_P3 = self._color(hits)
        depth_P = np.where(hits["primID"] < 0, np.float32(0), hits["tfar"])
        pixels = np.empty_like(colors_P3)
        depth = np.empty_like(depth_P)
        pixels[order], depth[order] = colors_P3, depth_P
        shape = (camera.height, camera.width)
        return Frame(pixels=pixels.reshape(*shape, 3), depth=depth.reshape(shape))

    def look_down(self, low: Doubles, high: Doubles, pixel_m: float, from_z: float) -> Bytes:
        """The scene seen straight from above, everything over `from_z` cut away; row 0 is the largest y."""
        xs = np.arange(low[0] + pixel_m / 2, high[0], pixel_m)
        ys = np.arange(low[1] + pixel_m / 2, high[1], pixel_m)[::-1]
        grid_y, grid_x = np.meshgrid(ys, xs, indexing="ij")
        origins_P3 = np.stack([grid_x.ravel(), grid_y.ravel(), np.full(grid_x.size, from_z)], axis=1).astype(
            np.float32
        )
        hits = self._scene.run(origins_P3, np.array([[0, 0, -1]], dtype=np.float32), output=True)
        return self._color(hits).reshape(len(ys), len(xs), 3)

    def hit_distance(self, origin: Doubles, direction: Doubles) -> float | None:
        """How far a ray goes before it meets the mesh, in lengths of `direction`; None when it never does."""
        hits = self._cast(origin.astype(np.float32), direction.astype(np.float32)[None])
        return None if hits["primID"][0] < 0 else float(hits["tfar"][0])

    def _color(self, hits: dict[str, Floats]) -> Bytes:
        # The last row is the background, which is what a miss's -1 picks.
        parts = self._colors[hits["primID"]]
        if self._is_flat:
            return np.asarray(parts, dtype=np.uint8)
        mixed = parts[:, 0] + hits["u"][:, None] * parts[:, 1] + hits["v"][:, None] * parts[:, 2]
        return np.asarray(mixed, dtype=np.uint8)

    def _cast(self, origin: Floats, directions_P3: Floats) -> dict[str, Floats]:
        origins_P3 = np.empty_like(directions_P3)
        origins_P3[:] = origin
        hits: dict[str, Floats] = self._scene.run(origins_P3, directions_P3, output=True)
        return hits


@lru_cache(maxsize=16)
def _camera_rays(camera: Camera) -> tuple[Ints, Floats]:
    """Which pixel each ray belongs to, and its direction with z = 1.

    Rays go block by block, because neighbours that follow each other find the same triangles in the cache.
    """
    rows, columns = np.mgrid[0 : camera.height, 0 : camera.width]
    keys = (rows // _BLOCK) * (camera.width // _BLOCK + 1) + columns // _BLOCK
    order = np.argsort(keys.ravel(), kind="stable").astype(np.int32)
    x = (columns.ravel()[order] - camera.cx) / camera.fx
    y = (rows.ravel()[order] - camera.cy) / camera.fy
    return order, np.stack([x, y, np.ones_like(x)], axis=1).astype(np.float32)


def _shade(mesh: Mesh) -> tuple[bool, Bytes | Floats]:
    """Colours with the light already on them, per face, and whether every face has just one.

    Flat meshes give uint8 [F + 1, 3]; others float32 [F + 1, 3, 3]: the first corner's colour and what the second and
    third add to it. The last row is the background.
    """
    corners = mesh.corners_F33()
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
    # Both sides of a face look the same: scans are not always wound outwards.
    toward_light = np.abs(normals @ _LIGHT)
    tilt = np.abs(normals @ np.array([0.86, -0.5, 0.0]))
    light = np.minimum(0.62 + 0.34 * toward_light + 0.12 * tilt, 1.0)
    colors = mesh.colors_V3[mesh.faces_F3].astype(np.float32) * light[:, None, None].astype(np.float32)
    if (mesh.colors_V3[mesh.faces_F3] == mesh.colors_V3[mesh.faces_F3[:, :1]]).all():
        flat = np.concatenate([colors[:, 0], [_BACKGROUND]])
        return True, flat.astype(np.uint8)
    parts = np.stack([colors[:, 0], colors[:, 1] - colors[:, 0], colors[:, 2] - colors[:, 0]], axis=1)
    background = np.array([[_BACKGROUND, (0, 0, 0), (0, 0, 0)]], dtype=np.float32)
    return False, np.concatenate([parts, background])
