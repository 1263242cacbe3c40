"""Sampled tokens per second of multi-turn rollouts: LocalPolicy beside plain `generate()` and beside TRL's own generation.

    python benchmarks/rollout.py --json [--trl-python PATH] [--turns 8] [--quick]

Every case samples the same number of tokens from the same model with both, one after the other, `--repeats` times; the best run of each counts.
`cpu_ratio` compares processor seconds instead of elapsed ones: on a machine that others use too, it is the figure to trust.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.models import qwen3_17m
from benchmarks.rollout_models import (
    IMAGE,
    VISION_END,
    VISION_START,
    byte_pair_tokenizer,
    image_processor,
    qwen3_vl_tiny,
)

from turnwise.policies.local import LocalPolicy
from turnwise.policy import Request
from turnwise.types import Image, SamplingParams

NUM_EPISODES, GROUP_SIZE, NUM_NEW = 16, 8, 64


class Script:
    """What the environment says in each turn: fixed before, so that both sides read the same."""

    def __init__(self, *, num_turns: int, num_tokens: int, vocab_size: int, image_side: int = 0) -> None:
        rng = np.random.default_rng(0)
        shape = (num_turns, NUM_EPISODES, num_tokens)
        self.texts = rng.integers(300, vocab_size, shape)
        self.images: list[list[Image]] | None = None
        if image_side:
            pixels = rng.integers(
                0, 256, (num_turns, NUM_EPISODES, image_side, image_side, 3), dtype=np.uint8
            )
            self.images = [[Image.from_pixels(one) for one in turn] for turn in pixels]
        # A group starts from the same prompt.
        first = [episode // GROUP_SIZE * GROUP_SIZE for episode in range(NUM_EPISODES)]
        self.texts[0] = self.texts[0, first]
        if self.images:
            self.images[0] = [self.images[0][episode] for episode in first]
        self.num_turns = num_turns
        self.image_ids = [VISION_START, *[IMAGE] * (image_side // 32) ** 2, VISION_END] if image_side else []

    def observe(self, turn: int, episode: int) -> list[int]:
        return [*self.image_ids, *self.texts[turn, episode].tolist()]


async def run_ours(policy: LocalPolicy, script: Script) -> tuple[float, int]:
    """Seconds, and tokens sampled."""
    prompts: list[list[int]] = [[] for _ in range(NUM_EPISODES)]
    images: list[list[Image]] = [[] for _ in range(NUM_EPISODES)]
    num_sampled, started_at = 0, time.perf_counter()
    for turn in range(script.num_turns):
        requests = []
        for episode in range(NUM_EPISODES):
            prompts[episode] += script.observe(turn, episode)
            if script.images:
                images[episode].append(script.images[turn][episode])
            requests.append(
                Request(
                    stream_id=f"{episode}", group_id=f"{episode // GROUP_SIZE}", seed=(0, episode, turn),
                    prompt_ids=np.array(prompts[episode], dtype=np.int32), images=tuple(images[episode]),
                    sampling=SamplingParams(max_new_tokens=NUM_NEW, stop_at_action=False),
                )
            )  # fmt: skip
        answers = await asyncio.gather(*(policy.complete(request) for request in requests))
        for prompt, answer in zip(prompts, answers, strict=True):
            prompt += answer.completion_ids.tolist()
            num_sampled += len(answer.completion_ids)
    seconds = time.perf_counter() - started_at
    for episode in range(NUM_EPISODES):
        await policy.release(f"{episode}")
    return seconds, num_sampled


def run_generate(network: Any, script: Script, processor: Any) -> tuple[float, int]:
    """Batched `generate()` over the whole history in each turn. All prompts have one length: it need not even pad."""
    prompts: list[list[int]] = [[] for _ in range(NUM_EPISODES)]
    images: list[list[Image]] = [[] for _ in range(NUM_EPISODES)]
    num_sampled, started_at = 0, time.perf_counter()
    for turn in range(script.num_turns):
        for episode in range(NUM_EPISODES):
            prompts[episode] += script.observe(turn, episode)
            if script.images:
                images[episode].append(script.images[turn][episode])
        ids = torch.tensor(prompts)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if script.images:
            pixels = [image.pixels for row in images for image in row]
            inputs |= processor(images=pixels, return_tensors="pt")
            inputs["mm_token_type_ids"] = (ids == IMAGE).int()
        with torch.inference_mode():
            output = network.generate(
                **inputs,
                max_new_tokens=NUM_NEW,
                min_new_tokens=NUM_NEW,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                suppress_tokens=[0, 1, 2, 3],
            )
        for prompt, row in zip(prompts, output[:, ids.shape[1] :].tolist(), strict=True):
            prompt += row
            num_sampled += len(row)
    return time.perf_counter() - started_at, num_sampled


def compare(
    name: str, network: Any, script: Script, *, repeats: int, processor: Any = None, budget_mb: int = 2048
) -> dict[str, Any]:
    """Tokens per second of both, and what share of our time the model did not take."""
    network.eval()
    network.generation_config.eos_token_id = None
    network.generation_config.pad_token_id = 0
    tokenizer = byte_pair_tokenizer(network.config.get_text_config().vocab_size)
    ours, overheads, theirs, our_cpu_s, their_cpu_s = [], [], [], [], []
    for _ in range(repeats):
        policy = LocalPolicy(network, tokenizer, image_processor=processor, kv_budget_mb=budget_mb)
        before_s = time.process_time()
        seconds, num_sampled = asyncio.run(_run_and_close(policy, script))
        our_cpu_s.append((time.process_time() - before_s) / num_sampled)
        ours.append(num_sampled / seconds)
        overheads.append((seconds - policy.statistics.model_s, num_sampled, seconds))
        before_s = time.process_time()
        seconds, num_sampled = run_generate(network, script, processor)
        their_cpu_s.append((time.process_time() - before_s) / num_sampled)
        theirs.append(num_sampled / seconds)
    outside_s, num_sampled, seconds = min(overheads)
    return {
        "name": name, "unit": "sampled tokens/s", "ours": max(ours), "baseline": max(theirs),
        "ratio": max(ours) / max(theirs), "cpu_ratio": min(their_cpu_s) / min(our_cpu_s),
        "outside_model_share": outside_s / seconds,
        "outside_model_us_per_token": 1e6 * outside_s / num_sampled,
    }  # fmt: skip


async def _run_and_close(policy: LocalPolicy, script: Script) -> tuple[float, int]:
    result = await run_ours(policy, script)
    await policy.close()
    return result


def compare_overhead(turns: tuple[int, int], repeats: int) -> dict[str, Any]:
    """Time outside the model per sampled token, of long episodes beside short ones; must not grow."""
    network = qwen3_vl_tiny().eval()
    network.generation_config.eos_token_id = None
    tokenizer = byte_pair_tokenizer(1024)
    found = []
    for num_turns in turns:
        script = Script(num_turns=num_turns, num_tokens=32, vocab_size=1024, image_side=64)
        best = float("inf")
        for _ in range(repeats):
            policy = LocalPolicy(network, tokenizer, image_processor=image_processor(), kv_budget_mb=4096)
            seconds, num_sampled = asyncio.run(_run_and_close(policy, script))
            best = min(best, 1e6 * (seconds - policy.statistics.model_s) / num_sampled)
        found.append(best)
    return {
        "name": f"outside_model_{turns[1]}_vs_{turns[0]}_turns", "unit": "us per sampled token", "ours": found[1],
        "baseline": found[0], "ratio": found[1] / found[0],
    }  # fmt: skip


def compare_trl(trl_python: str | None, repeats: int) -> dict[str, Any]:
    """Single turn, 16 prompts of 512 tokens in groups of 8, beside TRL's GRPO trainer generating in its own environment."""
    network = qwen3_17m().eval()
    network.generation_config.eos_token_id = None
    script = Script(num_turns=1, num_tokens=512, vocab_size=49_152)
    tokenizer = byte_pair_tokenizer(49_152)
    ours, our_cpu_s = [], []
    for _ in range(max(3, repeats)):
        policy = LocalPolicy(network, tokenizer)
        before_s = time.process_time()
        seconds, num_sampled = asyncio.run(_run_and_close(policy, script))
        our_cpu_s.append((time.process_time() - before_s) / num_sampled)
        ours.append(num_sampled / seconds)
    result: dict[str, Any] = {
        "name": "trl_single_turn", "unit": "sampled tokens/s", "ours": max(ours), "baseline": None, "ratio": None,
    }  # fmt: skip
    if trl_python is not None:
        command = [trl_python, str(Path(__file__).with_name("rollout_trl.py")), str(max(3, repeats))]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        theirs = json.loads(printed.splitlines()[-1])
        result["baseline"] = theirs["tokens_per_s"]
        result["ratio"] = max(ours) / theirs["tokens_per_s"]
        result["cpu_ratio"] = theirs["cpu_s_per_token"] / min(our_cpu_s)
        result["trl"] = theirs["trl"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trl-python", help="a Python with torch and trl installed")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", help="run the cases whose names contain this")
    options = parser.parse_args()
    repeats = options.repeats
    cases = {
        "text_8_turns": lambda: compare(
            "text_8_turns", qwen3_17m(), Script(num_turns=8, num_tokens=300, vocab_size=49_152), repeats=repeats
        ),
        "vision_8_turns": lambda: compare(
            "vision_8_turns", qwen3_vl_tiny(), repeats=repeats, processor=image_processor(),
            script=Script(num_turns=8, num_tokens=300, vocab_size=1024, image_side=128),
        ),
        "vision_32_turns": lambda: compare(
            "vision_32_turns", qwen3_vl_tiny(), repeats=1, processor=image_processor(),
            script=Script(num_turns=32, num_tokens=300, vocab_size=1024, image_side=128), budget_mb=4096,
        ),
        "outside_model": lambda: compare_overhead((8, 128), repeats),
        "trl_single_turn": lambda: compare_trl(options.trl_python, repeats),
    }  # fmt: skip
    results = []
    for name, case in cases.items():
        if options.only is None or options.only in name:
            results.append(case())
            print(json.dumps(results[-1]), file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
