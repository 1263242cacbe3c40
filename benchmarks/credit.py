"""How fast GiGPO is, and that its cost grows in step with the batch.

    python benchmarks/credit.py [--json] [--quick]

A batch has 1,000 episodes of 50 turns in groups of 8; about a fifth of the turns share a state with others of their group,
the rest are in states of their own. States are texts of 200 characters or 10 × 10 integer arrays, every one a fresh object.
Beside it: the published way to compute returns, which scans the whole batch once for every row.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from turnwise.advantages import gigpo, step_returns

BARS_MS = {"str": 60.0, "array": 160.0}
MAX_RATIO = 1.3
WORDS = np.array(
    [
        "shelf",
        "drawer",
        "lamp",
        "mug",
        "desk",
        "apple",
        "sink",
        "open",
        "closed",
        "take",
        "cabinet",
        "fridge",
        "you",
        "see",
        "a",
        "the",
        "on",
        "in",
        "nothing",
    ]
)


def make_batch(
    num_episodes: int, kind: str, *, num_turns: int = 50, group_size: int = 8, seed: int = 20250510
) -> dict[str, Any]:
    """Columns of a synthetic batch, the same for the same arguments."""
    rng = np.random.default_rng(seed)
    num_rows = num_episodes * num_turns
    episode = np.repeat(np.arange(num_episodes), num_turns)
    group = episode // group_size
    num_shared = (int(group.max()) + 1) * 20
    is_shared = rng.random(num_rows) < 0.2
    state = np.where(is_shared, group * 20 + rng.integers(0, 20, num_rows), num_shared + np.arange(num_rows))
    reward = -0.1 * (rng.random(num_rows) < 0.05)
    reward[num_turns - 1 :: num_turns] += rng.random(num_episodes) < 0.4
    return {
        "group_ids": [f"g{number:03d}" for number in group],
        "episode_ids": [f"e{number:05d}" for number in episode],
        "state_keys": [make_state(int(number), kind) for number in state],
        "rewards": reward,
    }


def make_state(number: int, kind: str) -> Any:
    draws = (number * 2654435761 + np.arange(100) * 40503) % 7919
    if kind == "array":
        grid = (draws % 7).astype(np.int64).reshape(10, 10)
        grid.flat[0] = number
        return grid
    return (f"[{number:07d}] " + " ".join(WORDS[draws[:40] % len(WORDS)]))[:200]


def scan_returns(episode_ids: Any, rewards: Any, gamma: float) -> Any:
    """Returns the published way (verl-agent): the batch is scanned per episode, and again for every row to put them back."""
    by_episode = {}
    for name in np.unique(episode_ids):
        rows = np.where(episode_ids == name)[0]
        running = 0.0
        own = np.zeros(len(rows))
        for position in range(len(rows) - 1, -1, -1):
            running = rewards[rows[position]] + gamma * running
            own[position] = running
        by_episode[name] = own
    returns = np.zeros_like(rewards)
    for row, name in enumerate(episode_ids):
        rows = np.where(episode_ids == name)[0]
        returns[row] = by_episode[name][np.where(rows == row)[0].item()]
    return returns


def measure(call: Callable[[], Any], repeats: int) -> float:
    """Least CPU time in ms."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return 1e3 * min(times)


def fresh(keys: list[Any]) -> list[Any]:
    """The same keys as new objects, so that no cached hash helps."""
    return [key.copy() if isinstance(key, np.ndarray) else "".join((key[:1], key[1:])) for key in keys]


def time_gigpo(batch: dict[str, Any], repeats: int) -> float:
    copies = iter([{**batch, "state_keys": fresh(batch["state_keys"])} for _ in range(repeats)])
    return measure(lambda: gigpo(**next(copies)), repeats)


def compare_returns() -> dict[str, float]:
    found: dict[str, float] = {}
    for num_episodes in (50, 200):
        batch = make_batch(num_episodes, "str")
        ids = np.array(batch["episode_ids"], dtype=object)
        ours = measure(lambda: step_returns(batch["episode_ids"], batch["rewards"], gamma=0.95), 3)
        theirs = measure(lambda: scan_returns(ids, batch["rewards"], 0.95), 1)
        assert np.allclose(
            scan_returns(ids, batch["rewards"], 0.95), step_returns(ids, batch["rewards"], gamma=0.95)
        )
        num_rows = 50 * num_episodes
        print(
            f"returns alone, {num_rows:6d} rows: {ours:6.2f} ms; scanning the batch for every row: {theirs:7.0f} ms, {theirs / ours:.0f} times as much"
        )
        found |= {f"returns_{num_rows}_ms": ours, f"scan_returns_{num_rows}_ms": theirs}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="leave out the batches of 500,000 rows")
    arguments = parser.parse_args()
    sizes = (100, 1_000) if arguments.quick else (100, 1_000, 10_000)
    results: dict[str, Any] = {}
    for kind, bar in BARS_MS.items():
        per_row = {}
        for num_episodes in sizes:
            batch = make_batch(num_episodes, kind)
            milliseconds = time_gigpo(
                batch, repeats=max(3, 2_000 // num_episodes if num_episodes < 1_000 else 3)
            )
            num_rows = 50 * num_episodes
            per_row[num_rows] = 1e3 * milliseconds / num_rows
            print(
                f"gigpo, {kind:5s} states {num_rows:7d} rows {milliseconds:8.1f} ms {per_row[num_rows]:6.2f} µs/row"
            )
            if num_rows == 50_000:
                results[f"{kind}_ms"] = milliseconds
                print(f"    bar at 50,000 rows: {bar:.0f} ms, {'held' if milliseconds <= bar else 'MISSED'}")
            del batch
        # The smallest and the largest batch; neither may cost more per turn than the other by much.
        ratio = per_row[50 * sizes[-1]] / per_row[50 * sizes[0]]
        results[f"{kind}_ratio"] = ratio
        print(
            f"    per row, largest to smallest: {ratio:.2f} (bar {MAX_RATIO}), {'held' if ratio <= MAX_RATIO else 'MISSED'}"
        )
    results |= compare_returns()
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
