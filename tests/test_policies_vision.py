"""Qwen3-VL through LocalPolicy: images in the middle of an episode, against the model's own positions and forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine_models import (
    image_prompt,
    make_image,
    make_image_processor,
    make_qwen3_vl,
    make_request,
    make_tokenizer,
    random_ids,
)
from tests.test_policies_local import rescore

from turnwise.errors import PolicyError
from turnwise.policies import vision
from turnwise.policies.local import LocalPolicy
from turnwise.policies.prefixes import image_spans
from turnwise.policies.vision import mrope_positions
from turnwise.types import Image


@pytest.fixture
async def policy() -> AsyncIterator[LocalPolicy]:
    policy = LocalPolicy(
        make_qwen3_vl(), make_tokenizer(), image_processor=make_image_processor(), kv_budget_mb=16
    )
    yield policy
    await policy.close()


def model_inputs(ids: list[int], images: list[Image]) -> dict[str, torch.Tensor]:
    features = make_image_processor()(images=[image.pixels for image in images], return_tensors="pt")
    tokens = torch.tensor([ids])
    return {"input_ids": tokens, "mm_token_type_ids": (tokens == 2).int(), **features}


def whole_logits(network: Any, ids: list[int], images: list[Image]) -> torch.Tensor:
    network.model.rope_deltas = None
    with torch.no_grad():
        return network(**model_inputs(ids, images), use_cache=False).logits[0]


def test_positions_equal_those_of_the_model() -> None:
    network = make_qwen3_vl()
    images = [make_image(1), make_image(2, 128, 32), make_image(3, 32, 32)]
    ids = random_ids(0, 7)
    for image in images:
        ids += [*image_prompt(image), *random_ids(1, 5)]
    inputs = model_inputs(ids, images)
    expected, _ = network.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
    )
    grids = [tuple(row) for row in inputs["image_grid_thw"].tolist()]
    ours, after = mrope_positions(np.array(ids), image_spans(np.array(ids), 2), grids, 2)
    np.testing.assert_array_equal(ours, expected[:, 0].numpy())
    assert after == int(expected.max()) + 1


async def test_greedy_tokens_equal_generate_with_images_in_the_middle(policy: LocalPolicy) -> None:
    network = policy._network
    banned = [[int(i)] for i in policy._vocabulary.banned_ids]
    episodes: list[tuple[list[int], list[Image]]] = [(random_ids(i, 9 + 13 * i), []) for i in range(3)]
    for turn in range(3):
        for i, (ids, images) in enumerate(episodes):
            image = make_image(10 * turn + i, 64 + 32 * i, 96)
            images.append(image)
            ids += [*image_prompt(image), *random_ids(turn, 6 + i)]
        requests = [
            make_request(ids, stream=f"s{i}", seed=(0, i, turn), images=tuple(images), temperature=0.0)
            for i, (ids, images) in enumerate(episodes)
        ]
        answers = await asyncio.gather(*(policy.complete(request) for request in requests))
        for (ids, images), answer in zip(episodes, answers, strict=True):
            network.model.rope_deltas = None
            output = network.generate(
                **model_inputs(ids, images), max_new_tokens=12, do_sample=False, bad_words_ids=banned
            )
            assert answer.completion_ids.tolist() == output[0, len(ids) :].tolist()
            ids += answer.completion_ids.tolist()


async def test_logprobs_equal_teacher_forcing_with_images(policy: LocalPolicy) -> None:
    ids, images = random_ids(5, 20), []
    for turn in range(4):
        images.append(make_image(turn, 64, 64 + 32 * turn))
        ids += [*image_prompt(images[-1]), *random_ids(turn, 8)]
        request = make_request(ids, seed=(2, 0, turn), images=tuple(images), temperature=0.8, top_k=20)
        answer = await policy.complete(request)
        logits = whole_logits(policy._network, [*ids, *answer.completion_ids.tolist()], images)
        expected = rescore(logits[len(ids) - 1 : -1].double(), answer, request.sampling)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
        ids += answer.completion_ids.tolist()


async def test_equal_placeholders_of_different_images_are_not_shared(policy: LocalPolicy) -> None:
    images = [make_image(1), make_image(2)]
    prompt = [*random_ids(0, 30), *image_prompt(images[0]), *random_ids(1, 6)]
    requests = [make_request(prompt, stream=f"s{i}", seed=(0, i, 0), images=(images[i],)) for i in range(2)]
    answers = await asyncio.gather(*(policy.complete(request) for request in requests))
    for i, answer in enumerate(answers):
        logits = whole_logits(policy._network, [*prompt, *answer.completion_ids.tolist()], [images[i]])
        expected = rescore(logits[len(prompt) - 1 : -1].double(), answer, requests[i].sampling)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


async def test_a_group_shares_its_first_image(policy: LocalPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    image = make_image(4)
    prompt = [*random_ids(0, 20), *image_prompt(image), *random_ids(1, 6)]
    seen: list[int] = []
    tower = policy._network.model.visual
    forward = tower.forward
    monkeypatch.setattr(
        tower, "forward", lambda *a, **k: (seen.append(len(k["grid_thw"])), forward(*a, **k))[1]
    )
    requests = [make_request(prompt, stream=f"s{i}", seed=(0, i, 0), images=(image,)) for i in range(4)]
    answers = await asyncio.gather(*(policy.complete(request) for request in requests))
    assert seen == [1]
    logits = whole_logits(policy._network, [*prompt, *answers[3].completion_ids.tolist()], [image])
    expected = rescore(logits[len(prompt) - 1 : -1].double(), answers[3], requests[3].sampling)
    np.testing.assert_allclose(answers[3].logprobs, expected, atol=1e-4)


async def test_a_missing_image_fails_its_own_stream_only(policy: LocalPolicy) -> None:
    image = make_image(4)
    prompt = [*random_ids(0, 20), *image_prompt(image), 9]
    bad = make_request(prompt, stream="bad", images=())
    wrong = make_request([4, 2, 2, 5, 9], stream="wrong", images=(image,))
    good = make_request(prompt, stream="good", images=(image,))
    outcomes = await asyncio.gather(*(policy.complete(r) for r in [bad, wrong, good]), return_exceptions=True)
    assert isinstance(outcomes[0], PolicyError)
    assert "1 runs of image placeholders but 0 images" in str(outcomes[0])
    assert isinstance(outcomes[1], PolicyError)
    assert "it needs 6" in str(outcomes[1])
    assert not isinstance(outcomes[2], BaseException)


async def test_a_turn_processes_its_new_image_only_however_long_the_episode_is(
    policy: LocalPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pixels of old images are let go of; their sizes are not, so nobody has to look at them again."""
    monkeypatch.setattr(vision, "_MAX_PREPARED", 2)
    processed: list[Image] = []
    process = vision.ImageInputs._process

    def count(self: vision.ImageInputs, image: Image) -> vision.PreparedImage:
        processed.append(image)
        return process(self, image)

    monkeypatch.setattr(vision.ImageInputs, "_process", count)
    ids: list[int] = random_ids(0, 5)
    images: list[Image] = []
    for turn in range(6):
        images.append(make_image(turn))
        ids += [*image_prompt(images[-1]), *random_ids(turn, 4)]
        request = make_request(ids, images=tuple(images), seed=(0, 0, turn), max_new_tokens=3)
        ids += (await policy.complete(request)).completion_ids.tolist()
    assert processed == images
