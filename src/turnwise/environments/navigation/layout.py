"""Plans rooms: a rectangle is cut by walls until there are enough, each wall with a door, so every room is reachable."""

from __future__ import annotations

import msgspec
import numpy as np

from turnwise.environments.navigation.scenes import Doubles

WALL_M = 0.1
DOOR_M = 1.0
ROOM_HEIGHT_M = 2.5
DOOR_HEIGHT_M = 2.05


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """The free inside of a room, walls excluded."""

    low_x: float
    low_y: float
    high_x: float
    high_y: float
    height: float = ROOM_HEIGHT_M

    def center(self) -> tuple[float, float]:
        return round((self.low_x + self.high_x) / 2, 3), round((self.low_y + self.high_y) / 2, 3)

    def contains(self, bounds: tuple[float, float, float, float]) -> bool:
        return (
            bounds[0] >= self.low_x
            and bounds[1] >= self.low_y
            and bounds[2] <= self.high_x
            and bounds[3] <= self.high_y
        )

    def walls(self) -> list[tuple[Doubles, Doubles]]:
        """The four walls, clockwise seen from above, so that their faces look inwards."""
        corners = [
            np.array(corner)
            for corner in (
                (self.low_x, self.low_y), (self.low_x, self.high_y), (self.high_x, self.high_y), (self.high_x, self.low_y),
            )
        ]  # fmt: skip
        return [(corners[i], corners[(i + 1) % 4]) for i in range(4)]


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """A gap in the wall between two rooms: the rectangle of floor that it opens."""

    low: tuple[float, float]
    high: tuple[float, float]
    is_across_x: bool
    """The wall stands across the x axis: one walks through along x."""
    height: float = DOOR_HEIGHT_M

    def gap_in(self, start: Doubles, end: Doubles) -> tuple[float, float, float] | None:
        """Where the door opens a wall from `start` to `end`: from, to (along it) and height."""
        fixed, along = (0, 1) if self.is_across_x else (1, 0)
        if (
            abs(start[fixed] - end[fixed]) > 1e-6
            or min(abs(start[fixed] - self.low[fixed]), abs(start[fixed] - self.high[fixed])) > 1e-6
        ):
            return None
        low, high = sorted((start[along], end[along]))
        if self.high[along] <= low + 1e-6 or self.low[along] >= high - 1e-6:
            return None
        if start[along] < end[along]:
            return self.low[along] - start[along], self.high[along] - start[along], self.height
        return start[along] - self.high[along], start[along] - self.low[along], self.height

    def keep_out(self, reach_m: float) -> tuple[float, float, float, float]:
        """Floor in front of both sides that furniture must leave free."""
        if self.is_across_x:
            return self.low[0] - reach_m, self.low[1], self.high[0] + reach_m, self.high[1]
        return self.low[0], self.low[1] - reach_m, self.high[0], self.high[1] + reach_m


def plan_rooms(
    rng: np.random.Generator, min_rooms: int, max_rooms: int, min_room_m: float, max_room_m: float
) -> tuple[list[Room], list[Door]]:
    """One to four rooms side by side or two by two, and a door in every wall between neighbours that needs one."""
    count = int(rng.integers(min_rooms, max_rooms + 1))
    columns = 1 if count == 1 else 2
    widths = [_size(rng, min_room_m, max_room_m) for _ in range(columns)]
    heights = [_size(rng, min_room_m, max_room_m) for _ in range(1 if count <= 2 else 2)]
    split_y, split_x = heights[0], widths[0]
    low_row_height = heights[0]
    rooms = [Room(low_x=0.0, low_y=0.0, high_x=widths[0], high_y=low_row_height)]
    doors = []
    if count >= 2:
        left = round(split_x + WALL_M, 3)
        rooms.append(Room(low_x=left, low_y=0.0, high_x=round(left + widths[1], 3), high_y=low_row_height))
        doors.append(_door_across_x(rng, split_x, 0.0, low_row_height))
    if count >= 3:
        bottom = round(split_y + WALL_M, 3)
        top = round(bottom + heights[1], 3)
        right = widths[0] if count == 4 else rooms[1].high_x
        rooms.append(Room(low_x=0.0, low_y=bottom, high_x=right, high_y=top))
        doors.append(_door_across_y(rng, split_y, 0.0, widths[0]))
        if count == 4:
            rooms.append(Room(low_x=rooms[1].low_x, low_y=bottom, high_x=rooms[1].high_x, high_y=top))
            doors.append(_door_across_y(rng, split_y, rooms[1].low_x, rooms[1].high_x))
    return rooms, doors


def _size(rng: np.random.Generator, low: float, high: float) -> float:
    return round(float(rng.uniform(low, high)), 2)


def _door_across_x(rng: np.random.Generator, x: float, low_y: float, high_y: float) -> Door:
    y = round(float(rng.uniform(low_y + 0.3, high_y - 0.3 - DOOR_M)), 2)
    return Door(low=(x, y), high=(round(x + WALL_M, 3), round(y + DOOR_M, 3)), is_across_x=True)


def _door_across_y(rng: np.random.Generator, y: float, low_x: float, high_x: float) -> Door:
    x = round(float(rng.uniform(low_x + 0.3, high_x - 0.3 - DOOR_M)), 2)
    return Door(low=(x, y), high=(round(x + DOOR_M, 3), round(y + WALL_M, 3)), is_across_x=False)
