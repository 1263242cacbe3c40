"""Scores episodes: the interface for reward authors, built-in rewards, and the sandbox user code runs in.

Names are loaded when first used: inside the sandbox only `interface` is needed, and it must start fast.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "turnwise.rewards.align": ("align_rewards", "align_step_rewards"),
    "turnwise.rewards.direct": ("evaluate_messages",),
    "turnwise.rewards.interface": (
        "EvaluateResult", "MetricResult", "RewardFunction", "StepOutput", "assistant_turns", "message_text",
        "reward_function",
    ),
    "turnwise.rewards.score": ("Rewards", "build_rewards", "score_groups", "score_run", "score_terms"),
    "turnwise.rewards.steps": ("StepData", "steps_of_episode"),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:  # the public names have many types
    if name not in _HOME_OF:
        raise AttributeError(f"module 'turnwise.rewards' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
