from __future__ import annotations

import pytest
from tests.chat_tokenizers import NASTY_MERGES, byte_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from turnwise.errors import ModelError
from turnwise.token_bytes import TokenBytes


def fast(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def test_byte_level_tokens_give_their_bytes_also_half_characters():
    tokenizer = byte_tokenizer([*NASTY_MERGES, b"\xf0\x9f"])
    token_bytes = TokenBytes(tokenizer)
    ids = tokenizer.encode('{"é": "😀."}<|im_end|>')
    assert [token_bytes[index] for index in ids] == [
        b'{"', b"\xc3", b"\xa9", b'": "', b"\xf0\x9f", b"\x98", b"\x80", b'."}', b"",
    ]  # fmt: skip
    assert token_bytes.text(ids) == '{"é": "😀."}'


def test_added_tokens_that_are_not_special_stand_for_their_text():
    tokenizer = byte_tokenizer()
    assert TokenBytes(tokenizer).text(tokenizer.encode("<think>a</think>")) == "<think>a</think>"


def test_sentencepiece_tokens_give_spaces_and_fallback_bytes():
    words = ["▁", "▁{", '"', "a", ":", "}", "▁1"]
    vocabulary = {"<unk>": 0, "</s>": 1, **{f"<0x{value:02X}>": 2 + value for value in range(256)}}
    vocabulary |= {word: 258 + index for index, word in enumerate(words)}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "{")][:0], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    token_bytes = TokenBytes(fast(backend))
    assert token_bytes[vocabulary["<0xF0>"]] == b"\xf0"
    assert token_bytes[vocabulary["▁{"]] == b" {"
    assert token_bytes[1] == b""


def test_wordpiece_and_word_level_tokens_are_separated_by_spaces():
    vocabulary = {"<unk>": 0, "</s>": 1, "{": 2, "mo": 3, "##ve": 4, "}": 5, '"': 6, ":": 7}
    backend = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    token_bytes = TokenBytes(fast(backend))
    assert token_bytes.join([2, 6, 3, 4, 6, 7]) == b' { " move " :'
    backend = Tokenizer(
        models.WordLevel(vocab={"<unk>": 0, "</s>": 1, "{": 2, "move": 3, "}": 4}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    assert TokenBytes(fast(backend)).join([2, 3, 4, 1]) == b" { move }"


def test_ids_beyond_the_vocabulary_stand_for_nothing():
    assert TokenBytes(byte_tokenizer())[10**6] == b""


def test_a_tokenizer_whose_tokens_were_misread_is_refused():
    backend = Tokenizer(
        models.WordLevel(vocab={"<unk>": 0, "</s>": 1, **{c: i + 2 for i, c in enumerate("{move}")}})
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    # It writes its tokens in a way nobody could guess.
    backend.decoder = decoders.Sequence([decoders.Replace("m", "xyz"), decoders.Fuse()])
    with pytest.raises(ModelError, match="could not be read as bytes"):
        TokenBytes(fast(backend))
