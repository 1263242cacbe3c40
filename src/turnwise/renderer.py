"""Messages become tokens: any Hugging Face chat template, images expanded, hostile text kept harmless.

A rendered prompt is text with seams: a seam is put inside every control token (`<|im_end|>` …) that a message
spells out, and the pieces between seams are encoded one by one. So an environment can quote such a string, but only
the template can write the token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from turnwise.errors import TemplateError
from turnwise.types import Image, IntArray, Message, Role

History = Literal["keep", "fork", "error"]

# A noncharacter: no text can mean anything by it, and templates pass it through.
_SEAM = "\ufdd0"
_SENTINEL = "\ufdd1turnwise-answer\ufdd1"
_RESERVED = str.maketrans({_SEAM: "\ufffd", "\ufdd1": "\ufffd"})
_IMAGE_TOKENS = ("<|image_pad|>", "<image>", "<image_soft_token>", "[IMG]", "<|image|>")


class Renderer:
    """Renders conversations with a tokenizer's chat template and encodes the text that comes out.

    `history` says what a conversation does when the template rewrites what was already answered: `keep` the sampled
    tokens and append only what is new, `fork` a second stream from the rewritten text, or stop with an `error`.
    """

    def __init__(
        self,
        tokenizer: Any,  # Hugging Face tokenizers share no importable light base
        *,
        image_processor: Any = None,
        history: History = "fork",
    ) -> None:
        if history not in ("keep", "fork", "error"):
            raise TemplateError(f"history is {history!r}; use keep, fork or error")
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.history = history
        self._template = _chat_template(tokenizer)
        self.special_ids = frozenset(
            int(index) for index in tokenizer.all_special_ids if index is not None
        ) | frozenset(int(index) for index, token in tokenizer.added_tokens_decoder.items() if token.special)
        self.image_token_id = _image_token_id(tokenizer)
        self._own_controls, self._foreign_controls = self._control_patterns()
        self._newline_ids: list[int] = tokenizer.encode("\n", add_special_tokens=False)
        self._adds_prefix = self._encode_after_newline("a") != tokenizer.encode("a", add_special_tokens=False)
        self._num_image_tokens: dict[tuple[int, int], int] = {}

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt as text with seams."""
        return self._apply([self._plain(message) for message in messages], add_generation_prompt)

    def render_rest(self, messages: Sequence[Message], answer_index: int) -> str | None:
        """What the template writes after the assistant's message at `answer_index`, whatever that message says.

        None when it leaves that message out.
        """
        plain = [self._plain(message) for message in messages]
        plain[answer_index]["content"] = _SENTINEL
        _, found, rest = self._apply(plain, True).rpartition(_SENTINEL)
        return rest if found else None

    def answer_text(self, text: str) -> str:
        """The assistant's text as `render` writes it into the prompt when the template leaves it alone."""
        return _seamed(text, self._own_controls)

    def encode(self, rendered: str, *, images: Sequence[Image] = (), is_start: bool = False) -> IntArray:
        """Token ids of rendered text, with one placeholder per image token; `is_start` for the first prompt of a stream."""
        ids: list[int] = []
        for index, piece in enumerate(rendered.split(_SEAM)):
            if piece:
                ids += self._encode_piece(piece, is_start=is_start and index == 0)
        return self._expand_images(np.asarray(ids, dtype=np.int32), images)

    def num_image_tokens(self, image: Image) -> int:
        """How many placeholders an image takes: the patches of the image processor's grid, merged."""
        size = (image.height, image.width)
        if size not in self._num_image_tokens:
            self._num_image_tokens[size] = self._count_image_tokens(image)
        return self._num_image_tokens[size]

    def control_text(self, token_id: int) -> str:
        """What a special token looks like in rendered text; empty for other tokens."""
        return str(self.tokenizer.convert_ids_to_tokens(token_id)) if token_id in self.special_ids else ""

    def _apply(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        import jinja2

        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateError(
                f"the chat template raised on messages of roles {roles}: {error}; "
                "change the messages the environment sends or the tokenizer's chat template"
            ) from error
        return str(rendered)

    def _plain(self, message: Message) -> dict[str, Any]:
        """The message as templates expect it; content is a list only when it holds images."""
        controls = self._own_controls if message.role is Role.ASSISTANT else self._foreign_controls
        if not message.images:
            return {"role": message.role.value, "content": _seamed(message.text, controls)}
        parts: list[dict[str, str]] = []
        for part in message.content:
            if isinstance(part, Image):
                parts.append({"type": "image"})
            elif parts and parts[-1]["type"] == "text":
                # Two texts in a row could spell a control token together.
                parts[-1]["text"] += part
            else:
                parts.append({"type": "text", "text": part})
        return {
            "role": message.role.value,
            "content": [
                {"type": "text", "text": _seamed(part["text"], controls)} if part["type"] == "text" else part
                for part in parts
            ],
        }

    def _control_patterns(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """The control tokens a message must not write: the special ones, and for others than the assistant also
        those added tokens that the template itself writes (`<think>`, `<tool_call>` …)."""
        added = [
            (str(token.content), bool(token.special))
            for token in self.tokenizer.added_tokens_decoder.values()
        ]
        special = {text for text, is_special in added if is_special} | set(self.tokenizer.all_special_tokens)
        written = {text for text, _ in added if text.strip() and text in self._template}
        return _one_of(special), _one_of(special | written)

    def _encode_piece(self, piece: str, *, is_start: bool) -> list[int]:
        if self._adds_prefix and not is_start:
            return self._encode_after_newline(piece)
        ids: list[int] = self.tokenizer.encode(piece, add_special_tokens=False, verbose=False)
        return ids

    def _encode_after_newline(self, piece: str) -> list[int]:
        # SentencePiece tokenizers put a space before the first word of a text; in the middle of a stream there is none.
        after: list[int] = self.tokenizer.encode("\n" + piece, add_special_tokens=False, verbose=False)
        if after[: len(self._newline_ids)] == self._newline_ids:
            return after[len(self._newline_ids) :]
        ids: list[int] = self.tokenizer.encode(piece, add_special_tokens=False, verbose=False)
        return ids

    def _expand_images(self, ids: IntArray, images: Sequence[Image]) -> IntArray:
        is_placeholder = ids == (-1 if self.image_token_id is None else self.image_token_id)
        if int(is_placeholder.sum()) != len(images):
            raise TemplateError(
                f"the prompt has {int(is_placeholder.sum())} image placeholders for {len(images)} images; "
                "the chat template must write one image token for each image"
            )
        if not images:
            return ids
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[is_placeholder] = [self.num_image_tokens(image) for image in images]
        return np.repeat(ids, repeats)

    def _count_image_tokens(self, image: Image) -> int:
        processor = self.image_processor
        if processor is None:
            raise TemplateError(
                "a message holds an image but the renderer has no image processor; "
                "use a vision-language model or an environment without images"
            )
        if hasattr(processor, "get_number_of_image_patches"):
            num_patches = int(processor.get_number_of_image_patches(image.height, image.width))
        else:
            grid_thw = processor(images=[image.pixels], return_tensors="np").get("image_grid_thw")
            if grid_thw is None:
                raise TemplateError(
                    f"{type(processor).__name__} gives no image_grid_thw, so the number of placeholders is unknown; "
                    "use an image processor with a patch grid (Qwen-VL)"
                )
            num_patches = int(np.prod(grid_thw[0]))
        return num_patches // int(processor.merge_size) ** 2


def _chat_template(tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        raise TemplateError(
            f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__} has no chat template; set "
            "tokenizer.chat_template (a Jinja text), or use an instruct model, whose tokenizer brings one"
        )
    return str(tokenizer.get_chat_template())


def _image_token_id(tokenizer: Any) -> int | None:
    named = getattr(tokenizer, "image_token_id", None)
    if named is not None:
        return int(named)
    added = {str(token.content): int(index) for index, token in tokenizer.added_tokens_decoder.items()}
    return next((added[text] for text in _IMAGE_TOKENS if text in added), None)


def _one_of(texts: set[str]) -> re.Pattern[str]:
    # A token of one character cannot be broken by a seam; longer ones first, so that none hides in another.
    breakable = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, breakable)) or "(?!)")


def _seamed(text: str, controls: re.Pattern[str]) -> str:
    def break_up(match: re.Match[str]) -> str:
        return match[0][0] + _SEAM + match[0][1:]

    return controls.sub(break_up, text.translate(_RESERVED))
