"""EndpointPolicy with images against a real vLLM that serves `tiny-vision`; started by `tests/vllm/run.sh` like check_vllm.py."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from tests.test_policies_local import rescore

from turnwise.config import ModelConfig
from turnwise.environments.navigation import NavigationEnvironment, NavigationSpec
from turnwise.environments.navigation.params import read_params
from turnwise.errors import PolicyError
from turnwise.models.loading import LoadedModel, load_model
from turnwise.policies.endpoint import EndpointPolicy
from turnwise.policy import Request
from turnwise.renderer import Renderer
from turnwise.streams import Conversation
from turnwise.templates import SMALL_ROOMS
from turnwise.types import Action, Image, SamplingParams

URL = os.environ.get("TURNWISE_VLLM_VISION_URL", "http://127.0.0.1:8124")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(ModelConfig(path="tiny-vision"))


def make_policy(model: LoadedModel, **changes: Any) -> EndpointPolicy:
    settings = {"image_token_id": model.network.config.image_token_id, **changes}
    return EndpointPolicy(URL, "tiny-vision", model.tokenizer, **settings)


def start_episode(model: LoadedModel) -> tuple[NavigationEnvironment, Conversation]:
    spec = NavigationSpec(read_params(SMALL_ROOMS))
    env = spec.make()
    renderer = Renderer(model.tokenizer, image_processor=model.image_processor, history="error")
    conversation = Conversation(renderer)
    conversation.observe(env.reset(spec.tasks.task(0, "eval")).messages)
    return env, conversation


def make_request(
    conversation: Conversation, turn: int, images: tuple[Image, ...], **sampling: Any
) -> Request:
    return Request(
        stream_id="s", group_id="g", prompt_ids=conversation.prompt_ids, images=images, seed=(0, 0, turn),
        sampling=SamplingParams(max_new_tokens=24, **sampling), action_schema=None, deadline_s=60.0,
    )  # fmt: skip


def whole_logits(model: LoadedModel, ids: list[int], images: tuple[Image, ...]) -> torch.Tensor:
    features = model.image_processor(images=[image.pixels for image in images], return_tensors="pt")
    tokens = torch.tensor([ids])
    is_image = (tokens == model.network.config.image_token_id).int()
    with torch.no_grad():
        output = model.network(input_ids=tokens, mm_token_type_ids=is_image, use_cache=False, **features)
    logits: torch.Tensor = output.logits[0]
    return logits


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 20}])
async def test_logprobs_are_exact_with_an_image_in_every_turn(
    model: LoadedModel, sampling: dict[str, Any]
) -> None:
    policy = make_policy(model)
    env, conversation = start_episode(model)
    for turn in range(3):
        request = make_request(conversation, turn, conversation.images, **sampling)
        answer = await policy.complete(request)
        assert answer.is_token_exact
        ids = [*request.prompt_ids.tolist(), *answer.completion_ids.tolist()]
        logits = whole_logits(model, ids, conversation.images)[len(request.prompt_ids) - 1 : -1].double()
        np.testing.assert_allclose(
            answer.logprobs, rescore(logits, answer, request.sampling), atol=1e-3, err_msg=f"turn {turn}"
        )
        conversation.answer(answer)
        action = Action(value={"rotation_angle_degrees": 45, "forward_meters": 0.25})
        conversation.observe(env.step(action).observation.messages)
    assert len(conversation.images) == 4
    await policy.close()


async def test_another_picture_gives_other_logprobs(model: LoadedModel) -> None:
    """The images that are sent are the images that are seen."""
    policy = make_policy(model)
    _, conversation = start_episode(model)
    seen = await policy.complete(make_request(conversation, 0, conversation.images))
    black = Image.from_pixels(np.zeros_like(conversation.images[0].pixels))
    unseen = await policy.complete(make_request(conversation, 0, (black,)))
    shared = min(len(seen.logprobs), len(unseen.logprobs))
    assert not np.allclose(seen.logprobs[:shared], unseen.logprobs[:shared], atol=1e-3)
    await policy.close()


async def test_a_picture_that_the_server_cuts_otherwise_is_refused(model: LoadedModel) -> None:
    """The prompt was rendered for a 96×96 frame; the server makes other placeholders of a larger one."""
    policy = make_policy(model)
    _, conversation = start_episode(model)
    larger = Image.from_pixels(np.zeros((128, 128, 3), dtype=np.uint8))
    with pytest.raises(PolicyError, match="its image processor differs"):
        await policy.complete(make_request(conversation, 0, (larger,)))
    await policy.close()
