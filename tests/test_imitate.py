from pathlib import Path

import numpy as np
import pytest
import torch

from turnwise.environments.navigation import NavigationSpec
from turnwise.environments.navigation.actions import Command
from turnwise.environments.navigation.params import read_params
from turnwise.fingerprint import fingerprint
from turnwise.imitate import (
    ImitationOptions,
    ImitationReport,
    Lesson,
    _part_of_stride,
    collect_lessons,
    lesson_loss,
    measure,
    play_lesson,
    teach,
    to_patches,
    write_model_card,
)
from turnwise.models.tiny_vision import (
    build_image_processor,
    build_network,
    build_tokenizer,
    make_tiny_vision,
)
from turnwise.renderer import Renderer
from turnwise.templates import SMALL_ROOMS
from turnwise.types import Image


def quiet(_what: str, _done: int, _all: int) -> None:
    pass


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(build_tokenizer(), image_processor=build_image_processor(), history="error")


def lesson(renderer: Renderer, noise: float, seed: int = 0) -> Lesson:
    spec = NavigationSpec(read_params(SMALL_ROOMS))
    return play_lesson(
        spec, spec.make(), 3, renderer, ImitationOptions(noise=noise), np.random.default_rng(seed)
    )


def learned_text(renderer: Renderer, found: Lesson) -> str:
    return str(renderer.tokenizer.decode(found.ids[found.is_learned]))


def test_an_expert_episode_is_learned_word_for_word(renderer: Renderer) -> None:
    found = lesson(renderer, noise=0.0)
    text = learned_text(renderer, found)
    assert text.count('{"rotation_angle_degrees":') == len(found.images)
    assert text.count("see the") == len(found.images)
    assert "<|im_end|>" not in text
    assert "Turn" not in text
    num_pads = int((found.ids == renderer.image_token_id).sum())
    assert num_pads == 9 * len(found.images)


def test_random_actions_are_shown_but_never_learned(renderer: Renderer) -> None:
    found = lesson(renderer, noise=1.0)
    text = learned_text(renderer, found)
    assert "{" not in text
    assert text.count("see the") == len(found.images)
    assert "rotation_angle_degrees" in renderer.tokenizer.decode(found.ids)


def test_patches_equal_those_of_the_image_processor() -> None:
    rng = np.random.default_rng(0)
    images = [Image.from_pixels(rng.integers(0, 256, (96, 128, 3)).astype(np.uint8)) for _ in range(3)]
    expected = build_image_processor()(images=[image.pixels for image in images], return_tensors="pt")
    patches, grids = to_patches(images)
    assert torch.equal(patches, expected["pixel_values"])
    assert torch.equal(grids, expected["image_grid_thw"])


def test_padding_changes_no_loss(renderer: Renderer) -> None:
    network = build_network(renderer.tokenizer, 0).eval()
    short, long = lesson(renderer, 0.0), lesson(renderer, 0.9, seed=4)
    assert len(short.ids) != len(long.ids)
    pad = renderer.tokenizer.pad_token_id
    with torch.no_grad():
        alone = [float(lesson_loss(network, pad, [item])) for item in (short, long)]
        together = float(lesson_loss(network, pad, [short, long]))
    # The first token of a stream is never predicted, and no lesson learns it.
    counts = [int(item.is_learned.sum()) for item in (short, long)]
    assert together == pytest.approx(np.average(alone, weights=counts), rel=1e-4)


def test_teaching_lowers_the_loss_and_repeats_for_a_seed(renderer: Renderer) -> None:
    options = ImitationOptions(num_lessons=4, num_epochs=6, batch_size=4, noise=0.0)
    lessons = collect_lessons(renderer, options, quiet)
    prints = []
    for _ in range(2):
        network = build_network(renderer.tokenizer, 0)
        losses = teach(network, renderer.tokenizer, lessons, options, quiet)
        assert losses[-1] < 0.85 * losses[0]
        prints.append(fingerprint(dict(network.state_dict())))
    assert prints[0] == prints[1]


async def test_a_fresh_model_is_measured_and_described(tmp_path: Path) -> None:
    folder = make_tiny_vision(tmp_path / "model", seed=0)
    evaluation = await measure(str(folder), num_tasks=2)
    assert (evaluation.num_episodes, evaluation.num_failed) == (2, 0)
    report = ImitationReport(num_lessons=4, num_tokens=1000, losses=(2.0, 1.0), seconds=60.0)
    write_model_card(folder, ImitationOptions(), report, evaluation, evaluation)
    text = (folder / "README.md").read_text()
    assert "--seed 0" in text
    assert "2 held-out tasks" in text


def test_the_teacher_walks_any_part_of_the_stride_and_always_turns_the_same_way() -> None:
    rng = np.random.default_rng(0)
    shown = {_part_of_stride(Command(rotation_degrees=30.0, forward_m=0.75), rng) for _ in range(60)}
    assert shown == {Command(rotation_degrees=30.0, forward_m=metres) for metres in (0.25, 0.5, 0.75)}
    look = Command(rotation_degrees=90.0)
    assert _part_of_stride(look, rng) == look
