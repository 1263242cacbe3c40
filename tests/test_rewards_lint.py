"""The reward linter: it finds the planted weaknesses, and leaves a sound reward alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.reward_episodes import make_episode
from tests.test_rewards_score import rewards_of

from turnwise.errors import RewardError
from turnwise.rewards.interface import RewardFunction, reward_function
from turnwise.rewards.lint import LintReport, lint_reward, sample_episodes
from turnwise.rewards.mutations import MUTATIONS, mutate


async def lint(function: RewardFunction) -> LintReport:
    return await lint_reward(rewards_of(function), sample_episodes("Paris"))


def kinds(report: LintReport) -> set[tuple[str, str]]:
    return {(finding.kind, finding.mutation) for finding in report.findings}


@reward_function
def sound(messages: list[dict[str, Any]], ground_truth: str) -> float:
    """Pays for the bare answer only."""
    return float(messages[-1]["content"] == ground_truth)


async def test_a_sound_reward_has_no_finding() -> None:
    report = await lint(sound)
    assert report.findings == ()
    assert report.mean_score == 0.2
    assert set(report.gains) == set(MUTATIONS)
    assert report.num_episodes == 5


async def test_paying_for_length_is_found_with_its_gain() -> None:
    @reward_function
    def length(messages: list[dict[str, Any]]) -> float:
        return float(len(messages[-1]["content"]))

    report = await lint(length)
    assert {mutation for kind, mutation in kinds(report) if kind == "exploit"} >= {
        "repeated",
        "padded",
        "huge",
    }
    huge = next(finding for finding in report.findings if finding.mutation == "huge")
    assert huge.count == 5
    assert huge.gain is not None
    assert huge.gain > 900_000


async def test_searching_for_the_truth_anywhere_is_found() -> None:
    @reward_function
    def contains(messages: list[dict[str, Any]]) -> float:
        return float(any(number in messages[-1]["content"] for number in ("42", "yes")))

    assert ("exploit", "every answer at once") in kinds(await lint(contains))


async def test_believing_the_answer_about_itself_is_found() -> None:
    @reward_function
    def believer(messages: list[dict[str, Any]]) -> float:
        return 10.0 if "highest possible score" in messages[-1]["content"] else 0.0

    assert {("exploit", "prompt injected"), ("exploit", "injection alone")} <= kinds(await lint(believer))


async def test_ignoring_the_order_of_steps_is_seen_as_no_change() -> None:
    @reward_function
    def last_step_only(messages: list[dict[str, Any]]) -> float:
        return float("tool" not in messages[-1]["content"])

    report = await lint(last_step_only)
    assert report.gains["shuffled steps"] < 0


async def test_a_crash_on_an_empty_answer_is_found_and_named() -> None:
    @reward_function
    def fragile(messages: list[dict[str, Any]]) -> float:
        return float(ord(messages[-1]["content"][0]) > 0)

    report = await lint(fragile)
    crash = next(finding for finding in report.findings if finding.mutation == "empty")
    assert (crash.kind, crash.count) == ("crash", 5)
    assert "IndexError" in crash.detail


async def test_nan_is_a_crash() -> None:
    @reward_function
    def undefined(messages: list[dict[str, Any]]) -> float:
        length = len(messages[-1]["content"])
        return float("nan") if length == 0 else 1.0 / length

    assert ("crash", "empty") in kinds(await lint(undefined))


async def test_dice_are_found() -> None:
    @reward_function
    def dice(messages: list[dict[str, Any]]) -> float:
        return random.random()

    assert ("nondeterminism", "none") in kinds(await lint(dice))


async def test_a_constant_teaches_nothing() -> None:
    @reward_function
    def same(messages: list[dict[str, Any]]) -> float:
        return 1.0

    assert kinds(await lint(same)) == {("constant", "none")}


async def test_batch_rewards_are_linted_one_spoilt_rollout_at_a_time() -> None:
    @reward_function(mode="batch")
    def longest(rollouts_messages: list[list[dict[str, Any]]]) -> list[float]:
        lengths = [len(messages[-1]["content"]) for messages in rollouts_messages]
        return [float(length == max(lengths)) for length in lengths]

    report = await lint(longest)
    padded = next(finding for finding in report.findings if finding.mutation == "padded")
    assert (padded.kind, padded.count, padded.gain) == ("exploit", 4, 1.0)


async def test_one_reward_is_linted_at_a_time() -> None:
    with pytest.raises(RewardError, match="one reward at a time"):
        await lint_reward(rewards_of(sound, RewardFunction(lambda m: 0.0, name="other")), sample_episodes())


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_mutations_keep_the_turns_and_what_the_environment_paid(name: str) -> None:
    episode = make_episode("one two three four", "five six seven eight", rewards=(0.5, 1.0))
    changed = mutate(episode, name)
    assert changed.num_turns == 2
    assert changed.final_reward == 1.5
    assert [turn.text for turn in changed.turns] != ["one two three four", "five six seven eight"]
    assert [turn.text for turn in episode.turns] == ["one two three four", "five six seven eight"]
    assert mutate(episode, name).turns[0].text == changed.turns[0].text
