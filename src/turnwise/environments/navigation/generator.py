"""Makes scenes to order: one to four rooms with doors, furnished, from a seed, in the form of an ARKitScenes capture."""

from __future__ import annotations

import math
from functools import cache

import msgspec
import numpy as np

from turnwise.environments.navigation.furniture import COLORS, FREE_STANDING, Rgb, Shape, build_piece
from turnwise.environments.navigation.layout import Door, Room, plan_rooms
from turnwise.environments.navigation.scenes import (
    CLASSES,
    Doubles,
    Mesh,
    Scene,
    SceneObject,
    estimate_floor,
)
from turnwise.errors import SceneError

_WALL_TINTS: tuple[Rgb, ...] = (
    (222, 212, 192), (196, 210, 216), (206, 216, 192), (224, 202, 196), (208, 202, 220), (228, 222, 208),
)  # fmt: skip
_FLOOR_TINTS: tuple[tuple[Rgb, Rgb], ...] = (
    ((164, 128, 92), (150, 114, 80)), ((176, 176, 172), (156, 156, 154)), ((140, 116, 100), (126, 104, 88)),
    ((188, 172, 148), (172, 156, 132)),
)  # fmt: skip
_DOOR_FRAME: Rgb = (120, 92, 66)


class SceneOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a made-to-order scene may look like."""

    min_rooms: int = 1
    max_rooms: int = 3
    min_room_m: float = 3.4
    """Shortest side of a room."""
    max_room_m: float = 5.0
    min_objects: int = 4
    """Pieces of furniture per room."""
    max_objects: int = 7
    classes: tuple[str, ...] = CLASSES
    colors: tuple[str, ...] = tuple(COLORS)
    distinct_colors: bool = False
    """No colour twice in a room, so that a colour alone tells a piece from the others."""
    tile_m: float = 0.5
    """Floor tiles; smaller ones make a finer mesh."""
    clearance_m: float = 0.55
    """Free floor kept around furniture and doors, so that the agent gets everywhere."""
    has_ceiling: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.min_rooms <= self.max_rooms <= 4:
            raise SceneError(
                f"rooms from {self.min_rooms} to {self.max_rooms}; choose between 1 and 4, least first"
            )
        if not 2.0 <= self.min_room_m <= self.max_room_m:
            raise SceneError(
                f"rooms measure from {self.min_room_m} to {self.max_room_m} m; the least must be 2 or more, and come first"
            )
        if not 1 <= self.min_objects <= self.max_objects:
            raise SceneError(
                f"from {self.min_objects} to {self.max_objects} objects a room; at least 1, least first"
            )
        for name, chosen, known in (("class", self.classes, CLASSES), ("colour", self.colors, tuple(COLORS))):
            unknown = sorted(set(chosen) - set(known))
            if unknown or not chosen:
                raise SceneError(
                    f"unknown {name} {unknown or 'list: it is empty'}; known: {', '.join(known)}"
                )


def make_scene(scene_id: str, seed: int | tuple[int, ...], options: SceneOptions | None = None) -> Scene:
    """The scene of this seed: the same bytes every time, on every machine."""
    options = options or SceneOptions()
    rng = np.random.default_rng(seed)
    rooms, doors = plan_rooms(
        rng, options.min_rooms, options.max_rooms, options.min_room_m, options.max_room_m
    )
    shape = Shape()
    for room in rooms:
        _build_room(shape, room, doors, rng, options)
    for door in doors:
        _build_door(shape, door)
    placed = [piece for room in rooms for piece in _furnish(room, doors, rng, options)]
    # A capture's origin is near its first camera: somewhere in the first room, at head height.
    origin = np.array([*rooms[0].center(), round(float(rng.uniform(1.0, 1.6)), 3)])
    objects = []
    for index, piece in enumerate(placed):
        vertices, faces, colors = build_piece(piece.label, piece.color)
        shape.add(vertices @ _rotation(piece.yaw).T + [piece.x, piece.y, 0.0], faces, colors)
        objects.append(_annotate(f"{scene_id}-{index:02d}", piece, vertices, origin))
    mesh = _finish(shape, origin)
    return Scene(
        scene_id=scene_id, mesh=mesh, objects=tuple(objects), floor_z=estimate_floor(mesh), fold="Training", dataset="generated"
    )  # fmt: skip


class _Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of furniture and where it stands, yaw in radians."""

    label: str
    color: str
    x: float
    y: float
    yaw: float

    def bounds(self) -> tuple[float, float, float, float]:
        """Low x, low y, high x, high y of its footprint."""
        corners = _local_corners(self.label) @ _rotation(self.yaw)[:2, :2].T + [self.x, self.y]
        return (*corners.min(axis=0).tolist(), *corners.max(axis=0).tolist())


