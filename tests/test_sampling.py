"""Draws by hand: which ids are kept, which one is picked, and with what probability."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import PolicyError
from turnwise.sampling import draw_tokens, top_candidates, uniforms
from turnwise.types import SamplingParams


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def draw_one(logits: torch.Tensor, uniform: float, **sampling: float) -> tuple[int, float, list[int]]:
    draw = draw_tokens(logits.clone(), SamplingParams(**sampling), np.array([uniform]))  # type: ignore[arg-type]
    return int(draw.token_ids[0]), float(draw.logprobs[0]), draw.kept[0].tolist()


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.09, 0), (0.11, 1), (0.39, 1), (0.41, 2), (0.99, 2)]
)
def test_the_uniform_picks_by_inverse_cdf(uniform: float, token: int) -> None:
    found, logprob, kept = draw_one(logits_of(0.1, 0.3, 0.6), uniform)
    assert found == token
    assert logprob == pytest.approx(math.log([0.1, 0.3, 0.6][token]), abs=1e-6)
    assert kept == []


def test_greedy_is_certain() -> None:
    assert draw_one(logits_of(0.1, 0.3, 0.6), 0.0, temperature=0.0) == (2, 0.0, [2])


def test_temperature_sharpens() -> None:
    # Squared and normalised: 1, 9, 36 of 46.
    assert draw_one(logits_of(0.1, 0.3, 0.6), 0.5, temperature=0.5)[1] == pytest.approx(
        math.log(36 / 46), abs=1e-6
    )


def test_top_k_keeps_the_k_best() -> None:
    token, logprob, kept = draw_one(logits_of(0.1, 0.2, 0.3, 0.4), 0.99, top_k=2)
    assert kept == [2, 3]
    assert token == 2
    assert logprob == pytest.approx(math.log(3 / 7), abs=1e-6)


def test_top_p_keeps_the_fewest_that_hold_the_share() -> None:
    assert draw_one(logits_of(0.1, 0.2, 0.3, 0.4), 0.0, top_p=0.65)[2] == [2, 3]
    assert draw_one(logits_of(0.1, 0.2, 0.3, 0.4), 0.0, top_p=0.75)[2] == [1, 2, 3]
    assert draw_one(logits_of(0.1, 0.2, 0.3, 0.4), 0.0, top_p=0.01)[2] == [3]


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    # Of 0.4 and 0.3 the first holds 4/7, more than half.
    assert draw_one(logits_of(0.1, 0.2, 0.3, 0.4), 0.0, top_k=2, top_p=0.5)[2] == [3]


def test_min_p_is_relative_to_the_best() -> None:
    assert draw_one(logits_of(0.1, 0.2, 0.3, 0.4), 0.0, min_p=0.6)[2] == [2, 3]
    assert draw_one(logits_of(0.1, 0.2, 0.3, 0.4), 0.0, min_p=0.6, top_k=1)[2] == [3]


def test_banned_and_forbidden_ids_hold_no_probability() -> None:
    draw = draw_tokens(
        logits_of(0.1, 0.2, 0.3, 0.4),
        SamplingParams(),
        np.array([0.99]),
        banned_ids=torch.tensor([3]),
        allowed_RV=torch.tensor([[True, False, True, True]]),
    )
    assert draw.token_ids.tolist() == [2]
    assert draw.logprobs[0] == pytest.approx(math.log(0.75), abs=1e-6)
    assert draw.kept[0].tolist() == [0, 2]


def test_nothing_left_and_nan_are_named() -> None:
    with pytest.raises(PolicyError, match="no token to sample"):
        draw_tokens(torch.full((1, 4), float("-inf")), SamplingParams(), np.array([0.5]))
    with pytest.raises(PolicyError, match="not finite"):
        draw_tokens(torch.full((2, 4), float("nan")), SamplingParams(), np.array([0.5, 0.5]))


def test_a_longer_request_begins_with_the_same_numbers() -> None:
    assert uniforms((1, 2, 3), 5).tolist() == uniforms((1, 2, 3), 9)[:5].tolist()
    assert uniforms((1, 2, 3), 5).tolist() != uniforms((1, 2, 4), 5).tolist()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 60), vocab=st.integers(1, 9000))
def test_top_candidates_are_those_of_topk(seed: int, count: int, vocab: int) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed))
    count = min(count, vocab)
    values, ids = top_candidates(logits, count)
    expected = torch.topk(logits, count)
    assert torch.equal(values, expected.values)
    assert torch.equal(logits.gather(1, ids), values)
    assert all(len(set(row)) == count for row in ids.tolist())


def reference(row: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Probabilities after all cuts, the slow way."""
    probabilities = torch.softmax(row.double() / sampling.temperature, dim=-1)
    order = probabilities.argsort(descending=True)
    if sampling.top_k:
        probabilities[order[sampling.top_k :]] = 0
        probabilities /= probabilities.sum()
    before = probabilities[order].cumsum(0) - probabilities[order]
    if sampling.top_p < 1:
        probabilities[order[before >= sampling.top_p]] = 0
    probabilities[probabilities < sampling.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([5, 100, 128, 129, 1000, 5000]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 20, 300]),
    top_p=st.sampled_from([0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
)
def test_draws_come_from_the_reference_distribution(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, vocab, generator=generator)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    draw = draw_tokens(logits.clone(), sampling, np.random.default_rng(seed).random(4))
    for row in range(4):
        expected = reference(logits[row], sampling)
        token = int(draw.token_ids[row])
        assert float(draw.logprobs[row]) == pytest.approx(float(expected[token].log()), abs=2e-5)
        if len(draw.kept[row]):
            assert draw.kept[row].tolist() == expected.nonzero()[:, 0].tolist()
        else:
            assert bool((expected > 0).all())


def test_frequencies_match_probabilities() -> None:
    draw = draw_tokens(
        logits_of(0.1, 0.2, 0.3, 0.4).expand(20_000, 4).clone(), SamplingParams(), uniforms((0,), 20_000)
    )
    shares = np.bincount(draw.token_ids, minlength=4) / 20_000
    np.testing.assert_allclose(shares, [0.1, 0.2, 0.3, 0.4], atol=0.015)
