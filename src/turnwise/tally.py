"""Running figures over stored episodes, one record at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


class Tally:
    """Running figures that need no episode to be kept."""

    def __init__(self) -> None:
        self.num_episodes = 0
        self._sums: Counter[str] = Counter()
        self._methods: Counter[str] = Counter()
        self._qualities: Counter[str] = Counter()
        self._stops: Counter[str] = Counter()
        self._dropouts: Counter[str] = Counter()

    def add(self, record: Mapping[str, Any]) -> None:
        self.num_episodes += 1
        self._sums["turns"] += record["num_turns"]
        self._sums["reward"] += record["final_reward"]
        self._sums["valid"] += record["is_valid"]
        self._sums["failed"] += record["failure"] is not None
        self._qualities[record["masking_quality"]] += 1
        self._stops[record["stop_reason"]] += 1
        if record["dropout_reason"] is not None:
            self._dropouts[record["dropout_reason"].partition(" ")[0].rstrip(":")] += 1
        for turn in record["turns"]:
            self._methods[turn["masking_method"]] += 1
            self._sums["action_tokens"] += turn["num_action_tokens"]
            self._sums["sampled_tokens"] += turn["completion_end"] - turn["completion_start"]

    def figures(self) -> dict[str, Any]:
        count = max(1, self.num_episodes)
        return {
            "num_episodes": self.num_episodes,
            "num_valid": int(self._sums["valid"]),
            "num_dropped": self.num_episodes - int(self._sums["valid"]),
            "num_failed": int(self._sums["failed"]),
            "dropout_rate": (self.num_episodes - self._sums["valid"]) / count,
            "num_turns": int(self._sums["turns"]),
            "mean_turns": self._sums["turns"] / count,
            "mean_reward": self._sums["reward"] / count,
            "num_sampled_tokens": int(self._sums["sampled_tokens"]),
            "num_action_tokens": int(self._sums["action_tokens"]),
            "masking_methods": dict(self._methods),
            "masking_quality": dict(self._qualities),
            "dropout_reasons": dict(self._dropouts),
            "stop_reasons": dict(self._stops),
        }