@cache
def _extent(label: str) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    vertices, _, _ = build_piece(label, "white")
    low, high = vertices.min(axis=0), vertices.max(axis=0)
    return (float(low[0]), float(low[1]), float(low[2])), (float(high[0]), float(high[1]), float(high[2]))


def _local_corners(label: str) -> Doubles:
    low, high = _extent(label)
    return np.array([[x, y] for x in (low[0], high[0]) for y in (low[1], high[1])])


def _rotation(yaw: float) -> Doubles:
    # Quarter turns are exact, so that furniture stands flush with its wall on every machine.
    cosine, sine = round(math.cos(yaw), 12), round(math.sin(yaw), 12)
    return np.array([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]])


def _furnish(room: Room, doors: list[Door], rng: np.random.Generator, options: SceneOptions) -> list[_Piece]:
    """Pieces that touch neither each other nor the way through a door; fewer when the room is full."""
    wanted = int(rng.integers(options.min_objects, options.max_objects + 1))
    placed: list[_Piece] = []
    taken = [door.keep_out(options.clearance_m) for door in doors]
    names: set[str] = set()
    for _ in range(wanted * 30):
        if len(placed) == wanted:
            break
        label = options.classes[int(rng.integers(len(options.classes)))]
        color = options.colors[int(rng.integers(len(options.colors)))]
        piece = _propose(room, label, color, rng)
        bounds = piece.bounds()
        inside = room.contains(bounds)
        gap = options.clearance_m
        name = color if options.distinct_colors else f"{color} {label}"
        if name in names or not inside or any(_overlap(bounds, other, gap) for other in taken):
            continue
        names.add(name)
        taken.append(bounds)
        placed.append(piece)
    return placed


def _propose(room: Room, label: str, color: str, rng: np.random.Generator) -> _Piece:
    low, high = _extent(label)
    gap = 0.02
    if label in FREE_STANDING and rng.random() < 0.5:
        yaw = float(rng.integers(24)) * math.pi / 12
        x, y = (
            rng.uniform(room.low_x + 0.5, room.high_x - 0.5),
            rng.uniform(room.low_y + 0.5, room.high_y - 0.5),
        )
        return _Piece(label=label, color=color, x=round(float(x), 3), y=round(float(y), 3), yaw=yaw)
    side, share = int(rng.integers(4)), float(rng.random())
    back = high[1] + gap
    along_x = room.low_x - low[0] + gap + share * (room.high_x - room.low_x - (high[0] - low[0]) - 2 * gap)
    along_y = room.low_y - low[0] + gap + share * (room.high_y - room.low_y - (high[0] - low[0]) - 2 * gap)
    x, y = (
        (along_x, room.high_y - back),
        (room.low_x + back, along_y),
        (along_x, room.low_y + back),
        (room.high_x - back, along_y),
    )[side]
    return _Piece(label=label, color=color, x=round(x, 3), y=round(y, 3), yaw=side * math.pi / 2)


def _overlap(a: tuple[float, ...], b: tuple[float, ...], gap: float) -> bool:
    return a[0] < b[2] + gap and b[0] < a[2] + gap and a[1] < b[3] + gap and b[1] < a[3] + gap


def _annotate(uid: str, piece: _Piece, vertices: Doubles, origin: Doubles) -> SceneObject:
    low, high = vertices.min(axis=0), vertices.max(axis=0)
    rotation = _rotation(piece.yaw)
    centroid = rotation @ ((low + high) / 2) + [piece.x, piece.y, 0.0] - origin
    return SceneObject.from_arrays(uid, piece.label, centroid, high - low, rotation.T, color=piece.color)


def _build_room(
    shape: Shape, room: Room, doors: list[Door], rng: np.random.Generator, options: SceneOptions
) -> None:
    tint = _WALL_TINTS[int(rng.integers(len(_WALL_TINTS)))]
    tiles = _FLOOR_TINTS[int(rng.integers(len(_FLOOR_TINTS)))]
    _tile_floor(shape, room, tiles, options.tile_m)
    if options.has_ceiling:
        shape.quads(_level_quad(room, room.height, up=False), np.array([[236, 236, 232]], dtype=np.uint8))
    for start, end in room.walls():
        gaps = sorted(span for door in doors if (span := door.gap_in(start, end)) is not None)
        _build_wall(shape, start, end, gaps, room.height, tint)


