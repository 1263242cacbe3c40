"""What makes two situations the same: state keys turned into bytes by content, and ready-made ways to derive them.

A key is any JSON value, bytes, a numpy array or None. Equal content means equal type, shape and dtype too: 1, 1.0 and
True are three keys, and so are an int32 and an int64 array of the same numbers. Tuples count as lists, because
that is what they become in a file; -0.0 counts as 0.0, because it is the same place.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import itertools
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from turnwise.columns import CodeArray
from turnwise.errors import CreditError
from turnwise.types import Episode, Image, Json, Message

StateKey: TypeAlias = Json | bytes | npt.NDArray[Any] | None
StateHasher: TypeAlias = Callable[[Episode, int], StateKey]
"""From an episode and a turn's index to the key of the state that the turn's action was taken in."""


def encode_state_key(key: StateKey) -> bytes:
    """Bytes that are equal for two keys exactly when their content, type, shape and dtype are."""
    if isinstance(key, np.ndarray):
        return _encode_array(key)
    if isinstance(key, np.generic):
        return _encode_array(np.asarray(key))
    if key is None:
        return b"n"
    if isinstance(key, bool):
        return b"t" if key else b"f"
    if isinstance(key, int):
        return b"i%d;" % key
    if isinstance(key, float):
        return b"d" + struct.pack("<d", key + 0.0)
    if isinstance(key, str):
        text = key.encode("utf-8", "surrogatepass")
        return b"s%d:" % len(text) + text
    if isinstance(key, bytes | bytearray | memoryview):
        return b"b%d:" % len(key) + bytes(key)
    if isinstance(key, Image):
        return b"p" + key.sha256.encode() + b";"
    if isinstance(key, list | tuple):
        return b"l" + b"".join(map(encode_state_key, key)) + b"e"
    if isinstance(key, Mapping):
        return _encode_mapping(key)
    raise CreditError(
        f"a state key holds a {type(key).__name__} ({key!r:.80}); use JSON values, bytes or numpy arrays"
    )


def hash_state_key(key: StateKey) -> str:
    """A short name for a key, equal for equal content: 16 hexadecimal digits."""
    return hashlib.blake2b(encode_state_key(key), digest_size=8).hexdigest()


def _encode_array(array: npt.NDArray[Any]) -> bytes:
    header, is_float = _array_header(array.dtype, array.shape)
    if is_float:
        array = array + 0.0  # -0.0 becomes 0.0
    return header + array.tobytes()


@functools.lru_cache(maxsize=1024)
def _array_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[bytes, bool]:
    if dtype.hasobject:
        raise CreditError(
            f"a state key is an array of Python objects with shape {shape}; use a numeric dtype or a list"
        )
    # A structured dtype's `str` hides its fields; its `descr` shows them.
    return f"a{dtype.descr}|{shape}|".encode(), dtype.kind in "fc"


def _encode_mapping(key: Mapping[Any, Any]) -> bytes:
    wrong = next((name for name in key if not isinstance(name, str)), None)
    if wrong is not None:
        raise CreditError(
            f"a state key has an object with the name {wrong!r}; names in JSON objects are strings"
        )
    return (
        b"m" + b"".join(encode_state_key(name) + encode_state_key(key[name]) for name in sorted(key)) + b"e"
    )


def environment_key(episode: Episode, turn_index: int) -> StateKey:
    """The environment's own key, or what it showed when it gave none."""
    key = episode.turns[turn_index].observation.state_key
    return last_observation(episode, turn_index) if key is None else key


def last_observation(episode: Episode, turn_index: int) -> StateKey:
    """What the environment showed before this turn: roles, texts and the content of images."""
    return [_describe_message(message) for message in episode.turns[turn_index].observation.messages]


def last_messages(count: int) -> StateHasher:
    """The last `count` messages before this turn, the agent's own included."""
    if count < 1:
        raise CreditError(f"last_messages needs at least 1 message, got {count}")

    def hasher(episode: Episode, turn_index: int) -> StateKey:
        seen: list[StateKey] = []
        for index in range(turn_index, -1, -1):
            if index < turn_index:
                seen.insert(0, ["assistant", episode.turns[index].text])
            seen[:0] = [_describe_message(message) for message in episode.turns[index].observation.messages]
            if len(seen) >= count:
                break
        return seen[-count:]

    return hasher


def normalised_text(episode: Episode, turn_index: int) -> StateKey:
    """The words and numbers of the observation's text, without case, punctuation or blanks."""
    text = episode.turns[turn_index].observation.text.casefold()
    return " ".join(re.findall(r"-?\d+(?:\.\d+)*|\w+", text))


def pose_grid(cell_m: float = 0.5, angle_degrees: float = 30.0) -> StateHasher:
    """The cell of a grid over position and heading that the agent stands in, read from `observation.info`."""
    if cell_m <= 0 or angle_degrees <= 0:
        raise CreditError(f"pose_grid needs positive cells, got {cell_m} m and {angle_degrees} degrees")

    def hasher(episode: Episode, turn_index: int) -> StateKey:
        info = episode.turns[turn_index].observation.info
        position, heading = _read_pose(info, episode.episode_id, turn_index)
        num_sectors = max(1, round(360.0 / angle_degrees))
        cells: list[StateKey] = [int(np.floor(value / cell_m)) for value in position]
        return [*cells, round(heading / angle_degrees) % num_sectors]

    return hasher


