"""Episodes on disk: a JSON record each, and their tokens side by side in one safetensors file per batch.

The columns of a batch hold the streams of its episodes one after the other; a record says where its own lie:

    tensors/step-000003.safetensors    ids         [ e0 stream 0 | e1 stream 0 | e1 stream 1 | … ]
                                       is_sampled, logprobs, action_mask   same length
                                       kept_offsets, kept_ids              ragged rows, one per sampled token
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import PIL.Image
import safetensors.numpy

from turnwise.errors import StoreError
from turnwise.store.log import read_records, sync_folder, write_atomically
from turnwise.types import (
    Action,
    Episode,
    Failure,
    FinishReason,
    Image,
    Json,
    KeptSets,
    MaskingMethod,
    Message,
    Observation,
    Role,
    SamplingParams,
    StopReason,
    Task,
    TokenStream,
    Turn,
)  # fmt: skip

EPISODES = "episodes.jsonl"


def write_batch(folder: Path, name: str, episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    """Put tensors and images of `episodes` on disk and return the records that may now be appended to the log."""
    for episode in episodes:
        for image in {image for stream in episode.streams for image in stream.images}:
            write_image(folder, image)
    columns, places = _stack_streams(episodes)
    content = safetensors.numpy.save(columns)
    path = folder / "tensors" / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, content)
    tensors = {
        "file": f"tensors/{path.name}",
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    return [_episode_record(episode, tensors, place) for episode, place in zip(episodes, places, strict=True)]


def read_episodes(folder: Path) -> Iterator[Episode]:
    """Every stored episode, in order."""
    for record in read_records(folder / EPISODES):
        yield read_episode(folder, record)


def find_episode(folder: Path, episode_id: str) -> Episode:
    for record in read_records(folder / EPISODES):
        if record["episode_id"] == episode_id:
            return read_episode(folder, record)
    raise StoreError(f"{folder} has no episode {episode_id!r}; `turnwise view {folder}` lists them")


def read_episode(folder: Path, record: Mapping[str, Any]) -> Episode:
    """The episode a record stands for, its tensors checked against their hash."""
    columns = _load_columns(folder, record)
    streams = tuple(_read_stream(folder, place, columns) for place in record["streams"])
    masks = [columns["action_mask"][place["start"] : place["end"]] for place in record["streams"]]
    return Episode(
        episode_id=record["episode_id"],
        group_id=record["group_id"],
        task=msgspec.convert(record["task"], Task),
        turns=tuple(_read_turn(folder, turn, streams, masks) for turn in record["turns"]),
        streams=streams,
        stop_reason=StopReason(record["stop_reason"]),
        sampling=msgspec.convert(record["sampling"], SamplingParams),
        seed=record["seed"],
        failure=None if record["failure"] is None else msgspec.convert(record["failure"], Failure),
        action_keys=tuple(record["action_keys"]),
        **{name: record[name] for name in _PLAIN_FIELDS},
    )


_PLAIN_FIELDS = (
    "num_retries", "metrics", "is_token_exact", "history", "is_valid", "masking_quality", "dropout_reason",
    "started_at", "seconds",
)  # fmt: skip


def write_image(folder: Path, image: Image) -> Path:
    """Store an image under its hash, once."""
    path = image_path(folder, image.sha256)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        PIL.Image.fromarray(image.pixels).save(temporary, format="PNG")
        temporary.replace(path)
        sync_folder(path.parent)
    return path


def image_path(folder: Path, sha256: str) -> Path:
    return folder / "images" / sha256[:2] / f"{sha256}.png"


def _stack_streams(episodes: Sequence[Episode]) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """The columns of a batch, and for each episode where each of its streams lies."""
    streams = [stream for episode in episodes for stream in episode.streams]
    kept = [stream.kept for stream in streams if stream.kept is not None]
    row_lengths = [np.diff(sets.offsets) for sets in kept]
    columns = {
        "ids": _concat([stream.ids for stream in streams], np.int32),
        "is_sampled": _concat([stream.is_sampled for stream in streams], np.bool_),
        "logprobs": _concat([stream.logprobs for stream in streams], np.float32),
        "action_mask": _concat(
            [_stream_mask(episode, stream) for episode in episodes for stream in episode.streams], np.bool_
        ),
        "kept_offsets": np.concatenate([[0], np.cumsum(_concat(row_lengths, np.int64))]).astype(np.int64),
        "kept_ids": _concat([sets.ids for sets in kept], np.int32),
    }
    places: list[list[dict[str, Any]]] = []
    token, row = 0, 0
    for episode in episodes:
        places.append([])
        for stream in episode.streams:
            rows = None if stream.kept is None else [row, row + len(stream.kept)]
            places[-1].append(
                {
                    "start": token,
                    "end": token + len(stream.ids),
                    "kept_rows": rows,
                    "banned_ids": stream.banned_ids.tolist(),
                    "images": [_image_record(image) for image in stream.images],
                }
            )
            token += len(stream.ids)
            row += 0 if stream.kept is None else len(stream.kept)
    return columns, places


def _concat(arrays: Sequence[Any], dtype: Any) -> Any:  # numpy's own argument types
    return np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype=dtype)


def _stream_mask(episode: Episode, stream: TokenStream) -> Any:
    """The action masks of a stream's turns, at the places of their tokens."""
    mask = np.zeros(len(stream.ids), dtype=np.bool_)
    for turn in episode.turns:
        if turn.stream is stream:
            mask[turn.completion_start : turn.completion_end] = turn.action_token_mask
    return mask