def _level_quad(room: Room, z: float, *, up: bool) -> Doubles:
    corners = [
        (room.low_x, room.low_y),
        (room.high_x, room.low_y),
        (room.high_x, room.high_y),
        (room.low_x, room.high_y),
    ]
    return np.array([[(x, y, z) for x, y in (corners if up else corners[::-1])]])


def _tile_floor(shape: Shape, room: Room, tiles: tuple[Rgb, Rgb], tile_m: float) -> None:
    xs = np.append(np.arange(room.low_x, room.high_x - 1e-6, tile_m), room.high_x)
    ys = np.append(np.arange(room.low_y, room.high_y - 1e-6, tile_m), room.high_y)
    i, j = (
        index.ravel() for index in np.meshgrid(np.arange(len(xs) - 1), np.arange(len(ys) - 1), indexing="ij")
    )
    x0, x1, y0, y1, z = xs[i], xs[i + 1], ys[j], ys[j + 1], np.zeros(len(i))
    corners = np.stack(
        [np.stack(p, axis=-1) for p in ((x0, y0, z), (x1, y0, z), (x1, y1, z), (x0, y1, z))], axis=1
    )
    shape.quads(corners, np.array(tiles, dtype=np.uint8)[(i + j) % 2])


def _build_wall(
    shape: Shape,
    start: Doubles,
    end: Doubles,
    gaps: list[tuple[float, float, float]],
    height: float,
    tint: Rgb,
) -> None:
    """Upright faces from `start` to `end` around the door gaps (from, to, height), with a skirting board and a rail.

    Both are at fixed heights, so a bare wall still shows how far away it is.
    """
    length = float(np.linalg.norm(end - start))
    direction = (end - start) / length
    skirting = tuple(int(channel * 0.55) for channel in tint)
    pieces: list[tuple[float, float, float, float, tuple[int, ...]]] = []
    position = 0.0
    for low, high, door_height in [*gaps, (length, length, 0.0)]:
        if low > position:
            pieces += [(position, low, 0.0, 0.1, skirting), (position, low, 0.1, 1.0, tint)]
            pieces += [(position, low, 1.0, 1.06, skirting), (position, low, 1.06, height, tint)]
        if high > low:
            pieces.append((low, high, door_height, height, tint))
        position = high
    corners = []
    for low, high, bottom, top, _ in pieces:
        a, b = start + direction * low, start + direction * high
        corners.append([(*a, bottom), (*b, bottom), (*b, top), (*a, top)])
    shape.quads(np.array(corners), np.array([piece[4] for piece in pieces], dtype=np.uint8))


def _build_door(shape: Shape, door: Door) -> None:
    """Jambs, lintel and threshold of a doorway through the wall between two rooms."""
    (x0, y0), (x1, y1) = door.low, door.high
    # The frame stands a little out of the wall: faces in the same plane would flicker.
    frame, out = 0.04, 0.015
    if door.is_across_x:
        shape.box((x0 - out, y0 - frame, 0), (x1 + out, y0, door.height), _DOOR_FRAME)
        shape.box((x0 - out, y1, 0), (x1 + out, y1 + frame, door.height), _DOOR_FRAME)
        shape.box(
            (x0 - out, y0 - frame, door.height), (x1 + out, y1 + frame, door.height + frame), _DOOR_FRAME
        )
    else:
        shape.box((x0 - frame, y0 - out, 0), (x0, y1 + out, door.height), _DOOR_FRAME)
        shape.box((x1, y0 - out, 0), (x1 + frame, y1 + out, door.height), _DOOR_FRAME)
        shape.box(
            (x0 - frame, y0 - out, door.height), (x1 + frame, y1 + out, door.height + frame), _DOOR_FRAME
        )
    corners = np.array([[(x0, y0, 0.0), (x1, y0, 0.0), (x1, y1, 0.0), (x0, y1, 0.0)]])
    shape.quads(corners, np.array([[100, 84, 66]], dtype=np.uint8))


def _finish(shape: Shape, origin: Doubles) -> Mesh:
    vertices, faces, colors = shape.arrays()
    return Mesh(
        vertices_V3=(vertices - origin).astype(np.float32), faces_F3=faces.astype(np.int32), colors_V3=colors
    )
