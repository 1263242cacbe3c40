"""The printed objective holds every number in force."""

from __future__ import annotations

import itertools

import pytest
from pydantic import ValidationError

from turnwise.config import Config, CreditConfig, LossConfig
from turnwise.errors import ConfigError
from turnwise.objective import describe_objective


def test_ppo_with_divergence_is_written_out() -> None:
    loss = LossConfig(name="ppo", entropy_coefficient=0.01, kl_coefficient=0.05, reference="frozen")
    text = describe_objective(loss, CreditConfig(estimator="gigpo", omega=0.5))
    assert text.splitlines()[0] == (
        "L = 1/N_tokens Σ_tokens [ min(max(-A r, -A clip(r, 0.8, 1.2)), -3 A if A < 0) - 0.01 H(π) "
        "+ 0.05 (π_ref/π - log(π_ref/π) - 1) ]"
    )
    assert "A_E + 0.5 A_S" in text
    assert "0.95^(j-k)" in text
    assert "π_ref = the weights at the start" in text


def test_reinforce_is_the_sum_over_an_episode() -> None:
    text = describe_objective(LossConfig(name="reinforce"), CreditConfig())
    assert text.splitlines()[0] == "L = 1/N_episodes Σ_episodes Σ_t [ -A log π(y_t) ]"


def test_a_value_head_shows_its_term() -> None:
    text = describe_objective(LossConfig(value_coefficient=0.5), CreditConfig(estimator="gae"))
    assert "+ 0.5 · 1/N_turns Σ_turns (V - G)²" in text


@pytest.mark.parametrize(
    ("name", "estimator"),
    itertools.product(
        ["reinforce", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo"],
        ["rloo", "grpo", "gigpo", "reinforce_plus_plus", "gae"],
    ),
)
def test_every_combination_can_be_written_down_with_its_numbers(name: str, estimator: str) -> None:
    loss = LossConfig(
        name=name, kl_coefficient=0.125, kl_place="reward", kl_kind="k1", reference="ema", ema_decay=0.875, ema_every=3,
        kl_target=0.0625, importance_cap=2.5,
    )  # fmt: skip
    text = describe_objective(loss, CreditConfig(estimator=estimator))
    for number in ("0.125", "0.875", "0.0625", "2.5", "every 3 updates"):
        assert number in text
    for knob in ("clip_high", "clip_low", "dual_clip"):
        value = getattr(loss, knob)
        if value is not None:
            shown = {
                "clip_low": 1 - value,
                "clip_high": value if name == "cispo" else 1 + value,
                "dual_clip": value,
            }[knob]
            assert f"{shown:g}" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "reinforce", "clip_low": 0.2},
            r"loss\.clip_low is 0\.2 but loss\.name reinforce does not read it",
        ),
        ({"name": "grpo", "dual_clip": 3.0}, r"loss\.dual_clip"),
        ({"ema_every": 2}, r"loss\.ema_every is 2 but loss\.kl_coefficient is 0"),
        (
            {"kl_coefficient": 0.1, "reference": "frozen", "ema_every": 2},
            r"loss\.ema_every is 2 but loss\.reference is 'frozen'",
        ),
    ],
)
def test_a_knob_that_nothing_reads_is_an_error(settings: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LossConfig(**settings)


def test_a_value_head_without_gae_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"loss\.value_coefficient is 0\.5 but credit\.estimator rloo reads no values"
    ):
        Config.from_dict({"loss": {"value_coefficient": 0.5}})
