"""What authors write and what they are given: declarations, results, messages by value and images by reference."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.reward_episodes import make_episode

from turnwise.errors import RewardError
from turnwise.rewards.arguments import Declaration, batch_arguments, plain, pointwise_arguments
from turnwise.rewards.interface import (
    EvaluateResult,
    MetricResult,
    RewardFunction,
    StepOutput,
    assistant_turns,
    message_text,
    reward_function,
)
from turnwise.types import Image, Message, Role

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def test_the_decorator_works_with_and_without_arguments() -> None:
    @reward_function
    def bare(messages: Any) -> float:
        """Pays 1."""
        return 1.0

    @reward_function(mode="batch", name="other", requires=("numpy",))
    def called(rollouts_messages: Any) -> list[float]:
        return [1.0 for _ in rollouts_messages]

    assert (bare.name, bare.mode, bare.__doc__, bare(MESSAGES).score) == ("bare", "pointwise", "Pays 1.", 1.0)
    assert (called.name, called.mode, called.requires) == ("other", "batch", ("numpy",))
    assert [result.score for result in called([MESSAGES, MESSAGES])] == [1.0, 1.0]


def test_an_async_function_gives_a_checked_result_too() -> None:
    @reward_function
    async def slow(messages: Any, bonus: float = 0.0) -> float:
        await asyncio.sleep(0)
        return 1.0 + bonus

    assert asyncio.run(slow(MESSAGES, bonus=0.5)).score == 1.5
    assert slow.run(MESSAGES, {}).score == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "groupwise"}, "mode is 'groupwise'; use 'pointwise' or 'batch'"),
        ({"step_index_kind": "token"}, "step_index_kind is 'token'"),
        ({"score_from_steps": "max"}, "score_from_steps is 'max'"),
    ],
)
def test_a_wrong_declaration_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        RewardFunction(lambda messages: 0.0, **options)


@pytest.mark.parametrize("function", [lambda: 0.0, lambda *, messages: 0.0, lambda **messages: 0.0])
def test_a_function_without_room_for_messages_is_refused(function: Any) -> None:
    with pytest.raises(RewardError, match="its first parameter must be messages"):
        RewardFunction(function, name="f")


@pytest.mark.parametrize("value", [1.0, {"a": 1}, None, "11"])
def test_a_batch_reward_returns_a_list(value: Any) -> None:
    with pytest.raises(RewardError, match="return a list with one result per rollout"):
        RewardFunction(lambda m: value, mode="batch", name="f")([MESSAGES, MESSAGES])


def test_results_accept_the_short_forms() -> None:
    long = EvaluateResult(score=1.0, metrics={"a": MetricResult(score=2.0)})
    assert EvaluateResult(score=1, metrics={"a": 2}) == long  # type: ignore[dict-item]
    assert RewardFunction(lambda m: {"score": 1, "metrics": {"a": 2}}, name="f")(MESSAGES) == long
    assert RewardFunction(lambda m: np.float32(0.5), name="f")(MESSAGES).score == 0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"score": float("nan")}, "score is nan; it must be finite"),
        ({"score": True}, "score needs a number, not bool"),
        ({"score": 1.0, "points": 2}, "points Extra inputs are not permitted"),
        ({}, "needs a score, step_outputs or an error"),
        ({"score": 1.0, "step_outputs": [{"step_index": 0}]}, "step_outputs.0.base_reward Field required"),
        ({"score": 1.0, "step_outputs": [{"step_index": -1, "base_reward": 0}]}, "step_outputs.0.step_index"),
        (
            {"score": 1.0, "step_outputs": [{"step_index": 0.5, "base_reward": 0}]},
            "step_outputs.0.step_index",
        ),
        (
            {"score": 1.0, "step_outputs": [{"step_index": True, "base_reward": 0}]},
            "step_outputs.0.step_index",
        ),
        ({"score": 1.0, "metrics": {"a": "high"}}, "metrics.a.score needs a number, not str"),
        ({"score": 1.0, "reason": 5}, "reason Input should be a valid string"),
    ],
)
def test_a_bad_result_says_where(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError) as caught:
        RewardFunction(lambda m: fields, name="f")(MESSAGES)
    assert str(caught.value).startswith("reward f returned a bad result: ")
    assert message in str(caught.value)


def test_a_result_that_skipped_its_checks_is_checked() -> None:
    forged = EvaluateResult.model_construct(score=float("inf"))
    with pytest.raises(RewardError, match="must be finite"):
        RewardFunction(lambda m: forged, name="f")(MESSAGES)
    outputs = [StepOutput.model_construct(step_index=0, base_reward="much")]
    with pytest.raises(RewardError, match=r"step_outputs\.0\.base_reward needs a number"):
        RewardFunction(lambda m: EvaluateResult.model_construct(score=1.0, step_outputs=outputs))(MESSAGES)


def test_images_come_by_reference_and_answers_carry_their_step() -> None:
    image = Image.from_pixels(np.zeros((2, 3, 3), dtype=np.uint8))
    seen = (Message(role=Role.SYSTEM, content="look"), Message(role=Role.USER, content=("a ", image, "room")))
    few_shot = (Message(role=Role.ASSISTANT, content="an example"), Message(role=Role.TOOL, content="ok"))
    episode = make_episode("first", "second", observations=(seen, few_shot))
    messages = pointwise_arguments(episode, Declaration(name="f"), {}).messages
    assert messages == [
        {"role": "system", "content": "look"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a "},
                {"type": "image", "sha256": image.sha256, "width": 3, "height": 2},
                {"type": "text", "text": "room"},
            ],
        },
        {"role": "assistant", "content": "first", "step_index": 0},
        {"role": "assistant", "content": "an example"},
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "content": "second", "step_index": 1},
    ]
    assert message_text(messages[1]) == "a room"
    assert [(index, message["content"]) for index, message in assistant_turns(messages)] == [
        (0, "first"),
        (1, "second"),
    ]
    assert [index for index, _ in assistant_turns(MESSAGES)] == [0]


def test_only_declared_arguments_are_passed_and_params_win() -> None:
    episode = make_episode(
        "a", rewards=(0.5,), ground_truth={"x": 1}, metrics={"success": 1.0}, data={"size": 3}
    )
    declared = Declaration(name="f", accepted=("ground_truth", "task", "metrics", "step_rewards", "scale"))
    arguments = pointwise_arguments(episode, declared, {"scale": 2, "metrics": {"mine": 1}})
    assert arguments.keywords == {
        "ground_truth": {"x": 1},
        "task": {"task_id": "t0", "seed": 0, "data": {"size": 3}},
        "metrics": {"mine": 1},
        "step_rewards": [0.5],
        "scale": 2,
    }
    assert pointwise_arguments(episode, Declaration(name="f"), {}).keywords == {}
    everything = pointwise_arguments(episode, Declaration(name="f", accepts_any=True), {})
    assert everything.keywords["episode_id"] == "e0"
    assert everything.keywords["infos"] == [{"position": 0}]
    assert everything.keywords["actions"] == [None]


def test_batch_arguments_are_lists_beside_the_shared_truth() -> None:
    episodes = [make_episode("a", episode_id=name, ground_truth=7) for name in ("x", "y")]
    declared = Declaration(
        name="f", mode="batch", accepted=("ground_truth", "ground_truths", "episode_ids", "stop_reasons")
    )
    assert batch_arguments(episodes, declared, {}).keywords == {
        "ground_truth": 7,
        "ground_truths": [7, 7],
        "episode_ids": ["x", "y"],
        "stop_reasons": ["terminal", "terminal"],
    }


def test_what_environments_report_becomes_plain_json() -> None:
    class Pose:
        def __repr__(self) -> str:
            return "Pose(1, 2)"

    facts = {
        "grid": np.eye(2, dtype=np.int64),
        "distance": np.float32(0.5),
        "pose": Pose(),
        "path": Path("a"),
        3: (1, 2),
    }
    assert plain(facts) == {"grid": [[1, 0], [0, 1]], "distance": 0.5, "pose": "Pose(1, 2)", "path": repr(Path("a")), "3": [1, 2]}  # fmt: skip
    assert msgspec.json.decode(msgspec.json.encode(plain(facts))) == plain(facts)


def test_a_function_may_change_its_arguments_without_harm() -> None:
    episode = make_episode("a", ground_truth={"x": [1]})
    declared = Declaration(name="f", accepted=("ground_truth",))
    first = pointwise_arguments(episode, declared, {})
    first.messages.clear()
    first.keywords["ground_truth"]["x"].append(2)
    again = pointwise_arguments(episode, declared, {})
    assert len(again.messages) == 2
    assert again.keywords["ground_truth"] == {"x": [1]}
    assert episode.task.ground_truth == {"x": [1]}
