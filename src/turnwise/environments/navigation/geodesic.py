"""Shortest ways over the free floor: distance fields from a goal, and the paths that follow them."""

from __future__ import annotations

import math

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from turnwise.environments.navigation.occupancy import OccupancyGrid
from turnwise.environments.navigation.scenes import Bools, Doubles, Floats
from turnwise.errors import SceneError

# Dimensions: I, J cells of the grid; K points of a path.
# Straight, diagonal and knight's moves: lengths along any direction are within 2.8 % of the truth.
_MOVES = ((1, 0), (0, 1), (1, 1), (1, -1), (2, 1), (1, 2), (2, -1), (1, -2))


class DistanceField:
    """For every free cell, how far it is to the goal region over free floor; infinite where there is no way."""

    def __init__(self, grid: OccupancyGrid, distance_IJ: Floats) -> None:
        self.grid = grid
        self.distance_IJ = distance_IJ

    def at(self, x: float, y: float) -> float:
        """Metres to the goal from a point; infinite off the free floor."""
        return float(self.at_points(np.array([[x, y]]))[0])

    def at_points(self, points_N2: Doubles) -> Floats:
        cells = np.floor((points_N2 - self.grid.low) / self.grid.cell_m).astype(int)
        inside = ((cells >= 0) & (cells < self.grid.shape)).all(axis=-1)
        clipped = np.clip(cells, 0, np.array(self.grid.shape) - 1)
        return np.where(inside, self.distance_IJ[clipped[..., 0], clipped[..., 1]], np.float32(np.inf))

    def path(self, x: float, y: float) -> Doubles:
        """The way from a point to the goal as corners, [K, 2], pulled tight."""
        i, j = self.grid.cell(x, y)
        if not math.isfinite(self.at(x, y)):
            raise SceneError(f"there is no way from ({x:.2f}, {y:.2f}) to the goal")
        cells = [(i, j)]
        while self.distance_IJ[cells[-1]] > 0:
            cells.append(self._downhill(*cells[-1]))
        points = [(x, y), *(self.grid.center(*cell) for cell in cells[1:])]
        return np.array(_pull_tight(self.grid, points))

    def path_length(self, x: float, y: float) -> float:
        """Length of `path`; 0 at the goal."""
        path = self.path(x, y)
        return float(np.linalg.norm(np.diff(path, axis=0), axis=1).sum())

    def _downhill(self, i: int, j: int) -> tuple[int, int]:
        best, best_value = (i, j), float(self.distance_IJ[i, j])
        for di, dj in _MOVES:
            for sign in (1, -1):
                a, b = i + sign * di, j + sign * dj
                if not (0 <= a < self.grid.shape[0] and 0 <= b < self.grid.shape[1]):
                    continue
                through = float(self.distance_IJ[a, b]) + self.grid.cell_m * math.hypot(di, dj)
                if self.distance_IJ[a, b] < best_value and abs(through - self.distance_IJ[i, j]) < 1e-3:
                    best, best_value = (a, b), float(self.distance_IJ[a, b])
        assert best != (i, j), "a finite distance above 0 has a neighbour that is nearer"
        return best


def floor_graph(grid: OccupancyGrid) -> sparse.csr_matrix:
    """The free cells as a graph; a move needs every cell it crosses to be free."""
    free = grid.is_free_IJ
    index = np.arange(free.size, dtype=np.int32).reshape(free.shape)
    starts, ends, lengths = [], [], []
    for di, dj in _MOVES:
        ok = free & _shifted(free, di, dj)
        for bi, bj in _crossed(di, dj):
            ok = ok & _shifted(free, bi, bj)
        start = index[ok]
        starts.append(start)
        ends.append(start + di * free.shape[1] + dj)
        lengths.append(np.full(len(start), grid.cell_m * math.hypot(di, dj)))
    entries = (np.concatenate(lengths), (np.concatenate(starts), np.concatenate(ends)))
    return sparse.csr_matrix(entries, shape=(free.size, free.size))


def distance_field(grid: OccupancyGrid, graph: sparse.csr_matrix, is_goal_IJ: Bools) -> DistanceField:
    """Distances from every free cell to the nearest goal cell."""
    goals = np.flatnonzero((is_goal_IJ & grid.is_free_IJ).ravel())
    if len(goals) == 0:
        return DistanceField(grid, np.full(grid.shape, np.inf, dtype=np.float32))
    distances = csgraph.dijkstra(graph, directed=False, indices=goals, min_only=True)
    return DistanceField(grid, distances.reshape(grid.shape).astype(np.float32))


def _crossed(di: int, dj: int) -> list[tuple[int, int]]:
    """The cells that a move from (0, 0) to (di, dj) cuts through."""
    if di == 0 or dj == 0:
        return []
    side = 1 if dj > 0 else -1
    if abs(di) == abs(dj):
        return [(di, 0), (0, dj)]
    return [(1, 0), (1, side)] if abs(di) == 2 else [(0, side), (1, side)]


def _shifted(free: Bools, di: int, dj: int) -> Bools:
    """`result[i, j] = free[i + di, j + dj]`, False beyond the edge."""
    result = np.zeros_like(free)
    rows, columns = free.shape
    result[max(0, -di) : rows - max(0, di), max(0, -dj) : columns - max(0, dj)] = free[
        max(0, di) : rows + min(0, di), max(0, dj) : columns + min(0, dj)
    ]
    return result


def _pull_tight(grid: OccupancyGrid, points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Only the corners that are needed to get around things."""
    kept, position = [points[0]], 0
    while position < len(points) - 1:
        low, high = position + 1, len(points) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if grid.sees(points[position], points[middle]):
                low = middle
            else:
                high = middle - 1
        kept.append(points[low])
        position = low
    return kept
