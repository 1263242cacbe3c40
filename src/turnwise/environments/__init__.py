"""Environments by name: what ships with turnwise, Gymnasium ids, and `file.py:Name` or `module:Name` of your own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from turnwise.config import EnvironmentConfig
from turnwise.environment import EnvironmentSpec
from turnwise.errors import ConfigError

# Name → module and the function in it that takes the config's params.
_BUILDERS = {
    "frozenlake": ("turnwise.environments.frozenlake", "build_frozenlake"),
    "navigation": ("turnwise.environments.navigation", "build_navigation"),
}


def build_environment(config: EnvironmentConfig) -> EnvironmentSpec:
    """The environments and tasks that `config.name` stands for."""
    if config.name.startswith("gym:"):
        from turnwise.environments.gym import build_gym

        return _call(config, lambda **params: build_gym(config.name.removeprefix("gym:"), **params))
    module_name, builder = _find_builder(config.name)
    try:
        module = (
            _load_file(Path(module_name))
            if module_name.endswith(".py")
            else importlib.import_module(module_name)
        )
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ConfigError(f"environment {config.name!r}: cannot import {module_name}: {error}") from None
    if not hasattr(module, builder):
        raise ConfigError(f"environment {config.name!r}: module {module_name} has no {builder}")
    return _call(config, getattr(module, builder))


def _find_builder(name: str) -> tuple[str, str]:
    if name in _BUILDERS:
        return _BUILDERS[name]
    module_name, separator, builder = name.partition(":")
    if not separator:
        raise ConfigError(
            f"environment.name is {name!r}; known: {', '.join(_BUILDERS)}, gym:ID, or file.py:Name or module:Name of your own"
        )
    return module_name, builder


def _load_file(path: Path) -> ModuleType:
    """A Python file as a module of its own name; it runs in this process, as the user's own code does."""
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve(strict=True))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _call(config: EnvironmentConfig, builder: Callable[..., EnvironmentSpec]) -> EnvironmentSpec:
    params: Mapping[str, Any] = config.params  # the builder checks them
    try:
        return builder(**params)
    except TypeError as error:
        raise ConfigError(
            f"environment {config.name!r} does not take these params {dict(params)}: {error}"
        ) from None
