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
from functools import partial
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


def time_sizes(kind: str, sizes: tuple[int, ...], rounds: int) -> dict[int, float]:
    """CPU ms by number of rows. The sizes take turns, so that a busy minute of the machine meets all of them."""
    batches = [make_batch(num_episodes, kind) for num_episodes in sizes]
    best = [float("inf")] * len(sizes)
    for _ in range(rounds):
        for index, batch in enumerate(batches):
            columns = {**batch, "state_keys": fresh(batch["state_keys"])}
            best[index] = min(best[index], measure(partial(gigpo, **columns), 1))
    return {50 * num_episodes: milliseconds for num_episodes, milliseconds in zip(sizes, best, strict=True)}


def compare_gigpo(sizes: tuple[int, ...], rounds: int) -> dict[str, float]:
    results = {}
    for kind, bar in BARS_MS.items():
        times = time_sizes(kind, sizes, rounds)
        for num_rows, milliseconds in times.items():
            print(
                f"gigpo, {kind:5s} states, {num_rows:7,d} rows: {milliseconds:8.1f} ms, {1e3 * milliseconds / num_rows:.2f} µs a row"
            )
        held = "held" if times[50_000] <= bar else "MISSED"
        print(f"    bar at 50,000 rows: {bar:.0f} ms, {held}")
        per_row = [milliseconds / num_rows for num_rows, milliseconds in times.items()]
        ratio = max(per_row) / min(per_row)
        held = "held" if ratio <= MAX_RATIO else "MISSED"
        print(f"    cost of a row, dearest size to cheapest: {ratio:.2f} (bar {MAX_RATIO}), {held}")
        results |= {f"{kind}_ms": times[50_000], f"{kind}_ratio": ratio}
    return results


def compare_returns(num_episodes: int) -> dict[str, float]:
    batch = make_batch(num_episodes, "str")
    ids, rewards = np.array(batch["episode_ids"], dtype=object), batch["rewards"]
    assert np.allclose(scan_returns(ids, rewards, 0.95), step_returns(ids, rewards, gamma=0.95))
    ours = measure(lambda: step_returns(batch["episode_ids"], rewards, gamma=0.95), 3)
    theirs = measure(lambda: scan_returns(ids, rewards, 0.95), 1)
    num_rows = 50 * num_episodes
    print(
        f"returns alone, {num_rows:6,d} rows: {ours:.2f} ms; scanning the batch for every row: {theirs:.0f} ms, {theirs / ours:.0f} times as much"
    )
    return {f"returns_{num_rows}_ms": ours, f"scan_returns_{num_rows}_ms": theirs}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="leave out the batches of 500,000 rows")
    arguments = parser.parse_args()
    sizes = (100, 1_000) if arguments.quick else (100, 1_000, 10_000)
    results = compare_gigpo(sizes, rounds=5)
    for num_episodes in (50, 200):
        results |= compare_returns(num_episodes)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
