"""The rewards that come with turnwise, by the name a config uses. They are trusted and run in this process."""

from __future__ import annotations

import importlib

from turnwise.rewards.interface import RewardFunction

BUILTINS = {
    "environment": "turnwise.rewards.builtin.environment",
}
"""Each name and the module that holds the function of that name."""


def load_builtin(name: str) -> RewardFunction:
    """The built-in reward of that name."""
    module = importlib.import_module(BUILTINS[name])
    function = getattr(module, f"{name}_reward")
    assert isinstance(function, RewardFunction)
    return function
