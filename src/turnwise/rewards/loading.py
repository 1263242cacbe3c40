"""Finds the reward a name stands for, and decides where it may run: built-ins here, everything else in the sandbox."""

from __future__ import annotations

from turnwise.config import RewardConfig, RewardsConfig
from turnwise.errors import RewardError
from turnwise.rewards.builtin import BUILTINS, load_builtin
from turnwise.rewards.evaluators import Evaluator, LocalEvaluator


def load_evaluator(function: RewardConfig, config: RewardsConfig) -> Evaluator:
    """The evaluator for one entry of `rewards.functions`."""
    if function.name in BUILTINS:
        return LocalEvaluator(load_builtin(function.name), function.params)
    known = ", ".join(sorted(BUILTINS))
    raise RewardError(f"there is no reward {function.name!r}; built in: {known}")
