"""How a process locks itself in before it touches user code: privileges, limits, Landlock, seccomp, in that order."""

from __future__ import annotations

import ctypes
import os
import resource
import stat
import struct
from collections.abc import Sequence

from turnwise.rewards.sandbox import landlock, seccomp

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 1, 4, 8
_SIGKILL = 9
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAP_DAC_READ_SEARCH = 1 << 2
_WRITABLE = ("/dev/null",)

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Be killed when the process that started this one dies; the filter keeps user code from undoing it."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def hide_memory() -> None:
    """No process of the same user may look into this one: its memory, its environment, its file descriptors."""
    _prctl(_PR_SET_DUMPABLE, 0)


def drop_privileges(uid: int, needed: Sequence[str]) -> None:
    """Root becomes `uid`, a user nobody else is, so that the process limit counts and no file belongs to it.

    When Python itself lives where only root can look (a pyenv in root's home), the right to read what others cannot
    is kept, and nothing else; Landlock or the mounts then decide what there is to read.
    """
    if os.geteuid() != 0:
        return
    keeps_reading = not all(_is_readable_by_others(path) for path in needed if os.path.exists(path))
    if keeps_reading:
        _prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kept = _CAP_DAC_READ_SEARCH if keeps_reading else 0
    header = struct.pack("<Ii", 0x20080522, 0)
    rights = struct.pack("<IIIIII", kept, kept, 0, 0, 0, 0)
    if _libc.syscall(_CAPSET[os.uname().machine], header, rights) != 0:
        raise OSError(ctypes.get_errno(), "capset failed")


def limit_process(*, memory_bytes: int, num_processes: int) -> None:
    """Limits of the zygote; none can be raised again."""
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_NPROC, num_processes),
        (resource.RLIMIT_NOFILE, 128),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def limit_call(*, memory_bytes: int, cpu_s: int) -> None:
    """Limits of one call's process."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def lock(tier: str, readable: Sequence[str]) -> None:
    """Close the doors that the tier has; raises when one cannot be closed."""
    if tier == "rlimits":
        return
    deny_truncate = False
    if tier == "landlock":
        deny_truncate = landlock.abi() < 3
        landlock.restrict(readable=readable, writable=_WRITABLE)
    seccomp.zygote_filter(deny_truncate=deny_truncate).install()


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _is_readable_by_others(path: str) -> bool:
    path = os.path.realpath(path)
    if not os.stat(path).st_mode & stat.S_IROTH:
        return False
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & stat.S_IXOTH:
            return False
    return True
