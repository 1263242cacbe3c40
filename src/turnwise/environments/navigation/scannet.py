"""Reads ScanNet and ScanNet++ scenes: their meshes are PLYs too, their objects come as segments or boxes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from turnwise.environments.navigation.arkitscenes import read_box, read_json
from turnwise.environments.navigation.ply import read_ply
from turnwise.environments.navigation.scenes import Mesh, Scene, SceneObject, estimate_floor
from turnwise.errors import SceneError


def load_scannet(folder: Path) -> Scene:
    """A ScanNet scene: `<scene>_vh_clean_2.ply`, `.aggregation.json` and `.segs.json`; boxes are axis-aligned."""
    scene_id = folder.name
    mesh = read_ply(folder / f"{scene_id}_vh_clean_2.ply")
    candidates = [folder / f"{scene_id}_vh_clean.aggregation.json", folder / f"{scene_id}.aggregation.json"]
    groups = next((path for path in candidates if path.is_file()), candidates[-1])
    segments = folder / f"{scene_id}_vh_clean_2.0.010000.segs.json"
    return Scene(
        scene_id=scene_id, mesh=mesh, objects=_boxes_of_segments(mesh, groups, segments), floor_z=estimate_floor(mesh),
        dataset="scannet",
    )  # fmt: skip


def load_scannetpp(folder: Path) -> Scene:
    """A ScanNet++ scene: `scans/mesh_aligned_0.05.ply` and `scans/segments_anno.json`."""
    mesh = read_ply(folder / "scans" / "mesh_aligned_0.05.ply")
    path = folder / "scans" / "segments_anno.json"
    groups = read_json(path).get("segGroups")
    if not isinstance(groups, list):
        raise SceneError(f"{path} has no list `segGroups`; is it the annotation of a ScanNet++ scene?")
    objects = []
    for index, group in enumerate(groups):
        try:
            objects.append(read_box(group["obb"], str(group.get("id", index)), str(group["label"])))
        except (KeyError, TypeError, ValueError) as error:
            raise SceneError(f"{path}: object {index} cannot be read: {error!r}") from None
    return Scene(
        scene_id=folder.name,
        mesh=mesh,
        objects=tuple(objects),
        floor_z=estimate_floor(mesh),
        dataset="scannetpp",
    )


def _boxes_of_segments(mesh: Mesh, groups_path: Path, segments_path: Path) -> tuple[SceneObject, ...]:
    groups, segments = read_json(groups_path), read_json(segments_path)
    segment_of_vertex = np.array(segments.get("segIndices", ()), dtype=np.int64)
    if len(segment_of_vertex) != len(mesh.vertices_V3):
        raise SceneError(
            f"{segments_path} names {len(segment_of_vertex)} vertices but the mesh has {len(mesh.vertices_V3)}; "
            "they belong to different meshes"
        )
    objects = []
    for index, group in enumerate(groups.get("segGroups", ())):
        points = mesh.vertices_V3[np.isin(segment_of_vertex, group.get("segments", ()))].astype(np.float64)
        if len(points) == 0:
            raise SceneError(
                f"{groups_path}: object {index} ({group.get('label')!r}) has no vertices in the mesh"
            )
        low, high = points.min(axis=0), points.max(axis=0)
        uid = str(group.get("id", index))
        objects.append(
            SceneObject.from_arrays(uid, str(group["label"]), (low + high) / 2, high - low, np.eye(3))
        )
    return tuple(objects)
