"""Draws scenes from above: the floor and what stands on it, the objects' boxes, a path and its goal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from turnwise.environments.navigation.scenes import Bytes, Doubles, Pose, SceneObject
from turnwise.environments.navigation.world import World

_Xy: TypeAlias = tuple[float, float]
_BOX = (30, 60, 140)
_PATH = (225, 45, 60)
_AGENT = (20, 130, 240)
_GOAL = (250, 180, 20)


class FloorMap:
    """A picture of a scene from above, in which things can be drawn at their place in the world."""

    def __init__(self, world: World, pixels_per_m: float = 60.0, cut_m: float = 1.9) -> None:
        grid = world.grid
        margin = 0.15
        cells = np.argwhere(grid.is_floor_IJ)
        low = grid.low + cells.min(axis=0) * grid.cell_m - margin
        high = grid.low + (cells.max(axis=0) + 1) * grid.cell_m + margin
        # Cut below the lintels, so that doors are open.
        pixels = world.caster.look_down(low, high, 1.0 / pixels_per_m, world.scene.floor_z + cut_m)
        self.image = PIL.Image.fromarray(pixels)
        self._walls(world, low, high)
        self._low, self._scale = low, pixels_per_m
        self._draw = PIL.ImageDraw.Draw(self.image)
        self._font = PIL.ImageFont.load_default(size=max(9, round(pixels_per_m / 5)))

    def pixels(self) -> Bytes:
        return np.asarray(self.image)

    def boxes(self, objects: Sequence[SceneObject], *, has_names: bool = True) -> None:
        for item in objects:
            corners = [self._at(*corner) for corner in item.footprint().tolist()]
            self._draw.line([*corners, corners[0]], fill=_BOX, width=2)
            if has_names:
                self._label(item.name, self._at(*item.centroid[:2]))

    def path(self, points_K2: Doubles) -> None:
        corners = [self._at(*point) for point in points_K2.tolist()]
        if len(corners) > 1:
            self._draw.line(corners, fill=_PATH, width=3, joint="curve")
        for corner in corners:
            self._dot(corner, 3, _PATH)

    def pose(self, pose: Pose, fov_degrees: float | None = None) -> None:
        """A dot and an arrow; with a field of view also its two edges."""
        center = self._at(pose.x, pose.y)
        if fov_degrees is not None:
            for side in (-0.5, 0.5):
                cosine, sine = pose.turned(side * fov_degrees).heading
                self._draw.line(
                    [center, self._at(pose.x + 0.7 * cosine, pose.y + 0.7 * sine)], fill=_AGENT, width=1
                )
        cosine, sine = pose.heading
        tip = self._at(pose.x + 0.4 * cosine, pose.y + 0.4 * sine)
        self._draw.line([center, tip], fill=_AGENT, width=3)
        self._dot(center, max(4, round(self._scale * 0.1)), _AGENT)

    def goal(self, item: SceneObject) -> None:
        corners = [self._at(*corner) for corner in item.footprint().tolist()]
        self._draw.line([*corners, corners[0]], fill=_GOAL, width=4)
        x, y = self._at(*item.centroid[:2])
        size = max(6.0, self._scale * 0.14)
        star = [
            (x + (size if i % 2 == 0 else size * 0.45) * math.sin(i * math.pi / 5),
             y - (size if i % 2 == 0 else size * 0.45) * math.cos(i * math.pi / 5))
            for i in range(10)
        ]  # fmt: skip
        self._draw.polygon(star, fill=_GOAL, outline=(90, 60, 0))

    def _walls(self, world: World, low: Doubles, high: Doubles) -> None:
        """Darken the walls, which are hairlines from above."""
        grid = world.grid
        rows, columns = self.image.height, self.image.width
        x = low[0] + (np.arange(columns) + 0.5) * (high[0] - low[0]) / columns
        y = high[1] - (np.arange(rows) + 0.5) * (high[1] - low[1]) / rows
        i = np.floor((x - grid.low[0]) / grid.cell_m).astype(int)
        j = np.floor((y - grid.low[1]) / grid.cell_m).astype(int)
        inside = ((i >= 0) & (i < grid.shape[0]))[None] & ((j >= 0) & (j < grid.shape[1]))[:, None]
        is_wall = world.is_wall_IJ[np.clip(i, 0, grid.shape[0] - 1)][:, np.clip(j, 0, grid.shape[1] - 1)].T
        pixels = np.array(self.image)
        pixels[is_wall & inside] = (70, 70, 78)
        self.image = PIL.Image.fromarray(pixels)

    def _at(self, x: float, y: float) -> _Xy:
        return (x - float(self._low[0])) * self._scale, self.image.height - (
            y - float(self._low[1])
        ) * self._scale

    def _dot(self, center: _Xy, radius: float, color: tuple[int, int, int]) -> None:
        x, y = center
        self._draw.ellipse(
            [x - radius, y - radius, x + radius, y + radius], fill=color, outline=(255, 255, 255)
        )

    def _label(self, text: str, center: _Xy) -> None:
        left, top, right, bottom = self._draw.textbbox(center, text, font=self._font, anchor="mm")
        x = min(max(center[0], (right - left) / 2 + 3), self.image.width - (right - left) / 2 - 3)
        y = min(max(center[1], (bottom - top) / 2 + 3), self.image.height - (bottom - top) / 2 - 3)
        self._draw.text(
            (x, y),
            text,
            fill=(15, 15, 20),
            font=self._font,
            anchor="mm",
            stroke_width=2,
            stroke_fill=(255, 255, 255),
        )


def draw_task(
    world: World, goal: SceneObject | None, walked: Sequence[Pose], shortest: Doubles | None = None, *, pixels_per_m: float = 60.0,
    fov_degrees: float | None = None, has_names: bool = True,
) -> Bytes:  # fmt: skip
    """The map of one episode: boxes, the goal, the way walked (or the shortest one), and where the agent is now."""
    picture = FloorMap(world, pixels_per_m)
    picture.boxes(world.scene.objects, has_names=has_names)
    if goal is not None:
        picture.goal(goal)
    if shortest is not None:
        picture.path(shortest)
    elif len(walked) > 1:
        picture.path(np.array([[pose.x, pose.y] for pose in walked]))
    if walked:
        picture.pose(walked[-1] if shortest is None else walked[0], fov_degrees)
    return picture.pixels()
