"""Reads and writes captures in the published layout of ARKitScenes (3dod): mesh, boxes, camera path and intrinsics.

<fold>/<id>/<id>_3dod_mesh.ply
<fold>/<id>/<id>_3dod_annotation.json
<fold>/<id>/<id>_frames/lowres_wide.traj
<fold>/<id>/<id>_frames/{lowres_wide,lowres_depth,lowres_wide_intrinsics}/<id>_<timestamp>.{png,png,pincam}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.spatial.transform import Rotation

from turnwise.environments.navigation.ply import read_ply, write_ply
from turnwise.environments.navigation.render import Camera, Frame
from turnwise.environments.navigation.scenes import CLASSES, Doubles, Scene, SceneObject, estimate_floor
from turnwise.errors import SceneError


class CameraPose(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One line of a camera path."""

    timestamp: float
    world_from_camera: Doubles
    """4×4."""


class CapturedFrame(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A frame of a capture, to be written."""

    timestamp: float
    camera: Camera
    world_from_camera: Doubles
    frame: Frame


def load_capture(folder: Path, *, fold: str = "", strict_classes: bool = True) -> Scene:
    """The scene of one capture folder; the floor is estimated from the mesh."""
    scene_id = folder.name
    mesh = read_ply(folder / f"{scene_id}_3dod_mesh.ply")
    objects = read_annotation(folder / f"{scene_id}_3dod_annotation.json", strict_classes=strict_classes)
    return Scene(
        scene_id=scene_id,
        mesh=mesh,
        objects=objects,
        floor_z=estimate_floor(mesh),
        fold=fold,
        dataset="arkitscenes",
    )


def write_capture(scene: Scene, root: Path, *, frames: Sequence[CapturedFrame] = ()) -> Path:
    """Write a scene under `root/<fold>/<id>`; the same scene gives the same bytes."""
    folder = root / (scene.fold or "Training") / scene.scene_id
    folder.mkdir(parents=True, exist_ok=True)
    write_ply(folder / f"{scene.scene_id}_3dod_mesh.ply", scene.mesh)
    write_annotation(folder / f"{scene.scene_id}_3dod_annotation.json", scene.objects)
    if frames:
        _write_frames(folder / f"{scene.scene_id}_frames", scene.scene_id, frames)
    return folder


def read_annotation(path: Path, *, strict_classes: bool = True) -> tuple[SceneObject, ...]:
    """The boxes of an annotation file; an unknown class is an error unless `strict_classes` is off."""
    items = read_json(path).get("data")
    if not isinstance(items, list):
        raise SceneError(f"annotation {path} has no list `data`; is it a *_3dod_annotation.json?")
    objects = []
    for index, item in enumerate(items):
        try:
            label = str(item["label"])
            box = read_box(item["segments"]["obbAligned"], str(item.get("uid") or f"object-{index}"), label)
        except (KeyError, TypeError, ValueError) as error:
            raise SceneError(f"annotation {path}: object {index} cannot be read: {error!r}") from None
        if strict_classes and label not in CLASSES:
            raise SceneError(
                f"annotation {path}: object {index} has the unknown class {label!r}; known: {', '.join(CLASSES)} "
                "(strict_classes: false accepts any)"
            )
        color = (item.get("attributes") or {}).get("color")
        objects.append(msgspec.structs.replace(box, color=color if isinstance(color, str) else None))
    return tuple(objects)


def read_box(box: Mapping[str, Any], uid: str, label: str) -> SceneObject:
    """An oriented box as ARKitScenes and ScanNet++ write it; the rows of `normalizedAxes` are the box's axes."""
    centroid, size = (
        np.array(box["centroid"], dtype=np.float64),
        np.array(box["axesLengths"], dtype=np.float64),
    )
    axes = np.array(box["normalizedAxes"], dtype=np.float64)
    if centroid.shape != (3,) or size.shape != (3,) or axes.shape != (9,):
        raise ValueError(f"centroid, axesLengths and normalizedAxes need 3, 3 and 9 numbers, got {box!r}")
    if not (np.isfinite(centroid).all() and np.isfinite(size).all() and np.isfinite(axes).all()):
        raise ValueError(f"the box holds numbers that are not finite: {box!r}")
    return SceneObject.from_arrays(uid, label, centroid, size, axes.reshape(3, 3))


def write_annotation(path: Path, objects: Sequence[SceneObject]) -> None:
    """The inverse of `read_annotation`."""
    items = []
    for item in objects:
        box = {
            "centroid": list(item.centroid),
            "axesLengths": list(item.size),
            "normalizedAxes": list(item.axes),
        }
        attributes = {} if item.color is None else {"color": item.color}
        items.append(
            {
                "uid": item.uid,
                "label": item.label,
                "attributes": attributes,
                "segments": {"obb": box, "obbAligned": box},
            }
        )
    text = json.dumps({"data": items, "skipped": False}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def read_traj(path: Path) -> tuple[CameraPose, ...]:
    """A camera path; the file holds world→camera transforms, the result camera→world poses."""
    poses = []
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values = [float(word) for word in line.split()]
        except ValueError:
            values = []
        if len(values) != 7 or not all(math.isfinite(value) for value in values):
            raise SceneError(
                f"{path}, line {number}: {line.strip()[:80]!r} is not `timestamp rx ry rz tx ty tz` with seven finite numbers"
            )
        camera_from_world = np.eye(4)
        camera_from_world[:3, :3] = Rotation.from_rotvec(values[1:4]).as_matrix()
        camera_from_world[:3, 3] = values[4:7]
        poses.append(CameraPose(timestamp=values[0], world_from_camera=_invert(camera_from_world)))
    return tuple(poses)


def write_traj(path: Path, poses: Sequence[CameraPose]) -> None:
    """The inverse of `read_traj`, to a tenth of a micrometre."""
    lines = []
    for pose in poses:
        camera_from_world = _invert(pose.world_from_camera)
        turn = Rotation.from_matrix(camera_from_world[:3, :3]).as_rotvec()
        numbers = " ".join(f"{value + 0.0:.9f}" for value in (*turn, *camera_from_world[:3, 3]))
        lines.append(f"{pose.timestamp:.5f} {numbers}\n")
    path.write_text("".join(lines), encoding="utf-8")


def read_pincam(path: Path) -> Camera:
    """The intrinsics in a `.pincam` file: `w h fx fy cx cy`."""
    text = _read_text(path)
    try:
        width, height, fx, fy, cx, cy = (float(word) for word in text.split())
    except ValueError:
        raise SceneError(f"{path}: {text.strip()[:80]!r} is not `w h fx fy cx cy`") from None
    return Camera(width=round(width), height=round(height), fx=fx, fy=fy, cx=cx, cy=cy)


def write_pincam(path: Path, camera: Camera) -> None:
    """The inverse of `read_pincam`."""
    numbers = " ".join(repr(value) for value in (camera.fx, camera.fy, camera.cx, camera.cy))
    path.write_text(f"{camera.width} {camera.height} {numbers}\n", encoding="utf-8")


def find_pincam(folder: Path, scene_id: str, timestamp: float) -> Path:
    """The intrinsics of a frame; their names may differ from the frame's by a millisecond."""
    for shift in (0, 1, -1):
        path = folder / f"{scene_id}_{timestamp + shift / 1000:.3f}.pincam"
        if path.is_file():
            return path
    raise SceneError(
        f"{folder} has no intrinsics for {scene_id} at {timestamp:.3f} s, nor a millisecond around it"
    )


def _write_frames(folder: Path, scene_id: str, frames: Sequence[CapturedFrame]) -> None:
    import PIL.Image

    for name in ("lowres_wide", "lowres_depth", "lowres_wide_intrinsics"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for item in frames:
        stem = f"{scene_id}_{item.timestamp:.3f}"
        PIL.Image.fromarray(item.frame.pixels).save(folder / "lowres_wide" / f"{stem}.png")
        millimetres = np.round(item.frame.depth * 1000).clip(0, 65535).astype(np.uint16)
        PIL.Image.fromarray(millimetres).save(folder / "lowres_depth" / f"{stem}.png")
        write_pincam(folder / "lowres_wide_intrinsics" / f"{stem}.pincam", item.camera)
    poses = [
        CameraPose(timestamp=item.timestamp, world_from_camera=item.world_from_camera) for item in frames
    ]
    write_traj(folder / "lowres_wide.traj", poses)


def _invert(matrix: Doubles) -> Doubles:
    inverse = np.eye(4)
    inverse[:3, :3] = matrix[:3, :3].T
    inverse[:3, 3] = -matrix[:3, :3].T @ matrix[:3, 3]
    return inverse


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SceneError(f"{path} does not exist; is the capture complete?") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SceneError(f"{path} cannot be read: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; anything else is a `SceneError` that names the file."""
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise SceneError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise SceneError(f"{path} holds a {type(value).__name__}; it needs an object")
    return value
