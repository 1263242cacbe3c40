"""FrozenLake as a conversation: a random map, start and goal for each seed, told in words."""

from __future__ import annotations

from collections import deque

import gymnasium
import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from turnwise.environments.gym import GymEnv, GymEnvironment, GymSpec
from turnwise.errors import ConfigError
from turnwise.types import Json, Task

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
_OFFSETS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_NAMES = {"F": "ice", "S": "ice", "H": "hole", "G": "goal"}

INSTRUCTIONS = (
    "You walk on a frozen lake. Go to the goal and stay away from holes. "
    'Answer only with your next move: {"move": "left"}, {"move": "down"}, {"move": "right"} or {"move": "up"}.'
)

ACTION_SCHEMA: dict[str, Json] = {
    "type": "object",
    "properties": {"move": {"enum": list(MOVES)}},
    "required": ["move"],
    "additionalProperties": False,
}


def build_frozenlake(
    *,
    size: int = 4,
    ice: float = 0.8,
    min_distance: int = 2,
    max_distance: int | None = None,
    invalid_reward: float = -0.1,
    progress_reward: float = 0.0,
    hole_reward: float = 0.0,
    instructions: bool = False,
) -> GymSpec:
    """Maps of `size` × `size` with a share of `ice`; start and goal are `min_distance` to `max_distance` moves apart.

    Reaching the goal pays 1. An action that is no move costs a little: standing still must not be the safe way out.
    `progress_reward` is paid for each move nearer to the goal and taken for each move away from it; `hole_reward` is
    paid for falling into a hole. With `instructions`, the first observation explains the game and the form of a move, which
    a pretrained model must be told.
    """
    if not 2 <= size <= 9:
        raise ConfigError(f"frozenlake size is {size}; use 2 to 9")
    if not 0.3 <= ice <= 1.0:
        raise ConfigError(f"frozenlake ice is {ice}; use a share from 0.3 to 1.0")
    furthest = max_distance if max_distance is not None else size * size
    if not 1 <= min_distance <= min(furthest, 2 * size - 2):
        raise ConfigError(
            f"frozenlake min_distance is {min_distance}; use 1 to {min(furthest, 2 * size - 2)}"
        )

    def make_game(task: Task) -> GymEnv:
        desc = make_map(task.seed, size=size, ice=ice, min_distance=min_distance, max_distance=furthest)
        return gymnasium.make("FrozenLake-v1", desc=desc, is_slippery=False, max_episode_steps=1000)

    def bonus(env: GymEnv, before: int, after: int) -> float:
        nearer = _moves_nearer(env, before, after)
        return hole_reward if nearer is None else progress_reward * nearer

    return GymSpec(
        "frozenlake",
        lambda: GymEnvironment(
            make_game,
            describe=describe,
            action_schema=ACTION_SCHEMA,
            instructions=INSTRUCTIONS if instructions else "",
            read_action=_read_move,
            state_key=_position,
            invalid_reward=invalid_reward,
            bonus=bonus,
        ),
    )


def make_map(seed: int, *, size: int, ice: float, min_distance: int, max_distance: int) -> list[str]:
    """A map with a path of the wanted length from S to G, the same for the same seed."""
    rng = np.random.default_rng([seed, size])
    while True:
        cells = np.where(rng.random((size, size)) < ice, "F", "H")
        goal = tuple(int(i) for i in rng.integers(0, size, 2))
        cells[goal] = "G"
        distances = _distances_to(cells, goal)
        starts = [cell for cell, moves in distances.items() if min_distance <= moves <= max_distance]
        if starts:
            cells[sorted(starts)[rng.integers(len(starts))]] = "S"
            return ["".join(row) for row in cells]


def describe(env: GymEnv, observation: int) -> str:
    """Position, goal direction and what lies next to the agent.

    On the map S F / H G, seen from S: `At row 1 column 1. Goal: down 1, right 1. left wall, down hole, right ice, up wall.`
    """
    game = env.unwrapped
    assert isinstance(game, FrozenLakeEnv)
    cells = game.desc.astype(str)
    row, column = divmod(int(observation), game.ncol)
    (goal_row, goal_column) = np.argwhere(cells == "G")[0]
    ways = []
    if goal_row != row:
        ways.append(f"{'down' if goal_row > row else 'up'} {abs(int(goal_row) - row)}")
    if goal_column != column:
        ways.append(f"{'right' if goal_column > column else 'left'} {abs(int(goal_column) - column)}")
    around = []
    for move, (down, right) in _OFFSETS.items():
        there = (row + down, column + right)
        inside = 0 <= there[0] < game.nrow and 0 <= there[1] < game.ncol
        around.append(f"{move} {_NAMES[cells[there]] if inside else 'wall'}")
    return f"At row {row + 1} column {column + 1}. Goal: {', '.join(ways) or 'here'}. {', '.join(around)}."


def _read_move(value: dict[str, Json]) -> int:
    move = value.get("move")
    if not isinstance(move, str) or move not in MOVES:
        raise ValueError(f'"move" must be one of {", ".join(MOVES)}')
    return MOVES[move]


def _moves_nearer(env: GymEnv, before: int, after: int) -> int | None:
    """1 for a step towards the goal, -1 for one away from it, 0 for bumping into a wall, None for a hole."""
    game = env.unwrapped
    cells = game.desc.astype(str)
    row, column = np.argwhere(cells == "G")[0]
    distances = _distances_to(cells, (int(row), int(column)))
    start, end = divmod(int(before), game.ncol), divmod(int(after), game.ncol)
    return distances[start] - distances[end] if end in distances else None


def _position(env: GymEnv, observation: int) -> Json:
    return int(observation)


def _distances_to(
    cells: np.ndarray[tuple[int, int], np.dtype[np.str_]], goal: tuple[int, ...]
) -> dict[tuple[int, int], int]:
    """Moves to the goal from every cell that can reach it without a hole."""
    start = (goal[0], goal[1])
    distances = {start: 0}
    queue = deque([start])
    while queue:
        here = queue.popleft()
        for down, right in _OFFSETS.values():
            there = (here[0] + down, here[1] + right)
            inside = 0 <= there[0] < cells.shape[0] and 0 <= there[1] < cells.shape[1]
            if inside and there not in distances and cells[there] != "H":
                distances[there] = distances[here] + 1
                queue.append(there)
    return distances
