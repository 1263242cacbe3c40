"""Credit of whole groups: who takes part, what a turn is paid, and what is explained."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from tests.reward_episodes import make_episode

from turnwise.config import Config, CreditConfig
from turnwise.credit import assign_advantages, describe_credit, is_without_signal, turn_rewards
from turnwise.errors import ConfigError, CreditError
from turnwise.types import Advantages, Episode, Failure, Group, Observation, Score, StopReason


def play(
    name: str,
    states: Sequence[object],
    *,
    group: str = "g0",
    invalid: Sequence[int] = (),
    failed: bool = False,
) -> Episode:
    """An episode whose turn t was taken in `states[t]`."""
    failure = Failure(stage="step", error="boom") if failed else None
    episode = make_episode(*["answer"] * len(states), episode_id=name, group_id=group, failure=failure)
    turns = tuple(
        msgspec.structs.replace(
            turn,
            observation=Observation(messages=turn.observation.messages, state_key=state),
            is_action_valid=turn.turn_index not in invalid,
        )
        for turn, state in zip(episode.turns, states, strict=True)
    )
    return msgspec.structs.replace(episode, turns=turns)


def judge(name: str, score: float | None, steps: tuple[float | None, ...] = ()) -> Score:
    return Score(episode_id=name, reward_name="test", score=score, step_rewards=steps)


def gather(*episodes: Episode) -> list[Group]:
    by_group: dict[str, list[Episode]] = {}
    for episode in episodes:
        by_group.setdefault(episode.group_id, []).append(episode)
    return [
        Group(group_id=name, task=found[0].task, episodes=tuple(found)) for name, found in by_group.items()
    ]


def assign(episodes: Sequence[Episode], scores: Sequence[Score], **knobs: object) -> Advantages:
    config = CreditConfig.model_validate(knobs)
    return assign_advantages(gather(*episodes), {score.episode_id: score for score in scores}, config)


def column(advantages: Advantages, name: str, field: str = "advantage") -> list[float | None]:
    return [getattr(credit, field) for credit in advantages.turns[name]]


def test_rloo_gives_every_turn_the_episodes_advantage() -> None:
    got = assign([play("a", [0, 1, 2]), play("b", [0])], [judge("a", 1.0), judge("b", 0.0)], estimator="rloo")
    assert column(got, "a") == [1.0, 1.0, 1.0]
    assert column(got, "b") == [-1.0]


def test_gigpo_by_hand_on_ragged_episodes() -> None:
    # Both start in s. a: s → u, 1 at the end; b: s, 0.
    got = assign(
        [play("a", ["s", "u"]), play("b", ["s"])], [judge("a", 1.0), judge("b", 0.0)],
        estimator="gigpo", gamma=0.5, step_norm="mean", omega=2.0,
    )  # fmt: skip
    assert column(got, "a", "step_reward") == [0.0, 1.0]
    assert column(got, "a", "step_return") == [0.5, 1.0]
    assert column(got, "a", "step_advantage") == [0.25, 0.0]
    assert column(got, "a", "episode_advantage") == [0.5, 0.5]
    assert column(got, "a") == [1.0, 0.5]
    assert column(got, "b") == [-1.0]
    assert column(got, "a", "anchor_size") == [2, 1]
    assert got.turns["a"][0].anchor == got.turns["b"][0].anchor != got.turns["a"][1].anchor
    assert got.metrics["credit/singleton_anchors"] == pytest.approx(1 / 3)


def test_failed_cancelled_and_unscored_episodes_take_no_part() -> None:
    good = [play("a", ["s", "u"]), play("b", ["s"])]
    cancelled = msgspec.structs.replace(play("d", ["s"]), stop_reason=StopReason.CANCELLED)
    others = [play("c", ["s", "u", "u"], failed=True), cancelled, play("e", ["s", "u"])]
    scores = [judge("a", 1.0), judge("b", 0.0), judge("c", 100.0), judge("d", 100.0), judge("e", None)]
    for estimator in ("rloo", "grpo", "gigpo", "reinforce_plus_plus", "gae"):
        alone = assign(good, scores[:2], estimator=estimator)
        among = assign([others[0], good[0], *others[1:], good[1]], scores, estimator=estimator)
        assert column(among, "a") == column(alone, "a")
        assert column(among, "b") == column(alone, "b")
        assert column(among, "c") == [None, None, None]
        assert column(among, "d") == [None]
        assert column(among, "e") == [None, None]
        assert among.metrics["credit/episodes_left_out"] == 3.0
        assert list(among.turns) == ["c", "a", "d", "e", "b"]


def test_step_rewards_are_used_as_steps_and_gaps_get_the_default() -> None:
    episode = play("a", ["s", "t", "u"])
    config = CreditConfig(estimator="gigpo", default_step_reward=-0.5)
    assert turn_rewards(episode, judge("a", 9.0, (1.0, None, 0.25)), config) == (1.0, -0.5, 0.25)


def test_without_step_rewards_the_score_is_paid_at_the_end() -> None:
    episode = play("a", ["s", "t", "u"])
    config = CreditConfig(estimator="gigpo", default_step_reward=-0.5)
    assert turn_rewards(episode, judge("a", 9.0), config) == (-0.5, -0.5, 9.0)
    assert turn_rewards(episode, judge("a", 9.0, (None, None, None)), config) == (-0.5, -0.5, 9.0)


def test_penalties_come_before_discounting_and_lower_the_score() -> None:
    episodes = [play("a", ["s", "u"], invalid=[1]), play("b", ["s"])]
    scores = [judge("a", 1.0), judge("b", 0.0)]
    got = assign(episodes, scores, estimator="gigpo", gamma=0.5, step_norm="mean", invalid_action_penalty=0.4)
    assert column(got, "a", "step_reward") == [0.0, 0.6]
    assert column(got, "a", "step_return") == [0.3, 0.6]
    assert column(got, "a", "episode_advantage") == [0.3, 0.3]
    assert column(assign(episodes, scores, estimator="rloo", invalid_action_penalty=0.4), "a") == [0.6, 0.6]


def test_states_are_compared_inside_their_group_only() -> None:
    episodes = [
        play("a", ["s"]),
        play("b", ["s"]),
        play("c", ["s"], group="g1"),
        play("d", ["s"], group="g1"),
    ]
    scores = [judge("a", 1.0), judge("b", 0.0), judge("c", 5.0), judge("d", 5.0)]
    got = assign(episodes, scores, estimator="gigpo", step_norm="mean")
    assert column(got, "a") == [1.0]
    assert column(got, "c") == column(got, "d") == [0.0]
    assert got.metrics["credit/groups_without_signal"] == 0.5
    groups = gather(*episodes)
    assert [is_without_signal(group, got.turns) for group in groups] == [False, True]


def test_a_lonely_episode_gets_zero() -> None:
    for estimator in ("rloo", "grpo", "gigpo"):
        assert column(assign([play("a", ["s", "u"])], [judge("a", 3.0)], estimator=estimator), "a") == [
            0.0,
            0.0,
        ]


def test_equal_rewards_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="turnwise.credit"):
        got = assign([play("a", ["s"]), play("b", ["s"])], [judge("a", 0.1), judge("b", 0.1)])
    assert column(got, "a") == [0.0]
    assert "every advantage is 0" in caplog.text


def test_gae_with_given_values_by_hand() -> None:
    config = CreditConfig(estimator="gae", gamma=1.0, lam=0.5, normalize=False)
    groups = gather(play("a", ["s", "u"]), play("b", ["s"]))
    scores = {"a": judge("a", 1.0), "b": judge("b", 0.0)}
    got = assign_advantages(groups, scores, config, {"a": [0.5, 0.75], "b": [0.5]})
    # a: delta_1 = 1 - 0.75 = 0.25; delta_0 = 0 + 0.75 - 0.5 = 0.25, plus half of 0.25.
    assert column(got, "a") == [0.375, 0.25]
    assert column(got, "b") == [-0.5]
    with pytest.raises(CreditError, match="episode a has 2 turns but 1 values"):
        assign_advantages(groups, scores, config, {"a": [0.5], "b": [0.5]})
    with pytest.raises(CreditError, match="rloo does not read them"):
        assign_advantages(groups, scores, CreditConfig(estimator="rloo"), {"a": [0.5, 0.5], "b": [0.5]})


def test_gae_without_values_asks_the_siblings() -> None:
    config = CreditConfig(estimator="gae", gamma=1.0, lam=1.0, normalize=False)
    episodes = [play("a", ["s", "u"]), play("b", ["s", "v"]), play("c", ["w", "u"])]
    scores = {"a": judge("a", 1.0), "b": judge("b", 0.0), "c": judge("c", 2.0)}
    got = assign_advantages(gather(*episodes), scores, config)
    # With lam 1 the advantage is the return minus the value: of b's visit to s, of c's visit to u;
    # v and w were seen once, so the same turn of the others serves.
    assert column(got, "a") == [1.0 - 0.0, 1.0 - 2.0]
    assert column(got, "b") == [0.0 - 1.0, 0.0 - 1.5]
    assert column(got, "c") == [2.0 - 0.5, 2.0 - 1.0]


def test_reinforce_plus_plus_needs_no_group() -> None:
    got = assign([play("a", ["s"]), play("b", ["s"], group="g1")], [judge("a", 1.0), judge("b", 0.0)], estimator="reinforce_plus_plus")  # fmt: skip
    assert column(got, "a") == pytest.approx([0.5**0.5])


def test_a_hasher_of_ones_own_decides_what_is_compared() -> None:
    groups = gather(play("a", [1]), play("b", [2]))
    scores = {"a": judge("a", 1.0), "b": judge("b", 0.0)}
    config = CreditConfig(estimator="gigpo", step_norm="mean")
    apart = assign_advantages(groups, scores, config)
    joined = assign_advantages(groups, scores, config, hasher=lambda episode, turn_index: "same")
    assert column(apart, "a", "step_advantage") == [0.0]
    assert column(joined, "a", "step_advantage") == [0.5]


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([judge("a", 1.0)], "episode b has no score"),
        ([judge("a", 1.0, (1.0,)), judge("b", 0.0)], "gave 1 step rewards to episode a of 2 turns"),
    ],
)
def test_wrong_scores_are_errors(scores: list[Score], message: str) -> None:
    with pytest.raises(CreditError, match=message):
        assign([play("a", ["s", "u"]), play("b", ["s"])], scores)


def test_an_episode_id_must_be_unique() -> None:
    with pytest.raises(CreditError, match="episode id a occurs twice"):
        assign([play("a", ["s"]), play("a", ["s"])], [judge("a", 1.0)])


def test_every_quantity_is_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="turnwise.credit"):
        got = assign(
            [play("a", ["s"]), play("b", ["s"])], [judge("a", 1.0), judge("b", 0.0)], estimator="gigpo", step_norm="mean"
        )  # fmt: skip
    line = describe_credit(got.turns["a"][0])
    assert line in caplog.text
    anchor = got.turns["a"][0].anchor
    assert (
        line
        == f"episode a turn 0: r=+1.0000 G_k=+1.0000 A_E=+0.5000 A_S=+0.5000 anchor={anchor} of 2 A=+1.0000"
    )


def test_knobs_nobody_reads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"default_step_reward is 0\.5 but"):
        CreditConfig(estimator="rloo", default_step_reward=0.5)
    with pytest.raises(ValueError, match="must lie in"):
        CreditConfig(estimator="gigpo", combine="convex", omega=1.5)
    assert CreditConfig(estimator="gigpo", combine="convex").omega == 0.5
    assert CreditConfig(estimator="gigpo").omega == 1.0


def test_a_written_config_can_be_turned_to_another_algorithm(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    Config.from_dict({"credit": {"estimator": "rloo"}, "loss": {"name": "ppo", "clip_low": 0.1}}).to_yaml(
        path
    )
    turned = Config.from_file(path, ["credit.estimator=gigpo", "credit.gamma=0.5"])
    assert (turned.credit.gamma, turned.credit.omega, turned.credit.normalize) == (0.5, 1.0, None)
    # What somebody chose is not dropped in silence.
    with pytest.raises(ConfigError, match=r"loss\.clip_low is 0\.1"):
        Config.from_file(path, ["loss.name=reinforce"])
