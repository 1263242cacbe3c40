from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from tests.chat_tokenizers import NASTY_MERGES, byte_tokenizer

from turnwise.masking import ActionTokenMasker, TokenBytes
from turnwise.types import MaskingMethod

KEYS = frozenset({"rotation_angle_degrees", "forward_meters"})
VALID = '{"rotation_angle_degrees": 15, "forward_meters": 0.5}'


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(NASTY_MERGES)


@pytest.fixture(scope="module")
def token_bytes(tokenizer):
    return TokenBytes(tokenizer)


def masked_text(token_bytes, ids, mask) -> str:
    return token_bytes.text(np.array(ids)[mask.action_token_mask])


# The edge-case table, row by row.


def test_valid_json_is_masked_by_brace_depth_with_full_confidence(tokenizer, token_bytes):
    masker = ActionTokenMasker(token_bytes)
    ids = tokenizer.encode(f"I see a chair.\n{VALID}<|im_end|>")
    mask = masker.mask(ids, KEYS)
    assert (mask.method, mask.confidence, mask.problem) == (MaskingMethod.BRACE_DEPTH, 1.0, None)
    assert mask.action.value == {"rotation_angle_degrees": 15, "forward_meters": 0.5}
    assert mask.action.text == VALID
    assert masked_text(token_bytes, ids, mask).strip() == VALID
    assert not mask.action_token_mask[-1]
    assert masker.evaluate([mask]).is_valid


@pytest.mark.parametrize("length", range(1, len(VALID)))
def test_truncated_json_falls_back_to_regex(tokenizer, token_bytes, length):
    masker = ActionTokenMasker(token_bytes, min_action_tokens=1)
    ids = tokenizer.encode(f"I see a chair. {VALID[:length]}")
    mask = masker.mask(ids, KEYS)
    assert (mask.method, mask.confidence) == (MaskingMethod.REGEX, 0.7)
    assert mask.action.value is None
    assert mask.action.text == VALID[:length]
    assert masked_text(token_bytes, ids, mask).lstrip() == VALID[:length]
    quality = masker.evaluate([mask])
    assert quality.is_valid
    assert quality.masking_quality == "fallback_used"


@pytest.mark.parametrize("text", ["I cannot see anything.", "a } b", "It is 15 degrees to the left."])
def test_no_json_fails_and_drops_the_episode(tokenizer, token_bytes, text):
    masker = ActionTokenMasker(token_bytes)
    mask = masker.mask(tokenizer.encode(text), KEYS)
    assert (mask.method, mask.confidence) == (MaskingMethod.FAILED, 0.0)
    assert mask.num_action_tokens == 0
    quality = masker.evaluate([mask])
    assert not quality.is_valid
    assert quality.dropout_reason == "no_json in turn 0: the completion holds no JSON object"


@pytest.mark.parametrize(
    "text",
    [
        "{rotation_angle_degrees: 15, forward_meters: 0.5}",
        '{"rotation_angle_degrees": 15, "forward_meters": 0.5,}',
        '{"rotation_angle_degrees": 15 "forward_meters": 0.5}',
        '{"rotation_angle_degrees": NaN, "forward_meters": 0.5}',
        '{"rotation_angle_degrees": 1e999, "forward_meters": 0.5}',
        '{"rotation_angle_degrees": 015, "forward_meters": .5}',
        '{"rotation_angle_degrees": "\\ud800", "forward_meters": 0.5}',
    ],
)
def test_invalid_json_drops_the_episode(tokenizer, token_bytes, text):
    masker = ActionTokenMasker(token_bytes)
    mask = masker.mask(tokenizer.encode(text), KEYS)
    assert (mask.method, mask.confidence, mask.problem) == (MaskingMethod.FAILED, 0.0, "invalid_json")
    assert not masker.evaluate([mask]).is_valid


def test_nested_json_is_masked_to_the_outer_brace(tokenizer, token_bytes):
    text = '{"rotation_angle_degrees": {"value": {"deg": 15}}, "forward_meters": [{"m": "}"}]}'
    mask = ActionTokenMasker(token_bytes).mask(tokenizer.encode(f"so {text} done"), KEYS)
    assert mask.confidence >= 0.7
    assert mask.action.text == text


@pytest.mark.parametrize(
    "text",
    ["{forward_meters: 1", '"go. {forward_meters: 1', "{'forward_meters': 1"],
)
def test_an_unclosed_object_that_is_no_json_is_found_by_regex(tokenizer, token_bytes, text):
    masker = ActionTokenMasker(token_bytes)
    ids = tokenizer.encode(f"so {text}<|im_end|>")
    mask = masker.mask(ids, KEYS)
    assert (mask.method, mask.action.value) == (MaskingMethod.REGEX, None)
    assert mask.action.text == text[text.rindex("{") :]


def test_quotes_without_end_cost_no_quadratic_time(tokenizer, token_bytes):
    masker = ActionTokenMasker(token_bytes)
    ids = tokenizer.encode('{x \\"' * 20_000)
    started = time.process_time()
    assert masker.mask(ids, KEYS).method is MaskingMethod.FAILED
    assert time.process_time() - started < 5


