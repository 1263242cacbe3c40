"""Advantages against reference values, hand-worked ones, and the properties every estimator promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise import advantages as adv

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
