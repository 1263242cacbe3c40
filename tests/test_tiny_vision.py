from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from turnwise.environments.navigation.actions import Command
from turnwise.fingerprint import fingerprint
from turnwise.models.patches import quicken_patches
from turnwise.models.tiny_vision import build_network, build_tokenizer, make_tiny_vision
from turnwise.renderer import Renderer
from turnwise.streams import Conversation
from turnwise.types import Image, Message, Role


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision(tmp_path_factory.mktemp("tiny") / "model", seed=0)


def test_the_folder_loads_offline_with_the_auto_classes(folder: Path) -> None:
    network = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert type(network).__name__ == "Qwen3VLForConditionalGeneration"
    assert 1_000_000 <= sum(weight.numel() for weight in network.parameters()) <= 3_000_000
    assert len(tokenizer) == network.get_input_embeddings().weight.shape[0]
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8 * 2**20


def test_each_word_and_number_of_an_answer_is_one_token() -> None:
    import json

    tokenizer = build_tokenizer()
    action = json.dumps(Command(rotation_degrees=-45.0, forward_m=0.25).as_value())
    text = f"I see the red tv monitor on the left. {action}"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.decode([index]) for index in ids] == [
        "I", " see", " the", " red", " tv", " monitor", " on", " the", " left", ".",
        ' {"rotation_angle_degrees":', " -45", ', "forward_meters":', " 0.25", "}",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == text


def test_text_from_outside_the_domain_survives_byte_by_byte() -> None:
    tokenizer = build_tokenizer()
    text = 'Grüße, "Wörter": {"x": [17.5e3]} 😀\n'
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(("side", "num_tokens"), [(64, 4), (96, 9), (128, 16)])
def test_a_frame_takes_one_token_per_32_pixels_squared(folder: Path, side: int, num_tokens: int) -> None:
    network = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    image = Image.from_pixels(np.zeros((side, side, 3), dtype=np.uint8))
    conversation = Conversation(Renderer(tokenizer, image_processor=processor, history="error"))
    conversation.observe((Message(role=Role.USER, content=(image, "Turn 1 of 8. Find the red chair.")),))
    ids = torch.tensor(conversation.prompt_ids.astype(np.int64))[None]
    is_image = ids == network.config.image_token_id
    assert int(is_image.sum()) == num_tokens
    features = processor(images=[image.pixels], return_tensors="pt")
    logits = network(input_ids=ids, mm_token_type_ids=is_image.int(), **features).logits
    assert torch.isfinite(logits).all()


def test_the_same_seed_builds_the_same_weights() -> None:
    tokenizer = build_tokenizer()
    first = fingerprint(dict(build_network(tokenizer, 1).state_dict()))
    assert first == fingerprint(dict(build_network(tokenizer, 1).state_dict()))
    assert first != fingerprint(dict(build_network(tokenizer, 2).state_dict()))


def test_the_tokenizer_is_the_same_every_time() -> None:
    assert build_tokenizer().get_vocab() == build_tokenizer().get_vocab()


def test_patches_as_a_product_equal_the_convolution_forwards_and_backwards() -> None:
    network = build_network(build_tokenizer(), 0)
    embed = network.model.visual.patch_embed
    patches = torch.randn(7, 3 * 2 * 16 * 16, generator=torch.manual_seed(0))
    expected = embed(patches)
    expected.square().sum().backward()
    gradient = embed.proj.weight.grad.clone()
    embed.proj.weight.grad = None
    names = set(network.state_dict())
    quicken_patches(network)
    assert type(embed.proj) is not torch.nn.Conv3d
    found = embed(patches)
    found.square().sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(embed.proj.weight.grad, gradient, atol=1e-3, rtol=1e-4)
    assert set(network.state_dict()) == names
