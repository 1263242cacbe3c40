"""Every attack on the sandbox, in each tier that this machine offers; the tiers that do not run here are skipped by name.

After each attack: a typed error (or an honest value), the parent alive, the next call right, nothing left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.reward_episodes import make_episode, make_group

from turnwise.config import RewardConfig, RewardsConfig
from turnwise.errors import RewardError, SandboxError
from turnwise.rewards.arguments import Arguments
from turnwise.rewards.evaluators import Outcome
from turnwise.rewards.sandbox import probe
from turnwise.rewards.sandbox.client import Limits, RewardCode, Zygote
from turnwise.rewards.sandbox.pool import SandboxEvaluator
from turnwise.rewards.score import build_rewards, score_groups

ATTACKS = (Path(__file__).parent / "reward_attacks.py").read_text(encoding="utf-8")
SOURCE = Path(__file__).parents[1] / "src"
MESSAGES = [{"role": "user", "content": "hello"}]
CANARY = "canary-" + secrets.token_hex(8)
TIMEOUT_S = 1.5


def needs(tier: str) -> str:
    found = probe.probe(tier)
    if not found.holds:
        pytest.skip(f"the {tier} tier does not hold on this machine: {found.reason}")
    return tier


@pytest.fixture(scope="module", params=probe.TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    return needs(request.param)


@pytest.fixture(scope="module")
def sandbox(tier: str) -> Iterator[SandboxEvaluator]:
    os.environ["TURNWISE_TEST_SECRET"] = CANARY
    code = RewardCode(function="attack", path="attacks.py", source=ATTACKS)
    limits = Limits(timeout_s=TIMEOUT_S, memory_mb=512)
    evaluator = SandboxEvaluator(code, {"name": "?"}, tier=tier, limits=limits, num_workers=1)
    yield evaluator
    evaluator.close()
    del os.environ["TURNWISE_TEST_SECRET"]
    assert wait_until_gone() == []


def call(evaluator: SandboxEvaluator, name: str, place: Any = None) -> Outcome:
    return evaluator.call(Arguments(messages=MESSAGES, keywords={"name": name, "place": place}))


def sandbox_processes() -> list[int]:
    """Processes of a sandbox that this test process started, wherever they were moved to."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                is_ours = f"{SOURCE}/turnwise".encode() in words
                if is_ours and b"zygote.py" in b" ".join(words) and _descends_from_us(int(entry.name)):
                    found.append(int(entry.name))
    return found


def _descends_from_us(pid: int) -> bool:
    """Whether it is a descendant of this process, or an orphan that may have been one."""
    parents = []
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return False
        parents.append(pid)
    return parents == [1]


def wait_until_gone(allowed: int = 0) -> list[int]:
    """What is left when no more than `allowed` processes are, or after half a minute."""
    deadline = time.monotonic() + 30
    left = sandbox_processes()
    while len(left) > allowed and time.monotonic() < deadline:
        time.sleep(0.05)
        left = sandbox_processes()
    return left if len(left) > allowed else []


def assert_unharmed(evaluator: SandboxEvaluator) -> None:
    """The next call is right, and only the zygote and the process it keeps ready are left, and bubblewrap's two around them."""
    outcome = call(evaluator, "honest")
    assert outcome.error is None
    assert [(r.score, r.reason) for r in outcome.results] == [(0.5, "1 messages")]
    assert wait_until_gone(4 if evaluator.tier == "bubblewrap" else 2) == []


DENIED = "PermissionError|Read-only file system|No such file|Operation not permitted"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("infinite_loop", r"took longer than 1\.5 s"),
        ("sleeps", r"took longer than 1\.5 s"),
        ("ignores_signals", r"took longer than 1\.5 s"),
        ("catastrophic_regex", r"took longer than 1\.5 s"),
        ("fork_bomb", "PermissionError"),
        ("allocates_2_gib", "MemoryError"),
        ("many_children", "PermissionError"),
        ("daemon_holds_stdout", "PermissionError"),
        ("memory_file", "PermissionError"),
        ("shared_memory", "PermissionError"),
        ("truncates_a_package", DENIED),
        ("dns", "gaierror|PermissionError"),
        ("kills_parent", "nobody died"),
        ("traces_parent", "PermissionError"),
        ("looks_into_parent", "nothing to see"),
        ("outlives_parent", "PermissionError"),
        ("becomes_dumpable", "PermissionError"),
        ("nested_namespaces", "no namespace"),
        ("returns_100_mb", r"the result takes 100000107 bytes|took longer than 1\.5 s"),
        ("returns_100_mb_raw", "more than 4194304 bytes"),
        ("returns_pickle", "returned Bomb"),
        ("returns_deep", "bad result|RecursionError"),
        ("exits", r"ended without a result \(exit status 0\)"),
        ("raises_system_exit", "SystemExit"),
        ("segfaults", r"ended without a result \(killed by SIGSEGV\)"),
        ("recurses", "RecursionError"),
        ("unprintable_error", "cannot be printed"),
        ("forges_and_returns", "not JSON"),
    ],
)
def test_an_attack_ends_in_a_typed_error(sandbox: SandboxEvaluator, name: str, expected: str) -> None:
    outcome = call(sandbox, name)
    assert outcome.results == ()
    assert outcome.error is not None
    assert outcome.error.startswith("reward attack ")
    assert re.search(expected, outcome.error), outcome.error
    assert_unharmed(sandbox)


