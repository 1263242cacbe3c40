"""What a reward function is called with: plain JSON values read off an episode, and only those it declared.

Messages are dicts with `role` and `content`. Content is a string, or a list of parts in order:
`{"type": "text", "text": …}` and `{"type": "image", "sha256": …, "width": …, "height": …}`.
The agent's own answers also have `step_index`, which tells them from assistant messages of a few-shot prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from turnwise.errors import RewardError
from turnwise.types import Episode, Image, Json, Message, Role


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward function said about itself."""

    name: str
    mode: Literal["pointwise", "batch"] = "pointwise"
    step_index_kind: Literal["turn", "message"] = "turn"
    score_from_steps: Literal["sum", "mean"] | None = None
    accepted: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    accepts_any: bool = False


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    """One call: the messages of an episode (of several in batch mode) and the keyword arguments."""

    messages: Json
    keywords: dict[str, Json]


def plain_message(message: Message) -> dict[str, Json]:
    """A message as rewards see it, images by reference."""
    if isinstance(message.content, str):
        return {"role": str(message.role), "content": message.content}
    return {"role": str(message.role), "content": [_plain_part(part) for part in message.content]}


def _plain_part(part: str | Image) -> dict[str, Json]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image", "sha256": part.sha256, "width": part.width, "height": part.height}


def plain_messages(episode: Episode) -> list[dict[str, Json]]:
    """The conversation as rewards see it; the agent's own answers carry their `step_index`."""
    spoken: list[dict[str, Json]] = []
    for ordinal, turn in enumerate(episode.turns):
        spoken.extend(plain_message(message) for message in turn.observation.messages)
        spoken.append({"role": str(Role.ASSISTANT), "content": turn.text, "step_index": ordinal})
    return spoken


def plain(value: Any) -> Json:  # facts of environments may hold numpy values
    """`value` as plain JSON; what JSON cannot say becomes its repr, so that a reward never gets half an object."""
    # There and back, so that a function sees the same values here as in the sandbox: lists, never tuples.
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_encode_other))


def _encode_other(value: Any) -> Json:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    return repr(value)


_OFFERS: dict[str, Callable[[Episode], Any]] = {
    "ground_truth": lambda episode: episode.task.ground_truth,
    "task": lambda episode: {
        "task_id": episode.task.task_id,
        "seed": episode.task.seed,
        "data": dict(episode.task.data),
    },
    "metrics": lambda episode: dict(episode.metrics),
    "step_rewards": lambda episode: [turn.reward for turn in episode.turns],
    "actions": lambda episode: [turn.action.value for turn in episode.turns],
    "infos": lambda episode: [dict(turn.observation.info) for turn in episode.turns],
    "stop_reason": lambda episode: str(episode.stop_reason),
    "episode_id": lambda episode: episode.episode_id,
}
"""Keyword arguments a pointwise reward may declare."""

_BATCH_NAMES = {
    "ground_truths": "ground_truth", "metrics": "metrics", "step_rewards": "step_rewards", "actions": "actions",
    "infos": "infos", "stop_reasons": "stop_reason", "episode_ids": "episode_id",
}  # fmt: skip
"""Those of a batch reward: lists with one entry per rollout. `ground_truth` and `task` are the group's own."""

_SHARED = ("ground_truth", "task")


def check_params(
    declaration: Declaration, params: Mapping[str, Json], *, offered: Iterable[str] | None = None
) -> None:
    """Raise when the config sets a parameter the function does not take, or leaves out one it needs.

    `offered` are the names that the caller can fill in; by default all that an episode has.
    """
    if offered is None:
        offered = _OFFERS if declaration.mode == "pointwise" else (*_BATCH_NAMES, *_SHARED)
    offered = set(offered)
    if not declaration.accepts_any:
        for name in params:
            if name not in declaration.accepted:
                known = ", ".join(declaration.accepted) or "none"
                raise RewardError(
                    f"reward {declaration.name} takes no parameter {name!r} (it takes: {known}); "
                    "remove it from the reward's params"
                )
    for name in declaration.required:
        if name not in params and name not in offered:
            raise RewardError(
                f"reward {declaration.name} requires {name!r}, which neither its params set nor turnwise offers; "
                f"offered in {declaration.mode} mode: {', '.join(sorted(offered))}"
            )


def pointwise_arguments(episode: Episode, declaration: Declaration, params: Mapping[str, Json]) -> Arguments:
    """The arguments for one episode; params win over what the episode offers."""
    keywords = {
        name: plain(offer(episode))
        for name, offer in _OFFERS.items()
        if name not in params and (name in declaration.accepted or declaration.accepts_any)
    }
    return Arguments(messages=plain_messages(episode), keywords={**keywords, **plain(dict(params))})


def batch_arguments(
    episodes: Sequence[Episode], declaration: Declaration, params: Mapping[str, Json]
) -> Arguments:
    """The arguments for a group, whose episodes share the task."""
    keywords: dict[str, Json] = {}
    for name, source in _BATCH_NAMES.items():
        if name not in params and (name in declaration.accepted or declaration.accepts_any):
            keywords[name] = [plain(_OFFERS[source](episode)) for episode in episodes]
    for name in _SHARED:
        if name not in params and (name in declaration.accepted or declaration.accepts_any) and episodes:
            keywords[name] = plain(_OFFERS[name](episodes[0]))
    return Arguments(
        messages=[plain_messages(episode) for episode in episodes],
        keywords={**keywords, **plain(dict(params))},
    )
