"""Writes down the samples of an update that was aborted, so that a person can look at them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from turnwise.samples import Samples


def save_aborted(samples: Samples, folder: Path, *, update: int, reason: str) -> Path:
    """One safetensors file: per sample its ids, log-probs, trained positions and advantages; the reason as metadata."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    names = []
    for index, sample in enumerate(samples.samples):
        names.append(
            {"episode_id": sample.episode_id, "group_id": sample.group_id, "temperature": sample.temperature}
        )
        tensors[f"{index}/ids"] = np.ascontiguousarray(sample.stream.ids)
        tensors[f"{index}/logprobs"] = np.ascontiguousarray(sample.stream.logprobs)
        tensors[f"{index}/targets"] = sample.targets_R
        tensors[f"{index}/advantages"] = sample.advantages_R
        tensors[f"{index}/turn_indices"] = sample.turn_indices_R
    path = folder / f"aborted-update-{update:06d}.safetensors"
    save_file(tensors, path, metadata={"reason": reason, "samples": json.dumps(names)})
    return path
