"""Landlock through its three system calls: after `restrict`, only the named paths can be opened, and only read."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same numbers on every architecture
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_FS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many file rights each ABI knows; later ones know as many as 5."""
_NET_BITS = 0b11
_SCOPE_BITS = 0b11

_libc = ctypes.CDLL(None, use_errno=True)


def abi() -> int:
    """The Landlock version of this kernel; 0 when it has none or refuses it."""
    version = int(_libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION_FLAG)))
    return max(version, 0)


def restrict(*, readable: Iterable[str], writable: Iterable[str]) -> None:
    """Give up every file right but reading beneath `readable` and writing the files `writable`, for good.

    TCP, and from ABI 6 on signals and abstract sockets to the outside, go as well. Paths that do not exist are skipped.
    """
    version = abi()
    if version == 0:
        raise OSError("this kernel has no Landlock, or does not allow it")
    rights = (1 << _FS_BITS[min(version, 5)]) - 1
    attributes = struct.pack("<QQQ", rights, _NET_BITS, _SCOPE_BITS)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = int(_libc.syscall(_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint(0)))
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset failed")
    try:
        for path in readable:
            _allow(ruleset, path, _READ_FILE | _READ_DIR)
        for path in writable:
            _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
        if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "no_new_privs is refused")
        if _libc.syscall(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0)) != 0:
            raise OSError(ctypes.get_errno(), "landlock_restrict_self failed")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= ~_READ_DIR
        rule = struct.pack("<Qi", rights, fd)
        if (
            _libc.syscall(_ADD, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint(0))
            != 0
        ):
            raise OSError(ctypes.get_errno(), f"landlock_add_rule failed for {path}")
    finally:
        os.close(fd)
