"""What is sent to model servers and how their answers are read, one pair of functions for each way to ask."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from turnwise.errors import PolicyError
from turnwise.policies.answers import Piece, ServerVocabulary
from turnwise.policies.prefixes import image_spans
from turnwise.policy import Request
from turnwise.types import Image, IntArray, Json, Message, SamplingParams

# Far below any log-prob that matters: servers write minus infinity as a large negative number.
_NO_PROBABILITY = -1e3
_BIAS = -100.0


def generate_body(request: Request, model: str, vocabulary: ServerVocabulary) -> dict[str, Any]:
    """vLLM's tokens in, tokens out; each image's placeholders are sent as one, and expanded by the server."""
    body: dict[str, Any] = {
        "model": model,
        "token_ids": request.prompt_ids.tolist(),
        "stream": True,
        "sampling_params": {
            **_sampling(request, vocabulary),
            "logprobs": _num_logprobs(request.sampling),
            "detokenize": False,
        },
    }
    if request.images:
        body["token_ids"] = _one_placeholder_each(request, vocabulary.image_token_id)
        body["content_parts"] = [{"type": "image_url", "url": data_url(image)} for image in request.images]
        body["return_token_ids"] = True
    return body


def read_generate(event: Json, request: Request) -> Iterator[Piece]:
    _check_prompt(event.get("prompt_token_ids"), request)
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids") or []
        entries = (choice.get("logprobs") or {}).get("content") or []
        masks = choice.get("sampling_mask") or [None] * len(ids)
        if len(entries) != len(ids):
            raise PolicyError(f"the server sent {len(ids)} token ids with {len(entries)} log-probs")
        for index, (token_id, entry, mask) in enumerate(zip(ids, entries, masks, strict=True)):
            top = {int(one["token_id"]): float(one["logprob"]) for one in entry.get("top_logprobs", ())}
            kept = _kept(request.sampling, top) if mask is None else np.array(mask, dtype=np.int32)
            reason = choice.get("finish_reason") if index == len(ids) - 1 else None
            yield _piece(request, int(token_id), float(entry["logprob"]), kept, reason)


def completions_body(request: Request, model: str, vocabulary: ServerVocabulary) -> dict[str, Any]:
    """OpenAI completions with token ids as the prompt."""
    return {
        "model": model,
        "prompt": request.prompt_ids.tolist(),
        "stream": True,
        "logprobs": _num_logprobs(request.sampling),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        **_sampling(request, vocabulary),
    }


def read_completions(event: Json, request: Request) -> Iterator[Piece]:
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids") or []
        logprobs = choice.get("logprobs") or {}
        found = logprobs.get("token_logprobs") or []
        if len(found) != len(ids):
            raise PolicyError(f"the server sent {len(ids)} token ids with {len(found)} log-probs")
        tops = logprobs.get("top_logprobs") or [None] * len(ids)
        for index, (token_id, logprob, top) in enumerate(zip(ids, found, tops, strict=True)):
            named = {int(name.removeprefix("token_id:")): float(value) for name, value in (top or {}).items()}
            reason = choice.get("finish_reason") if index == len(ids) - 1 else None
            yield _piece(request, int(token_id), float(logprob), _kept(request.sampling, named), reason)


def chat_body(request: Request, model: str) -> dict[str, Any]:
    """OpenAI chat: only what every server knows."""
    if not request.messages:
        raise PolicyError(f"stream {request.stream_id} has no messages, and the server speaks text only")
    sampling = request.sampling
    return {
        "model": model,
        "messages": [_message(message) for message in request.messages],
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": server_seed(request.seed),
    }


def server_seed(seed: tuple[int, ...]) -> int:
    """A request's seed as the one 63-bit number that servers take."""
    entropy = [part & 0xFFFF_FFFF_FFFF_FFFF for part in seed]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


def data_url(image: Image) -> str:
    import PIL.Image

    file = io.BytesIO()
    PIL.Image.fromarray(image.pixels).save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _sampling(request: Request, vocabulary: ServerVocabulary) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": server_seed(request.seed),
        "stop_token_ids": sorted(vocabulary.end_ids),
        "logit_bias": {str(token_id): _BIAS for token_id in vocabulary.banned_ids.tolist()},
    }


def _num_logprobs(sampling: SamplingParams) -> int:
    # With top-k, the k best log-probs show what was kept.
    return sampling.top_k if sampling.temperature > 0 else 0


def _kept(sampling: SamplingParams, top: dict[int, float]) -> IntArray | None:
    if sampling.top_k == 0:
        return None
    return np.array(sorted(i for i, value in top.items() if value > _NO_PROBABILITY), dtype=np.int32)


def _piece(
    request: Request, token_id: int, logprob: float, kept: IntArray | None, finish_reason: str | None
) -> Piece:
    # The best token is certain; servers report what it would have had at temperature 1.
    certain = request.sampling.temperature == 0
    return Piece(
        token_id=token_id, logprob=0.0 if certain else logprob, kept=kept, finish_reason=finish_reason
    )


def _one_placeholder_each(request: Request, image_token_id: int | None) -> list[int]:
    """Servers expand images themselves: of each run of placeholders only the first is sent."""
    spans = image_spans(request.prompt_ids, image_token_id)
    if len(spans) != len(request.images):
        raise PolicyError(
            f"stream {request.stream_id} has {len(request.images)} images but {len(spans)} runs of the image token "
            f"{image_token_id}; give the policy the `image_token_id` of the model's config"
        )
    rest = [np.arange(start + 1, end) for start, end in spans]
    return [int(token_id) for token_id in np.delete(request.prompt_ids, np.concatenate(rest))]


def _check_prompt(prompt_ids: list[int] | None, request: Request) -> None:
    if prompt_ids is not None and prompt_ids != request.prompt_ids.tolist():
        raise PolicyError(
            f"the server read {len(prompt_ids)} prompt tokens of stream {request.stream_id} where turnwise has "
            f"{len(request.prompt_ids)}, or others; its image processor differs from the one given to turnwise"
        )


def _message(message: Message) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": str(message.role), "content": message.content}
    parts: list[dict[str, Any]] = []
    for part in message.content:
        if isinstance(part, Image):
            parts.append({"type": "image_url", "image_url": {"url": data_url(part)}})
        else:
            parts.append({"type": "text", "text": part})
    return {"role": str(message.role), "content": parts}
