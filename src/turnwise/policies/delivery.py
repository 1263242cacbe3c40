"""Hands new weights to a vLLM server through a folder both can read, and checks that they arrived."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turnwise.errors import PolicyError
from turnwise.fingerprint import fingerprint
from turnwise.policies.wire import Wire
from turnwise.types import FloatArray

log = logging.getLogger(__name__)


class Delivery:
    """Writes tensors to a folder and tells the server to load them.

    An adapter (tensors named lora_…) is loaded beside the model under a new name; the server needs `--enable-lora` and
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True. Whole weights replace the model's; the server needs VLLM_SERVER_DEV_MODE=1.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        adapter_config: Mapping[str, Any] | None = None,
        probe_ids: Sequence[int] = (),
        probe_logprobs: Callable[[Sequence[int]], FloatArray] | None = None,
        tolerance: float = 1e-2,
    ) -> None:
        """`probe_logprobs` gives the learner's log-probs of `probe_ids[1:]`; the server must then agree within `tolerance`."""
        self._folder = Path(folder).absolute()
        self._adapter_config = adapter_config
        self._probe_ids = list(probe_ids)
        self._probe_logprobs = probe_logprobs
        self._tolerance = tolerance
        self._loaded: tuple[str, Path] | None = None
        self._base_model: str | None = None

    async def deliver(
        self, wire: Wire, model: str, weights: Mapping[str, Any], version: int
    ) -> tuple[str, str]:
        """The name to ask for from now on, and the fingerprint of the tensors as written."""
        if not weights:
            raise PolicyError("load_weights got no tensors; the server would go on with the old ones")
        self._base_model = self._base_model or model
        is_adapter = all("lora_" in name for name in weights)
        folder = self._folder / f"version-{version:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        if is_adapter:
            digest = self._write_adapter(folder, weights)
            name = await self._load_adapter(wire, folder, version)
        else:
            digest = _write(folder / "model.safetensors", weights, lambda name: name)
            name = await self._reload(wire, folder)
        await self._check(wire, name, version)
        return name, digest

    def _write_adapter(self, folder: Path, weights: Mapping[str, Any]) -> str:
        if self._adapter_config is None:
            raise PolicyError(
                "an adapter is to be delivered but Delivery was given no adapter_config (that of PEFT)"
            )
        (folder / "adapter_config.json").write_text(json.dumps(dict(self._adapter_config)))
        return _write(
            folder / "adapter_model.safetensors", weights, lambda name: name.replace(".default.", ".")
        )

    async def _load_adapter(self, wire: Wire, folder: Path, version: int) -> str:
        name = f"{self._base_model}-v{version}"
        await wire.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        before, self._loaded = self._loaded, (name, folder)
        if before is not None and before[0] != name:
            await wire.post("/v1/unload_lora_adapter", {"lora_name": before[0]})
            shutil.rmtree(before[1], ignore_errors=True)
        return name

    async def _reload(self, wire: Wire, folder: Path) -> str:
        arguments = {"weights_path": str(folder)}
        await wire.post("/collective_rpc", {"method": "reload_weights", "kwargs": arguments})
        # Cached keys and values belong to the old weights.
        await wire.post("/reset_prefix_cache", {})
        before, self._loaded = self._loaded, (str(self._base_model), folder)
        if before is not None and before[1] != folder:
            shutil.rmtree(before[1], ignore_errors=True)
        return str(self._base_model)

    async def _check(self, wire: Wire, model: str, version: int) -> None:
        """Compare the server's log-probs of the probe with the learner's."""
        if self._probe_logprobs is None:
            return
        served = await prompt_logprobs(wire, model, self._probe_ids)
        gap = float(np.abs(served - self._probe_logprobs(self._probe_ids)).max())
        if not gap <= self._tolerance:
            raise PolicyError(
                f"the server's log-probs of the probe differ from the learner's by {gap:.3g} after version {version} was "
                f"loaded (allowed: {self._tolerance:g}); the weights did not arrive, or the server computes differently"
            )
        log.info("weights of version %d arrived: log-probs of the probe within %.2g", version, gap)


async def prompt_logprobs(wire: Wire, model: str, ids: Sequence[int]) -> FloatArray:
    """The server's log-probs of ids[1:], each given those before it."""
    body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    answer = await wire.post("/v1/completions", body)
    rows = answer["choices"][0]["prompt_logprobs"][1:]
    found = [row[str(token_id)]["logprob"] for row, token_id in zip(rows, list(ids)[1:], strict=True)]
    return np.array(found, dtype=np.float32)


def _write(path: Path, weights: Mapping[str, Any], rename: Callable[[str], str]) -> str:
    """Save the tensors, read them back, and return the fingerprint of what was read, under the names given."""
    from safetensors.torch import load_file, save_file

    save_file(
        {rename(name): torch.as_tensor(tensor).detach().cpu().clone() for name, tensor in weights.items()},
        path,
    )
    written = load_file(path)
    return fingerprint({name: written[rename(name)] for name in weights})
