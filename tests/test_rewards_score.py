"""Scores of groups: failed episodes stay out, terms add up, one bad episode leaves the rest alone."""

from __future__ import annotations

from typing import Any

import pytest
from tests.reward_episodes import make_episode, make_group

from turnwise.config import RewardConfig, RewardsConfig
from turnwise.errors import RewardError
from turnwise.rewards.arguments import Declaration
from turnwise.rewards.combine import combine_scores
from turnwise.rewards.direct import evaluate_messages
from turnwise.rewards.evaluators import LocalEvaluator
from turnwise.rewards.interface import EvaluateResult, RewardFunction, StepOutput, reward_function
from turnwise.rewards.score import Rewards, Term, build_rewards, score_groups, score_run, score_terms
from turnwise.types import Failure, Score


def rewards_of(*functions: RewardFunction, weights: tuple[float, ...] | None = None) -> Rewards:
    return Rewards(
        [
            Term(name=f.name, weight=w, params={}, evaluator=LocalEvaluator(f, {}))
            for f, w in zip(functions, weights or (1.0,) * len(functions), strict=True)
        ]
    )


async def test_the_environment_reward_is_the_sum_with_its_parts_as_steps() -> None:
    group = make_group(make_episode("a", "b", rewards=(0.25, 1.0)))
    with build_rewards(RewardsConfig()) as rewards:
        scores = await score_groups([group], rewards)
    assert scores["e0"] == Score(
        episode_id="e0", reward_name="environment", score=1.25, step_rewards=(0.25, 1.0)
    )


async def test_a_failed_episode_is_unscored_and_never_shown_to_the_reward() -> None:
    seen: list[int] = []

    @reward_function(mode="batch")
    def count(rollouts_messages: list[Any]) -> list[float]:
        seen.append(len(rollouts_messages))
        return [1.0] * len(rollouts_messages)

    group = make_group(
        make_episode("a", episode_id="good"),
        make_episode("b", episode_id="bad", failure=Failure(stage="step", error="boom")),
    )
    scores = await score_groups([group], rewards_of(count))
    assert seen == [1]
    assert scores["good"].score == 1.0
    assert scores["bad"].score is None
    assert scores["bad"].error == "the episode failed in step: boom"


async def test_one_episode_that_cannot_be_scored_leaves_the_rest_scored() -> None:
    @reward_function
    def picky(messages: list[Any], episode_id: str) -> float:
        if episode_id == "e1":
            raise KeyError("no such object")
        if episode_id == "e2":
            return float("nan")
        return 0.5

    group = make_group(*(make_episode("a", episode_id=f"e{i}") for i in range(4)))
    scores = await score_groups([group], rewards_of(picky))
    assert [scores[f"e{i}"].score for i in range(4)] == [0.5, None, None, 0.5]
    assert scores["e1"].error == "reward picky raised KeyError: 'no such object'"
    assert "nan" in str(scores["e2"].error)


async def test_a_reward_can_declare_an_episode_unscorable() -> None:
    @reward_function
    def unsure(messages: list[Any]) -> EvaluateResult:
        return EvaluateResult(score=0.0, is_score_valid=False, reason="the picture was black")

    scores = await score_groups([make_group(make_episode("a"))], rewards_of(unsure))
    assert (scores["e0"].score, scores["e0"].error) == (None, "the picture was black")


async def test_weighted_terms_add_up_and_stay_visible() -> None:
    @reward_function
    def short(messages: list[Any]) -> EvaluateResult:
        return EvaluateResult(
            score=0.5,
            metrics={"length": 3},
            step_outputs=[StepOutput(step_index=1, base_reward=1.0)],
        )

    @reward_function
    async def right(messages: list[Any]) -> EvaluateResult:
        return EvaluateResult(
            score=1.0, step_outputs=[StepOutput(step_index=i, base_reward=0.5) for i in range(2)]
        )

    group = make_group(make_episode("a", "b"))
    scores = await score_groups([group], rewards_of(short, right, weights=(2.0, 0.5)))
    score = scores["e0"]
    assert score.score == 2.0 * 0.5 + 0.5 * 1.0
    assert score.step_rewards == (0.25, 2.25)
    assert score.metrics == {"short": 0.5, "short/length": 3.0, "right": 1.0}
    assert score.reward_name == "combined"


def test_a_combination_is_unscored_when_one_term_is() -> None:
    terms = {
        "a": Score(episode_id="e", reward_name="a", score=1.0),
        "b": Score(episode_id="e", reward_name="b", score=None, error="timed out"),
    }
    combined = combine_scores(terms, {"a": 1.0, "b": 1.0}, "combined")
    assert (combined.score, combined.error, combined.metrics) == (None, "b: timed out", {"a": 1.0})


