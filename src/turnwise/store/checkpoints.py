"""Checkpoints: folders that appear whole or not at all, and load without pickle."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.errors import StoreError
from turnwise.store.log import sync_folder

if TYPE_CHECKING:
    import torch

_NAME = re.compile(r"step-(\d{6,})")


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]
) -> Path:
    """Write `checkpoints/step-…` and publish it with one rename."""
    from safetensors.torch import save_file

    final = folder / "checkpoints" / f"step-{step:06d}"
    draft = final.with_name(f".{final.name}.{os.getpid()}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            draft / "learner.safetensors",
        )
        (draft / "state.json").write_text(json.dumps(dict(state), allow_nan=False), encoding="utf-8")
        for file in draft.iterdir():
            _sync_file(file)
        sync_folder(draft)
        if final.exists():
            shutil.rmtree(final)
        os.replace(draft, final)
        sync_folder(final.parent)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise StoreError(f"cannot write checkpoint {final}: {error.strerror}") from error
    return final


def load_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the state of a published checkpoint."""
    from safetensors.torch import load_file

    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return load_file(path / "learner.safetensors"), state
    except FileNotFoundError as error:
        raise StoreError(f"checkpoint {path} is incomplete: {error.filename} is missing") from None


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Published checkpoints, oldest first."""
    found = []
    for path in (folder / "checkpoints").glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            found.append((int(match.group(1)), path))
    return sorted(found)


def remove_old_checkpoints(folder: Path, keep: int, best_step: int | None) -> None:
    """Keep the newest `keep` and the best one."""
    for step, path in list_checkpoints(folder)[:-keep]:
        if step != best_step:
            shutil.rmtree(path)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