def _episode_record(
    episode: Episode, tensors: dict[str, Any], places: list[dict[str, Any]]
) -> dict[str, Any]:
    numbers = {id(stream): index for index, stream in enumerate(episode.streams)}
    known = {
        name: episode.task.data[name]
        for name in ("scene_id", "question_id", "question")
        if name in episode.task.data
    }
    return {
        "episode_id": episode.episode_id,
        "group_id": episode.group_id,
        "task": msgspec.to_builtins(episode.task),
        **known,
        "num_turns": episode.num_turns,
        "final_reward": episode.final_reward,
        "terminal_reward": episode.terminal_reward,
        "stop_reason": episode.stop_reason,
        "failure": None if episode.failure is None else msgspec.to_builtins(episode.failure),
        "seed": episode.seed,
        "sampling": msgspec.to_builtins(episode.sampling),
        "action_keys": list(episode.action_keys),
        **{name: getattr(episode, name) for name in _PLAIN_FIELDS},
        "tensors": tensors,
        "streams": places,
        "turns": [_turn_record(turn, numbers[id(turn.stream)]) for turn in episode.turns],
    }


def _turn_record(turn: Turn, stream_index: int) -> dict[str, Any]:
    return {
        "turn_index": turn.turn_index,
        "stream_index": stream_index,
        "prompt_start": turn.prompt_start,
        "completion_start": turn.completion_start,
        "completion_end": turn.completion_end,
        "input_token_length": turn.input_token_length,
        "action_token_start_index": turn.action_token_start_index,
        "action_token_end_index": turn.action_token_end_index,
        "num_action_tokens": turn.num_action_tokens,
        "masking_method": turn.masking_method,
        "masking_confidence": turn.masking_confidence,
        "observation": {
            "messages": [_message_record(message) for message in turn.observation.messages],
            "state_key": _key_record(turn.observation.state_key),
            "info": dict(turn.observation.info),
        },
        "text": turn.text,
        "reasoning": turn.reasoning,
        "action": turn.action.value,
        "action_text": turn.action.text,
        "is_action_valid": turn.is_action_valid,
        "finish_reason": turn.finish_reason,
        "policy_version": turn.policy_version,
        "reward": turn.reward,
        "metrics": dict(turn.metrics),
    }


def _message_record(message: Message) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    parts = [part if isinstance(part, str) else _image_record(part) for part in message.content]
    return {"role": message.role, "content": parts}


def _image_record(image: Image) -> dict[str, Any]:
    return {"type": "image", "sha256": image.sha256, "width": image.width, "height": image.height}


