"""The rewards that come with turnwise, by the name a config uses. They are trusted and run in this process."""

from __future__ import annotations

import importlib

from turnwise.rewards.interface import RewardFunction

_MODULES = {
    "environment": ("environment",),
    "text": ("text",),
    "language": ("language",),
    "matching": ("exact", "regex", "numeric"),
    "json_validity": ("json",),
    "navigation": ("navigation", "vsibench"),
    "judges": ("judge", "judge_ranking"),
}
BUILTINS = {name: module for module, names in _MODULES.items() for name in names}
"""Each name and the module here that holds its function, called `<name>_reward`."""


def load_builtin(name: str) -> RewardFunction:
    """The built-in reward of that name."""
    module = importlib.import_module(f"turnwise.rewards.builtin.{BUILTINS[name]}")
    function = getattr(module, f"{name}_reward")
    assert isinstance(function, RewardFunction)
    return function
