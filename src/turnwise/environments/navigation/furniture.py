"""Furniture of the 17 annotated classes, built from boxes and cylinders so that each reads well at 128×128.

A piece stands at the origin, its base at z = 0, its back towards +Y and its front towards -Y.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from turnwise.environments.navigation.scenes import Bytes, Doubles, Ints

Rgb: TypeAlias = tuple[int, int, int]
Point: TypeAlias = tuple[float, float, float]

COLORS: dict[str, Rgb] = {
    "red": (205, 40, 35), "orange": (238, 130, 25), "yellow": (240, 205, 40), "green": (50, 155, 60),
    "blue": (40, 85, 200), "purple": (130, 60, 170), "pink": (240, 140, 175), "brown": (125, 80, 45),
    "white": (238, 238, 232), "black": (40, 40, 44),
}  # fmt: skip
_STEEL: Rgb = (150, 155, 160)
_DARK: Rgb = (35, 35, 38)
_WOOD: Rgb = (150, 105, 65)
_LINEN: Rgb = (235, 232, 222)


class Shape:
    """Triangles in the making; every face has its own vertices, so that colours and normals stay flat."""

    def __init__(self) -> None:
        self._vertices: list[Doubles] = []
        self._colors: list[Bytes] = []
        self._faces: list[Ints] = []
        self._num_vertices = 0

    def add(self, vertices_V3: Doubles, faces_F3: Ints, colors_V3: Bytes) -> None:
        self._vertices.append(vertices_V3)
        self._colors.append(colors_V3)
        self._faces.append(faces_F3 + np.int32(self._num_vertices))
        self._num_vertices += len(vertices_V3)

    def arrays(self) -> tuple[Doubles, Ints, Bytes]:
        return np.concatenate(self._vertices), np.concatenate(self._faces), np.concatenate(self._colors)

    def quads(self, corners_Q43: Doubles, colors_Q3: Bytes) -> None:
        """Flat four-sided faces, corners counter-clockwise seen from outside."""
        count = len(corners_Q43)
        first = np.arange(count, dtype=np.int32)[:, None] * 4
        faces = (
            np.stack([first + np.array([0, 1, 2]), first + np.array([0, 2, 3])], axis=1)
            .reshape(-1, 3)
            .astype(np.int32)
        )
        self.add(corners_Q43.reshape(-1, 3), faces, np.repeat(colors_Q3, 4, axis=0).astype(np.uint8))

    def box(self, low: Point, high: Point, color: Rgb) -> None:
        """An axis-aligned box."""
        bounds = np.array([low, high], dtype=np.float64)
        corners = np.stack([bounds[_BOX_FACES[..., axis], axis] for axis in range(3)], axis=-1)
        self.quads(corners, np.tile(np.array(color, dtype=np.uint8), (6, 1)))

    def cylinder(
        self, center: Point, radius: float, height: float, color: Rgb, *, axis: int = 2, sides: int = 14
    ) -> None:
        """A cylinder whose lower end lies at `center`, along an axis."""
        angles = np.arange(sides + 1) * (2 * np.pi / sides)
        ring = np.stack([np.cos(angles), np.sin(angles)], axis=-1) * radius
        low = np.concatenate([ring, np.zeros((sides + 1, 1))], axis=1)
        high = low + np.array([0.0, 0.0, height])
        walls = np.stack([low[:-1], low[1:], high[1:], high[:-1]], axis=1)
        middle_low, middle_high = np.zeros((sides, 3)), np.tile([0.0, 0.0, height], (sides, 1))
        bottoms = np.stack([middle_low, low[1:], low[:-1], low[:-1]], axis=1)
        tops = np.stack([middle_high, high[:-1], high[1:], high[1:]], axis=1)
        corners = np.concatenate([walls, bottoms, tops])
        corners = np.roll(corners, axis - 2, axis=-1) + np.array(center)
        self.quads(corners, np.tile(np.array(color, dtype=np.uint8), (len(corners), 1)))


# For each face and corner of a box: which of the two bounds, per axis.
_BOX_FACES = np.array(
    [
        [[0, 0, 0], [0, 0, 1], [0, 1, 1], [0, 1, 0]],
        [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 1]],
        [[0, 0, 0], [1, 0, 0], [1, 0, 1], [0, 0, 1]],
        [[0, 1, 0], [0, 1, 1], [1, 1, 1], [1, 1, 0]],
        [[0, 0, 0], [0, 1, 0], [1, 1, 0], [1, 0, 0]],
        [[0, 0, 1], [1, 0, 1], [1, 1, 1], [0, 1, 1]],
    ]
)


def _darker(color: Rgb, share: float = 0.7) -> Rgb:
    return int(color[0] * share), int(color[1] * share), int(color[2] * share)


def _legs(shape: Shape, width: float, depth: float, top: float, thickness: float, color: Rgb) -> None:
    for x in (-width / 2, width / 2 - thickness):
        for y in (-depth / 2, depth / 2 - thickness):
            shape.box((x, y, 0), (x + thickness, y + thickness, top), color)


def _cabinet(shape: Shape, color: Rgb) -> None:
    shape.box((-0.45, -0.22, 0), (0.45, 0.25, 0.95), color)
    for x in (-0.43, 0.01):
        shape.box((x, -0.24, 0.06), (x + 0.42, -0.22, 0.9), _darker(color, 0.85))
    for x in (-0.06, 0.03):
        shape.box((x, -0.27, 0.5), (x + 0.03, -0.24, 0.62), _STEEL)


def _refrigerator(shape: Shape, color: Rgb) -> None:
    shape.box((-0.35, -0.3, 0), (0.35, 0.35, 1.75), color)
    shape.box((-0.34, -0.33, 0.04), (0.34, -0.3, 1.12), _darker(color, 0.9))
    shape.box((-0.34, -0.33, 1.16), (0.34, -0.3, 1.73), _darker(color, 0.9))
    shape.box((0.24, -0.37, 0.7), (0.28, -0.33, 1.08), _DARK)
    shape.box((0.24, -0.37, 1.2), (0.28, -0.33, 1.5), _DARK)


def _shelf(shape: Shape, color: Rgb) -> None:
    shape.box((-0.45, 0.12, 0), (0.45, 0.15, 1.7), _darker(color))
    for x in (-0.45, 0.41):
        shape.box((x, -0.15, 0), (x + 0.04, 0.12, 1.7), color)
    for z in (0.05, 0.45, 0.85, 1.25, 1.66):
        shape.box((-0.41, -0.15, z), (0.41, 0.12, z + 0.04), color)
    books: tuple[Rgb, ...] = ((180, 60, 50), (60, 90, 160), (220, 200, 120), (70, 130, 90))
    for row, z in enumerate((0.09, 0.49, 0.89, 1.29)):
        for i in range(4):
            x = -0.38 + 0.09 * i + 0.2 * (row % 2)
            shape.box((x, -0.08, z), (x + 0.07, 0.1, z + 0.22 + 0.02 * i), books[(i + row) % 4])


def _stove(shape: Shape, color: Rgb) -> None:
    shape.box((-0.3, -0.3, 0), (0.3, 0.3, 0.88), color)
    shape.box((-0.3, -0.3, 0.88), (0.3, 0.3, 0.9), _DARK)
    for x in (-0.14, 0.14):
        for y in (-0.14, 0.14):
            shape.cylinder((x, y, 0.9), 0.09, 0.015, (190, 70, 40))
    for i in range(4):
        shape.cylinder((-0.21 + 0.14 * i, -0.34, 0.8), 0.03, 0.04, _DARK, axis=1)


def _bed(shape: Shape, color: Rgb) -> None:
    shape.box((-0.8, -1.0, 0.1), (0.8, 0.95, 0.3), _WOOD)
    shape.box((-0.77, -0.98, 0.3), (0.77, 0.93, 0.48), _LINEN)
    shape.box((-0.79, -0.99, 0.48), (0.79, 0.35, 0.54), color)
    shape.box((-0.8, 0.95, 0), (0.8, 1.02, 1.0), _darker(color, 0.8))
    for x in (-0.68, 0.08):
        shape.box((x, 0.5, 0.48), (x + 0.6, 0.88, 0.6), (250, 250, 246))
    _legs(shape, 1.6, 1.95, 0.1, 0.08, _WOOD)


def _sink(shape: Shape, color: Rgb) -> None:
    shape.box((-0.35, -0.25, 0), (0.35, 0.25, 0.72), color)
    shape.box((-0.38, -0.28, 0.72), (0.38, 0.25, 0.76), _LINEN)
    for low, high in (
        ((-0.38, -0.28, 0.76), (-0.3, 0.25, 0.86)), ((0.3, -0.28, 0.76), (0.38, 0.25, 0.86)),
        ((-0.3, -0.28, 0.76), (0.3, -0.2, 0.86)), ((-0.3, 0.1, 0.76), (0.3, 0.25, 0.86)),
    ):  # fmt: skip
        shape.box(low, high, (248, 248, 246))
    shape.box((-0.02, 0.14, 0.86), (0.02, 0.18, 1.1), _STEEL)
    shape.box((-0.02, -0.04, 1.06), (0.02, 0.14, 1.1), _STEEL)


def _washer(shape: Shape, color: Rgb) -> None:
    shape.box((-0.3, -0.27, 0), (0.3, 0.3, 0.86), color)
    shape.cylinder((0, -0.3, 0.42), 0.21, 0.03, _STEEL, axis=1, sides=20)
    shape.cylinder((0, -0.32, 0.42), 0.15, 0.02, _DARK, axis=1, sides=20)
    shape.box((-0.28, -0.285, 0.72), (0.28, -0.27, 0.84), _darker(color, 0.75))


def _toilet(shape: Shape, color: Rgb) -> None:
    shape.cylinder((0, -0.05, 0), 0.13, 0.3, _darker(color, 0.92))
    shape.cylinder((0, -0.1, 0.3), 0.21, 0.08, color, sides=18)
    shape.cylinder((0, -0.1, 0.38), 0.14, 0.005, (120, 150, 170), sides=18)
    shape.box((-0.21, 0.12, 0.3), (0.21, 0.32, 0.78), color)
    shape.box((-0.22, 0.11, 0.78), (0.22, 0.33, 0.82), _darker(color, 0.9))


def _bathtub(shape: Shape, color: Rgb) -> None:
    shape.box((-0.8, -0.36, 0), (0.8, 0.36, 0.12), color)
    for low, high in (
        ((-0.8, -0.36, 0.12), (-0.7, 0.36, 0.56)), ((0.7, -0.36, 0.12), (0.8, 0.36, 0.56)),
        ((-0.7, -0.36, 0.12), (0.7, -0.28, 0.56)), ((-0.7, 0.28, 0.12), (0.7, 0.36, 0.56)),
    ):  # fmt: skip
        shape.box(low, high, color)
    shape.box((-0.7, -0.28, 0.12), (0.7, 0.28, 0.36), (120, 190, 215))
    shape.box((0.66, -0.03, 0.56), (0.76, 0.03, 0.75), _STEEL)


def _oven(shape: Shape, color: Rgb) -> None:
    shape.box((-0.3, -0.28, 0), (0.3, 0.3, 1.3), color)
    shape.box((-0.26, -0.31, 0.62), (0.26, -0.28, 1.08), _STEEL)
    shape.box((-0.2, -0.32, 0.68), (0.2, -0.31, 0.98), _DARK)
    shape.box((-0.24, -0.35, 1.02), (0.24, -0.32, 1.05), _DARK)
    for x in (-0.18, 0.0, 0.18):
        shape.cylinder((x, -0.32, 1.2), 0.035, 0.04, _DARK, axis=1)


def _dishwasher(shape: Shape, color: Rgb) -> None:
    shape.box((-0.3, -0.28, 0.08), (0.3, 0.3, 0.84), color)
    shape.box((-0.3, -0.24, 0), (0.3, 0.3, 0.08), _DARK)
    shape.box((-0.3, -0.3, 0.7), (0.3, -0.28, 0.82), _DARK)
    shape.box((-0.24, -0.33, 0.62), (0.24, -0.28, 0.65), _STEEL)


def _fireplace(shape: Shape, color: Rgb) -> None:
    shape.box((-0.7, -0.2, 0), (-0.35, 0.2, 1.0), color)
    shape.box((0.35, -0.2, 0), (0.7, 0.2, 1.0), color)
    shape.box((-0.35, -0.2, 0.72), (0.35, 0.2, 1.0), color)
    shape.box((-0.35, 0.15, 0), (0.35, 0.2, 0.72), _DARK)
    shape.box((-0.78, -0.26, 1.0), (0.78, 0.2, 1.08), _darker(color, 0.75))
    shape.box((-0.28, -0.1, 0), (0.28, 0.05, 0.1), (90, 60, 40))
    for x, height in ((-0.18, 0.32), (-0.04, 0.45), (0.1, 0.35)):
        shape.box((x, -0.04, 0.1), (x + 0.1, 0.02, height), (250, 140, 30))


def _stool(shape: Shape, color: Rgb) -> None:
    shape.cylinder((0, 0, 0.5), 0.19, 0.07, color, sides=18)
    for x in (-0.11, 0.08):
        for y in (-0.11, 0.08):
            shape.box((x, y, 0), (x + 0.03, y + 0.03, 0.5), _darker(color, 0.6))


def _chair(shape: Shape, color: Rgb) -> None:
    shape.box((-0.24, -0.24, 0.42), (0.24, 0.24, 0.48), color)
    _legs(shape, 0.46, 0.46, 0.42, 0.05, _darker(color, 0.6))
    for x in (-0.24, 0.18):
        shape.box((x, 0.19, 0.48), (x + 0.06, 0.24, 0.98), _darker(color, 0.8))
    shape.box((-0.18, 0.2, 0.62), (0.18, 0.24, 0.96), color)


def _table(shape: Shape, color: Rgb) -> None:
    shape.box((-0.6, -0.4, 0.7), (0.6, 0.4, 0.75), color)
    _legs(shape, 1.12, 0.72, 0.7, 0.07, _darker(color, 0.65))


def _tv_monitor(shape: Shape, color: Rgb) -> None:
    shape.box((-0.55, -0.2, 0), (0.55, 0.2, 0.42), color)
    shape.box((-0.12, -0.02, 0.42), (0.12, 0.08, 0.5), _DARK)
    shape.box((-0.56, 0.0, 0.5), (0.56, 0.06, 1.16), _DARK)
    shape.box((-0.51, -0.01, 0.55), (0.51, 0.0, 1.11), (60, 75, 95))


def _sofa(shape: Shape, color: Rgb) -> None:
    shape.box((-0.95, -0.42, 0.08), (0.95, 0.42, 0.26), _darker(color, 0.75))
    shape.box((-0.95, 0.22, 0.26), (0.95, 0.42, 0.85), _darker(color, 0.85))
    for x in (-0.95, 0.77):
        shape.box((x, -0.42, 0.26), (x + 0.18, 0.22, 0.6), _darker(color, 0.85))
    for x in (-0.76, 0.01):
        shape.box((x, -0.42, 0.26), (x + 0.75, 0.22, 0.44), color)
    _legs(shape, 1.85, 0.8, 0.08, 0.06, _DARK)


SHAPES: dict[str, Callable[[Shape, Rgb], None]] = {
    "cabinet": _cabinet, "refrigerator": _refrigerator, "shelf": _shelf, "stove": _stove, "bed": _bed, "sink": _sink,
    "washer": _washer, "toilet": _toilet, "bathtub": _bathtub, "oven": _oven, "dishwasher": _dishwasher,
    "fireplace": _fireplace, "stool": _stool, "chair": _chair, "table": _table, "tv_monitor": _tv_monitor, "sofa": _sofa,
}  # fmt: skip

FREE_STANDING = frozenset({"chair", "stool", "table", "sofa"})
"""What may stand in the middle of a room; everything else has its back to a wall."""


def build_piece(label: str, color: str) -> tuple[Doubles, Ints, Bytes]:
    """Vertices, faces and colours of one piece; its box is the bounds of its vertices."""
    shape = Shape()
    SHAPES[label](shape, COLORS[color])
    return shape.arrays()