@pytest.mark.parametrize(
    "name", ["leftover_thread", "atexit_loop", "floods_stdout", "patches_everything", "mutates_input"]
)
def test_what_a_call_leaves_behind_does_not_reach_the_next(sandbox: SandboxEvaluator, name: str) -> None:
    outcome = call(sandbox, name)
    if name == "patches_everything":  # it may spoil its own result, and no other
        assert outcome.error is not None or outcome.results[0].score in (0.25, 1e6)
    else:
        assert (outcome.error, [r.score for r in outcome.results]) == (None, [0.25])
    assert MESSAGES == [{"role": "user", "content": "hello"}]
    assert_unharmed(sandbox)


def test_threads_are_bounded(sandbox: SandboxEvaluator) -> None:
    outcome = call(sandbox, "thread_bomb")
    if outcome.error is None:
        score = outcome.results[0].score
        assert score is not None
        assert score < (100 if os.geteuid() == 0 else 5000)
    assert_unharmed(sandbox)


@pytest.mark.parametrize(
    "kind",
    ["nan", "inf", "1e999", "none", "str", "bool", "complex", "list", "bytes", "huge int", "numpy nan", "numpy bool",
     "numpy array", "set", "dict", "constructed", "nothing"],
)  # fmt: skip
def test_nonsense_is_not_a_score(sandbox: SandboxEvaluator, kind: str) -> None:
    outcome = call(sandbox, "returns", kind)
    assert outcome.results == ()
    assert outcome.error is not None
    assert "reward attack returned" in outcome.error


@pytest.mark.parametrize(("kind", "score"), [("numpy float", 0.25), ("numpy int", 3.0), ("int", 2.0)])
def test_real_numbers_are_scores_whoever_made_them(
    sandbox: SandboxEvaluator, kind: str, score: float
) -> None:
    assert [r.score for r in call(sandbox, "returns", kind).results] == [score]


@pytest.mark.parametrize(
    "frame",
    [
        '{"results": [{"score": NaN}]}', '{"results": [{"score": 1e999}]}', '{"results": [{"score": true}]}',
        '{"results": []}', '{"results": [{"score": 1}, {"score": 1}]}', '{"results": {"score": 1}}', "[]", "null",
        '{"results": [{"score": 1, "step_outputs": [{"step_index": -1, "base_reward": 1}]}]}',
        "[" * 200_000, "\x00" * 100, '{"error": 5}', "cos\nsystem\n(S'true'\ntR.",
        '{"results": [{"score": ' + "9" * 5000 + "}]}",
    ],
)  # fmt: skip
def test_forged_frames_are_refused(sandbox: SandboxEvaluator, frame: str) -> None:
    outcome = call(sandbox, "forges_frames", frame)
    assert outcome.results == ()
    assert outcome.error is not None
    assert_unharmed(sandbox)


def test_a_forged_frame_counts_for_its_own_call_only(sandbox: SandboxEvaluator) -> None:
    # A function may return any number; writing it by hand is no more than that.
    outcome = call(sandbox, "forges_frames", '{"results": [{"score": 1000000.0}]}')
    assert [r.score for r in outcome.results] == [1e6]
    for _ in range(3):
        assert_unharmed(sandbox)


def test_a_call_holds_no_descriptor_but_its_own(sandbox: SandboxEvaluator) -> None:
    outcome = call(sandbox, "open_descriptors")
    assert outcome.results[0].score == 4.0, outcome.results[0].reason  # standard ones and its connection


