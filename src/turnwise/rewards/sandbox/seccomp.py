"""The system calls reward code may make, as a seccomp filter written out by hand for x86_64 and aarch64.

An allow-list: everything not named fails with EPERM, so a system call the kernel gains tomorrow is refused too. There
is no exec, no socket but connected stream pairs, no signal to anyone, no namespace, no file that changes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable

# name: (x86_64, aarch64); None where the architecture has no such call. In the order of how often they are made.
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "futex": (202, 98), "read": (0, 63), "write": (1, 64), "mmap": (9, 222), "munmap": (11, 215), "brk": (12, 214),
    "newfstatat": (262, 79), "openat": (257, 56), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "mprotect": (10, 226),
    "madvise": (28, 233), "mremap": (25, 216), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65),
    "writev": (20, 66), "preadv": (295, 69), "pwritev": (296, 70), "getdents64": (217, 61), "access": (21, None),
    "faccessat": (269, 48), "faccessat2": (439, 439), "open": (2, None), "stat": (4, None), "lstat": (6, None),
    "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44), "readlink": (89, None), "readlinkat": (267, 78),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "umask": (95, 166), "flock": (73, 32),
    "fsync": (74, 82), "fdatasync": (75, 83), "fadvise64": (221, 223), "dup": (32, 23), "dup2": (33, None),
    "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59), "poll": (7, None), "ppoll": (271, 73),
    "select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441),
    "eventfd": (284, None), "eventfd2": (290, 19), "timerfd_create": (283, 85), "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87), "signalfd": (282, None), "signalfd4": (289, 74), "recvfrom": (45, 207),
    "recvmsg": (47, 212), "shutdown": (48, 210), "getsockopt": (55, 209), "getsockname": (51, 204),
    "getpeername": (52, 205), "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126),
    "getpriority": (140, 141), "pause": (34, None), "nanosleep": (35, 101), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "gettimeofday": (96, 169), "time": (201, None),
    "times": (100, 153), "alarm": (37, None), "getitimer": (36, 102), "setitimer": (38, 103),
    "timer_create": (222, 107), "timer_settime": (223, 110), "timer_gettime": (224, 108), "timer_delete": (226, 111),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getpgrp": (111, None), "getpgid": (121, 155),
    "getsid": (124, 156), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158), "uname": (63, 160),
    "sysinfo": (99, 179), "getrlimit": (97, 163), "getrusage": (98, 165), "getcpu": (309, 168),
    "getrandom": (318, 278), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "arch_prctl": (158, None), "set_tid_address": (218, 96),
    "set_robust_list": (273, 99), "get_robust_list": (274, 100), "rseq": (334, 293), "membarrier": (324, 283),
    "restart_syscall": (219, 128), "futex_waitv": (449, 449), "pkey_alloc": (330, 289), "pkey_free": (331, 290),
    "pkey_mprotect": (329, 288), "close_range": (436, 436), "wait4": (61, 260), "waitid": (247, 95),
    "exit": (60, 93), "exit_group": (231, 94),
    # What the zygote needs to lock a child further; they can only take away.
    "seccomp": (317, 277), "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}  # fmt: skip
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_FORKS = (57, 58)  # fork and vfork, on x86_64 only
_PRCTL = (157, 167)
_PRLIMIT64 = (302, 261)
_SOCKETPAIR = (53, 199)
_SENDTO = (44, 206)
_FCNTL = (72, 25)
_IOCTL = (16, 29)
_OPENAT = (257, 56)
_OPEN = 2

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000

_NEW_NAMESPACES = 0x7E020000
_CLONE_PARENT, _CLONE_THREAD = 0x8000, 0x10000
_O_TRUNC = 0x200
_AF_UNIX, _SOCK_STREAM, _SOCK_FLAGS = 1, 1, 0o2004000
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15
_HARMLESS_IOCTLS = (
    0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451,
)  # fmt: skip  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_HARMLESS_PRCTLS = (
    3, 15, 16, 22, 23, 38, 39, 0x53564D41,
)  # fmt: skip  # GET_DUMPABLE, SET/GET_NAME, SET_SECCOMP, CAPBSET_READ, SET/GET_NO_NEW_PRIVS, SET_VMA
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2

# BPF operations on 32-bit words: load, and compare with a constant.
_LOAD, _JEQ, _JSET, _RETURN, _AND = 0x20, 0x15, 0x45, 0x06, 0x54


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _argument(index: int) -> bytes:
    """Load the lower half of a system call's argument; the kernel reads these as 32-bit values."""
    return _op(_LOAD, 16 + 8 * index)


_DENY = _op(_RETURN, _ERRNO | errno.EPERM)
_PASS = _op(_RETURN, _ALLOW)


