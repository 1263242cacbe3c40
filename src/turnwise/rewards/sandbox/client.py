"""Speaks to one zygote: starts it, hands it calls, and takes nothing it says on trust."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import time
from typing import Any

import msgspec

from turnwise.errors import RewardError, SandboxError
from turnwise.rewards.arguments import Declaration
from turnwise.rewards.interface import EvaluateResult, to_result
from turnwise.rewards.sandbox import launch

_MAX_HELLO_BYTES = 1 << 20
_EXIT_GRACE_S = 2.0
"""How long a finished call's process may take to be gone."""


class RewardCode(msgspec.Struct, frozen=True, kw_only=True):
    """Where a reward function is: a file's text, or a module to be imported."""

    function: str
    path: str
    """For people: the file or the import path."""
    source: str | None = None
    """The file's text; None when `module` is to be imported."""
    module: str | None = None
    package_location: str | None = None
    """The module's top-level file or folder when it is not among the installed packages."""
    reads: tuple[str, ...] = ()
    """What else the code may read."""
    requires: tuple[str, ...] = ()


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one call may use."""

    timeout_s: float = 10.0
    memory_mb: int = 1024
    """On top of what the imported code takes."""
    import_timeout_s: float = 60.0
    import_memory_mb: int = 4096
    """On top of `memory_mb`; torch needs that much address space to be imported."""
    max_result_bytes: int = 4 << 20


class ZygoteDied(Exception):
    """The process that forks for us is gone; nothing is known about the call."""


class CallError(Exception):
    """The call came to nothing; the message is the reason."""


class Zygote:
    """One sandboxed process that knows one reward function. Not for two threads at once."""

    def __init__(self, code: RewardCode, tier: launch.Tier, limits: Limits) -> None:
        self.tier = tier
        self._limits = limits
        self._owes_status = False
        extra = (*code.reads, *((code.package_location,) if code.package_location else ()))
        self._process, self._control = launch.spawn(tier, extra)
        self._control.setblocking(False)
        try:
            self.declaration = self._introduce(code, extra)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can take another call; a killed one cannot."""
        return self._control.fileno() >= 0

    def _introduce(self, code: RewardCode, extra: tuple[str, ...]) -> Declaration:
        """Send the code and wait until it is imported."""
        limits = self._limits
        folders = [path for path in code.reads if os.path.isdir(path)]
        setup = {
            **{name: getattr(code, name) for name in code.__struct_fields__},
            "tier": self.tier,
            "sys_path": [*launch.package_paths(), *folders],
            "readable": launch.readable_paths(extra),
            "uid": launch.unused_uid(),
            "parent_pid": None if self.tier == launch.BUBBLEWRAP else os.getpid(),
            "num_processes": launch.process_limit(self.tier),
            "memory_mb": limits.memory_mb,
            "import_memory_mb": limits.memory_mb + limits.import_memory_mb,
            # For the case that nobody is left to watch the clock; threads may use several cores.
            "cpu_s": int(4 * limits.timeout_s) + 2,
            "max_result_bytes": limits.max_result_bytes,
        }
        content = msgspec.json.encode(setup)
        deadline = time.monotonic() + limits.import_timeout_s
        try:
            _send(self._control, struct.pack("<Q", len(content)) + content, deadline)
            size = struct.unpack("<Q", _receive(self._control, 8, deadline))[0]
            if size > _MAX_HELLO_BYTES:
                raise SandboxError(f"the sandbox announced {size} bytes for its greeting; it is not ours")
            hello = _decode(_receive(self._control, size, deadline))
        except TimeoutError:
            raise RewardError(
                f"reward {code.path} took longer than {limits.import_timeout_s:g} s to be imported"
            ) from None
        except (EOFError, OSError):
            raise SandboxError(
                f"the {self.tier} sandbox for {code.path} ended while it started "
                f"({_describe_exit(self._wait_exit())})"
            ) from None
        return _read_hello(hello, code)

    def call(self, payload: bytes, *, num_results: int) -> list[EvaluateResult]:
        """Run the function once, in a process of its own."""
        self._settle()
        deadline = time.monotonic() + self._limits.timeout_s
        ours, theirs = socket.socketpair()
        with ours:
            try:
                socket.send_fds(self._control, [b"c"], [theirs.fileno()])
            except OSError:
                raise ZygoteDied from None
            finally:
                theirs.close()
            ours.setblocking(False)
            try:
                answer = _converse(ours, payload, deadline, self._limits.max_result_bytes)
            except TimeoutError:
                self.kill()
                raise CallError(f"took longer than {self._limits.timeout_s:g} s") from None
            except OverflowError:
                self.kill()
                raise CallError(f"returned more than {self._limits.max_result_bytes} bytes") from None
        self._owes_status = True
        if not answer:
            status = self._settle()
            raise CallError(f"ended without a result ({_describe_exit(status)})")
        return _read_answer(answer, num_results, self.declaration.name)

    def _settle(self) -> int | None:
        """Wait until the last call's process is gone; how it ended, as the zygote reports it."""
        if not self._owes_status:
            return None
        try:
            packed = _receive(self._control, 4, time.monotonic() + _EXIT_GRACE_S)
        except (EOFError, OSError, TimeoutError):
            # It closed its result but did not end, or took the zygote with it: start afresh.
            self.kill()
            raise ZygoteDied from None
        self._owes_status = False
        return os.waitstatus_to_exitcode(struct.unpack("<i", packed)[0])

    def kill(self) -> None:
        """End the process and everything it started; waits until it is gone."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # User code cannot leave the process group; bubblewrap's namespace dies with its first process.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def _wait_exit(self) -> int | None:
        try:
            return self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return None


def _converse(connection: socket.socket, payload: bytes, deadline: float, max_bytes: int) -> bytes:
    """Send the request and read until the other side closes, whichever it does first."""
    to_send = memoryview(payload)
    received = bytearray()
    poller = select.poll()
    poller.register(connection, select.POLLIN | select.POLLOUT)
    while True:
        _wait(poller, deadline)
        if to_send:
            try:
                to_send = to_send[connection.send(to_send) :]
            except BlockingIOError:
                pass
            except OSError:
                to_send = memoryview(b"")  # it does not care for the rest; what it says still counts
            if not to_send:
                poller.modify(connection, select.POLLIN)
        try:
            part = connection.recv(1 << 16)
        except BlockingIOError:
            continue
        except ConnectionResetError:
            part = b""
        if not part:
            return bytes(received)
        received += part
        if len(received) > max_bytes:
            raise OverflowError


def _wait(poller: select.poll, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0 or not poller.poll(left * 1000):
        raise TimeoutError


def _send(connection: socket.socket, content: bytes, deadline: float) -> None:
    poller = select.poll()
    poller.register(connection, select.POLLOUT)
    view = memoryview(content)
    while view:
        _wait(poller, deadline)
        view = view[connection.send(view) :]


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    received = bytearray()
    while len(received) < count:
        _wait(poller, deadline)
        part = connection.recv(count - len(received))
        if not part:
            raise EOFError
        received += part
    return bytes(received)


def _decode(content: bytes) -> Any:  # JSON from the other side of the wall
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise CallError(f"sent something that is not JSON ({error})") from None


def _read_hello(hello: Any, code: RewardCode) -> Declaration:
    if isinstance(hello, dict) and isinstance(hello.get("refused"), str):
        raise SandboxError(f"the sandbox could not lock itself: {hello['refused']}")
    if isinstance(hello, dict) and isinstance(hello.get("error"), str):
        raise RewardError(f"reward {code.path}:{code.function} cannot be loaded: {hello['error']}")
    try:
        return msgspec.convert(hello["declaration"], Declaration)
    except (KeyError, TypeError, msgspec.ValidationError):
        raise SandboxError(f"the sandbox of {code.path} did not introduce itself; it is not ours") from None


def _read_answer(content: bytes, num_results: int, name: str) -> list[EvaluateResult]:
    answer = _decode(content)
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        raise CallError(f"raised {answer['error'][:4000]}")
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list) or len(results) != num_results:
        raise CallError("sent an answer that is not a result")
    try:
        return [to_result(result, name) for result in results]
    except RewardError as error:
        raise CallError(str(error)) from None


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "it still ran"
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
