"""Advantages against reference values, hand-worked ones, and the properties every estimator promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import advantages as adv
from turnwise.errors import CreditError

VECTORS = json.loads((Path(__file__).parent / "data" / "advantages.json").read_text())["cases"]


def cases(family: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in VECTORS if case["family"] == family]


def assert_close(got: Any, expected: Any) -> None:
    got, expected = np.asarray(got, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert got.shape == expected.shape
    assert (np.abs(got - expected) <= 1e-6 * (1 + np.abs(expected))).all()


def same_partition(left: Any, right: Any) -> bool:
    pairs = set(zip(list(left), list(right), strict=True))
    return len(pairs) == len(set(left)) == len(set(right))


@pytest.mark.parametrize("case", cases("gigpo"))
def test_gigpo_equals_the_reference(case: dict[str, Any]) -> None:
    rows, params, expected = case["rows"], case["params"], case["expected"]
    keys = [np.array(key) for key in rows["anchor"]] if params["anchor_kind"] == "ndarray" else rows["anchor"]
    for stats, suffix in (("episodes", "traj"), ("rows", "steps")):
        options: dict[str, Any] = {
            "scores": case["episode_score"] if params["episode_score"] == "given" else None,
            "gamma": params["gamma"],
            "omega": params["omega"],
            "normalize": params["mode"].removesuffix("_norm"),
            "episode_stats": stats,
            "epsilon": params["epsilon"],
            "similarity": params["similarity_thresh"] if params["enable_similarity"] else None,
        }
        got = adv.gigpo(rows["group_id"], rows["traj_id"], keys, rows["reward"], **options)
        assert_close(got.step_returns, expected["step_return"])
        assert same_partition(got.step_groups, expected["step_group"])
        assert_close(got.step_advantages, expected["step_adv"])
        assert_close(got.episode_advantages, expected[f"episode_adv_{suffix}"])
        assert_close(got.advantages, expected[f"combined_{suffix}"])
        if "derived_rewardkit_convex" in case:
            convex = adv.gigpo(
                rows["group_id"], rows["traj_id"], keys, rows["reward"], combine="convex", **options
            )
            name = next(key for key in case["derived_rewardkit_convex"] if key.endswith(suffix))
            assert_close(convex.advantages, case["derived_rewardkit_convex"][name])


@pytest.mark.parametrize("case", cases("gigpo"))
def test_episode_estimators_equal_the_multi_turn_reference(case: dict[str, Any]) -> None:
    rows, expected, epsilon = case["rows"], case["expected"], case["params"]["epsilon"]
    group_of = dict(zip(rows["traj_id"], rows["group_id"], strict=True))
    episodes = list(group_of)
    scores = case["episode_score"]
    columns = {
        "traj": ([group_of[name] for name in episodes], [scores[name] for name in episodes]),
        "steps": (rows["group_id"], [scores[name] for name in rows["traj_id"]]),
    }
    for suffix, (groups, column) in columns.items():
        for name, got in (
            ("grpo", adv.grpo(groups, column, epsilon=epsilon)),
            ("drgrpo", adv.grpo(groups, column, scale="none")),
            ("rloo", adv.rloo(groups, column)),
        ):
            if suffix == "traj":
                by_episode = dict(zip(episodes, got, strict=True))
                got = np.array([by_episode[name] for name in rows["traj_id"]])
            assert_close(got, expected[f"{name}_{suffix}"])


OUTCOMES = {
    "verl_grpo": lambda groups, scores: adv.grpo(groups, scores),
    "verl_grpo_vectorized": lambda groups, scores: adv.grpo(groups, scores),
    "verl_drgrpo": lambda groups, scores: adv.grpo(groups, scores, scale="none"),
    "verl_rloo": lambda groups, scores: adv.rloo(groups, scores),
    "verl_rloo_vectorized": lambda groups, scores: adv.rloo(groups, scores, singleton="zero"),
    "trl_grpo_group": lambda groups, scores: adv.grpo(groups, scores, epsilon=1e-4, singleton="zero"),
    "trl_grpo_batch": lambda groups, scores: adv.grpo(
        groups, scores, scale="batch", epsilon=1e-4, singleton="zero"
    ),
    "trl_drgrpo_none": lambda groups, scores: adv.grpo(groups, scores, scale="none", singleton="zero"),
    "trl_rloo": lambda groups, scores: adv.rloo(groups, scores, singleton="zero"),
    "trl_rloo_normalized": lambda groups, scores: adv.rloo(groups, scores, normalize=True, singleton="zero"),
}


@pytest.mark.parametrize("case", cases("outcome"))
def test_outcome_estimators_equal_the_reference(case: dict[str, Any]) -> None:
    for name, expected in case["expected"].items():
        got = OUTCOMES[name](case["group_id"], case["reward"])
        assert [value is None for value in got] == [reward is None for reward in case["reward"]]
        # The reference writes 0 where nothing was scored; here that is None.
        assert_close([0.0 if value is None else value for value in got], expected)


@pytest.mark.parametrize("case", cases("gae"))
def test_gae_equals_the_reference(case: dict[str, Any]) -> None:
    mask = np.array(case["mask"], dtype=bool)
    params = case["params"]
    got = adv.gae(case["reward"], case["value"], case["mask"], gamma=params["gamma"], lam=params["lam"])
    assert_close(got[mask], np.array(case["expected"]["advantage_raw"])[mask])
    assert_close((got + case["value"])[mask], np.array(case["expected"]["returns"])[mask])
    whitened = adv.whiten(got, mask, epsilon=params["whiten_eps"])
    assert_close(whitened[mask], np.array(case["expected"]["advantage_whitened"])[mask])
    assert (got[~mask] == 0).all()
    assert (whitened[~mask] == 0).all()


def test_gigpo_by_hand() -> None:
    # Two episodes start in "s"; a moves to "u" and gets 1, b moves to "v" and gets 0.
    got = adv.gigpo(
        ["g"] * 4,
        ["a", "a", "b", "b"],
        ["s", "u", "s", "v"],
        [0.0, 1.0, 0.0, 0.0],
        gamma=0.5,
        normalize="mean",
    )
    assert got.step_returns.tolist() == [0.5, 1.0, 0.0, 0.0]
    assert got.step_advantages.tolist() == [0.25, 0.0, -0.25, 0.0]
    assert got.episode_advantages.tolist() == [0.5, 0.5, -0.5, -0.5]
    assert got.advantages.tolist() == [0.75, 0.5, -0.75, -0.5]


def test_convex_gigpo_by_hand() -> None:
    columns = (["g"] * 4, ["a", "a", "b", "b"], ["s", "u", "s", "v"], [0.0, 1.0, 0.0, 0.0])
    got = adv.gigpo(*columns, gamma=0.5, normalize="mean", combine="convex", omega=0.25)
    assert got.advantages.tolist() == [0.3125, 0.125, -0.3125, -0.125]
    with pytest.raises(CreditError, match=r"omega is 2\.0.*share"):
        adv.gigpo(*columns, combine="convex", omega=2.0)


def test_an_unscored_episode_takes_no_part_and_gets_none() -> None:
    columns = (["g"] * 3, ["a", "b", "c"], ["s"] * 3, [1.0, 0.0, None])
    got = adv.gigpo(*columns, scores={"a": 1.0, "b": 0.0, "c": None}, normalize="mean")
    alone = adv.gigpo(["g"] * 2, ["a", "b"], ["s"] * 2, [1.0, 0.0], normalize="mean")
    assert got.advantages.tolist() == [*alone.advantages.tolist(), None]
    assert got.step_returns.tolist() == [1.0, 0.0, None]
    assert got.step_groups.tolist() == [0, 0, -1]
    assert adv.rloo(["g"] * 3, [1.0, None, 0.0]).tolist() == [1.0, None, -1.0]
    assert adv.grpo(["g"] * 3, [1.0, None, 0.0], scale="none").tolist() == [0.5, None, -0.5]
    # Two episodes with returns 1 and 0; the third is not counted.
    plus = adv.reinforce_plus_plus(["a", "b", "c", "c"], [1.0, 0.0, None, 1.0], epsilon=0.0)
    assert plus[:2].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert plus[2:].tolist() == [None, None]


def test_a_group_with_nobody_left_gives_nothing() -> None:
    assert adv.rloo(["g", "g"], [None, None]).tolist() == [None, None]
    assert adv.rloo([], []).tolist() == []
    empty = adv.gigpo([], [], [], [])
    assert empty.advantages.tolist() == []
    assert adv.gigpo(["g"], ["a"], ["s"], [1.0], scores={"a": None}).advantages.tolist() == [None]


@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.3, 1e9 + 0.1, 0.0])
def test_equal_rewards_give_exactly_zero(value: float) -> None:
    groups, episodes = ["g"] * 7, list("abcdefg")
    assert adv.rloo(groups, [value] * 7).tolist() == [0.0] * 7
    assert adv.rloo(groups, [value] * 7, normalize=True).tolist() == [0.0] * 7
    for scale in ("group", "batch", "none"):
        assert adv.grpo(groups, [value] * 7, scale=scale).tolist() == [0.0] * 7
    for normalize in ("mean_std", "mean"):
        for stats in ("episodes", "rows"):
            got = adv.gigpo(
                groups, episodes, ["s"] * 7, [value] * 7, normalize=normalize, episode_stats=stats
            )
            assert got.advantages.tolist() == [0.0] * 7
    assert adv.reinforce_plus_plus(episodes, [value] * 7).tolist() == [0.0] * 7


def test_a_group_of_one_is_raw_or_zero() -> None:
    assert adv.rloo(["g"], [3.0]).tolist() == [3.0]
    assert adv.rloo(["g"], [3.0], singleton="zero").tolist() == [0.0]
    assert adv.grpo(["g"], [3.0]).tolist() == pytest.approx([3.0 / (1 + 1e-6)])
    assert adv.grpo(["g"], [3.0], singleton="zero").tolist() == [0.0]


def test_seed_functions_by_hand() -> None:
    baselines = adv.compute_loo_baseline([1.0, 0.0, 0.5])
    assert baselines.tolist() == [0.25, 0.75, 0.5]
    assert adv.compute_advantages([1.0, 0.0, 0.5], baselines, normalize=False).tolist() == [0.75, -0.75, 0.0]
    # Deviation of (0.75, -0.75, 0) is 0.75.
    assert adv.compute_advantages([1.0, 0.0, 0.5], baselines).tolist() == pytest.approx([1.0, -1.0, 0.0])
    assert adv.compute_loo_baseline([4.0]).tolist() == [0.0]
    assert adv.compute_advantages([4.0], [0.0]).tolist() == [4.0]
    assert adv.compute_loo_baseline([1.0, None, 0.0]).tolist() == [0.0, None, 1.0]


def test_seed_functions_take_and_return_tensors() -> None:
    torch = pytest.importorskip("torch")

    class Batch:
        rewards = torch.tensor([1.0, 0.0])

    baselines = adv.compute_loo_baseline(Batch())
    assert torch.equal(baselines, torch.tensor([0.0, 1.0]))
    got = adv.compute_advantages(Batch.rewards, baselines, normalize=False)
    assert torch.equal(got, torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: adv.rloo(["g"], [1.0, 2.0]), "group_ids 1, scores 2"),
        (lambda: adv.rloo(["g"], [float("nan")]), "score 0 is nan"),
        (lambda: adv.grpo(["g", "g"], [1.0, float("inf")]), "score 1 is inf"),
        (lambda: adv.grpo(["g"], [1.0], scale="gruop"), "scale is 'gruop'"),
        (lambda: adv.rloo(["g"], [1.0], singleton="none"), "singleton is 'none'"),
        (lambda: adv.gigpo(["g", "h"], ["a", "a"], [1, 1], [0, 0]), "episode 'a' is in group 'g' and, at row 1"),
        (lambda: adv.gigpo(["g"], ["a"], [1], [0], scores={}), "episode 'a' has turns but no score"),
        (lambda: adv.gigpo(["g"], ["a"], [1], [None]), "row 0 .* has no reward"),
        (lambda: adv.gigpo(["g"], ["a"], [1], [0], gamma=1.5), "gamma is 1.5"),
        (lambda: adv.gigpo(["g"], ["a"], [1], [0], similarity=0.9), "state key 0 is a int"),
        (lambda: adv.gigpo(["g"], ["a"], ["x"], [0], similarity=2), "similarity is 2"),
        (lambda: adv.gae([[1.0]], [[1.0, 2.0]], [[1]], gamma=1, lam=1), "one shape"),
        (lambda: adv.gae([[float("nan")]], [[1.0]], [[1]], gamma=1, lam=1), "reward that is not finite"),
        (lambda: adv.rloo(["g"], [[1.0]]), r"shape \(1, 1\)"),
        (lambda: adv.rloo(["g"], ["x"]), "cannot be read as numbers"),
    ],
)  # fmt: skip
def test_wrong_columns_are_errors_that_say_what(call: Any, message: str) -> None:
    with pytest.raises(CreditError, match=message):
        call()


# ── properties ──

REWARDS = st.floats(-10, 10, allow_nan=False).map(lambda value: round(value, 3))
EPISODES = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.tuples(st.integers(0, 3), REWARDS), min_size=1, max_size=5)),
    min_size=1,
    max_size=8,
)


def to_columns(episodes: Any) -> tuple[list[str], list[str], list[int], list[float]]:
    rows = [
        (f"g{group}", f"e{number}", state, reward)
        for number, (group, turns) in enumerate(episodes)
        for state, reward in turns
    ]
    groups, names, states, rewards = zip(*rows, strict=True)
    return list(groups), list(names), list(states), list(rewards)


OPTIONS = st.fixed_dictionaries(
    {
        "gamma": st.sampled_from([0.0, 0.5, 0.95, 1.0]),
        "normalize": st.sampled_from(["mean", "mean_std"]),
        "episode_stats": st.sampled_from(["episodes", "rows"]),
        "singleton": st.sampled_from(["raw", "zero"]),
    }
)


@settings(deadline=None)
@given(EPISODES, OPTIONS, st.randoms(use_true_random=False))
def test_the_order_of_episodes_does_not_matter(episodes: Any, options: Any, random: Any) -> None:
    groups, names, states, rewards = to_columns(episodes)
    got = adv.gigpo(groups, names, states, rewards, **options).advantages
    # Any interleaving that keeps the turns of each episode in order.
    slots = list(names)
    random.shuffle(slots)
    rows_of = {name: iter([i for i, other in enumerate(names) if other == name]) for name in set(names)}
    order = [next(rows_of[name]) for name in slots]
    shuffled = adv.gigpo(
        *([column[i] for i in order] for column in (groups, names, states, rewards)), **options
    )
    np.testing.assert_allclose(shuffled.advantages, got[order], atol=1e-6, rtol=1e-6)


@settings(deadline=None)
@given(EPISODES, st.floats(-5, 5, allow_nan=False))
def test_a_constant_added_to_all_scores_changes_nothing(episodes: Any, constant: float) -> None:
    groups = [f"g{group}" for group, _ in episodes]
    scores = np.array([sum(reward for _, reward in turns) for _, turns in episodes])
    for estimate in (
        lambda column: adv.rloo(groups, column, singleton="zero"),
        lambda column: adv.grpo(groups, column, scale="none", singleton="zero"),
        lambda column: adv.grpo(groups, column, epsilon=1e-3, singleton="zero"),
        lambda column: adv.gigpo(groups, range(len(groups)), ["s"] * len(groups), column, epsilon=1e-3, singleton="zero").advantages,
    ):  # fmt: skip
        np.testing.assert_allclose(estimate(scores + constant), estimate(scores), atol=1e-6)


@settings(deadline=None)
@given(EPISODES, OPTIONS)
def test_groups_do_not_see_each_other(episodes: Any, options: Any) -> None:
    groups, names, states, rewards = to_columns(episodes)
    together = adv.gigpo(groups, names, states, rewards, **options)
    scores = adv.grpo(groups, rewards, singleton=options["singleton"])
    for group in set(groups):
        rows = [i for i, other in enumerate(groups) if other == group]
        apart = adv.gigpo(
            *([column[i] for i in rows] for column in (groups, names, states, rewards)), **options
        )
        assert together.advantages[rows].tolist() == apart.advantages.tolist()
        alone = adv.grpo([group] * len(rows), [rewards[i] for i in rows], singleton=options["singleton"])
        assert scores[rows].tolist() == alone.tolist()


@settings(deadline=None)
@given(EPISODES)
def test_group_means_are_zero(episodes: Any) -> None:
    groups = [f"g{group}" for group, _ in episodes]
    scores = [turns[0][1] for _, turns in episodes]
    for column in (
        adv.rloo(groups, scores, singleton="zero"),
        adv.grpo(groups, scores, scale="none", singleton="zero"),
    ):
        for group in set(groups):
            members = [value for value, other in zip(column, groups, strict=True) if other == group]
            assert abs(sum(members)) < 1e-9


@settings(deadline=None)
@given(EPISODES, st.sampled_from([0.0, 0.3, 1.0]))
def test_returns_follow_their_recursion(episodes: Any, gamma: float) -> None:
    _, names, _, rewards = to_columns(episodes)
    got = adv.step_returns(names, rewards, gamma=gamma)
    for row, (name, reward) in enumerate(zip(names, rewards, strict=True)):
        is_last = row + 1 == len(names) or names[row + 1] != name
        assert got[row] == reward + (0.0 if is_last else gamma * got[row + 1])


@settings(deadline=None)
@given(st.lists(REWARDS, min_size=2, max_size=12))
def test_rloo_equals_reward_minus_loo_baseline(rewards: list[float]) -> None:
    by_hand = adv.compute_advantages(rewards, adv.compute_loo_baseline(rewards), normalize=False)
    np.testing.assert_allclose(adv.rloo(["g"] * len(rewards), rewards), by_hand, atol=1e-9)
