"""The program inside the sandbox: locks itself in, imports the reward once, then forks for each call.

Started as a script with two arguments: the turnwise package folder and the descriptor of the control socket. Everything up
to `confine.lock` is ours. After the import nothing here can be trusted any more, and the parent does not: it checks what
it reads and kills what takes too long.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import socket
import struct
import sys
import traceback
import types
from typing import Any

_MAX_ERROR_CHARS = 2000
_TAKEN, _CLOSED = b"t", b"c"


def _load_package(name: str, location: str) -> types.ModuleType:
    """Import a package or module from where it is; its parent folder may be out of reach."""
    if name in sys.modules:
        return sys.modules[name]
    folder = location if os.path.isdir(location) else None
    path = os.path.join(location, "__init__.py") if folder else location
    spec = importlib.util.spec_from_file_location(
        name, path, submodule_search_locations=[folder] if folder else None
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{location} is no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _receive_exactly(connection: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.read(connection, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _receive_frame(connection: int) -> bytes:
    return _receive_exactly(connection, struct.unpack("<Q", _receive_exactly(connection, 8))[0])


def _send_all(connection: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(connection, view) :]


def _load_function(setup: dict[str, Any]) -> Any:
    """Run the user's module and find the function in it."""
    from turnwise.rewards.interface import RewardFunction

    for requirement in setup["requires"]:
        if importlib.util.find_spec(requirement) is None:
            raise ImportError(f"the package {requirement} is not installed")
    if setup["source"] is not None:
        module = types.ModuleType("turnwise_user_reward")
        module.__file__ = setup["path"]
        sys.modules[module.__name__] = module
        exec(compile(setup["source"], setup["path"], "exec"), module.__dict__)  # noqa: S102 - its very purpose
    else:
        if setup["package_location"] is not None:
            _load_package(setup["module"].partition(".")[0], setup["package_location"])
        module = importlib.import_module(setup["module"])
    function: Any = module
    for part in setup["function"].split("."):
        if not hasattr(function, part):
            raise AttributeError(f"{setup['path']} has no {setup['function']!r}")
        function = getattr(function, part)
    function = function if isinstance(function, RewardFunction) else RewardFunction(function)
    for requirement in function.requires:
        if importlib.util.find_spec(requirement) is None:
            raise ImportError(
                f"reward {function.name} requires the package {requirement}, which is not installed"
            )
    return function


def _describe(error: BaseException) -> str:
    """The error and where in the user's code it happened, cut to size."""
    try:
        name = type(error).__name__
        said = f"{name}: {error}"[:_MAX_ERROR_CHARS]
        frames = traceback.extract_tb(error.__traceback__)
        ours = os.path.dirname(os.path.dirname(__file__))
        theirs = [frame for frame in frames if not frame.filename.startswith((ours, "<frozen"))]
        if theirs:
            said += f" ({os.path.basename(theirs[-1].filename)}, line {theirs[-1].lineno})"
        return said
    except BaseException:  # noqa: BLE001 - an exception whose text raises is still an exception
        return "an exception that cannot be printed"


def _run_call(function: Any, encode: Any, decode: Any, connection: int, setup: dict[str, Any]) -> bytes:
    """The answer to one call, as JSON."""
    try:
        request = decode(_receive_frame(connection))
        value = function.run(request["messages"], request["keywords"])
        results = value if isinstance(value, list) else [value]
        answer: bytes = encode({"results": [result.model_dump(mode="json") for result in results]})
        if len(answer) > setup["max_result_bytes"]:
            raise ValueError(
                f"the result takes {len(answer)} bytes; at most {setup['max_result_bytes']} are allowed"
            )
        return answer
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are the user's as well
        return bytes(encode({"error": _describe(error)}))


