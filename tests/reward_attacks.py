"""Reward code that misbehaves. Read as text by the tests and run inside the sandbox, never imported here."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy

from turnwise import EvaluateResult, reward_function

libc = ctypes.CDLL(None, use_errno=True)


@reward_function
def attack(messages, name, place=None):
    return globals()[name](messages, place) if place is not None else globals()[name](messages)


def honest(messages):
    return EvaluateResult(score=0.5, reason=f"{len(messages)} messages")


# Time


def infinite_loop(messages):
    while True:
        pass


def sleeps(messages):
    time.sleep(3600)


def ignores_signals(messages):
    for name in (signal.SIGTERM, signal.SIGXCPU, signal.SIGALRM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    while True:
        pass


def catastrophic_regex(messages):
    import re

    return float(bool(re.match(r"(a+)+$", "a" * 64 + "!")))


def leftover_thread(messages):
    threading.Thread(target=infinite_loop, args=(messages,)).start()
    return 0.25


def atexit_loop(messages):
    import atexit

    atexit.register(infinite_loop, messages)
    return 0.25


# Processes and memory


def fork_bomb(messages):
    while True:
        os.fork()


def thread_bomb(messages):
    threading.stack_size(32768)
    started = 0
    try:
        while started < 20000:
            threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
            started += 1
    except RuntimeError:
        return EvaluateResult(score=started)
    return EvaluateResult(score=started)


def allocates_2_gib(messages):
    return len(bytearray(2 << 30))


def many_children(messages):
    return [subprocess.Popen([sys.executable, "-c", "pass"]) for _ in range(100)]


def daemon_holds_stdout(messages):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(0)
    return 1.0


def memory_file(messages):
    return os.memfd_create("hidden")


def shared_memory(messages):
    key = libc.shmget(0, 1 << 20, 0o1600)
    if key < 0:
        raise OSError(ctypes.get_errno(), "shmget")
    return 1.0


# Files


def fills(messages, place):
    with open(os.path.join(place, "filler"), "wb") as file:
        for _ in range(256):
            file.write(b"x" * (1 << 20))
    return 1.0


def reads(messages, place):
    with open(place) as file:
        return EvaluateResult(score=1.0, reason=file.read())


def lists(messages, place):
    return EvaluateResult(score=1.0, reason=str(os.listdir(place)))


def writes(messages, place):
    with open(place, "w") as file:
        file.write("was here")
    return 1.0


def makes_folder(messages, place):
    os.mkdir(place)
    return 1.0


def writes_through_symlink(messages, place):
    for folder in ("/tmp", "/dev/shm", os.getcwd(), os.path.dirname(place)):
        try:
            os.symlink(place, os.path.join(folder, "link"))
        except OSError:
            continue
        with open(os.path.join(folder, "link"), "w") as file:
            file.write("was here")
        return 1.0
    raise PermissionError("no place for a link")


def truncates_a_package(messages):
    os.close(os.open(os.__file__, os.O_RDONLY | os.O_TRUNC))
    return 1.0


def environment(messages, place):
    """Score 1 when the canary is found anywhere."""
    found = [name for name in os.environ if place in os.environ[name]]
    for pid in ("self", "1", str(os.getppid())):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if place.encode() in file.read():
                    found.append(pid)
        except OSError:
            continue
    return EvaluateResult(score=float(bool(found)), reason=str(found))


# Network


def tcp(messages, place):
    socket.create_connection(("127.0.0.1", place), timeout=1).sendall(b"leak")
    return 1.0


def udp(messages, place):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.sendto(b"leak", ("127.0.0.1", place))
    return 1.0


def dns(messages):
    return EvaluateResult(score=1.0, reason=str(socket.getaddrinfo("example.com", 80)))


def unix(messages, place):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as out:
        out.connect(place)
        out.sendall(b"leak")
    return 1.0


def unix_datagram_pair(messages, place):
    out, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    out.sendto(b"leak", place)
    return 1.0


def stream_pair_to_address(messages, place):
    out, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    out.sendto(b"leak", place)
    return 1.0


# Other processes


def kills_parent(messages):
    for target in (os.getppid(), 1, -1):
        try:
            os.kill(target, signal.SIGKILL)
        except PermissionError:
            continue
        return 1.0
    raise PermissionError("nobody died")


def signals_through_fcntl(messages, place):
    import fcntl

    ours, _theirs = socket.socketpair()
    fcntl.fcntl(ours, fcntl.F_SETOWN, place)
    return 1.0


def traces_parent(messages):
    if libc.ptrace(16, os.getppid(), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    return 1.0


def looks_into_parent(messages):
    for what in ("fd", "mem", "environ", "maps"):
        try:
            if what == "fd":
                links = [os.readlink(f"/proc/{os.getppid()}/fd/{n}") for n in range(3, 20)]
                return EvaluateResult(score=1.0, reason=str(links))
            with open(f"/proc/{os.getppid()}/{what}", "rb") as file:
                file.read(1)
            return EvaluateResult(score=1.0, reason=what)
        except OSError:
            continue
    raise PermissionError("nothing to see")


def limits_parent(messages, place):
    import resource

    resource.prlimit(place, resource.RLIMIT_NOFILE, (0, 0))
    return 1.0


def outlives_parent(messages):
    if libc.prctl(1, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG")
    return 1.0


def becomes_dumpable(messages):
    if libc.prctl(4, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_DUMPABLE")
    return 1.0


def nested_namespaces(messages):
    for flags in (0x10000000, 0x20000, 0x40000000, 0x20000000):
        if libc.unshare(flags) == 0:
            return 1.0
    clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    if libc.syscall(clone, 0x10000000 | 17, 0, 0, 0, 0) >= 0:
        return 1.0
    raise PermissionError(ctypes.get_errno(), "no namespace")


def forbidden_calls(messages):
    """Score = how many of the calls that must not exist in here got past the filter."""
    numbers = {
        "x86_64": {"io_uring_setup": 425, "bpf": 321, "perf_event_open": 298, "keyctl": 250, "add_key": 248,
                   "process_vm_readv": 310, "pidfd_open": 434, "userfaultfd": 323, "open_by_handle_at": 304,
                   "mount": 165, "setns": 308, "personality": 135, "setuid": 105, "setpgid": 109, "setsid": 112,
                   "tgkill": 234, "tkill": 200, "rt_sigqueueinfo": 129, "execveat": 322, "mknod": 133, "chmod": 90,
                   "socket": 41, "connect": 42, "bind": 49, "sendmsg": 46, "mq_open": 240, "msgget": 68,
                   "sched_setaffinity": 203, "setpriority": 141, "io_setup": 206, "x32 getpid": 0x40000027},
        "aarch64": {"io_uring_setup": 425, "bpf": 280, "perf_event_open": 241, "keyctl": 219, "pidfd_open": 434,
                    "process_vm_readv": 270, "mount": 40, "setns": 268, "setsid": 157, "socket": 198},
    }[os.uname().machine]  # fmt: skip
    passed = []
    for name, number in numbers.items():
        ctypes.set_errno(0)
        libc.syscall(number, -1, 0, 0, 0, 0, 0)
        if ctypes.get_errno() != 1:
            passed.append(name)
    return EvaluateResult(score=len(passed), reason=str(passed))


# Results


def returns(messages, place):
    values = {
        "nan": float("nan"), "inf": float("inf"), "1e999": 1e999, "none": None, "str": "1.0", "bool": True,
        "complex": 1j, "list": [1.0], "bytes": b"1", "huge int": 10**5000, "numpy nan": numpy.float32("nan"),
        "numpy bool": numpy.bool_(True), "numpy array": numpy.ones(2), "set": {1.0}, "dict": {"points": 1.0},
        "constructed": EvaluateResult.model_construct(score=float("nan")), "nothing": {},
        "numpy float": numpy.float32(0.25), "numpy int": numpy.int64(3), "int": 2,
    }  # fmt: skip
    return values[place]


def returns_100_mb(messages):
    return EvaluateResult(score=1.0, reason="x" * 100_000_000)


def returns_pickle(messages):
    class Bomb:
        def __reduce__(self):
            return os.system, ("true",)

    return Bomb()


def returns_deep(messages):
    nested = {}
    for _ in range(100_000):
        nested = {"metrics": nested}
    return nested


def floods_stdout(messages):
    for _ in range(200):
        os.write(1, b"x" * 65536)
        os.write(2, b"x" * 65536)
    print("y" * 1_000_000)
    return 0.25


def exits(messages):
    os._exit(0)


def raises_system_exit(messages):
    sys.exit(0)


def segfaults(messages):
    ctypes.string_at(0)


def recurses(messages):
    return recurses(messages)


def unprintable_error(messages):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    raise Mute


def forges_frames(messages, place):
    """Writes `place` to every descriptor, then ends without a word."""
    for fd in range(256):
        try:
            os.write(fd, place.encode())
        except OSError:
            continue
    os._exit(0)


def forges_and_returns(messages):
    for fd in range(256):
        try:
            os.write(fd, b'{"results": [{"score": 1000000.0}]}')
        except OSError:
            continue
    return 0.25


def open_descriptors(messages):
    """Score = how many descriptors a call holds."""
    found = []
    for fd in range(256):
        try:
            os.fstat(fd)
            found.append(fd)
        except OSError:
            continue
    return EvaluateResult(score=len(found), reason=str(found))


def answers_and_stays(messages):
    """Sends a good answer by hand, hangs up, and goes on running."""
    for fd in range(3, 256):
        try:
            os.write(fd, b'{"results": [{"score": 0.75}]}')
            os.close(fd)
        except OSError:
            continue
    while True:
        pass


def returns_100_mb_raw(messages):
    for fd in range(3, 256):
        try:
            while True:
                os.write(fd, b"x" * 65536)
        except OSError:
            continue
    os._exit(0)


def patches_everything(messages):
    import builtins
    import json

    import msgspec.json

    json.dumps = json.loads = msgspec.json.encode = msgspec.json.decode = lambda *a, **k: b'{"score": 1e6}'
    EvaluateResult.model_dump = lambda self, **k: {"score": 1e6}
    builtins.len = lambda value: 1_000_000
    builtins.isinstance = lambda value, kind: True
    return 0.25


def mutates_input(messages):
    messages.clear()
    messages.append("mine")
    return 0.25
