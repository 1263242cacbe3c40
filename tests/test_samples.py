"""Which tokens are trained, with what, and what is refused by name."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tests.learning_cases import make_advantages, make_episode, make_groups, make_stream, random_advantages

from turnwise.errors import SampleError
from turnwise.packs import build_packs
from turnwise.samples import Samples, build_samples, loss_mask
from turnwise.types import Episode, KeptSets, MaskingMethod, TokenStream


def one_stream(**fields: object) -> TokenStream:
    """prompt 1 2 3, answer 4 5 6, prompt 7 8, answer 9 10"""
    stream = make_stream([([1, 2, 3], False), ([4, 5, 6], True), ([7, 8], False), ([9, 10], True)], **fields)
    stream.logprobs[:] = -np.arange(10, dtype=np.float32) / 10
    return stream


def build(episodes: list[Episode], advantages=None, **settings: object) -> Samples:
    settings = {"tokens_per_pack": 64, **settings}
    return build_samples(make_groups(episodes), advantages or random_advantages(episodes), **settings)


def test_only_action_tokens_carry_loss() -> None:
    masks = [np.array([False, True, True]), np.array([True, False])]
    episode = make_episode("e", [one_stream()], masks=masks)
    (sample,) = build([episode], make_advantages([episode], [[1.5, -2.0]])).samples
    assert sample.targets_R.tolist() == [4, 5, 8]
    assert sample.target_ids_R.tolist() == [5, 6, 9]
    assert sample.advantages_R.tolist() == [1.5, 1.5, -2.0]
    assert sample.turn_indices_R.tolist() == [0, 0, 1]
    np.testing.assert_allclose(sample.logprobs_R, [-0.4, -0.5, -0.8], rtol=1e-6)
    # Token 8 is the last target: nothing from there on is read.
    assert sample.num_needed_tokens == 8


def test_a_turn_without_credit_takes_no_part() -> None:
    episode = make_episode("e", [one_stream()])
    (sample,) = build([episode], make_advantages([episode], [[None, 2.0]])).samples
    assert sample.targets_R.tolist() == [8, 9]


def test_kept_rows_belong_to_sampled_tokens_in_order() -> None:
    rows = [np.array([token, 50 + token], np.int32) for token in (4, 5, 6, 9, 10)]
    masks = [np.array([False, False, True]), np.array([True, True])]
    episode = make_episode("e", [one_stream(kept=KeptSets.from_rows(rows))], masks=masks)
    (sample,) = build([episode]).samples
    assert [sample.kept_row(index).tolist() for index in range(3)] == [[6, 56], [9, 59], [10, 60]]


def test_each_stream_of_a_forked_episode_is_a_sample() -> None:
    streams = [make_stream([([1, 2], False), ([3], True)]), make_stream([([1, 5], False), ([6], True)])]
    samples = build([make_episode("e", streams)])
    assert [sample.turn_indices_R.tolist() for sample in samples.samples] == [[0], [1]]
    assert samples.episode_ids == ("e",)


def test_episodes_that_take_no_part_are_counted() -> None:
    good = make_episode("good", [one_stream()])
    unscored = make_episode("unscored", [one_stream()])
    episodes = [good, unscored]
    samples = build(episodes, make_advantages(episodes, [[1.0, 1.0], [None, None]]))
    assert samples.episode_ids == ("good",)
    assert samples.metrics["episodes_left_out"] == 1


def test_a_turn_without_an_action_trains_on_everything_it_sampled() -> None:
    episode = make_episode("odd", [one_stream()])
    first, second = episode.turns
    lost = msgspec.structs.replace(
        first,
        masking_method=MaskingMethod.FAILED,
        masking_confidence=0.0,
        action_token_mask=np.zeros_like(first.action_token_mask),
    )
    assert loss_mask(lost, "action").all()
    assert (loss_mask(second, "action") == second.action_token_mask).all()
    assert loss_mask(second, "completion").all()
    odd = msgspec.structs.replace(episode, turns=(lost, second), is_valid=False)
    (sample,) = build([odd], make_advantages([odd], [[1.0, 2.0]])).samples
    whole = list(range(first.completion_start, first.completion_end))
    action = (np.flatnonzero(second.action_token_mask) + second.completion_start).tolist()
    assert sample.targets_R.tolist() == [*whole, *action]


def bad_logprob() -> Episode:
    stream = one_stream()
    stream.logprobs[4] = np.nan
    return make_episode("bad", [stream])


def given_token() -> Episode:
    stream = one_stream()
    episode = make_episode("bad", [stream])
    stream.is_sampled[4] = False
    return episode


def short_kept() -> Episode:
    return make_episode("bad", [one_stream(kept=KeptSets.from_rows([np.array([4], np.int32)]))])


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        (make_episode("bad", [one_stream()], is_token_exact=False), "episode bad is not token-exact"),
        (make_episode("bad", [one_stream()], temperature=0.0), "episode bad was sampled greedily"),
        (
            make_episode("bad", [one_stream()], masks=[np.zeros(3, bool), np.zeros(2, bool)]),
            "episode bad has no action token in any of its 2 turns",
        ),
        (bad_logprob(), "turn 0 of episode bad has log-probs"),
        (given_token(), "turn 0 of episode bad has 1 tokens that were given, not sampled"),
        (short_kept(), "turn 0 of episode bad: the stream has 5 sampled tokens but 1 kept sets"),
        (
            make_episode("bad", [make_stream([([4, 5], True)])]),
            "turn 0 of episode bad was sampled from an empty prompt",
        ),
    ],
)
def test_an_episode_that_cannot_be_trained_on_is_refused_by_name(episode: Episode, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        build([episode])


@pytest.mark.parametrize("advantage", [float("nan"), float("inf")])
def test_an_advantage_that_is_no_number_is_refused(advantage: float) -> None:
    episode = make_episode("bad", [one_stream()])
    with pytest.raises(SampleError, match="turn 1 of episode bad has the advantage"):
        build([episode], make_advantages([episode], [[1.0, advantage]]))


def test_credits_of_other_turns_or_episodes_are_refused() -> None:
    episode = make_episode("bad", [one_stream()])
    with pytest.raises(SampleError, match="episode bad has 2 turns but 1 credits"):
        build([episode], make_advantages([episode], [[1.0]]))
    with pytest.raises(SampleError, match="episode bad has no entry"):
        build([episode], make_advantages([], []))


def test_a_batch_without_anything_to_train_is_refused() -> None:
    episode = make_episode("e", [one_stream()])
    with pytest.raises(SampleError, match="none of the 1 episodes can be trained on"):
        build([episode], make_advantages([episode], [[None, None]]))


def test_a_sampled_id_outside_its_kept_set_is_refused() -> None:
    rows = [np.array([token], np.int32) for token in (4, 5, 77, 9, 10)]
    samples = build([make_episode("bad", [one_stream(kept=KeptSets.from_rows(rows))])])
    with pytest.raises(SampleError, match="episode bad sampled id 6, which is not among the 1 ids"):
        build_packs(samples)


def test_a_sampled_id_that_is_banned_is_refused() -> None:
    samples = build([make_episode("bad", [one_stream(banned_ids=[9])])])
    with pytest.raises(SampleError, match="episode bad sampled an id that its own stream bans"):
        build_packs(samples)


def test_a_stream_longer_than_a_pack_is_refused() -> None:
    samples = build([make_episode("long", [one_stream()])], tokens_per_pack=8)
    with pytest.raises(
        SampleError, match=r"episode long has a stream of 9 tokens but training\.tokens_per_pack is 8"
    ):
        build_packs(samples)


def siblings(count: int, group: str = "g0") -> list[Episode]:
    return [
        make_episode(
            f"{group}-{index}",
            [make_stream([(range(1, 9), False), ([20 + index] * 4, True)])],
            group_id=group,
        )
        for index in range(count)
    ]


def test_packs_hold_as_many_distinct_tokens_as_fit() -> None:
    # A prompt of 8, then 3 tokens each (the last is only a target): 8 + 3 n.
    packs = build_packs(build(siblings(5), tokens_per_pack=17))
    assert [len(pack.tree) for pack in packs] == [17, 14]
    assert sum(pack.num_rows for pack in packs) == 20
    plain = build_packs(build(siblings(5), tokens_per_pack=22, use_trees=False))
    assert [len(pack.tree) for pack in plain] == [22, 22, 11]


def test_rows_that_ask_for_the_same_distribution_share_a_head_row() -> None:
    (pack,) = build_packs(build(siblings(3)))
    # The first tokens of all three are predicted by the prompt's last token; then 3 positions each.
    assert len(pack.head.positions_U) == 1 + 3 * 3
    assert pack.num_rows == 12


def test_minibatches_are_whole_groups_while_there_are_enough() -> None:
    episodes = [*siblings(2, "a"), *siblings(2, "b"), *siblings(2, "c")]
    parts = build(episodes).split(3)
    assert sorted(part.episode_ids for part in parts) == [("a-0", "a-1"), ("b-0", "b-1"), ("c-0", "c-1")]
    parts = build(episodes).split(6)
    assert sorted(len(part.episode_ids) for part in parts) == [1] * 6
    with pytest.raises(
        SampleError, match=r"training\.num_minibatches is 7 but the batch has 6 trainable episodes"
    ):
        build(episodes).split(7)


def test_samples_are_frozen() -> None:
    samples = build(siblings(1))
    with pytest.raises(AttributeError):
        samples.samples = ()  # type: ignore[misc]
    assert isinstance(msgspec.structs.replace(samples, tokens_per_pack=99), Samples)
