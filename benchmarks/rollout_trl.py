"""TRL's own generation path, run in TRL's environment: 16 prompts of 512 tokens in groups of 8, 64 new tokens each.

/path/to/trl-env/bin/python benchmarks/rollout_trl.py 3
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import trl

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.models import qwen3_17m
from benchmarks.rollout_models import byte_pair_tokenizer


def make_trainer(folder: str) -> Any:
    tokenizer = byte_pair_tokenizer(49_152)
    tokenizer.pad_token = tokenizer.eos_token = "<|video|>"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = trl.GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, per_device_train_batch_size=16, num_generations=8,
        max_completion_length=64, top_k=0, top_p=1.0, temperature=1.0, report_to="none",
    )  # fmt: skip
    return trl.GRPOTrainer(
        model=qwen3_17m(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * 16}),
        processing_class=tokenizer,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder)
        prompts = np.random.default_rng(0).integers(300, 49_152, (2, 512)).tolist()
        prompt_ids = [prompt for prompt in prompts for _ in range(8)]
        best, cpu_s = 0.0, float("inf")
        for _ in range(int(sys.argv[1])):
            started_at, before_s = time.perf_counter(), time.process_time()
            completion_ids = trainer._generate_single_turn(prompt_ids, None, {}, 8)[0]
            num_sampled = sum(len(ids) for ids in completion_ids)
            best = max(best, num_sampled / (time.perf_counter() - started_at))
            cpu_s = min(cpu_s, (time.process_time() - before_s) / num_sampled)
    print(json.dumps({"tokens_per_s": best, "cpu_s_per_token": cpu_s, "trl": trl.__version__}))


if __name__ == "__main__":
    main()