def _key_record(key: Json | bytes | np.ndarray[Any, Any] | None) -> dict[str, Any] | None:
    if key is None:
        return None
    if isinstance(key, bytes):
        return {"kind": "bytes", "base64": base64.b64encode(key).decode()}
    if isinstance(key, np.ndarray):
        content = base64.b64encode(np.ascontiguousarray(key).tobytes()).decode()
        return {"kind": "array", "dtype": str(key.dtype), "shape": list(key.shape), "base64": content}
    return {"kind": "json", "value": key}


def _read_key(record: Mapping[str, Any] | None) -> Json | bytes | np.ndarray[Any, Any] | None:
    if record is None:
        return None
    if record["kind"] == "bytes":
        return base64.b64decode(record["base64"])
    if record["kind"] == "array":
        content = base64.b64decode(record["base64"])
        return np.frombuffer(content, dtype=record["dtype"]).reshape(record["shape"])
    return record["value"]


def _read_image(folder: Path, record: Mapping[str, Any]) -> Image:
    path = image_path(folder, record["sha256"])
    return Image(sha256=record["sha256"], width=record["width"], height=record["height"], source=path)


def _read_message(folder: Path, record: Mapping[str, Any]) -> Message:
    content = record["content"]
    if not isinstance(content, str):
        content = tuple(part if isinstance(part, str) else _read_image(folder, part) for part in content)
    return Message(role=Role(record["role"]), content=content)


def _read_stream(folder: Path, place: Mapping[str, Any], columns: Mapping[str, Any]) -> TokenStream:
    span = slice(place["start"], place["end"])
    kept = None
    if place["kept_rows"] is not None:
        first, last = place["kept_rows"]
        offsets = columns["kept_offsets"][first : last + 1]
        kept = KeptSets(offsets=offsets - offsets[0], ids=columns["kept_ids"][offsets[0] : offsets[-1]])
    return TokenStream(
        ids=columns["ids"][span],
        is_sampled=columns["is_sampled"][span],
        logprobs=columns["logprobs"][span],
        kept=kept,
        banned_ids=np.asarray(place["banned_ids"], dtype=np.int32),
        images=tuple(_read_image(folder, image) for image in place["images"]),
    )


def _read_turn(
    folder: Path, record: Mapping[str, Any], streams: Sequence[TokenStream], masks: Sequence[Any]
) -> Turn:
    index, start, end = record["stream_index"], record["completion_start"], record["completion_end"]
    observation = record["observation"]
    return Turn(
        turn_index=record["turn_index"],
        stream=streams[index],
        prompt_start=record["prompt_start"],
        completion_start=start,
        completion_end=end,
        observation=Observation(
            messages=tuple(_read_message(folder, message) for message in observation["messages"]),
            state_key=_read_key(observation["state_key"]),
            info=observation["info"],
        ),
        action=Action(value=record["action"], text=record["action_text"]),
        text=record["text"],
        action_token_mask=masks[index][start:end],
        masking_method=MaskingMethod(record["masking_method"]),
        masking_confidence=record["masking_confidence"],
        finish_reason=FinishReason(record["finish_reason"]),
        policy_version=record["policy_version"],
        reward=record["reward"],
        is_action_valid=record["is_action_valid"],
        metrics=record["metrics"],
    )


def _load_columns(folder: Path, record: Mapping[str, Any]) -> Mapping[str, Any]:
    name, sha256 = record["tensors"]["file"], record["tensors"]["sha256"]
    path = (folder / name).resolve()
    if folder.resolve() not in path.parents:
        raise StoreError(f"episode {record['episode_id']}: tensor file {name!r} lies outside the run")
    try:
        return _read_tensor_file(path, sha256)
    except StoreError as error:
        raise StoreError(f"episode {record['episode_id']}: {error}") from None


@functools.lru_cache(maxsize=4)
def _read_tensor_file(path: Path, sha256: str) -> Mapping[str, Any]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise StoreError(f"tensor file {path} is missing") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise StoreError(f"tensor file {path} does not have the recorded content; it was changed or damaged")
    columns: Mapping[str, Any] = safetensors.numpy.load(content)
    for column in columns.values():
        column.setflags(write=False)
    return columns