def _serve(control: socket.socket, function: Any, setup: dict[str, Any], statm_fd: int) -> None:
    """Fork a process ahead of each call; when one takes its call, fork the next, and report how the last one ended."""
    import msgspec.json  # noqa: F401 - the children use it

    import turnwise.rewards.sandbox.confine  # noqa: F401
    from turnwise.rewards.sandbox import seccomp

    used = int(os.pread(statm_fd, 100, 0).split()[0]) * os.sysconf("SC_PAGE_SIZE")
    os.close(statm_fd)
    setup["memory_bytes"] = used + setup["memory_mb"] * 1024 * 1024
    belt = seccomp.child_filter() if setup["tier"] != "rlimits" else None
    taken, take = os.pipe()
    gc.collect()
    gc.freeze()  # children share these pages as long as nobody touches them
    waiting = _fork_ahead(control, function, setup, belt, (taken, take))
    while True:
        if os.read(taken, 1) != _TAKEN:
            os._exit(0)  # the parent has closed the control socket
        running, waiting = waiting, _fork_ahead(control, function, setup, belt, (taken, take))
        _, status = os.waitpid(running, 0)
        control.sendall(struct.pack("<i", status))


def _fork_ahead(
    control: socket.socket, function: Any, setup: dict[str, Any], belt: Any, pipe: tuple[int, int]
) -> int:
    """A process that locks itself in, waits for one call, answers it and ends."""
    child = os.fork()
    if child:
        return child
    try:
        from msgspec.json import decode, encode

        from turnwise.rewards.interface import EvaluateResult
        from turnwise.rewards.sandbox import confine

        confine.die_with_parent()
        confine.limit_call(memory_bytes=setup["memory_bytes"], cpu_s=setup["cpu_s"])
        if belt is not None:
            belt.install()
        # Touches what every answer needs, while nobody waits for it.
        decode(encode({"results": [EvaluateResult(score=0.0).model_dump(mode="json")]}))
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        os.write(pipe[1], _TAKEN if message and fds else _CLOSED)
        # Nothing is left open but this call's own connection.
        os.close(pipe[0])
        os.close(pipe[1])
        control.close()
        if fds:
            _send_all(fds[0], _run_call(function, encode, decode, fds[0], setup))
            os.close(fds[0])
    finally:
        os._exit(0)


def main() -> None:
    _load_package("turnwise", sys.argv[1])
    import json

    from turnwise.rewards.sandbox import confine

    control = socket.socket(fileno=int(sys.argv[2]))
    setup = json.loads(_receive_frame(control.fileno()))
    sys.path[:] = setup["sys_path"]
    confine.drop_privileges(setup["uid"], setup["readable"])
    confine.die_with_parent()
    if os.getppid() != setup["parent_pid"] and setup["parent_pid"] is not None:
        os._exit(0)  # the parent died before we could ask to die with it
    # Read again after the import, when /proc is out of reach.
    statm_fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    importlib.import_module("msgspec.json")
    importlib.import_module("turnwise.rewards.interface")
    importlib.import_module("turnwise.rewards.sandbox.seccomp")
    os.chdir("/")
    try:
        confine.limit_process(
            memory_bytes=setup["import_memory_mb"] * 1024 * 1024, num_processes=setup["num_processes"]
        )
        confine.hide_memory()
        confine.lock(setup["tier"], setup["readable"])
    except OSError as error:
        _send_control(control, {"refused": f"{setup['tier']}: {error}"})
        os._exit(1)
    try:
        function = _load_function(setup)
        declaration = function.declare()
        threading = sys.modules.get("threading")
        if threading is not None and threading.active_count() > 1:
            raise RuntimeError("the module starts a thread when it is imported; start it in the function")
    except BaseException as error:  # noqa: BLE001 - SystemExit at module level is the author's mistake as well
        _send_control(control, {"error": _describe(error)})
        os._exit(0)
    _send_control(control, {"declaration": declaration})
    _serve(control, function, setup, statm_fd)


def _send_control(control: socket.socket, answer: dict[str, Any]) -> None:
    from msgspec.json import encode

    content = encode(answer)
    _send_all(control.fileno(), struct.pack("<Q", len(content)) + content)


if __name__ == "__main__":
    main()
