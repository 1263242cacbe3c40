"""Losses against the published reference values and hand-worked ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from turnwise.config import LossConfig
from turnwise.losses import (
    TokenTerms,
    cispo_loss,
    clipped_loss,
    divergence,
    importance_ratio,
    measure,
    policy_loss,
    token_weights,
    total_loss,
    truncated_importance,
    turn_ratio,
)

CASES = json.loads((Path(__file__).parent / "data" / "advantages.json").read_text())["cases"]


def _cases(family: str) -> list:
    return [pytest.param(case, id=case["id"]) for case in CASES if case["family"] == family]


def _close(got: torch.Tensor, expected: float | list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", _cases("kl"))
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_divergence_equals_the_reference(case: dict, kind: str) -> None:
    logprobs = torch.tensor(case["logprob"], dtype=torch.float64)
    reference = torch.tensor(case["ref_logprob"], dtype=torch.float64)
    _close(divergence(logprobs, reference, kind), case["expected"][f"verl_{kind}"])


def _ppo_terms(case: dict, name: str, aggregate: str) -> tuple[torch.Tensor, TokenTerms, LossConfig]:
    """The masked tokens of a case as rows; each line of the case is one episode of one turn."""
    mask = torch.tensor(case["mask"], dtype=torch.bool)
    lines = torch.arange(mask.shape[0])[:, None].expand(mask.shape)[mask]
    params = case["params"]
    loss = LossConfig(
        name="ppo", clip_low=params["clip_low"], clip_high=params["clip_high"], dual_clip=params["clip_ratio_c"],
        aggregate=aggregate,
    )  # fmt: skip
    width = torch.full(lines.shape, mask.shape[1])
    shape = loss if name == "ppo" else LossConfig(name=name, aggregate=aggregate)
    terms = TokenTerms(
        old_logprobs_R=torch.tensor(case["old_logprob"], dtype=torch.float64)[mask],
        advantages_R=torch.tensor(case["advantage"], dtype=torch.float64)[mask],
        weights_R=token_weights(shape, lines, lines, width).double(),
        turns_R=lines,
    )
    return torch.tensor(case["logprob"], dtype=torch.float64)[mask], terms, loss


@pytest.mark.parametrize("case", _cases("ppo_loss"))
@pytest.mark.parametrize(
    ("reference_name", "name", "aggregate"),
    [
        ("token-mean", "ppo", "token"),
        ("seq-mean-token-sum", "reinforce", "episode"),
        ("seq-mean-token-mean", "ppo", "episode"),
        ("seq-mean-token-sum-norm", "dr_grpo", "turn"),
    ],
)
def test_ppo_equals_the_reference(case: dict, reference_name: str, name: str, aggregate: str) -> None:
    logprobs, terms, loss = _ppo_terms(case, name, aggregate)
    expected = case["expected"][reference_name]
    entropies = torch.zeros_like(logprobs)
    total = total_loss(logprobs, entropies, terms, loss, kl_coefficient=0.0)
    figures = measure(logprobs, entropies, terms, loss)
    _close(total, expected["loss"])
    _close(figures["clip_fraction"].double().mean(), expected["clipfrac"])
    _close(figures["approx_kl"].mean(), expected["approx_kl"])
    _close(figures["clip_fraction_dual"].double().mean(), expected["clipfrac_lower"])


def test_clip_higher_lets_rare_tokens_grow() -> None:
    ratio = torch.tensor([1.25, 1.25, 0.7])
    advantages = torch.tensor([1.0, 1.0, -1.0])
    symmetric = clipped_loss(ratio, advantages, clip_low=0.2, clip_high=0.2)
    higher = clipped_loss(ratio, advantages, clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(symmetric, torch.tensor([-1.2, -1.2, 0.8]))
    torch.testing.assert_close(higher, torch.tensor([-1.25, -1.25, 0.8]))


def test_gspo_ratio_is_the_geometric_mean_of_the_turn() -> None:
    logprobs, old = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.7, -0.5])
    # turn 0: mean(0.5, -0.3) = 0.1; turn 1: 0
    expected = torch.tensor([0.1, 0.1, 0.0]).exp()
    torch.testing.assert_close(turn_ratio(logprobs, old, torch.tensor([0, 0, 1])), expected)


def test_cispo_passes_gradient_through_clipped_tokens() -> None:
    logprobs = torch.tensor([0.0, -1.0], requires_grad=True)
    ratio = importance_ratio(logprobs, torch.tensor([-2.0, -1.0]))
    loss = cispo_loss(logprobs, ratio, torch.tensor([1.0, 2.0]), clip_high=4.0).sum()
    loss.backward()
    # e² = 7.39 is cut to 4; the other ratio is 1.
    torch.testing.assert_close(logprobs.grad, torch.tensor([-4.0, -2.0]))


def test_ppo_gives_no_gradient_to_clipped_tokens() -> None:
    logprobs = torch.tensor([0.5, -0.5, 0.05], requires_grad=True)
    terms = TokenTerms(
        old_logprobs_R=torch.zeros(3), advantages_R=torch.tensor([1.0, -1.0, 1.0]), weights_R=torch.ones(3),
        turns_R=torch.arange(3),
    )  # fmt: skip
    policy_loss(logprobs, terms, LossConfig(name="ppo")).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0] == 0
    assert logprobs.grad[1] == 0
    torch.testing.assert_close(logprobs.grad[2], torch.tensor(-0.05127).sub(1.0), rtol=1e-4, atol=0)


def test_importance_is_cut_at_the_cap() -> None:
    weights = truncated_importance(torch.tensor([0.0, -1.0, -2.0]), torch.tensor([-1.0, -1.0, -1.0]), 2.0)
    torch.testing.assert_close(weights, torch.tensor([2.0, 1.0, 0.36788]), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("name", "aggregate", "expected"),
    [
        ("ppo", None, [1 / 6] * 6),
        ("ppo", "turn", [1 / 6, 1 / 6, 1 / 9, 1 / 9, 1 / 9, 1 / 3]),
        ("grpo", None, [1 / 10] * 5 + [1 / 2]),
        ("reinforce", None, [1 / 2] * 6),
        ("dr_grpo", None, [1 / 30] * 6),
        ("dr_grpo", "episode", [1 / 20] * 6),
        ("gspo", None, [1 / 6, 1 / 6, 1 / 9, 1 / 9, 1 / 9, 1 / 3]),
    ],
)
def test_every_token_turn_or_episode_counts_once(
    name: str, aggregate: str | None, expected: list[float]
) -> None:
    # Episode 0 has turns of 2 and 3 tokens, episode 1 a turn of 1; at most 10 tokens per turn.
    turns, episodes = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([0, 0, 0, 0, 0, 1])
    weights = token_weights(LossConfig(name=name, aggregate=aggregate), turns, episodes, torch.full((6,), 10))
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_entropy_and_divergence_enter_with_their_coefficients() -> None:
    terms = TokenTerms(
        old_logprobs_R=torch.tensor([-1.0]), advantages_R=torch.tensor([2.0]), weights_R=torch.tensor([1.0]),
        turns_R=torch.tensor([0]), reference_logprobs_R=torch.tensor([-1.5]),
    )  # fmt: skip
    loss = LossConfig(name="ppo", entropy_coefficient=0.1, kl_coefficient=0.5, kl_kind="k1")
    total = total_loss(torch.tensor([-1.0]), torch.tensor([3.0]), terms, loss, kl_coefficient=0.5)
    torch.testing.assert_close(total, torch.tensor(-2.0 - 0.1 * 3.0 + 0.5 * 0.5))
