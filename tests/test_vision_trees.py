"""Trees with images: M-RoPE positions per path, every distinct image through the tower once, gradients as without trees."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine_models import image_prompt, make_image, make_image_processor, make_qwen3_vl, random_ids
from tests.learning_cases import (
    gradients,
    make_episode,
    make_groups,
    make_stream,
    random_advantages,
    relative_difference,
    turn_logprobs,
    with_logprobs,
)

from turnwise.config import LossConfig, TrainingConfig
from turnwise.errors import SampleError
from turnwise.learner import Learner
from turnwise.samples import build_samples
from turnwise.types import Episode, Image, TokenStream


def plain_forward(network: Any, processor: Any) -> Any:
    """The model's own way with one sequence and its images."""

    def forward(ids: torch.Tensor, stream: TokenStream) -> torch.Tensor:
        runs = int(((ids[0, 1:] == 2) & (ids[0, :-1] == 4)).sum())
        done = processor(images=[image.pixels for image in stream.images[:runs]], return_tensors="pt")
        return network(
            input_ids=ids, pixel_values=done["pixel_values"], image_grid_thw=done["image_grid_thw"],
            mm_token_type_ids=(ids == 2).int(), use_cache=False,
        ).logits[0]  # fmt: skip

    return forward


def seen_episodes() -> list[Episode]:
    """A picture in the shared prompt, then one in each branch; two branches see the same second picture."""
    first, left, right = make_image(0), make_image(1, 64, 64), make_image(2, 96, 64)
    prompt = [*random_ids(0, 4), *image_prompt(first), *random_ids(1, 3)]
    episodes = []
    for index, second in enumerate((left, right, left)):
        pieces = [
            (prompt, False), (random_ids(10 + index, 4), True),
            ([*random_ids(20 + index, 2), *image_prompt(second), *random_ids(21, 2)], False), (random_ids(30 + index, 5), True),
        ]  # fmt: skip
        episodes.append(make_episode(f"e{index}", [make_stream(pieces, images=(first, second))]))
    return episodes


def sharing_answers(images: list[Image]) -> list[Episode]:
    """The same token ids throughout; only the pictures differ."""
    ids = [*random_ids(0, 4), *image_prompt(images[0]), *random_ids(1, 3)]
    return [
        make_episode(f"e{index}", [make_stream([(ids, False), (random_ids(5, 4), True)], images=(image,))])
        for index, image in enumerate(images)
    ]


def build(network: Any, **training: object) -> Learner:
    settings = {"learning_rate": 1e-30, "max_grad_norm": 1e9, "max_logprob_gap": 1e-3, **training}
    return Learner(
        network, loss=LossConfig(name="reinforce"), training=TrainingConfig(**settings), image_processor=make_image_processor()
    )  # fmt: skip


def plain_gradients(network: Any, episodes: list[Episode], advantages: Any) -> dict[str, torch.Tensor]:
    forward = plain_forward(network, make_image_processor())
    for episode in episodes:
        for turn, credit in zip(episode.turns, advantages.turns[episode.episode_id], strict=True):
            logprobs, _ = turn_logprobs(network, turn, 1.0, forward)
            (-credit.advantage * logprobs.sum() / len(episodes)).backward()
    return gradients(network)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_images_in_prefix_and_branches_have_the_plain_gradient(checkpointing: bool) -> None:
    network = make_qwen3_vl()
    episodes = with_logprobs(network, seen_episodes(), forward=plain_forward(network, make_image_processor()))
    advantages = random_advantages(episodes)
    expected = plain_gradients(copy.deepcopy(network), episodes, advantages)
    learner = build(network, gradient_checkpointing=checkpointing)
    update = learner.update(build_samples(make_groups(episodes), advantages, tokens_per_pack=512))
    assert update.metrics["logprob_gap"] < 1e-4
    assert update.metrics["shared_prefix_factor"] > 1.3
    assert relative_difference(gradients(network), expected) < 1e-5


def test_equal_ids_with_other_pictures_are_not_merged() -> None:
    network = make_qwen3_vl()
    episodes = sharing_answers([make_image(0), make_image(7)])
    with_logprobs(network, episodes, forward=plain_forward(network, make_image_processor()))
    advantages = random_advantages(episodes)
    expected = plain_gradients(copy.deepcopy(network), episodes, advantages)
    update = build(network).update(build_samples(make_groups(episodes), advantages, tokens_per_pack=512))
    assert relative_difference(gradients(network), expected) < 1e-5
    # Of the 18 tokens that are read, only the four before the picture and its marker are common.
    assert update.metrics["distinct_tokens"] == 2 * 18 - 5


def test_every_distinct_image_goes_through_the_tower_once(monkeypatch: pytest.MonkeyPatch) -> None:
    network = make_qwen3_vl()
    episodes = with_logprobs(network, seen_episodes(), forward=plain_forward(network, make_image_processor()))
    learner = build(network)
    seen: list[int] = []
    tower = network.model.visual.forward
    monkeypatch.setattr(
        network.model.visual, "forward", lambda *a, grid_thw, **k: seen.append(len(grid_thw)) or tower(*a, grid_thw=grid_thw, **k)
    )  # fmt: skip
    learner.update(build_samples(make_groups(episodes), random_advantages(episodes), tokens_per_pack=512))
    # Six pictures are shown, three are distinct, in one pack.
    assert seen == [3]


def test_images_that_do_not_match_their_placeholders_are_refused_by_name() -> None:
    image = make_image(0)
    stream = make_stream(
        [([*random_ids(0, 3), *image_prompt(image), 9], False), (random_ids(1, 3), True)],
        images=(image, image),
    )
    episodes = [make_episode("lost-picture", [stream])]
    stream.logprobs[stream.is_sampled] = -1.0
    samples = build_samples(make_groups(episodes), random_advantages(episodes), tokens_per_pack=512)
    with pytest.raises(SampleError, match="lost-picture has 1 runs of image placeholders"):
        build(make_qwen3_vl()).update(samples)


def test_positions_follow_the_model_on_each_path() -> None:
    from turnwise.packs import build_packs

    network = make_qwen3_vl()
    learner = build(network)
    episodes = with_logprobs(network, seen_episodes(), forward=plain_forward(network, make_image_processor()))
    samples = build_samples(make_groups(episodes), random_advantages(episodes), tokens_per_pack=512)
    (pack,) = build_packs(samples, image_token_id=2)
    positions_3T = learner._model._positions(pack)[:, 0].numpy()
    processor = make_image_processor()
    for sample, path in zip(pack.samples, pack.tree.paths, strict=True):
        ids = torch.from_numpy(sample.stream.ids[: len(path)].astype(np.int64))[None]
        grid = processor(images=[image.pixels for image in sample.stream.images], return_tensors="pt")[
            "image_grid_thw"
        ]
        expected, _ = network.model.get_rope_index(ids, (ids == 2).int(), image_grid_thw=grid)
        assert (positions_3T[:, path] == expected[:, 0].numpy()).all()