def _when(number: int | None, body: Iterable[bytes]) -> bytes:
    """Run `body` for that system call; the body must return in every branch."""
    if number is None:
        return b""
    block = b"".join(body)
    return _op(_JEQ, number, 0, len(block) // 8) + block


def _one_of(values: Iterable[int]) -> list[bytes]:
    """Allow when the loaded word is one of `values`; falls through otherwise."""
    return [op for value in values for op in (_op(_JEQ, value, 0, 1), _PASS)]


class Filter:
    """A compiled filter; install it in the thread that runs untrusted code."""

    def __init__(self, program: bytes) -> None:
        self.program = program
        """Its BPF instructions, eight bytes each."""
        self._program = ctypes.create_string_buffer(program, len(program))
        # struct sock_fprog { unsigned short len; struct sock_filter *filter; }
        self._head = ctypes.create_string_buffer(
            struct.pack("@HP", len(program) // 8, ctypes.addressof(self._program))
        )
        self._libc = ctypes.CDLL(None, use_errno=True)

    def install(self) -> None:
        """Lock the calling thread in; there is no way back."""
        if self._libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "no_new_privs is refused")
        if self._libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, self._head, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def is_supported() -> bool:
    """Whether there is a table for this machine's architecture."""
    return platform.machine() in _AUDIT_ARCH


def _start(column: int, arch: int) -> list[bytes]:
    return [
        _op(_LOAD, 4),
        _op(_JEQ, arch, 1, 0),
        _op(_RETURN, _KILL),  # a 32-bit call: its numbers mean something else
        _op(_LOAD, 0),
        _when(_CLONE3[column], [_op(_RETURN, _ERRNO | errno.ENOSYS)]),  # glibc falls back to clone
    ]


def zygote_filter(*, deny_truncate: bool) -> Filter:
    """The wall: in force before user code is imported. It still may fork, since the zygote must."""
    column = 0 if platform.machine() == "x86_64" else 1
    program = _start(column, _AUDIT_ARCH[platform.machine()])
    if deny_truncate:
        # Landlock before ABI 3 lets O_TRUNC empty a file that may only be read.
        program.append(_when(_OPENAT[column], [_argument(2), _op(_JSET, _O_TRUNC, 0, 1), _DENY, _PASS]))
        if column == 0:
            program.append(_when(_OPEN, [_argument(1), _op(_JSET, _O_TRUNC, 0, 1), _DENY, _PASS]))
    program += [_when(numbers[column], [_PASS]) for numbers in _ALLOWED.values()]
    program += [
        _when(_CLONE[column], [_argument(0), _op(_JSET, _NEW_NAMESPACES | _CLONE_PARENT, 0, 1), _DENY, _PASS]),
        *(_when(number, [_PASS]) for number in _FORKS if column == 0),
        _when(_PRCTL[column], _prctl_rule()),
        _when(_PRLIMIT64[column], [_argument(0), _op(_JEQ, 0, 1, 0), _DENY, _PASS]),  # its own limits only
        _when(_SOCKETPAIR[column], _socketpair_rule()),
        # send() has no address; one would reach other sockets.
        _when(_SENDTO[column], [_argument(4), _op(_JEQ, 0, 0, 3), _op(_LOAD, 16 + 8 * 4 + 4), _op(_JEQ, 0, 0, 1), _PASS, _DENY]),
        # F_SETOWN would let the kernel signal another process.
        _when(_FCNTL[column], [_argument(1), *(op for value in (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX) for op in (_op(_JEQ, value, 0, 1), _DENY)), _PASS]),
        _when(_IOCTL[column], [_argument(1), *_one_of(_HARMLESS_IOCTLS), _op(_RETURN, _ERRNO | errno.ENOTTY)]),
        _DENY,
    ]  # fmt: skip
    return Filter(b"".join(program))


def child_filter() -> Filter:
    """The belt, for the process of one call: it may start threads, but no process."""
    column = 0 if platform.machine() == "x86_64" else 1
    program = [
        *_start(column, _AUDIT_ARCH[platform.machine()]),
        _when(_CLONE[column], [_argument(0), _op(_JSET, _CLONE_THREAD, 1, 0), _DENY, _PASS]),
        *(_when(number, [_DENY]) for number in _FORKS if column == 0),
        _PASS,
    ]
    return Filter(b"".join(program))


def _prctl_rule() -> list[bytes]:
    """Naming threads and the like; dying with the parent and being undumpable may be turned on, never off."""
    return [
        _argument(0),
        *_one_of(_HARMLESS_PRCTLS),
        _op(_JEQ, _PR_SET_PDEATHSIG, 0, 3), _argument(1), _op(_JEQ, 9, 0, 4), _PASS,
        _op(_JEQ, _PR_SET_DUMPABLE, 0, 2), _argument(1), _op(_JEQ, 0, 1, 0),
        _DENY,
        _PASS,
    ]  # fmt: skip


def _socketpair_rule() -> list[bytes]:
    """Connected stream pairs (asyncio wakes itself with one); a datagram pair could be sent anywhere."""
    return [
        _argument(0), _op(_JEQ, _AF_UNIX, 0, 4),
        _argument(1), _op(_AND, 0xFFFFFFFF ^ _SOCK_FLAGS), _op(_JEQ, _SOCK_STREAM, 0, 1), _PASS,
        _DENY,
    ]  # fmt: skip
