"""Finds the reward a name stands for, and decides where it may run: built-ins here, everything else in the sandbox.

A name is a built-in, `path/to/file.py:function`, an import path `package.module:function`, or an entry point that an
installed package registered under `turnwise.rewards`. User code is located without being imported.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import types
from importlib.metadata import entry_points
from pathlib import Path

from turnwise.config import RewardConfig, RewardsConfig
from turnwise.errors import RewardError
from turnwise.rewards.builtin import BUILTINS, load_builtin
from turnwise.rewards.evaluators import Evaluator, LocalEvaluator
from turnwise.rewards.interface import RewardFunction
from turnwise.rewards.sandbox.client import Limits, RewardCode
from turnwise.rewards.sandbox.launch import package_paths

ENTRY_POINTS = "turnwise.rewards"


def load_evaluator(function: RewardConfig, config: RewardsConfig) -> Evaluator:
    """The evaluator for one entry of `rewards.functions`."""
    if function.name in BUILTINS:
        return LocalEvaluator(load_builtin(function.name), function.params)
    code = locate(function.name, reads=config.reads)
    if config.sandbox == "none":
        return LocalEvaluator(import_here(code), function.params, timeout_s=config.timeout_s)
    from turnwise.rewards.sandbox.pool import SandboxEvaluator
    from turnwise.rewards.sandbox.probe import choose_tier

    return SandboxEvaluator(
        code,
        function.params,
        tier=choose_tier(config.sandbox, allow_weak=config.allow_weak_sandbox),
        limits=Limits(
            timeout_s=config.timeout_s,
            memory_mb=config.memory_mb,
            import_timeout_s=config.import_timeout_s,
        ),
        num_workers=config.num_workers,
    )


def locate(name: str, *, reads: tuple[str, ...] = ()) -> RewardCode:
    """Where the code of a reward is, found without running any of it."""
    readable = tuple(_existing(path) for path in reads)
    where, separator, function = name.rpartition(":")
    if not separator:
        registered = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}
        if name not in registered:
            raise RewardError(_unknown(name, [*BUILTINS, *registered]))
        where, _, function = registered[name].rpartition(":")
    if not where or not function:
        raise RewardError(f"reward {name!r} is not of the form file.py:function or package.module:function")
    if where.endswith(".py"):
        path = Path(where).expanduser()
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RewardError(f"reward file {where} cannot be read: {error}") from None
        return RewardCode(function=function, path=str(path), source=source, reads=readable)
    return RewardCode(
        function=function, path=where, module=where, package_location=_package_location(where), reads=readable
    )


def import_here(code: RewardCode) -> RewardFunction:
    """Import user code into this process; only for `rewards.sandbox: none`."""
    try:
        if code.source is not None:
            module = types.ModuleType(f"turnwise_user_reward_{abs(hash(code.source))}")
            module.__file__ = code.path
            sys.modules[module.__name__] = module
            exec(compile(code.source, code.path, "exec"), module.__dict__)  # noqa: S102 - the user asked for it
        else:
            module = importlib.import_module(code.module or "")
        found = getattr(module, code.function)
    except Exception as error:
        raise RewardError(
            f"reward {code.path}:{code.function} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return found if isinstance(found, RewardFunction) else RewardFunction(found)


def _package_location(module: str) -> str | None:
    """The top-level file or folder of a module, or None when it is an installed package anyway."""
    top = module.partition(".")[0]
    spec = importlib.util.find_spec(top)  # does not import: a top-level name has no parent
    if spec is None:
        raise RewardError(f"there is no module {top!r} for reward {module}; is its package installed?")
    if spec.submodule_search_locations:
        location = Path(next(iter(spec.submodule_search_locations)))
    elif spec.origin is not None and Path(spec.origin).exists():
        location = Path(spec.origin)
    else:
        return None
    installed = any(location.is_relative_to(path) for path in package_paths())
    return None if installed else str(location.resolve())


def _existing(path: str) -> str:
    resolved = Path(path).expanduser().resolve()
    if not resolved.exists():
        raise RewardError(f"rewards.reads names {path}, which does not exist")
    return str(resolved)


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
    return f"there is no reward {name!r}; {hint} (your own is file.py:function or package.module:function)"
