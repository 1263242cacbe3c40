"""Reads and writes PLY meshes with vertex colours: ASCII and binary in, binary little-endian out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from turnwise.environments.navigation.scenes import Bytes, Ints, Mesh
from turnwise.errors import SceneError

_TYPES = {
    "char": "i1", "int8": "i1", "uchar": "u1", "uint8": "u1", "short": "i2", "int16": "i2", "ushort": "u2",
    "uint16": "u2", "int": "i4", "int32": "i4", "uint": "u4", "uint32": "u4", "float": "f4", "float32": "f4",
    "double": "f8", "float64": "f8",
}  # fmt: skip
_ORDERS = {"binary_little_endian": "<", "binary_big_endian": ">", "ascii": "="}


class _Property(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: str
    count_kind: str | None = None
    """Set for lists: the type of their length."""


class _Element(msgspec.Struct, kw_only=True):
    name: str
    count: int
    properties: list[_Property]


def write_ply(path: Path, mesh: Mesh) -> None:
    """Write the mesh as ARKitScenes does: float positions, uchar colours, int triangles."""
    header = (
        "ply\nformat binary_little_endian 1.0\n"
        f"element vertex {len(mesh.vertices_V3)}\n"
        "property float x\nproperty float y\nproperty float z\n"
        "property uchar red\nproperty uchar green\nproperty uchar blue\n"
        f"element face {len(mesh.faces_F3)}\n"
        "property list uchar int vertex_indices\nend_header\n"
    )
    vertices = np.empty(len(mesh.vertices_V3), dtype=[("position", "<f4", 3), ("color", "u1", 3)])
    vertices["position"], vertices["color"] = mesh.vertices_V3, mesh.colors_V3
    faces = np.empty(len(mesh.faces_F3), dtype=[("count", "u1"), ("corners", "<i4", 3)])
    faces["count"], faces["corners"] = 3, mesh.faces_F3
    path.write_bytes(header.encode() + vertices.tobytes() + faces.tobytes())


def read_ply(path: Path) -> Mesh:
    """The mesh in a PLY file; a file without faces or colours, or a damaged one, is a `SceneError` that says so."""
    try:
        with path.open("rb") as file:
            file_format, elements = _read_header(file, path)
            tables = {item.name: _read_element(file, item, file_format, path) for item in elements}
    except FileNotFoundError:
        raise SceneError(f"mesh {path} does not exist; check the dataset folder and the scene id") from None
    vertex = tables.get("vertex", {})
    if not {"x", "y", "z"} <= vertex.keys():
        raise SceneError(f"mesh {path} has no vertices with x, y, z; is it a PLY mesh?")
    if not {"red", "green", "blue"} <= vertex.keys():
        raise SceneError(
            f"mesh {path} has no vertex colours (red, green, blue); textured meshes need their colours baked to vertices"
        )
    faces = next(
        (column for name, column in tables.get("face", {}).items() if name.startswith("vertex_ind")), None
    )
    if faces is None or len(faces) == 0:
        raise SceneError(
            f"mesh {path} has no faces; a point cloud cannot be rendered, use the mesh file of the scene"
        )
    try:
        return Mesh(
            vertices_V3=np.stack([vertex[axis] for axis in "xyz"], axis=1).astype(np.float32),
            faces_F3=np.ascontiguousarray(faces, dtype=np.int32),
            colors_V3=_to_bytes(np.stack([vertex[name] for name in ("red", "green", "blue")], axis=1)),
        )
    except SceneError as error:
        raise SceneError(f"mesh {path}: {error}") from None


def _to_bytes(colors: npt.NDArray[Any]) -> Bytes:  # the file chooses the type
    if colors.dtype.kind == "f":
        return np.asarray(np.clip(np.round(colors * 255), 0, 255), dtype=np.uint8)
    return np.asarray(colors, dtype=np.uint8)


def _read_header(file: BinaryIO, path: Path) -> tuple[str, list[_Element]]:
    if file.readline().strip() != b"ply":
        raise SceneError(f"mesh {path} does not start with `ply`; it is not a PLY file")
    file_format = ""
    elements: list[_Element] = []
    for _ in range(1000):
        line = file.readline()
        words = line.decode("ascii", "replace").split()
        if not line:
            break
        if not words or words[0] in ("comment", "obj_info"):
            continue
        if words[0] == "end_header":
            if file_format not in _ORDERS:
                raise SceneError(f"mesh {path} has format {file_format!r}; known: {', '.join(_ORDERS)}")
            return file_format, elements
        try:
            if words[0] == "format":
                file_format = words[1]
            elif words[0] == "element":
                elements.append(_Element(name=words[1], count=int(words[2]), properties=[]))
            elif words[0] == "property" and words[1] == "list":
                found = _Property(name=words[4], kind=_TYPES[words[3]], count_kind=_TYPES[words[2]])
                elements[-1].properties.append(found)
            elif words[0] == "property":
                elements[-1].properties.append(_Property(name=words[2], kind=_TYPES[words[1]]))
        except (IndexError, KeyError, ValueError):
            raise SceneError(
                f"mesh {path} has a header line that cannot be read: {' '.join(words)!r}"
            ) from None
    raise SceneError(f"mesh {path} has no end_header; the file is cut off or not a PLY file")


def _read_element(
    file: BinaryIO, element: _Element, file_format: str, path: Path
) -> dict[str, npt.NDArray[Any]]:
    if file_format == "ascii":
        return _read_ascii(file, element, path)
    order = _ORDERS[file_format]
    fields: list[Any] = []  # numpy's own notation of record types
    for item in element.properties:
        if item.count_kind is None:
            fields.append((item.name, order + item.kind))
        else:
            fields += [(f"{item.name} count", order + item.count_kind), (item.name, order + item.kind, 3)]
    record = np.dtype(fields)
    start = file.tell()
    raw = file.read(record.itemsize * element.count)
    if len(raw) == record.itemsize * element.count:
        table = np.frombuffer(raw, dtype=record, count=element.count)
        lists = [item.name for item in element.properties if item.count_kind]
        if all((table[f"{name} count"] == 3).all() for name in lists):
            return {item.name: table[item.name] for item in element.properties}
    if not any(item.count_kind for item in element.properties):
        raise SceneError(
            f"mesh {path} ends within its {element.count} {element.name} records; the file is cut off"
        )
    file.seek(start)
    return _read_ragged(file, element, order, path)


def _read_ragged(file: BinaryIO, element: _Element, order: str, path: Path) -> dict[str, npt.NDArray[Any]]:
    """Lists of any length, record by record; polygons are cut into fans of triangles."""
    triangles: list[tuple[int, int, int]] = []
    name = next(item.name for item in element.properties if item.count_kind)
    for index in range(element.count):
        for item in element.properties:
            count = 1
            if item.count_kind is not None:
                count = int(_take(file, order + item.count_kind, 1, path, index)[0])
            values = _take(file, order + item.kind, count, path, index)
            if item.name == name:
                triangles += _fan([int(value) for value in values])
    return {name: np.array(triangles, dtype=np.int32).reshape(-1, 3)}


def _take(file: BinaryIO, kind: str, count: int, path: Path, index: int) -> npt.NDArray[Any]:
    size = np.dtype(kind).itemsize * count
    raw = file.read(size)
    if len(raw) != size:
        raise SceneError(f"mesh {path} ends within face {index}; the file is cut off")
    return np.frombuffer(raw, dtype=kind)


def _fan(corners: list[int]) -> list[tuple[int, int, int]]:
    return [(corners[0], corners[i], corners[i + 1]) for i in range(1, len(corners) - 1)]


def _read_ascii(file: BinaryIO, element: _Element, path: Path) -> dict[str, npt.NDArray[Any]]:
    rows = [file.readline().split() for _ in range(element.count)]
    try:
        if any(item.count_kind for item in element.properties):
            if len(element.properties) != 1:
                raise SceneError(
                    f"mesh {path} mixes lists and numbers in {element.name}; convert it to binary PLY"
                )
            triangles: list[tuple[int, int, int]] = []
            for row in rows:
                triangles += _fan([int(word) for word in row[1 : 1 + int(row[0])]])
            faces: Ints = np.array(triangles, dtype=np.int32).reshape(-1, 3)
            return {element.properties[0].name: faces}
        table = np.array([[float(word) for word in row] for row in rows]).reshape(element.count, -1)
        return {item.name: table[:, i].astype(item.kind) for i, item in enumerate(element.properties)}
    except (ValueError, IndexError) as error:
        raise SceneError(f"mesh {path} has a {element.name} line that cannot be read: {error}") from None