def build_state_hasher(name: str) -> StateHasher:
    """`environment`, `last_observation`, `last_messages:N`, `normalised_text`, `pose_grid[:METRES:DEGREES]` or `module:function`."""
    plain: dict[str, StateHasher] = {
        "environment": environment_key,
        "last_observation": last_observation,
        "normalised_text": normalised_text,
        "pose_grid": pose_grid(),
    }
    if name in plain:
        return plain[name]
    head, _, tail = name.partition(":")
    try:
        if head == "last_messages":
            return last_messages(int(tail))
        if head == "pose_grid":
            return pose_grid(*map(float, tail.split(":")))
    except (TypeError, ValueError) as error:
        raise CreditError(f"state key {name!r} cannot be read: {error}") from None
    if not head or not tail:
        raise CreditError(
            f"state key {name!r} is not known; use {', '.join(plain)}, last_messages:N or module:function"
        )
    try:
        found = getattr(importlib.import_module(head), tail)
    except (ImportError, AttributeError) as error:
        raise CreditError(f"state key {name!r} cannot be imported: {error}") from None
    if not callable(found):
        raise CreditError(f"state key {name!r} is a {type(found).__name__}; it must be a function")
    hasher: StateHasher = found
    return hasher


def _describe_message(message: Message) -> StateKey:
    content = message.content
    parts: list[StateKey] = [content] if isinstance(content, str) else list(content)
    return [str(message.role), *parts]


def _read_pose(info: Mapping[str, Json], episode_id: str, turn_index: int) -> tuple[list[float], float]:
    pose = info.get("pose", info)
    try:
        if isinstance(pose, Mapping):
            position = pose["position"] if "position" in pose else [pose["x"], pose["y"]]
            names = ("heading_degrees", "yaw_degrees", "heading", "yaw", "rotation_degrees")
            heading = next(pose[name] for name in names if name in pose)
        else:
            *position, heading = pose
        return [float(value) for value in position], float(heading)
    except (KeyError, StopIteration, TypeError, ValueError):
        raise CreditError(
            f"turn {turn_index} of episode {episode_id} has no pose in its observation's info ({dict(info)!r:.120}); "
            "pose_grid reads info['pose'] = {'position': [x, y], 'heading_degrees': angle}"
        ) from None


def number_states(group_of: CodeArray, state_keys: Sequence[StateKey], similarity: float | None) -> CodeArray:
    """Number the distinct (group, state) pairs."""
    if similarity is not None:
        return _similar_groups(group_of, state_keys, similarity)
    is_sorted = bool((group_of[1:] >= group_of[:-1]).all())
    order = None if is_sorted else np.argsort(group_of, kind="stable")
    codes = group_of if order is None else group_of[order]
    bounds = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)] if len(codes) else [0]
    labels = np.empty(len(codes), dtype=np.int64)
    num_states = 0
    # Group by group, so that one small table is in use at a time, whatever the size of the batch.
    for start, stop in itertools.pairwise(bounds):
        table: dict[str | bytes, int] = {}
        rows = range(start, stop) if order is None else order[start:stop].tolist()
        found = []
        for row in rows:
            key = state_keys[row]
            found.append(
                table.setdefault(key if type(key) is str else encode_state_key(key), num_states + len(table))
            )
        labels[start:stop] = found
        num_states += len(table)
    if order is None:
        return labels
    unsorted = np.empty_like(labels)
    unsorted[order] = labels
    return unsorted


def _similar_groups(group_of: CodeArray, state_keys: Sequence[StateKey], threshold: float) -> CodeArray:
    """Join the first cluster of the group whose first member is similar enough, else open one."""
    if not 0.0 < threshold <= 1.0:
        raise CreditError(f"similarity is {threshold}; it must lie in (0, 1]")
    clusters: dict[int, list[tuple[difflib.SequenceMatcher[str], int]]] = {}
    known: dict[tuple[int, str], int] = {}
    labels = []
    num_clusters = 0
    for row, (group, key) in enumerate(zip(group_of.tolist(), state_keys, strict=True)):
        if not isinstance(key, str):
            raise CreditError(
                f"state key {row} is a {type(key).__name__}; similarity compares text keys only"
            )
        # Clusters never change their first member, so the same text always finds the same one.
        if (group, key) not in known:
            candidates = clusters.setdefault(group, [])
            label = next(
                (label for matcher, label in candidates if _is_similar(matcher, key, threshold)), None
            )
            if label is None:
                label, num_clusters = num_clusters, num_clusters + 1
                candidates.append((difflib.SequenceMatcher(None, "", key), label))
            known[group, key] = label
        labels.append(known[group, key])
    return np.array(labels, dtype=np.int64)


def _is_similar(matcher: difflib.SequenceMatcher[str], text: str, threshold: float) -> bool:
    matcher.set_seq1(text)
    # The two cheap ratios are upper bounds of the real one.
    return (
        matcher.real_quick_ratio() >= threshold
        and matcher.quick_ratio() >= threshold
        and matcher.ratio() >= threshold
    )
