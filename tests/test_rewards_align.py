"""The aligner: each step output lands on its turn, and what does not fit is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.reward_episodes import make_episode

from turnwise.errors import RewardError
from turnwise.rewards.align import align_rewards
from turnwise.rewards.interface import EvaluateResult, StepOutput
from turnwise.rewards.steps import steps_of_episode, with_credit, with_score, write_steps
from turnwise.types import Message, Role, Score, TurnCredit


def outputs(*pairs: tuple[int, float]) -> list[StepOutput]:
    return [StepOutput(step_index=index, base_reward=reward) for index, reward in pairs]


def test_steps_carry_the_token_spans_of_their_turns() -> None:
    steps = steps_of_episode(make_episode("a", "b"), values=[0.1, 0.2])
    assert [(s.step_index, s.message_index, s.is_done) for s in steps] == [(0, 1, False), (1, 3, True)]
    span = steps[1].span
    assert (span.stream_index, span.prompt_start, span.completion_start, span.completion_end) == (0, 5, 7, 10)
    assert (span.action_start, span.action_end) == (1, 3)
    assert steps[1].policy_logprobs == (-0.5, -0.5, -0.5)
    assert steps[1].policy_value_estimate == 0.2
    assert [m.text for m in steps[1].messages] == ["question 0", "a", "question 1", "b"]


def test_outputs_land_on_their_turns_and_the_score_stays_apart() -> None:
    steps = steps_of_episode(make_episode("a", "b", "c"))
    aligned = align_rewards(steps, EvaluateResult(score=5.0, step_outputs=outputs((2, 0.5), (0, -1.0))))
    assert [s.base_reward for s in aligned] == [-1.0, None, 0.5]
    assert [s.score for s in aligned] == [5.0, 5.0, 5.0]
    assert [s.base_reward for s in steps] == [None, None, None]


def test_steps_without_an_output_get_the_default() -> None:
    steps = steps_of_episode(make_episode("a", "b"))
    aligned = align_rewards(
        steps, EvaluateResult(score=1.0, step_outputs=outputs((1, 0.5))), default_step_reward=0.0
    )
    assert [s.base_reward for s in aligned] == [0.0, 0.5]


def test_message_indices_are_accepted_when_declared() -> None:
    steps = steps_of_episode(make_episode("a", "b"))
    result = EvaluateResult(score=1.0, step_outputs=outputs((1, 0.1), (3, 0.2)))
    aligned = align_rewards(steps, result, step_index_kind="message")
    assert [s.base_reward for s in aligned] == [0.1, 0.2]


def test_a_few_shot_answer_in_the_prompt_is_no_step() -> None:
    shots = (
        Message(role=Role.USER, content="2+2?"),
        Message(role=Role.ASSISTANT, content="4"),
        Message(role=Role.USER, content="3+3?"),
    )
    steps = steps_of_episode(make_episode("6", observations=(shots,)))
    assert [s.message_index for s in steps] == [3]
    with pytest.raises(RewardError, match=r"step_index 1 is no message of the agent; those are at \[3\]"):
        align_rewards(
            steps, EvaluateResult(score=0.0, step_outputs=outputs((1, 1.0))), step_index_kind="message"
        )


@pytest.mark.parametrize(
    ("indices", "kind", "message"),
    [
        ([0, 0], "turn", "step_index 0 appears twice"),
        ([2], "turn", "step_index 2 is out of range; the episode has 2 turns"),
        ([0], "message", "step_index 0 is no message of the agent"),
        ([1, 1], "message", "step_index 1 appears twice"),
    ],
)
def test_indices_that_do_not_fit_are_errors(indices: list[int], kind: str, message: str) -> None:
    steps = steps_of_episode(make_episode("a", "b", episode_id="e7"))
    result = EvaluateResult(score=0.0, step_outputs=outputs(*((i, 1.0) for i in indices)))
    with pytest.raises(RewardError, match=f"reward f, episode e7: {message}"):
        align_rewards(steps, result, function="f", step_index_kind=kind)  # type: ignore[arg-type]


def test_steps_become_a_score_only_when_asked() -> None:
    steps = steps_of_episode(make_episode("a", "b"))
    result = EvaluateResult(step_outputs=outputs((0, 1.0), (1, 2.0)))
    with pytest.raises(RewardError, match="there are step_outputs but no score"):
        align_rewards(steps, result)
    assert align_rewards(steps, result, score_from_steps="sum")[0].score == 3.0
    assert align_rewards(steps, result, score_from_steps="mean")[0].score == 1.5


def test_an_invalid_result_cannot_be_aligned() -> None:
    with pytest.raises(RewardError, match="not valid: no picture"):
        align_rewards(steps_of_episode(make_episode("a")), EvaluateResult(error="no picture"))


def test_scores_and_credits_fill_in_copies(tmp_path: Path) -> None:
    steps = steps_of_episode(make_episode("a", "b"))
    scored = with_score(
        steps,
        Score(episode_id="e0", reward_name="f", score=1.0, step_rewards=(None, 0.5)),
        default_step_reward=0.0,
    )
    credited = with_credit(
        scored,
        [
            TurnCredit(episode_id="e0", turn_index=0, advantage=0.1, step_return=0.475),
            TurnCredit(episode_id="e0", turn_index=1, advantage=0.2, step_return=0.5),
        ],
    )
    assert [(s.base_reward, s.score, s.advantage, s.step_return) for s in credited] == [
        (0.0, 1.0, 0.1, 0.475),
        (0.5, 1.0, 0.2, 0.5),
    ]
    assert write_steps(tmp_path / "steps.jsonl", credited) == 2
    line = json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[1])
    assert line["messages"] == [
        {"role": "user", "content": "question 1"},
        {"role": "assistant", "content": "b"},
    ]
    assert (line["advantage"], line["span"]["completion_start"]) == (0.2, 7)


def test_step_rewards_of_another_length_are_refused() -> None:
    with pytest.raises(RewardError, match="2 step rewards for 1 steps"):
        with_score(
            steps_of_episode(make_episode("a")),
            Score(episode_id="e0", reward_name="f", score=1.0, step_rewards=(0.0, 0.0)),
        )


@given(
    num_turns=st.integers(1, 6),
    indices=st.lists(st.integers(0, 14), max_size=8),
    kind=st.sampled_from(["turn", "message"]),
)
def test_every_output_lands_once_or_the_whole_result_is_refused(
    num_turns: int, indices: list[int], kind: str
) -> None:
    steps = steps_of_episode(make_episode(*"abcdef"[:num_turns]))
    result = EvaluateResult(score=0.0, step_outputs=outputs(*((i, float(n)) for n, i in enumerate(indices))))
    allowed = range(num_turns) if kind == "turn" else range(1, 2 * num_turns, 2)
    fits = len(set(indices)) == len(indices) and set(indices) <= set(allowed)
    if not fits:
        with pytest.raises(RewardError, match="reward f, episode e0: step_index"):
            align_rewards(steps, result, function="f", step_index_kind=kind)  # type: ignore[arg-type]
        return
    aligned = align_rewards(steps, result, function="f", step_index_kind=kind)  # type: ignore[arg-type]
    expected: list[float | None] = [None] * num_turns
    for value, index in enumerate(indices):
        expected[index if kind == "turn" else index // 2] = float(value)
    assert [step.base_reward for step in aligned] == expected
