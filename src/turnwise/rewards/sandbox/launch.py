"""Starts the sandbox's process: which files it can see, with which command, under which user."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import turnwise

Tier = str
BUBBLEWRAP, LANDLOCK, RLIMITS = "bubblewrap", "landlock", "rlimits"

_SYSTEM_LIBRARIES = (
    "/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo",
    "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives",
)  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_MACHINE_FACTS = ("/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu")
_PROCESSES = 64
"""How many processes and threads the sandbox may have when they can be counted apart from the user's others."""
_MORE_PROCESSES = 512
_FIRST_FREE_UID = 1_600_000_000
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMEXPR_NUM_THREADS": "1",
}  # fmt: skip
"""All that the sandbox sees; without it numpy would start a thread per core when imported."""


@lru_cache(maxsize=1)
def package_folder() -> str:
    """Where turnwise itself lies; the sandbox needs it to import the interface."""
    return str(Path(turnwise.__file__).resolve().parent)


@lru_cache(maxsize=1)
def package_paths() -> tuple[str, ...]:
    """The entries of `sys.path` that hold the standard library and installed packages, and no others."""
    paths = sysconfig.get_paths()
    stdlib = {paths["stdlib"], paths["platstdlib"], str(Path(paths["stdlib"]) / "lib-dynload")}
    stdlib.add(
        str(Path(paths["stdlib"]).parent / f"python{sys.version_info.major}{sys.version_info.minor}.zip")
    )
    return tuple(
        entry
        for entry in sys.path
        if entry in stdlib or Path(entry).name in ("site-packages", "dist-packages")
    )


@lru_cache(maxsize=1)
def python_roots() -> tuple[str, ...]:
    """What Python and its packages need to be read: the interpreter, its libraries, the environment, the system's."""
    executable = Path(sys.executable)
    roots = [str(executable), str(executable.resolve()), str(Path(sys.base_prefix) / "lib"), *package_paths()]
    if sys.prefix != sys.base_prefix:
        roots.append(sys.prefix)
    hops = executable
    while hops.is_symlink():
        hops = hops.parent / os.readlink(hops)
        roots.append(str(hops))
    roots += [package_folder(), *_SYSTEM_LIBRARIES]
    return tuple(dict.fromkeys(os.path.normpath(root) for root in roots if os.path.exists(root)))


def readable_paths(extra: tuple[str, ...]) -> tuple[str, ...]:
    """All that reward code can read in the Landlock tier."""
    return (*python_roots(), *_DEVICES, *_MACHINE_FACTS, *extra)


def find_bubblewrap() -> str | None:
    return shutil.which("bwrap")


def command(tier: Tier, extra: tuple[str, ...]) -> list[str]:
    """The command line that starts the zygote."""
    script = str(Path(package_folder()) / "rewards" / "sandbox" / "zygote.py")
    python = [sys.executable, "-I", "-B", "-X", "utf8", script, package_folder()]
    if tier != BUBBLEWRAP:
        return python
    bubblewrap = find_bubblewrap()
    if bubblewrap is None:
        raise FileNotFoundError("bwrap is not installed")
    return [bubblewrap, *_bubblewrap_options(extra), "--", *python]


def _bubblewrap_options(extra: tuple[str, ...]) -> list[str]:
    options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() == 0:
        # Root needs no user namespace. The zygote gives up its user before it imports anything of the author's:
        # in a user namespace it would stay root outside, whom no process limit binds.
        options += ["--cap-drop", "ALL"]
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_DAC_READ_SEARCH"):
            options += ["--cap-add", capability]
    else:
        options += ["--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    options += ["--die-with-parent", "--new-session", "--hostname", "sandbox"]
    options += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]  # noqa: S108 - the sandbox's own
    shown = _outermost((*python_roots(), *extra))
    folders = {str(parent) for path in shown for parent in Path(path).parents if str(parent) != "/"}
    for folder in sorted(folders):
        # Without this bubblewrap makes them for root alone, and the zygote is root no longer.
        options += ["--perms", "0755", "--dir", folder]
    for path in shown:
        if Path(path).is_symlink() and Path(path).parent == Path("/"):
            options += ["--symlink", os.readlink(path), path]
        else:
            options += ["--ro-bind", path, path]
    # Nothing in the sandbox can be written: no call can leave a file behind for the next.
    for path in ("/dev", "/tmp", "/"):  # noqa: S108 - the sandbox's own
        options += ["--remount-ro", path]
    return options


def _outermost(paths: tuple[str, ...]) -> list[str]:
    """The paths without those that lie inside another of them."""
    found: list[str] = []
    for path in sorted(set(paths), key=lambda path: path.count("/")):
        if not any(Path(path).is_relative_to(outer) for outer in found):
            found.append(path)
    return found


def spawn(tier: Tier, extra: tuple[str, ...]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the zygote and return it with our end of its control socket."""
    ours, theirs = socket.socketpair()
    try:
        process = _spawner().submit(_popen, command(tier, extra), theirs.fileno()).result()
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def _popen(arguments: list[str], control: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - our own command
        [*arguments, str(control)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(control,),
        env=_ENVIRONMENT,
        cwd="/",
        start_new_session=True,
    )


_spawners: dict[int, ThreadPoolExecutor] = {}
_spawners_lock = threading.Lock()


def _spawner() -> ThreadPoolExecutor:
    """One thread starts all sandboxes and lives as long as the process: they die with the thread that started them."""
    with _spawners_lock:
        if os.getpid() not in _spawners:
            _spawners.clear()
            _spawners[os.getpid()] = ThreadPoolExecutor(1, thread_name_prefix="turnwise-sandbox")
        return _spawners[os.getpid()]


def unused_uid() -> int:
    """A user id that nobody has, for a sandbox started by root."""
    return _FIRST_FREE_UID + secrets.randbelow(1 << 28)


def process_limit(tier: Tier) -> int:
    """How many processes the sandbox's user may have: its own when they are counted apart, else those running plus some."""
    release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    if os.geteuid() == 0 or (tier == BUBBLEWRAP and release >= (5, 14)):
        return _PROCESSES
    return _count_own_threads() + _MORE_PROCESSES


def _count_own_threads() -> int:
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == os.geteuid():
                    count += len(os.listdir(entry / "task"))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it ended while we counted
    return count
