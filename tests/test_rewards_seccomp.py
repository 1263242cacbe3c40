"""The seccomp filters, run by a small interpreter, so that both architectures can be checked on either."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from turnwise.rewards.sandbox import seccomp

ALLOW, EPERM, ENOSYS, ENOTTY, KILL = "allow", "EPERM", "ENOSYS", "ENOTTY", "kill"
ACTIONS = {0x7FFF0000: ALLOW, 0x00050001: EPERM, 0x00050026: ENOSYS, 0x00050019: ENOTTY, 0x80000000: KILL}
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def decide(program: bytes, arch: int, number: int, *arguments: int) -> str:
    """What the kernel would do with that system call."""
    values = [*arguments, *[0] * (6 - len(arguments))]
    call = struct.pack("<IIQ6Q", number, arch, 0, *(value & (2**64 - 1) for value in values))
    accumulator, position = 0, 0
    while True:
        code, if_true, if_false, constant = struct.unpack_from("<HBBI", program, 8 * position)
        position += 1
        if code == 0x20:
            accumulator = struct.unpack_from("<I", call, constant)[0]
        elif code == 0x54:
            accumulator &= constant
        elif code in (0x15, 0x45):
            holds = accumulator == constant if code == 0x15 else bool(accumulator & constant)
            position += if_true if holds else if_false
        elif code == 0x06:
            return ACTIONS[constant]
        else:
            raise AssertionError(f"unknown instruction {code:#x}")


@pytest.fixture(params=sorted(ARCHES))
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(seccomp.platform, "machine", lambda: request.param)
    return str(request.param)


# name: (x86_64, aarch64)
NUMBERS = {
    "read": (0, 63), "openat": (257, 56), "execve": (59, 221), "socket": (41, 198), "connect": (42, 203),
    "kill": (62, 129), "tgkill": (234, 131), "ptrace": (101, 117), "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "memfd_create": (319, 279), "bpf": (321, 280), "io_uring_setup": (425, 425),
    "unlinkat": (263, 35), "mkdirat": (258, 34), "renameat2": (316, 276), "fchmodat": (268, 53), "setuid": (105, 146),
    "setsid": (112, 157), "setpgid": (109, 154), "process_vm_readv": (310, 270), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "sendmsg": (46, 211), "bind": (49, 200), "keyctl": (250, 219), "ftruncate": (77, 46),
    "execveat": (322, 281), "shmget": (29, 194), "init_module": (175, 105), "reboot": (169, 142),
    "open_by_handle_at": (304, 265), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "linkat": (265, 37),
    "symlinkat": (266, 36), "mknodat": (259, 33), "truncate": (76, 45), "chroot": (161, 51), "setrlimit": (160, 164),
    "openat2": (437, 437), "sched_setaffinity": (203, 122), "rt_sigqueueinfo": (129, 138),
}  # fmt: skip
PERMITTED = {"read", "openat"}


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_only_harmless_calls_pass(machine: str, name: str) -> None:
    number = NUMBERS[name][0 if machine == "x86_64" else 1]
    program = seccomp.zygote_filter(deny_truncate=False).program
    assert decide(program, ARCHES[machine], number) == (ALLOW if name in PERMITTED else EPERM)


def test_another_architecture_is_killed(machine: str) -> None:
    for found in (seccomp.zygote_filter(deny_truncate=False), seccomp.child_filter()):
        assert decide(found.program, 0x40000003, 0) == KILL
    if machine == "x86_64":  # x32 numbers carry a bit of their own
        assert (
            decide(seccomp.zygote_filter(deny_truncate=False).program, ARCHES[machine], 0x40000000) == EPERM
        )


CLONE, PRCTL, SOCKETPAIR, SENDTO, FCNTL, IOCTL, PRLIMIT, OPENAT, CLONE3 = (
    (56, 220), (157, 167), (53, 199), (44, 206), (72, 25), (16, 29), (302, 261), (257, 56), (435, 435),
)  # fmt: skip
POINTER = 0x7F00_0000_0000


@pytest.mark.parametrize(
    ("call", "arguments", "expected"),
    [
        (CLONE, (0x1200011,), ALLOW),  # fork
        (CLONE, (0x3D0F00,), ALLOW),  # a thread
        (CLONE, (0x10000011,), EPERM),  # CLONE_NEWUSER
        (CLONE, (0x00020011,), EPERM),  # CLONE_NEWNS
        (CLONE, (0x00008011,), EPERM),  # CLONE_PARENT
        (CLONE3, (POINTER, 88), ENOSYS),
        (PRCTL, (1, 9), ALLOW),  # PDEATHSIG on
        (PRCTL, (1, 0), EPERM),  # and off
        (PRCTL, (4, 0), ALLOW),  # not dumpable
        (PRCTL, (4, 1), EPERM),
        (PRCTL, (15, POINTER), ALLOW),  # a thread's name
        (PRCTL, (22, 2, POINTER), ALLOW),  # more seccomp
        (PRCTL, (35, 1), EPERM),  # PR_SET_MM
        (PRCTL, (0x59616D61, 1), EPERM),  # PR_SET_PTRACER
        (SOCKETPAIR, (1, 1), ALLOW),
        (SOCKETPAIR, (1, 1 | 0o2004000), ALLOW),
        (SOCKETPAIR, (1, 2), EPERM),  # datagrams
        (SOCKETPAIR, (1, 5), EPERM),  # sequenced packets
        (SOCKETPAIR, (2, 1), EPERM),
        (SENDTO, (5, POINTER, 1, 0, 0, 0), ALLOW),
        (SENDTO, (5, POINTER, 1, 0, POINTER, 16), EPERM),
        (SENDTO, (5, POINTER, 1, 0, 1 << 32, 16), EPERM),  # only the upper half of the pointer is set
        (FCNTL, (3, 3), ALLOW),
        (FCNTL, (3, 8, 1), EPERM),  # F_SETOWN
        (FCNTL, (3, 10, 9), EPERM),  # F_SETSIG
        (FCNTL, (3, 15, POINTER), EPERM),  # F_SETOWN_EX
        (IOCTL, (0, 0x5401), ALLOW),
        (IOCTL, (0, 0x5412), ENOTTY),  # TIOCSTI
        (IOCTL, (0, 0x8901), ENOTTY),  # FIOSETOWN
        (PRLIMIT, (0, 7), ALLOW),
        (PRLIMIT, (1234, 7), EPERM),
        (OPENAT, (-100, POINTER, 0x201), ALLOW),  # left to Landlock
    ],
)
def test_arguments_decide_where_they_must(
    machine: str, call: tuple[int, int], arguments: tuple[int, ...], expected: str
) -> None:
    number = call[0 if machine == "x86_64" else 1]
    program = seccomp.zygote_filter(deny_truncate=False).program
    assert decide(program, ARCHES[machine], number, *arguments) == expected


def test_old_landlock_gets_truncation_refused(machine: str) -> None:
    program = seccomp.zygote_filter(deny_truncate=True).program
    number = OPENAT[0 if machine == "x86_64" else 1]
    assert decide(program, ARCHES[machine], number, -100, POINTER, 0x200) == EPERM
    assert decide(program, ARCHES[machine], number, -100, POINTER, 0x80000) == ALLOW


def test_the_process_of_a_call_starts_threads_only(machine: str) -> None:
    program, arch = seccomp.child_filter().program, ARCHES[machine]
    number = CLONE[0 if machine == "x86_64" else 1]
    assert decide(program, arch, number, 0x3D0F00) == ALLOW
    assert decide(program, arch, number, 0x1200011) == EPERM
    assert decide(program, arch, CLONE3[0], POINTER) == ENOSYS
    if machine == "x86_64":
        assert [decide(program, arch, fork) for fork in (57, 58)] == [EPERM, EPERM]


@pytest.mark.parametrize(
    ("machine_name", "header"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        ("aarch64", "/usr/include/asm-generic/unistd.h"),
    ],
)
def test_the_numbers_are_those_of_the_kernel_headers(machine_name: str, header: str) -> None:
    if not Path(header).exists():
        pytest.skip(f"{header} is not installed")
    text = Path(header).read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    known.setdefault("newfstatat", known.get("fstatat", 79))
    column = 0 if machine_name == "x86_64" else 1
    for name, numbers in {**seccomp._ALLOWED, **NUMBERS}.items():
        if numbers[column] is not None:
            assert known[name] == numbers[column], name
        elif machine_name == "aarch64":
            assert name not in known, name