def test_a_process_that_answers_and_stays_is_removed_before_the_next_call(sandbox: SandboxEvaluator) -> None:
    assert [r.score for r in call(sandbox, "answers_and_stays").results] == [0.75]
    assert_unharmed(sandbox)


def test_no_forbidden_system_call_gets_past_the_filter(sandbox: SandboxEvaluator) -> None:
    outcome = call(sandbox, "forbidden_calls")
    assert outcome.error is None
    assert (outcome.results[0].score, outcome.results[0].reason) == (0.0, "[]")


def test_files_outside_cannot_be_read(sandbox: SandboxEvaluator, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    for parent in list(tmp_path.parents)[:2]:  # pytest's own; only the sandbox may be what stops the reader
        os.chmod(parent, 0o755)
    secret = tmp_path / "episodes.jsonl"
    secret.write_text("the run folder")
    secret.chmod(0o644)
    places = [
        str(secret),
        f"{Path(os.__file__).parent}/../../../../../../../{secret}",
        "/etc/passwd",
        "/etc/shadow",
    ]
    places += [
        str(Path.home() / ".ssh" / "id_rsa"),
        "/proc/1/environ",
        "/proc/self/environ",
        "/proc/self/mem",
    ]
    places += [f"/proc/{os.getpid()}/environ", f"/proc/{os.getpid()}/root/etc/passwd"]
    for place in places:
        outcome = call(sandbox, "reads", place)
        if place == "/proc/1/environ" and outcome.error is None:
            assert (
                CANARY not in outcome.results[0].reason
            )  # bubblewrap's own process, started with next to nothing
            continue
        assert outcome.results == (), place
        assert "Error" in str(outcome.error)
    for place in (str(tmp_path), "/etc/ssl", "/home", "/var"):
        assert call(sandbox, "lists", place).results == (), place


def test_nothing_can_be_written(sandbox: SandboxEvaluator, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    target = tmp_path / "target"
    for place in (
        str(target),
        f"/usr/../{target}",
        "/tmp/turnwise-was-here",
        "/dev/shm/turnwise-was-here",
        "/was-here",
    ):
        assert call(sandbox, "writes", place).results == (), place
        assert call(sandbox, "makes_folder", place).results == (), place
        assert not Path(place).exists()
    assert call(sandbox, "writes_through_symlink", str(target)).results == ()
    assert not target.exists()
    for folder in ("/tmp", "/dev/shm"):
        assert call(sandbox, "fills", folder).results == ()
        assert not Path(folder, "filler").exists()
    assert call(sandbox, "writes", "/dev/null").results[0].score == 1.0
    assert_unharmed(sandbox)


def test_the_environment_does_not_show(sandbox: SandboxEvaluator) -> None:
    outcome = call(sandbox, "environment", CANARY)
    assert (outcome.results[0].score, outcome.results[0].reason) == (0.0, "[]")


def test_the_network_is_out_of_reach(sandbox: SandboxEvaluator, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    abstract = "\0turnwise-" + secrets.token_hex(4)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unix,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hidden,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        udp.bind(("127.0.0.1", 0))
        unix.bind(path)
        hidden.bind(abstract)
        datagrams.bind(abstract + "-d")
        os.chmod(path, 0o777)
        for listener in (tcp, unix, hidden):
            listener.listen()
        for each in (tcp, udp, unix, hidden, datagrams):
            each.setblocking(False)
        for name, place in [
            ("tcp", tcp.getsockname()[1]),
            ("udp", udp.getsockname()[1]),
            ("unix", path),
            ("unix", abstract),
            ("unix_datagram_pair", abstract + "-d"),
            ("stream_pair_to_address", abstract + "-d"),
        ]:
            outcome = call(sandbox, name, place)
            assert outcome.results == (), name
        for listener in (tcp, unix, hidden):
            with pytest.raises(BlockingIOError):
                listener.accept()
        for receiver in (udp, datagrams):
            with pytest.raises(BlockingIOError):
                receiver.recv(10)


def test_other_processes_cannot_be_touched(sandbox: SandboxEvaluator) -> None:
    assert "PermissionError" in str(call(sandbox, "limits_parent", os.getpid()).error)
    assert "Error" in str(call(sandbox, "signals_through_fcntl", os.getpid()).error)
    assert_unharmed(sandbox)


# What the module may do while it is imported


def start(tier: str, source: str, **limits: Any) -> Zygote:
    return Zygote(RewardCode(function="f", path="f.py", source=source), tier, Limits(**limits))


HONEST = "\ndef f(messages): return 0.5\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import sys; sys.exit(3)" + HONEST, "SystemExit: 3"),
        ("1 / 0" + HONEST, r"ZeroDivisionError: division by zero \(f.py, line 1\)"),
        ("def f(: pass", "SyntaxError"),
        ("import no_such_package" + HONEST, "No module named 'no_such_package'"),
        ("def g(messages): pass", "f.py has no 'f'"),
        ("def f(): pass", "takes no messages"),
        ("from turnwise import reward_function\n@reward_function(requires=('not_installed',))" + HONEST, "requires the package not_installed"),
        ("f = 5", "is not a callable object"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()" + HONEST, "starts a thread when it is imported"),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_loaded_says_why(tier: str, source: str, expected: str) -> None:
    with pytest.raises(RewardError, match=expected):
        start(tier, source)
    assert wait_until_gone(4) == []


def test_a_slow_import_has_its_own_deadline(tier: str) -> None:
    with pytest.raises(RewardError, match="took longer than 1 s to be imported"):
        start(tier, "import time; time.sleep(60)" + HONEST, import_timeout_s=1.0)


@pytest.mark.parametrize(
    "source",
    [
        "import os; os._exit(0)",
        "import ctypes; ctypes.string_at(0)",
        "import os; os.close(3); os.close(4); os.close(5)",
    ],
)
def test_a_module_that_ends_the_zygote_is_an_error(tier: str, source: str) -> None:
    with pytest.raises((SandboxError, RewardError)):
        start(tier, source + HONEST, import_timeout_s=5.0)


def test_a_fork_bomb_at_import_is_bounded_and_cleared_away(tier: str) -> None:
    bomb = """
import os, time
born = 0
try:
    while born < 2000:
        if os.fork() == 0:
            while True: time.sleep(60)
        born += 1
except OSError:
    pass
def f(messages): return float(born)
"""
    before = set(sandbox_processes())
    zygote = start(tier, bomb, import_timeout_s=30.0)
    born = len(set(sandbox_processes()) - before)
    zygote.kill()
    assert born < (100 if os.geteuid() == 0 else 1500)
    assert set(wait_until_gone(len(before))) == set()


def test_import_time_code_cannot_kill_write_or_connect(tier: str, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    source = f"""
import os, socket
passed = []
for name, attack in dict(
    write=lambda: open({str(tmp_path / "x")!r}, "w"), read=lambda: open("/etc/passwd"),
    kill=lambda: os.kill(os.getppid(), 9), group=lambda: os.killpg(0, 9), leave=lambda: os.setsid(),
    network=lambda: socket.socket(), program=lambda: os.execv("/bin/true", ["true"]),
).items():
    try:
        attack()
        passed.append(name)
    except OSError:
        pass
assert not passed, passed
def f(messages): return 0.5
"""
    # Code that fails when it is imported makes `start` raise.
    start(tier, source).kill()
    assert not (tmp_path / "x").exists()


# What must work


@pytest.mark.parametrize(
    ("source", "keywords", "score"),
    [
        ("async def f(messages):\n    import asyncio\n    await asyncio.sleep(0.01)\n    return 0.5", {}, 0.5),
        ("import numpy as np\ndef f(messages):\n    return (np.ones((8, 8)) @ np.ones((8, 8))).mean() / 8", {}, 1.0),
        ("import json, re, math, statistics, datetime, collections, random, hashlib\ndef f(messages, x):\n    return x * 2", {"x": 2}, 4.0),
        ("from concurrent.futures import ThreadPoolExecutor as T\ndef f(messages):\n    return sum(T(4).map(float, range(4)))", {}, 6.0),
        ("def f(messages):\n    return {'score': 1, 'metrics': {'a': 2}, 'step_outputs': [{'step_index': 0, 'base_reward': 1}]}", {}, 1.0),
    ],
)  # fmt: skip
def test_ordinary_reward_code_runs(tier: str, source: str, keywords: dict[str, Any], score: float) -> None:
    code = RewardCode(function="f", path="f.py", source=source)
    evaluator = SandboxEvaluator(code, keywords, tier=tier, num_workers=1)
    try:
        outcome = evaluator.call(Arguments(messages=MESSAGES, keywords=keywords))
        assert (outcome.error, [r.score for r in outcome.results]) == (None, [score])
    finally:
        evaluator.close()


@pytest.mark.slow
def test_torch_can_be_imported(tier: str) -> None:
    code = RewardCode(
        function="f",
        path="f.py",
        source="import torch\ndef f(messages):\n    return torch.ones(3).sum().item()",
    )
    evaluator = SandboxEvaluator(code, {}, tier=tier, limits=Limits(import_timeout_s=120), num_workers=1)
    try:
        outcome = evaluator.call(Arguments(messages=[], keywords={}))
        assert (outcome.error, [r.score for r in outcome.results]) == (None, [3.0])
    finally:
        evaluator.close()


async def test_a_hundred_calls_at_once_all_come_right(tier: str) -> None:
    code = RewardCode(function="f", path="f.py", source="def f(messages, i): return i")
    evaluator = SandboxEvaluator(code, {"i": 0}, tier=tier, num_workers=2)
    try:
        calls = [Arguments(messages=[], keywords={"i": i}) for i in range(100)]
        outcomes = await evaluator.evaluate(calls)
        assert [o.results[0].score for o in outcomes] == [float(i) for i in range(100)]
    finally:
        evaluator.close()
    assert len(wait_until_gone(4)) == 0


def test_a_killed_zygote_is_a_retry_and_never_a_score(tier: str) -> None:
    code = RewardCode(function="f", path="f.py", source="def f(messages): return 0.5")
    evaluator = SandboxEvaluator(code, {}, tier=tier, num_workers=1)
    try:
        for pid in [zygote.pid for zygote in evaluator._idle]:
            os.killpg(pid, signal.SIGKILL)
        outcome = evaluator.call(Arguments(messages=[], keywords={}))
        assert (outcome.error, [r.score for r in outcome.results]) == (None, [0.5])
    finally:
        evaluator.close()


def test_the_sandbox_dies_with_its_parent(tier: str, tmp_path: Path) -> None:
    script = f"""
import sys, threading
sys.path.insert(0, {str(SOURCE)!r})
from turnwise.rewards.sandbox.pool import SandboxEvaluator
from turnwise.rewards.sandbox.client import RewardCode, Limits
from turnwise.rewards.arguments import Arguments
code = RewardCode(function="f", path="f.py", source="import time\\ndef f(messages): time.sleep(600)")
evaluator = SandboxEvaluator(code, {{}}, tier={tier!r}, limits=Limits(timeout_s=600), num_workers=1)
threading.Thread(target=evaluator.call, args=(Arguments(messages=[], keywords={{}}),)).start()
import time; time.sleep(0.3)
print("ready", flush=True)
time.sleep(600)
"""
    before = set(sandbox_processes())
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    assert set(sandbox_processes()) - before
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while set(sandbox_processes()) - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert set(sandbox_processes()) - before == set()


def test_nothing_is_leaked_over_many_calls(tier: str) -> None:
    code = RewardCode(function="f", path="f.py", source="def f(messages): return 0.5")
    evaluator = SandboxEvaluator(code, {}, tier=tier, num_workers=1)
    try:
        evaluator.call(Arguments(messages=[], keywords={}))
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(200):
            assert evaluator.call(Arguments(messages=[], keywords={})).error is None
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        evaluator.close()


async def test_user_files_are_scored_with_the_tier_on_record(tier: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from turnwise import reward_function, EvaluateResult, StepOutput\n"
        "from helper import double\n"
        "@reward_function\n"
        "def mine(messages, ground_truth, bonus=0.0):\n"
        "    if ground_truth == 'hang':\n"
        "        while True: pass\n"
        "    steps = [StepOutput(step_index=m['step_index'], base_reward=0.1) for m in messages if 'step_index' in m]\n"
        "    return EvaluateResult(score=double(len(messages)) + bonus, step_outputs=steps)\n"
    )
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helper.py").write_text("def double(x): return 2 * x\n")
    config = RewardsConfig(
        functions=(RewardConfig(name=f"{tmp_path}/mine.py:mine", params={"bonus": 0.5}),),
        sandbox=tier,  # type: ignore[arg-type]
        reads=(str(tmp_path / "lib"),),
        timeout_s=1.5,
    )
    groups = [
        make_group(make_episode("a", "b", episode_id="good", ground_truth="x")),
        make_group(make_episode("a", episode_id="bad", ground_truth="hang", group_id="g1")),
    ]
    with build_rewards(config) as rewards:
        scores = await score_groups(groups, rewards)
    good, bad = scores["good"], scores["bad"]
    assert (good.score, good.step_rewards, good.sandbox) == (8.5, (0.1, 0.1), tier)
    assert (bad.score, bad.error, bad.sandbox) == (None, "reward mine took longer than 1.5 s", tier)


async def test_a_reward_in_a_package_is_imported_inside_only(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_rewards_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("from .deep import score\ndef f(messages): return score\n")
    (package / "deep.py").write_text("score = 0.75\n")
    (tmp_path / "secret.txt").write_text("x")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = RewardsConfig(
        functions=(RewardConfig(name="my_rewards_package.inner:f"),),
        sandbox=tier,  # type: ignore[arg-type]
    )
    with build_rewards(config) as rewards:
        scores = await score_groups([make_group(make_episode("a"))], rewards)
    assert scores["e0"].score == 0.75
    assert "my_rewards_package" not in sys.modules


async def test_a_reward_registered_by_an_installed_package_is_found(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registered_rewards.py").write_text("def f(messages): return 0.625\n")
    info = tmp_path / "registered-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: registered\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[turnwise.rewards]\nregistered = registered_rewards:f\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = RewardsConfig(
        functions=(RewardConfig(name="registered", label="mine"),),
        sandbox=tier,  # type: ignore[arg-type]
    )
    with build_rewards(config) as rewards:
        scores = await score_groups([make_group(make_episode("a"))], rewards)
    assert (scores["e0"].score, scores["e0"].reward_name) == (0.625, "mine")


# When there is no sandbox


@pytest.fixture
def no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {name: probe.Probe(tier=name, holds=False, reason="switched off") for name in probe.TIERS}
    monkeypatch.setattr(probe, "_found", found)


def user_reward(tmp_path: Path) -> str:
    (tmp_path / "f.py").write_text("def f(messages): return 0.5\n")
    return f"{tmp_path}/f.py:f"


@pytest.mark.usefixtures("no_sandbox")
def test_without_a_sandbox_user_code_is_refused(tmp_path: Path) -> None:
    config = RewardsConfig(functions=(RewardConfig(name=user_reward(tmp_path)),))
    with pytest.raises(SandboxError, match=r"no sandbox holds on this machine .*switched off"):
        build_rewards(config)


@pytest.mark.usefixtures("no_sandbox")
async def test_the_weak_sandbox_must_be_asked_for_and_is_on_record(tmp_path: Path) -> None:
    config = RewardsConfig(functions=(RewardConfig(name=user_reward(tmp_path)),), allow_weak_sandbox=True)
    with build_rewards(config) as rewards:
        scores = await score_groups([make_group(make_episode("a"))], rewards)
    assert (scores["e0"].score, scores["e0"].sandbox) == (0.5, "rlimits")


async def test_no_sandbox_at_all_must_be_asked_for(tmp_path: Path) -> None:
    config = RewardsConfig(functions=(RewardConfig(name=user_reward(tmp_path)),), sandbox="none")
    with build_rewards(config) as rewards:
        scores = await score_groups([make_group(make_episode("a"))], rewards)
    assert (scores["e0"].score, scores["e0"].sandbox) == (0.5, "none")


def test_a_tier_that_leaks_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_found", {})
    found = probe.probe("rlimits")
    assert not found.holds


def test_closing_twice_and_calling_after_is_harmless() -> None:
    if not any(probe.probe(name).holds for name in probe.TIERS):
        pytest.skip("no sandbox tier holds on this machine")
    code = RewardCode(function="f", path="f.py", source="def f(messages): return 0.5")
    evaluator = SandboxEvaluator(code, {}, tier=probe.choose_tier("auto"))
    evaluator.close()
    evaluator.close()
    outcome = evaluator.call(Arguments(messages=[], keywords={}))
    assert outcome.error is not None

    async def evaluate() -> list[Outcome]:
        return await evaluator.evaluate([Arguments(messages=[], keywords={})])

    with pytest.raises(RuntimeError):
        asyncio.run(evaluate())


@pytest.mark.parametrize("found_here", probe.TIERS)
def test_the_probe_does_not_depend_on_which_variables_are_set(found_here: str) -> None:
    """bubblewrap gives its child a PWD of its own; the canary must not take that for a leak."""
    code = f"from turnwise.rewards.sandbox import probe; print(probe.probe({found_here!r}).holds)"
    environment = {"PWD": "/", "LC_CTYPE": "C.UTF-8", "PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE)}
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == str(probe.probe(found_here).holds)