def test_keys_without_braces_fall_back_to_the_last_tokens(tokenizer, token_bytes):
    masker = ActionTokenMasker(token_bytes, last_n=12)
    ids = tokenizer.encode("I turn. rotation_angle_degrees: 15<|im_end|>")
    mask = masker.mask(ids, KEYS)
    assert (mask.method, mask.confidence) == (MaskingMethod.LAST_N, 0.3)
    assert mask.num_action_tokens == 12
    assert masked_text(token_bytes, ids, mask) == "_degrees: 15"
    assert not mask.action_token_mask[-1]
    assert mask.action.value is None


def test_an_empty_completion_is_named(tokenizer, token_bytes):
    masker = ActionTokenMasker(token_bytes)
    for text in ("", "<|im_end|>", "  \n"):
        assert masker.mask(tokenizer.encode(text), KEYS).problem == "empty_completion"


def test_json_without_an_action_key_is_no_action(tokenizer, token_bytes):
    masker = ActionTokenMasker(token_bytes, min_action_tokens=1)
    mask = masker.mask(tokenizer.encode('{"thought": "hm"}'), KEYS)
    assert (mask.method, mask.problem) == (MaskingMethod.FAILED, "no_action_key")
    assert masker.mask(tokenizer.encode('{"thought": "hm"}')).action.value == {"thought": "hm"}


def test_braces_in_the_reasoning_do_not_hide_the_action(tokenizer, token_bytes):
    text = f'The set {{1, 2}} and {{"a": 1}} and {{"open": "{VALID}'
    mask = ActionTokenMasker(token_bytes).mask(tokenizer.encode(text), KEYS)
    assert mask.method is MaskingMethod.BRACE_DEPTH
    assert mask.action.text == VALID


def test_the_token_count_is_checked_against_the_range(tokenizer, token_bytes):
    masker = ActionTokenMasker(token_bytes, min_action_tokens=10, max_action_tokens=20)
    short = masker.mask(tokenizer.encode("{}"))
    assert (short.method, short.problem) == (MaskingMethod.BRACE_DEPTH, "too_few_action_tokens")
    long = masker.mask(tokenizer.encode(VALID), KEYS)
    assert long.problem == "too_many_action_tokens"
    assert masker.evaluate([long]).dropout_reason == (
        f"too_many_action_tokens in turn 0: the action has {long.num_action_tokens} tokens, outside 10 to 20"
    )


def test_quality_follows_the_share_of_fallbacks(tokenizer, token_bytes):
    masker = ActionTokenMasker(token_bytes)
    good = masker.mask(tokenizer.encode(VALID), KEYS)
    cut = masker.mask(tokenizer.encode(VALID[:-1]), KEYS)
    assert masker.evaluate([good, good]).masking_quality == "good"
    assert masker.evaluate([good, cut]).masking_quality == "low_confidence"
    assert masker.evaluate([good, cut, cut]).masking_quality == "fallback_used"
    assert masker.evaluate([]).dropout_reason == "no_turns: the episode ended before the first completion"


def test_statistics_count_methods_qualities_and_dropouts(tokenizer, token_bytes):
    masker = ActionTokenMasker(token_bytes)
    good, none = (masker.mask(tokenizer.encode(text), KEYS) for text in (VALID, "no"))
    masker.evaluate([good])
    masker.evaluate([good, none])
    statistics = masker.statistics
    assert statistics.num_turns == 2
    assert statistics.methods == {"brace_depth": 1, "regex": 0, "last_n": 0, "failed": 1}
    assert statistics.qualities == {"good": 1, "low_confidence": 1}
    assert statistics.dropouts == {"no_json": 1}
    assert statistics.dropout_rate == 0.5
    assert statistics.num_action_tokens == good.num_action_tokens


def test_integers_beyond_64_bits_become_floats(tokenizer, token_bytes):
    masker = ActionTokenMasker(token_bytes, max_action_tokens=10_000)
    assert masker.mask(tokenizer.encode('{"a": 123456789012345678901}')).action.value == {
        "a": 123456789012345678901.0
    }
    digits = "1" * 5000
    assert masker.mask(tokenizer.encode(f'{{"a": {digits}}}')).problem == "invalid_json"


def test_tensors_of_one_completion_are_taken_and_batches_are_not(tokenizer, token_bytes):
    masker = ActionTokenMasker(token_bytes)
    ids = tokenizer.encode(f"so {VALID}")
    plain = masker.mask(ids, KEYS)
    assert plain.action_token_start_index == np.flatnonzero(plain.action_token_mask)[0]
    assert plain.action_token_end_index == len(ids)
    for given in (torch.tensor(ids), torch.tensor([ids]), np.array(ids)):
        assert masker.mask(given, KEYS).action_token_mask.tolist() == plain.action_token_mask.tolist()
    with pytest.raises(ValueError, match=r"shape \(2, "):
        masker.mask(torch.tensor([ids, ids]), KEYS)


def test_settings_that_cannot_work_are_refused(token_bytes):
    with pytest.raises(ValueError, match="must ascend"):
        ActionTokenMasker(token_bytes, min_action_tokens=5, max_action_tokens=4)
    with pytest.raises(ValueError, match="last_n is 0"):
        ActionTokenMasker(token_bytes, last_n=0)