async def test_stored_episodes_are_scored_in_their_order_with_groups_put_together() -> None:
    @reward_function(mode="batch")
    def rank(rollouts_messages: list[Any]) -> list[float]:
        return [float(i) for i in range(len(rollouts_messages))]

    episodes = [
        make_episode("a", episode_id=name, group_id=group)
        for name, group in [("x0", "x"), ("y0", "y"), ("x1", "x")]
    ]
    scores = await score_run(episodes, rewards_of(rank))
    assert [(s.episode_id, s.score) for s in scores] == [("x0", 0.0), ("y0", 0.0), ("x1", 1.0)]


async def test_a_batch_reward_must_return_one_result_per_rollout() -> None:
    @reward_function(mode="batch")
    def lazy(rollouts_messages: list[Any]) -> list[float]:
        return [1.0]

    group = make_group(make_episode("a", episode_id="e0"), make_episode("b", episode_id="e1"))
    scores = await score_groups([group], rewards_of(lazy))
    assert {s.score for s in scores.values()} == {None}
    assert "1 results for 2 rollouts" in str(scores["e0"].error)


async def test_a_wrong_step_index_names_function_episode_and_index() -> None:
    @reward_function
    def off(messages: list[Any]) -> EvaluateResult:
        return EvaluateResult(score=0, step_outputs=[StepOutput(step_index=7, base_reward=1.0)])

    scores = await score_groups([make_group(make_episode("a"))], rewards_of(off))
    assert scores["e0"].error is not None
    assert "reward off, episode e0: step_index 7 is out of range" in scores["e0"].error


async def test_batch_rewards_get_the_group_truth_and_lists_of_the_rest() -> None:
    got: dict[str, Any] = {}

    @reward_function(mode="batch")
    def look(rollouts_messages: Any, ground_truth: Any, step_rewards: Any, episode_ids: Any) -> list[float]:
        got.update(ground_truth=ground_truth, step_rewards=step_rewards, episode_ids=episode_ids)
        return [0.0] * len(rollouts_messages)

    group = make_group(
        make_episode("a", episode_id="e0", ground_truth="x", rewards=(1.0,)),
        make_episode("b", episode_id="e1", ground_truth="x", rewards=(2.0,)),
    )
    await score_terms([group], rewards_of(look))
    assert got == {"ground_truth": "x", "step_rewards": [[1.0], [2.0]], "episode_ids": ["e0", "e1"]}


TALKS = [
    [{"role": "user", "content": "6 × 7?"}, {"role": "assistant", "content": answer}]
    for answer in ("42", "41")
]


async def test_messages_are_evaluated_without_episodes() -> None:
    @reward_function
    def right(messages: list[Any], ground_truth: str) -> float:
        if messages[-1]["content"] == "41":
            raise ValueError("off by one")
        return float(messages[-1]["content"] == ground_truth)

    results = await evaluate_messages(rewards_of(right), TALKS, ["42", "42"])
    assert [result.score for result in results] == [1.0, None]
    assert results[1].error == "reward right raised ValueError: off by one"
    assert await evaluate_messages(rewards_of(right), [], []) == []


async def test_a_batch_reward_evaluates_messages_together() -> None:
    @reward_function(mode="batch")
    def best(rollouts_messages: list[Any], ground_truth: str, ground_truths: list[str]) -> list[float]:
        assert ground_truths == [ground_truth] * 2
        return [float(messages[-1]["content"] == ground_truth) for messages in rollouts_messages]

    results = await evaluate_messages(rewards_of(best), TALKS, ["42", "42"])
    assert [result.score for result in results] == [1.0, 0.0]


async def test_messages_alone_do_not_fill_every_parameter() -> None:
    @reward_function
    def needs_metrics(messages: Any, metrics: Any) -> float:
        return 0.0

    with pytest.raises(RewardError, match="requires 'metrics'"):
        await evaluate_messages(rewards_of(needs_metrics), TALKS)
    with pytest.raises(RewardError, match="1 ground truths for 2 rollouts"):
        await evaluate_messages(rewards_of(needs_metrics), TALKS, ["42"])


def test_a_parameter_nobody_reads_is_an_error() -> None:
    with pytest.raises(RewardError, match="takes no parameter 'colour'"):
        build_rewards(RewardsConfig(functions=(RewardConfig(params={"colour": 1}),)))


def test_a_parameter_nobody_gives_is_an_error() -> None:
    @reward_function
    def needy(messages: Any, wings: int) -> float:
        return 0.0

    with pytest.raises(RewardError, match="requires 'wings'"):
        LocalEvaluator(needy, {})


def test_two_rewards_of_one_name_are_refused() -> None:
    with pytest.raises(RewardError, match="two rewards are called 'environment'"):
        build_rewards(RewardsConfig(functions=(RewardConfig(), RewardConfig())))


def test_a_declaration_is_plain_data() -> None:
    @reward_function(mode="batch", step_index_kind="message")
    def f(rollouts_messages: Any, ground_truth: Any = None, **others: Any) -> list[float]:
        return []

    assert LocalEvaluator(f, {}).declaration == Declaration(
        name="f",
        mode="batch",
        step_index_kind="message",
        accepted=("ground_truth",),
        accepts_any=True,
    )
