"""One model update, ours against a good plain one, seed 003's per-turn loop and TRL's GRPO; gradients compared.

    python -m benchmarks.update --json
    python -m benchmarks.update --trl-python ENV/bin/python --json      # an environment with trl==1.16.0

Every method computes the same loss (clipped ratios, mean over tokens) of the same model (Qwen3, 17 M parameters, 49,152
ids) on the same tokens, forward and backward. Methods take turns, and the best of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from benchmarks.models import qwen3_17m
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from turnwise.config import LossConfig, TrainingConfig
from turnwise.learner import Learner
from turnwise.minibatch import Tally
from turnwise.samples import Sample, Samples, TurnStarts
from turnwise.types import TokenStream

VOCABULARY = 49_152
LOSS = LossConfig(name="dapo", clip_low=0.2, clip_high=0.2)
OLD_LOGPROB = -10.8
"""About log(1 / 49,152), what a random model gives; keeps ratios near 1."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Groups of episodes: a shared prompt, then turns of (given, sampled) tokens; the first turn follows the prompt."""

    name: str
    groups: int
    size: int
    prompt: int
    turns: int
    given: int
    sampled: int


CASES = (
    Case(name="2x8x(512+64)", groups=2, size=8, prompt=512, turns=1, given=0, sampled=64),
    Case(name="1x16x(2048+64)", groups=1, size=16, prompt=2048, turns=1, given=0, sampled=64),
    Case(
        name="2x8 episodes of 6 turns (512, then 64+64)",
        groups=2,
        size=8,
        prompt=512,
        turns=6,
        given=64,
        sampled=64,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tokens of a case, as rows of equal length."""

    ids_BT: Tensor
    is_sampled_T: Tensor
    advantages_B: Tensor


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(case.groups):
        prompt = rng.integers(0, VOCABULARY, case.prompt)
        length = case.turns * (case.given + case.sampled)
        rows += [np.concatenate([prompt, rng.integers(0, VOCABULARY, length)]) for _ in range(case.size)]
    origin = np.tile(np.repeat([False, True], [case.given, case.sampled]), case.turns)
    return Inputs(
        ids_BT=torch.from_numpy(np.stack(rows)),
        is_sampled_T=torch.from_numpy(np.concatenate([np.zeros(case.prompt, bool), origin])),
        advantages_B=torch.from_numpy(rng.normal(size=len(rows))).float(),
    )


def clipped_sum(logprobs: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - OLD_LOGPROB).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).sum()


def plain_update(network: nn.Module, inputs: Inputs) -> None:
    """(a) One padded batch, logits of sampled tokens only, log-softmax, backward."""
    targets_T = torch.nonzero(inputs.is_sampled_T)[:, 0]
    logits = network(input_ids=inputs.ids_BT, logits_to_keep=targets_T - 1, use_cache=False).logits
    targets = inputs.ids_BT[:, targets_T]
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, targets[..., None])[..., 0]
    (clipped_sum(logprobs, inputs.advantages_B[:, None]) / targets.numel()).backward()


def per_turn_update(network: nn.Module, inputs: Inputs) -> None:
    """Seed 003: one forward pass per turn over its whole context, all logits, backward per episode."""
    edges = (
        torch.nonzero(torch.diff(inputs.is_sampled_T.int(), append=torch.zeros(1, dtype=torch.int)))[:, 0] + 1
    )
    spans = list(zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True))
    total = len(inputs.ids_BT) * int(inputs.is_sampled_T.sum())
    for ids_T, advantage in zip(inputs.ids_BT, inputs.advantages_B, strict=True):
        loss = torch.zeros(())
        for start, end in spans:
            logits = network(input_ids=ids_T[None, :end], use_cache=False).logits[0, start - 1 : -1]
            logprobs = torch.log_softmax(logits, dim=-1).gather(-1, ids_T[start:end, None])[:, 0]
            loss = loss + clipped_sum(logprobs, advantage)
        (loss / total).backward()


def make_samples(case: Case, inputs: Inputs) -> Samples:
    targets_R = torch.nonzero(inputs.is_sampled_T)[:, 0].numpy()
    starts = TurnStarts(
        turn_indices_N=np.zeros(0, np.int64),
        positions_N=np.zeros(0, np.int64),
        returns_N=np.zeros(0, np.float32),
    )
    samples = []
    for index, (ids_T, advantage) in enumerate(
        zip(inputs.ids_BT.numpy(), inputs.advantages_B.tolist(), strict=True)
    ):
        stream = TokenStream(
            ids=ids_T.astype(np.int32), is_sampled=inputs.is_sampled_T.numpy(),
            logprobs=np.full(len(ids_T), OLD_LOGPROB, dtype=np.float32),
        )  # fmt: skip
        samples.append(
            Sample(
                group_id=str(index // case.size), episode_id=str(index), stream=stream, targets_R=targets_R,
                advantages_R=np.full(len(targets_R), advantage, np.float32), turn_indices_R=np.zeros_like(targets_R),
                policy_versions_R=np.zeros_like(targets_R), turns=starts, temperature=1.0, max_new_tokens=case.sampled,
            )
        )  # fmt: skip
    return Samples(samples=tuple(samples), tokens_per_pack=8192)


def our_update(network: nn.Module, case: Case, inputs: Inputs) -> None:
    """What `Learner.update` does up to the optimizer, packing included."""
    settings = TrainingConfig(max_logprob_gap=1e3)
    learner = Learner(network, loss=LOSS, training=settings)
    for portion in learner._portions(make_samples(case, inputs)):
        learner._backward(portion, Tally())


def methods(network: nn.Module, case: Case, inputs: Inputs) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {
        "turnwise": lambda: our_update(network, case, inputs),
        "plain": lambda: plain_update(network, inputs),
    }
    if case.turns > 1:
        found["per_turn_loop"] = lambda: per_turn_update(network, inputs)
    return found


def timed(network: nn.Module, run: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one update; gradients are left on the network."""
    network.zero_grad(set_to_none=True)
    network.get_decoder().config._attn_implementation = "sdpa"
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def gradient(network: nn.Module) -> dict[str, Tensor]:
    return {
        name: tensor.grad.clone() for name, tensor in network.named_parameters() if tensor.grad is not None
    }


def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    gap = sum(float((first[name] - second[name]).square().sum()) for name in second)
    return (gap / sum(float(tensor.square().sum()) for tensor in second.values())) ** 0.5


def measure_case(case: Case, repeats: int) -> dict[str, object]:
    network = qwen3_17m().train()
    inputs = make_inputs(case)
    small = Case(name="", groups=1, size=2, prompt=8, turns=case.turns, given=case.given and 4, sampled=4)
    for run in methods(network, small, make_inputs(small)).values():
        timed(network, run)  # the first call of every kernel pays for its set-up
    best: dict[str, list[float]] = {}
    grads: dict[str, dict[str, Tensor]] = {}
    for repeat in range(repeats):
        for name, run in methods(network, case, inputs).items():
            if name == "per_turn_loop" and repeat > 0:
                continue  # it takes minutes
            wall, cpu = timed(network, run)
            known = best.setdefault(name, [wall, cpu])
            best[name] = [min(known[0], wall), min(known[1], cpu)]
            grads.setdefault(name, gradient(network))
    ours = best.pop("turnwise")
    return {
        "case": case.name,
        "seconds": round(ours[0], 3),
        "cpu_seconds": round(ours[1], 3),
        "tokens": inputs.ids_BT.numel(),
        "distinct_tokens": _distinct(case, inputs),
        "baselines": {
            name: {
                "seconds": round(wall, 3),
                "cpu_seconds": round(cpu, 3),
                "ratio": round(wall / ours[0], 2),
                "cpu_ratio": round(cpu / ours[1], 2),
                "gradient_difference": difference(grads["turnwise"], grads[name]),
            }
            for name, (wall, cpu) in best.items()
        },
    }


def _distinct(case: Case, inputs: Inputs) -> int:
    from turnwise.packs import build_packs

    return sum(len(pack.tree) for pack in build_packs(make_samples(case, inputs)))


def peak_memory_mb(case_index: int, method: str) -> float:
    """How far one update raises the peak of a fresh process above model and inputs."""
    command = [sys.executable, "-m", "benchmarks.update", "--peak", str(case_index), method]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def print_peak(case_index: int, method: str) -> None:
    case = CASES[case_index]
    network, inputs = qwen3_17m().train(), make_inputs(case)
    # The gradients themselves are part of every method.
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    small = make_inputs(Case(name="", groups=1, size=2, prompt=4, turns=1, given=0, sampled=2))
    plain_update(network, small)
    # Forget the peak so far; what getrusage says of it includes the parent's.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_mb("VmRSS")
    methods(network, case, inputs)[method]()
    print(memory_mb("VmHWM") - before)


def memory_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def measure_trl(python: str, repeats: int) -> dict[str, object]:
    """TRL's loss and backward on the first case, at its defaults and at its fastest on a CPU."""
    network, inputs = qwen3_17m(), make_inputs(CASES[0])
    with tempfile.TemporaryDirectory() as folder:
        network.save_pretrained(f"{folder}/model")
        save_file({"ids": inputs.ids_BT, "advantages": inputs.advantages_B}, f"{folder}/inputs.safetensors")
        script = Path(__file__).with_name("update_trl.py")
        command = [python, str(script), folder, str(CASES[0].prompt), str(OLD_LOGPROB), str(repeats)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"error": done.stderr.strip().splitlines()[-1]}
        found: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
        timed(network, lambda: our_update(network.train(), CASES[0], inputs))
        found["gradient_difference"] = difference(
            gradient(network), load_file(f"{folder}/gradient.safetensors")
        )
        return found


def measure_linearity(repeats: int) -> list[dict[str, float]]:
    """Seconds per distinct token while the number of groups doubles."""
    rows = []
    network = qwen3_17m().train()
    for groups in (1, 2, 4):
        case = Case(name="", groups=groups, size=8, prompt=512, turns=1, given=0, sampled=64)
        inputs = make_inputs(case)
        seconds = min(
            timed(network, lambda c=case, i=inputs: our_update(network, c, i))[1] for _ in range(repeats)
        )
        distinct = _distinct(case, inputs)
        rows.append(
            {
                "distinct_tokens": distinct,
                "cpu_seconds": round(seconds, 3),
                "cpu_ms_per_token": round(1e3 * seconds / distinct, 3),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", type=int, nargs="*", default=[0, 1, 2], help="which cases to run")
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument("--trl-python", help="python of an environment with trl==1.16.0")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print_peak(int(arguments.peak[0]), arguments.peak[1])
        return
    cases = []
    for index in arguments.cases:
        row = measure_case(CASES[index], arguments.repeats)
        if not arguments.no_memory:
            ours, plain = (peak_memory_mb(index, method) for method in ("turnwise", "plain"))
            row["peak_mb"] = {"turnwise": round(ours), "plain": round(plain), "share": round(ours / plain, 3)}
        cases.append(row)
        print(json.dumps(row, indent=2), file=sys.stderr)
    trl = measure_trl(arguments.trl_python, arguments.repeats) if arguments.trl_python else None
    first = next((row for row in cases if row["case"] == CASES[0].name), None)
    if trl is not None and first is not None and "fast" in trl:
        for name in ("fast", "default"):
            trl[f"ratio_{name}"] = round(trl[name] / first["seconds"], 2)
            trl[f"cpu_ratio_{name}"] = round(trl[f"{name}_cpu"] / first["cpu_seconds"], 2)
    result = {
        "benchmark": "update",
        "ratio": first["baselines"]["plain"]["ratio"] if first else None,
        "cases": cases,
        "linearity": measure_linearity(arguments.repeats),
        "trl": trl,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
