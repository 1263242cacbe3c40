"""The pieces together: a vision-language model acts in a made room, through the public names."""

from types import SimpleNamespace

import pytest

from turnwise import EpisodeSimulator, NavigationEnvironment
from turnwise.models.tiny_vision import build_image_processor, build_network, build_tokenizer
from turnwise.templates import SMALL_ROOMS
from turnwise.types import MaskingMethod, StopReason


@pytest.mark.parametrize("use_grammar", [False, True])
def test_a_vision_language_model_plays_an_episode(use_grammar: bool) -> None:
    if use_grammar:
        pytest.importorskip("xgrammar", reason="constrained actions need the extra `grammar`")
    tokenizer = build_tokenizer()
    processor = SimpleNamespace(tokenizer=tokenizer, image_processor=build_image_processor())
    env = NavigationEnvironment(**{**SMALL_ROOMS, "max_turns": 2})
    env.load_scene("made-0-train-00003")
    with EpisodeSimulator(
        build_network(tokenizer, 0), processor, min_action_tokens=1, max_turns=2, max_new_tokens=40, use_grammar=use_grammar,
        kv_budget_mb=64,
    ) as simulator:  # fmt: skip
        episode = simulator.run_episode(env, env.get_random_pose(seed=5), "ep001")
    assert episode.failure is None
    assert episode.stop_reason is StopReason.TERMINAL
    (stream,) = episode.streams
    assert len(stream.images) == episode.num_turns
    image_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert int((stream.ids == image_token).sum()) == 9 * episode.num_turns
    assert not (stream.ids[stream.is_sampled] == image_token).any()
    if use_grammar:
        assert all(turn.is_action_valid for turn in episode.turns)
        assert all(turn.masking_method is MaskingMethod.BRACE_DEPTH for turn in episode.turns)
        assert episode.metrics["invalid_actions"] == 0
