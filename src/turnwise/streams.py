"""The growing tokens of one episode: append-only, each either given or sampled.

    observe(messages)   appends the tokens of what is new in the prompt, or opens a second stream
    answer(completion)  appends the sampled tokens as they are

Sampled tokens are the truth. They are never decoded and encoded again to extend the stream they are in; a template
that only trims or adds white space around an answer therefore changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from turnwise.errors import PolicyError, TemplateError
from turnwise.renderer import Renderer
from turnwise.types import (
    BoolArray,
    Completion,
    FloatArray,
    Image,
    IntArray,
    KeptSets,
    Message,
    Role,
    TokenStream,
)


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Where one turn lies in its stream."""

    stream_index: int
    prompt_start: int
    completion_start: int
    completion_end: int


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that did not extend the last one, and what was done about it."""

    turn_index: int
    """The turn whose prompt it was."""
    handling: Literal["white_space", "keep", "fork"]
    """white_space: the answer differed in white space only, the sampled tokens were kept."""
    expected: str
    found: str
    """The text from the first difference on, as sampled and as the template wrote it."""


class _GrowingStream:
    def __init__(self) -> None:
        self.ids: list[IntArray] = []
        self.is_sampled: list[BoolArray] = []
        self.logprobs: list[FloatArray] = []
        self.kept_rows: list[IntArray] = []
        self.has_kept_sets = False
        self.banned_ids: IntArray | None = None
        self.images: list[Image] = []
        self.length = 0

    def append(self, ids: IntArray, logprobs: FloatArray | None = None) -> None:
        self.ids.append(ids.astype(np.int32, copy=False))
        self.is_sampled.append(np.full(len(ids), logprobs is not None))
        self.logprobs.append(np.zeros(len(ids), dtype=np.float32) if logprobs is None else logprobs)
        self.length += len(ids)

    def append_kept(self, completion: Completion) -> None:
        if completion.kept is None:
            self.kept_rows += [np.empty(0, dtype=np.int32)] * len(completion.completion_ids)
            return
        self.has_kept_sets = True
        self.kept_rows += [completion.kept.row(index) for index in range(len(completion.kept))]

    def freeze(self) -> TokenStream:
        return TokenStream(
            ids=_joined(self.ids, np.int32),
            is_sampled=_joined(self.is_sampled, np.bool_),
            logprobs=_joined(self.logprobs, np.float32),
            kept=KeptSets.from_rows(self.kept_rows) if self.has_kept_sets else None,
            banned_ids=np.empty(0, dtype=np.int32) if self.banned_ids is None else self.banned_ids,
            images=tuple(self.images),
        )


class Conversation:
    """The messages and tokens of one episode so far; `observe` and `answer` alternate."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._messages: list[Message] = []
        self._rendered = ""
        self._streams = [_GrowingStream()]
        self._prompt_start = 0
        self._spans: list[Span] = []
        self._rewrites: list[Rewrite] = []
        self._last: Completion | None = None
        self._is_waiting = False

    def observe(self, messages: Sequence[Message]) -> None:
        """Take in what the environment showed; the prompt for the next answer is then in `prompt_ids`."""
        if self._is_waiting:
            raise ValueError("observe was called twice in a row; each observation needs an answer first")
        if not messages:
            raise TemplateError("an observation has no messages; the environment must show at least one")
        spoken = [*self._messages, *messages]
        rendered = self._renderer.render(spoken)
        if self._last is None:
            self._start_stream(rendered, spoken)
        else:
            self._extend(rendered, spoken, messages)
        self._messages, self._rendered, self._is_waiting = spoken, rendered, True

    def answer(self, completion: Completion) -> None:
        """Take in what the policy sampled for the current prompt."""
        if not self._is_waiting:
            raise ValueError("answer was called without an observation to answer")
        stream = self._streams[-1]
        self._check_completion(completion, stream)
        start = stream.length
        stream.append(completion.completion_ids, completion.logprobs.astype(np.float32, copy=False))
        stream.append_kept(completion)
        self._spans.append(
            Span(
                stream_index=len(self._streams) - 1,
                prompt_start=self._prompt_start,
                completion_start=start,
                completion_end=stream.length,
            )
        )
        self._messages.append(Message(role=Role.ASSISTANT, content=self._answer_text(completion)))
        self._last, self._is_waiting = completion, False

    @property
    def prompt_ids(self) -> IntArray:
        """All the tokens of the current stream."""
        return _joined(self._streams[-1].ids, np.int32)

    @property
    def images(self) -> tuple[Image, ...]:
        """The images of the current stream, in the order of their placeholders."""
        return tuple(self._streams[-1].images)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, answers included."""
        return tuple(self._messages)

    @property
    def stream_index(self) -> int:
        return len(self._streams) - 1

    @property
    def spans(self) -> tuple[Span, ...]:
        """One per answered turn."""
        return tuple(self._spans)

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        """Each time the template did not simply extend the prompt, and what was done."""
        return tuple(self._rewrites)

    def streams(self) -> tuple[TokenStream, ...]:
        """All tokens so far; every sampled token is in exactly one stream."""
        return tuple(stream.freeze() for stream in self._streams)

    def _start_stream(self, rendered: str, spoken: Sequence[Message]) -> None:
        images = [image for message in spoken for image in message.images]
        stream = self._streams[-1]
        stream.append(self._renderer.encode(rendered, images=images, is_start=True))
        stream.images = images
        self._prompt_start = 0

    def _extend(self, rendered: str, spoken: Sequence[Message], messages: Sequence[Message]) -> None:
        expected = self._rendered + self._renderer.answer_text(self._messages[-1].text)
        if rendered.startswith(expected):
            self._append_given(rendered[len(expected) :], messages)
            return
        rewrite = _describe(len(self._spans), expected, rendered)
        rest = None
        if self._renderer.history == "keep" or rendered.startswith(self._rendered):
            rest = self._renderer.render_rest(spoken, len(self._messages) - 1)
        if rest is not None and self._is_same_but_for_white_space(expected, rendered, rest):
            self._rewrites.append(msgspec.structs.replace(rewrite, handling="white_space"))
            self._append_given(rest, messages)
        elif self._renderer.history == "keep":
            if rest is None:
                raise TemplateError(
                    "the chat template leaves the assistant's last message out of the prompt, so new messages cannot be "
                    "appended to it; use rollout.history=fork or another template"
                )
            self._rewrites.append(msgspec.structs.replace(rewrite, handling="keep"))
            self._append_given(rest, messages)
        elif self._renderer.history == "fork":
            self._rewrites.append(rewrite)
            self._streams.append(_GrowingStream())
            self._start_stream(rendered, spoken)
        else:
            raise TemplateError(
                f"the chat template rewrote history before turn {rewrite.turn_index}: expected {rewrite.expected!r}, "
                f"found {rewrite.found!r}; use rollout.history=fork or keep, or a template that keeps every message"
            )

    def _is_same_but_for_white_space(self, expected: str, rendered: str, rest: str) -> bool:
        if not rendered.startswith(self._rendered) or not rendered.endswith(rest):
            return False
        written = rendered[len(self._rendered) : len(rendered) - len(rest)]
        return written.split() == expected[len(self._rendered) :].split()

    def _append_given(self, rest: str, messages: Sequence[Message]) -> None:
        assert self._last is not None
        stream = self._streams[-1]
        if len(self._last.completion_ids):
            # The model said itself that its turn is over; the template would say it again.
            rest = rest.removeprefix(self._renderer.control_text(int(self._last.completion_ids[-1])))
        images = [image for message in messages for image in message.images]
        self._prompt_start = stream.length
        stream.append(self._renderer.encode(rest, images=images))
        stream.images += images

    def _answer_text(self, completion: Completion) -> str:
        if not len(completion.completion_ids):
            return completion.text
        return completion.text.removesuffix(self._renderer.control_text(int(completion.completion_ids[-1])))

    def _check_completion(self, completion: Completion, stream: _GrowingStream) -> None:
        image_token_id = self._renderer.image_token_id
        if image_token_id is not None and (completion.completion_ids == image_token_id).any():
            where = int(np.flatnonzero(completion.completion_ids == image_token_id)[0])
            raise PolicyError(
                f"sampled token {where} of turn {len(self._spans)} is the image placeholder {image_token_id}; "
                "the policy must ban it (Completion.banned_ids)"
            )
        if stream.banned_ids is None:
            stream.banned_ids = completion.banned_ids
        elif not np.array_equal(stream.banned_ids, completion.banned_ids):
            raise PolicyError(
                f"turn {len(self._spans)} was sampled with {len(completion.banned_ids)} banned ids, the turns before it "
                f"with {len(stream.banned_ids)} others; a policy must ban the same ids throughout a stream"
            )


def _joined(parts: list[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def _describe(turn_index: int, expected: str, rendered: str, width: int = 60) -> Rewrite:
    same = next(
        (index for index, (left, right) in enumerate(zip(expected, rendered, strict=False)) if left != right),
        min(len(expected), len(rendered)),
    )
    return Rewrite(
        turn_index=turn_index,
        handling="fork",
        expected=expected[same : same + width],
        found=rendered[same : same + width],
    )
