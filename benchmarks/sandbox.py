"""What the sandbox costs: a call in each tier, beside the bare function and a plain subprocess; and that nothing leaks.

    python benchmarks/sandbox.py [--json] [--quick]

One-shot is a whole life (start, lock, import, call, end). Fails when a zygote's median call takes more than 5 ms, or when
10,000 calls leave file descriptors, processes or memory behind. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turnwise.rewards.arguments import Arguments
from turnwise.rewards.sandbox import probe
from turnwise.rewards.sandbox.client import RewardCode
from turnwise.rewards.sandbox.pool import SandboxEvaluator

MAX_CALL_MS = 5.0
MAX_GROWTH_MB = 8.0
SOURCE = """
from turnwise import EvaluateResult, StepOutput, reward_function

@reward_function
def reward(messages, ground_truth):
    answers = [m for m in messages if m["role"] == "assistant"]
    steps = [StepOutput(step_index=i, base_reward=0.1 * len(m["content"])) for i, m in enumerate(answers)]
    return EvaluateResult(score=float(ground_truth in answers[-1]["content"]), step_outputs=steps)
"""
CALL = Arguments(
    messages=[
        {"role": role, "content": f"{role} says something of ordinary length in turn {turn}, forty-two or so"}
        for turn in range(10)
        for role in ("user", "assistant")
    ],
    keywords={"ground_truth": "forty-two"},
)
PLAIN = "import json, sys; call = json.load(sys.stdin); print(json.dumps({'score': float(len(call['messages']))}))"


def median_ms(function: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


def unsandboxed_ms(count: int) -> float:
    namespace: dict[str, Any] = {}
    exec(SOURCE, namespace)
    function = namespace["reward"]
    return median_ms(lambda: function(CALL.messages, **CALL.keywords), count)


def subprocess_ms(count: int) -> float:
    payload = json.dumps({"messages": CALL.messages})
    return median_ms(
        lambda: subprocess.run([sys.executable, "-I", "-c", PLAIN], input=payload, text=True, capture_output=True, check=True),
        count,
    )  # fmt: skip


def evaluator(tier: str, num_workers: int) -> SandboxEvaluator:
    code = RewardCode(function="reward", path="benchmark.py", source=SOURCE)
    return SandboxEvaluator(code, CALL.keywords, tier=tier, num_workers=num_workers)


def one_shot(tier: str) -> None:
    fresh = evaluator(tier, 1)
    assert fresh.call(CALL).error is None
    fresh.close()


def calls_per_second(tier: str, count: int) -> float:
    workers = evaluator(tier, 2)

    async def run() -> float:
        await workers.evaluate([CALL] * 20)
        started = time.perf_counter()
        outcomes = await workers.evaluate([CALL] * count)
        assert all(outcome.error is None for outcome in outcomes)
        return count / (time.perf_counter() - started)

    try:
        return asyncio.run(run())
    finally:
        workers.close()


def rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def descendants(pid: int) -> list[int]:
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return [found for child in children for found in (child, *descendants(child))]  # fmt: skip


def leak_check(tier: str, count: int) -> dict[str, float]:
    """Growth over `count` calls, after a warm-up."""
    worker = evaluator(tier, 1)
    try:
        for _ in range(200):
            worker.call(CALL)
        before = _footprint()
        for _ in range(count):
            assert worker.call(CALL).error is None
        after = _footprint()
    finally:
        worker.close()
    return {"calls": count, **{name: round(after[name] - before[name], 2) for name in before}}


def _footprint() -> dict[str, float]:
    time.sleep(1.0)  # the last call's process is still on its way out
    ours = descendants(os.getpid())
    return {
        "open_files": len(os.listdir("/proc/self/fd")),
        "processes": len(ours),
        "parent_mb": rss_mb(os.getpid()),
        "sandbox_mb": sum(rss_mb(pid) for pid in ours),
    }


def measure(tier: str, *, quick: bool) -> dict[str, Any]:
    worker = evaluator(tier, 1)
    try:
        median_ms(lambda: worker.call(CALL), 20)
        zygote = median_ms(lambda: worker.call(CALL), 100 if quick else 500)
    finally:
        worker.close()
    return {
        "one_shot_ms": round(median_ms(lambda: one_shot(tier), 3 if quick else 9), 2),
        "zygote_ms": round(zygote, 3),
        "calls_per_s_2_workers": round(calls_per_second(tier, 200 if quick else 1000), 1),
        "growth": leak_check(tier, 500 if quick else 10_000),
    }


def failures(tier: str, found: dict[str, Any]) -> list[str]:
    growth = found["growth"]
    wrong = []
    if found["zygote_ms"] > MAX_CALL_MS:
        wrong.append(f"{tier}: a call takes {found['zygote_ms']} ms, more than {MAX_CALL_MS}")
    if growth["open_files"] > 0 or growth["processes"] > 0:
        wrong.append(f"{tier}: {growth['calls']} calls left files or processes behind: {growth}")
    if growth["parent_mb"] > MAX_GROWTH_MB or growth["sandbox_mb"] > MAX_GROWTH_MB:
        wrong.append(f"{tier}: memory grew over {growth['calls']} calls: {growth}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer calls")
    options = parser.parse_args()
    tiers = [tier for tier in probe.TIERS if probe.probe(tier).holds]
    result: dict[str, Any] = {
        "unsandboxed_ms": round(unsandboxed_ms(200), 4),
        "subprocess_ms": round(subprocess_ms(5 if options.quick else 15), 2),
        "tiers": {tier: measure(tier, quick=options.quick) for tier in tiers},
        "not_run": {tier: probe.probe(tier).reason for tier in probe.TIERS if tier not in tiers},
    }
    wrong = [sentence for tier, found in result["tiers"].items() for sentence in failures(tier, found)]
    result["failures"] = wrong
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"unsandboxed {result['unsandboxed_ms']} ms, plain subprocess {result['subprocess_ms']} ms a call"
        )
        for tier, found in result["tiers"].items():
            print(
                f"{tier}: one-shot {found['one_shot_ms']} ms, zygote {found['zygote_ms']} ms, "
                f"{found['calls_per_s_2_workers']} calls/s on two workers; growth over {found['growth']}"
            )
        for tier, reason in result["not_run"].items():
            print(f"{tier}: not run here ({reason})")
        for sentence in wrong:
            print(f"FAIL {sentence}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
