"""TRL's GRPO loss and backward on given tokens; run by `benchmarks.update` in an environment of its own.

python update_trl.py FOLDER PROMPT_LENGTH OLD_LOGPROB REPEATS
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

SETTINGS = {
    # bfloat16 autocast and gradient checkpointing are TRL's defaults.
    "default": {},
    "fast": {"bf16": False, "gradient_checkpointing": False},
}


def make_trainer(folder: Path, batch: int, **settings: object) -> GRPOTrainer:
    core = Tokenizer(models.WordLevel({"a": 0, "[PAD]": 1, "[EOS]": 2}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", eos_token="[EOS]")
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, report_to=[], loss_type="bnpo", epsilon=0.2, beta=0.0,
        per_device_train_batch_size=batch, num_generations=batch // 2, **settings,
    )  # fmt: skip
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions), args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * batch}), processing_class=tokenizer,
    )  # fmt: skip


def main() -> None:
    folder, prompt, old, repeats = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    tensors = load_file(folder / "inputs.safetensors")
    ids, advantages = tensors["ids"], tensors["advantages"]
    inputs = {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": torch.ones_like(ids[:, :prompt]),
        "completion_ids": ids[:, prompt:],
        "completion_mask": torch.ones_like(ids[:, prompt:]),
        "advantages": advantages,
        "old_per_token_logps": torch.full(ids[:, prompt:].shape, old),
        "num_items_in_batch": torch.tensor(ids[:, prompt:].numel()),
    }
    found: dict[str, float] = {}
    for name, settings in SETTINGS.items():
        trainer = make_trainer(folder, len(ids), **settings)
        model = trainer.model.train()
        if trainer.args.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        # Outside of train() the trainer does not know this yet.
        trainer.current_gradient_accumulation_steps = 1
        for _ in range(repeats if name == "fast" else 1):
            model.zero_grad()
            started, started_cpu = time.perf_counter(), time.process_time()
            trainer.compute_loss(model, inputs).backward()
            for key, seconds in (
                (name, time.perf_counter() - started),
                (f"{name}_cpu", time.process_time() - started_cpu),
            ):
                found[key] = min(found.get(key, seconds), seconds)
    # A tied head shares its tensor with the embedding and is named once.
    grads = {key: tensor.grad.clone() for key, tensor in model.named_parameters() if tensor.grad is not None}
    save_file(grads, folder / "gradient.safetensors")
    print(json.dumps({name: round(seconds, 3) for name, seconds in found.items()}))


if __name__ == "__main__":
    main()
