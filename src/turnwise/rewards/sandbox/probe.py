"""Finds out which tier of the sandbox holds on this machine, by attacking it rather than by asking what is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec

from turnwise.errors import RewardError, SandboxError
from turnwise.rewards.arguments import Arguments
from turnwise.rewards.sandbox import landlock, launch, seccomp
from turnwise.rewards.sandbox.client import Limits, RewardCode

TIERS = (launch.BUBBLEWRAP, launch.LANDLOCK)
"""Strongest first."""

_VARIABLE = "TURNWISE_CANARY"
_CANARY = """
import os, socket

def attempt(escapes, name, attack):
    try:
        attack()
    except (OSError, KeyError):
        return
    escapes[name] = 1.0

def canary(messages, secret, outside, variable):
    escapes = {}
    attempt(escapes, "read a secret file", lambda: open(secret).read())
    attempt(escapes, "read /etc/passwd", lambda: open("/etc/passwd").read())
    attempt(escapes, "wrote a file", lambda: open(outside, "w").write("x"))
    attempt(escapes, "wrote to /tmp", lambda: open("/tmp/turnwise-canary", "w").write("x"))
    attempt(escapes, "wrote to /dev/shm", lambda: open("/dev/shm/turnwise-canary", "w").write("x"))
    attempt(escapes, "saw the environment", lambda: os.environ[variable])
    attempt(escapes, "opened a TCP socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    attempt(escapes, "opened a UDP socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    attempt(escapes, "opened a unix socket", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    attempt(escapes, "signalled its parent", lambda: os.kill(os.getppid(), 0))
    attempt(escapes, "made a memory file", lambda: os.memfd_create("canary"))
    attempt(escapes, "looked into its parent", lambda: os.listdir(f"/proc/{os.getppid()}/fd"))
    attempt(escapes, "started a program", lambda: os.execv("/bin/true", ["true"]))
    attempt(escapes, "forked", lambda: os._exit(0) if os.fork() == 0 else None)
    return {"score": float(len(escapes)), "metrics": escapes}
"""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a tier holds here, and if not, why."""

    tier: str
    holds: bool
    reason: str = ""


_found: dict[str, Probe] = {}
_lock = threading.Lock()


def probe(tier: str) -> Probe:
    """Attack the tier once per process and remember what came of it."""
    with _lock:
        if tier not in _found:
            _found[tier] = _attack(tier)
        return _found[tier]


def choose_tier(wanted: str, *, allow_weak: bool = False) -> str:
    """The tier to use: the one asked for if it holds, with `auto` the strongest that does; else refuse."""
    tried = [probe(wanted)] if wanted != "auto" else []
    if wanted == "auto":
        for tier in TIERS:
            tried.append(probe(tier))
            if tried[-1].holds:
                break
    if tried[-1].holds:
        return tried[-1].tier
    if allow_weak:
        return launch.RLIMITS
    reasons = "; ".join(f"{found.tier}: {found.reason}" for found in tried)
    raise SandboxError(
        f"no sandbox holds on this machine ({reasons}). Install bubblewrap or use a kernel with Landlock; "
        "rewards.allow_weak_sandbox=true goes on with resource limits alone, rewards.sandbox=none with nothing"
    )


def _attack(tier: str) -> Probe:
    from turnwise.rewards.sandbox.pool import SandboxEvaluator  # the pool imports launch as well

    missing = _missing_part(tier)
    if missing:
        return Probe(tier=tier, holds=False, reason=missing)
    code = RewardCode(function="canary", path="canary", source=_CANARY)
    with tempfile.TemporaryDirectory(prefix="turnwise-probe-") as folder:
        secret = Path(folder) / "secret"
        secret.write_text("canary", encoding="utf-8")
        os.chmod(folder, 0o755)  # noqa: S103 - only the sandbox may stop the canary, not the file's mode
        keywords = {
            "secret": str(secret),
            "outside": str(Path(folder) / "outside"),
            "variable": _VARIABLE,
        }
        # A name that nothing else sets: bubblewrap itself gives its child a PWD.
        os.environ[_VARIABLE] = "canary"
        try:
            evaluator = SandboxEvaluator(
                code, keywords, tier=tier, limits=Limits(timeout_s=10, import_timeout_s=30), num_workers=1
            )
        except (SandboxError, RewardError, OSError) as error:
            return Probe(tier=tier, holds=False, reason=_first_words(tier) or str(error))
        finally:
            del os.environ[_VARIABLE]
        try:
            outcome = evaluator.call(Arguments(messages=[], keywords=keywords))
        finally:
            evaluator.close()
    if outcome.error is not None:
        return Probe(tier=tier, holds=False, reason=outcome.error)
    escapes = sorted(outcome.results[0].metrics)
    return Probe(tier=tier, holds=not escapes, reason=f"the canary {', '.join(escapes)}" if escapes else "")


def _missing_part(tier: str) -> str:
    if sys.platform != "linux":
        return f"it needs Linux, not {sys.platform}"
    if not seccomp.is_supported():
        return "there is no seccomp table for this architecture"
    if tier == launch.BUBBLEWRAP and launch.find_bubblewrap() is None:
        return "bwrap is not installed"
    if tier == launch.LANDLOCK and landlock.abi() == 0:
        return "the kernel has no Landlock, or does not allow it"
    return ""


def _first_words(tier: str) -> str:
    """What bubblewrap says when it cannot start."""
    if tier != launch.BUBBLEWRAP:
        return ""
    try:
        run = subprocess.run(  # noqa: S603 - our own command
            [*launch.command(tier, ()), "-1"], env={}, capture_output=True, text=True, timeout=10, check=False
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return str(error)
    return next((line for line in run.stderr.splitlines() if line.startswith("bwrap:")), "")
