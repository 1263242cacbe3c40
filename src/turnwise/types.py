"""The words of turnwise: the records that one stage hands to the next.

An episode is a fact. It is frozen when its rollout ends; rewards and advantages are separate records that
name it. Tokens live in `TokenStream`s: append-only, each token either given or sampled, each sampled one with the
log-probability of the distribution it was really drawn from. A `Turn` is a span of one stream.

    stream.ids       [ 5  9  2 | 7  7  1 | 3  4 | 8  1 ]
    is_sampled         .  .  .   x  x  x   .  .   x  x
    turn 0             prompt 0:3, completion 3:6
    turn 1                                prompt 6:8, completion 8:10   (its context is 0:8)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
PixelArray: TypeAlias = npt.NDArray[np.uint8]

# JSON values come from environments and models, so their shape is only known where they are used.
Json: TypeAlias = Any


class Role(StrEnum):
    """Who speaks in a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class StopReason(StrEnum):
    """Why a rollout ended."""

    TERMINAL = "terminal"
    """The environment said so: goal reached, question answered, game lost."""
    MAX_TURNS = "max_turns"
    CONTEXT_FULL = "context_full"
    """The next prompt would not have fitted into the model's context."""
    FAILED = "failed"
    """A stage raised; `Episode.failure` says which. Never scored, never part of a baseline."""
    CANCELLED = "cancelled"


class FinishReason(StrEnum):
    """Why one completion ended."""

    END = "end"
    """The model sampled an end-of-turn token."""
    ACTION = "action"
    """The action's closing token was sampled."""
    LENGTH = "length"


class MaskingMethod(StrEnum):
    """How the action tokens of a turn were found, strongest first."""

    BRACE_DEPTH = "brace_depth"
    REGEX = "regex"
    LAST_N = "last_n"
    FAILED = "failed"


class Image(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An RGB image, named by its content; the pixels may still lie on disk."""

    sha256: str
    width: int
    height: int
    source: PixelArray | Path

    @classmethod
    def from_pixels(cls, pixels: PixelArray) -> Image:
        """The image of a uint8 array of shape [height, width, 3]."""
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise ValueError(
                f"an image needs uint8 pixels of shape [height, width, 3]; got {pixels.dtype} {pixels.shape}"
            )
        pixels = np.ascontiguousarray(pixels)
        pixels.setflags(write=False)
        digest = hashlib.sha256(
            f"{pixels.shape[0]}x{pixels.shape[1]}".encode() + pixels.tobytes()
        ).hexdigest()
        return cls(sha256=digest, width=pixels.shape[1], height=pixels.shape[0], source=pixels)

    @property
    def pixels(self) -> PixelArray:
        """The pixels, uint8 [height, width, 3]."""
        if isinstance(self.source, Path):
            import PIL.Image

            with PIL.Image.open(self.source) as picture:
                return np.asarray(picture.convert("RGB"))
        return self.source

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and other.sha256 == self.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation: text, or text and images in order."""

    role: Role
    content: str | tuple[str | Image, ...]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part for part in self.content if isinstance(part, str))

    @property
    def images(self) -> tuple[Image, ...]:
        if isinstance(self.content, str):
            return ()
        return tuple(part for part in self.content if isinstance(part, Image))


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What an episode starts from. Episodes of one group share the task and its seed."""

    task_id: str
    seed: int = 0
    """Fixes everything random in the environment."""
    data: Mapping[str, Json] = msgspec.field(default_factory=dict)
    """What the environment needs to build the situation (scene, question, prompt …)."""
    ground_truth: Json = None
    """What rewards compare with; the agent never sees it."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment shows the agent: the messages that are new since its last action."""

    messages: tuple[Message, ...]
    state_key: Json | bytes | npt.NDArray[Any] | None = None
    """Equal keys mean the same situation; GiGPO compares actions taken from equal keys."""
    info: Mapping[str, Json] = msgspec.field(default_factory=dict)
    """Facts for rewards and the viewer (pose, position …); the model does not see them."""

    @property
    def text(self) -> str:
        return "\n".join(message.text for message in self.messages)

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(image for message in self.messages for image in message.images)


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent did: the JSON object found in its completion, or None when there was none."""

    value: dict[str, Json] | None
    text: str = ""
    """The characters it was read from."""

    @property
    def is_valid(self) -> bool:
        return self.value is not None


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """What an action led to."""

    observation: Observation
    reward: float = 0.0
    is_terminal: bool = False
    is_action_valid: bool = True
    """False when the environment could not carry the action out (malformed, out of range)."""
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Figures about the episode so far; those of the last turn become the episode's (success, spl …)."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution that completions are drawn from."""

    max_new_tokens: int = 100
    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """0 means no limit."""
    top_p: float = 1.0
    min_p: float = 0.0
    stop_at_action: bool = True
    """End the completion at the token that closes the action."""
    use_grammar: bool = False
    """Allow only completions whose action fits the environment's action schema."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; a completion needs at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; use 0 for greedy or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; use 0 for no limit or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1]")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p is {self.min_p}; it must lie in [0, 1)")


class KeptSets(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """For each sampled token, the ids it was chosen among: row i is `ids[offsets[i]:offsets[i + 1]]`.

    An empty row means that nothing was cut (all of the vocabulary except `TokenStream.banned_ids`).
    """

    offsets: npt.NDArray[np.int64]
    ids: IntArray

    def __post_init__(self) -> None:
        if len(self.offsets) == 0 or self.offsets[0] != 0 or self.offsets[-1] != len(self.ids):
            raise ValueError(f"kept-set offsets must run from 0 to {len(self.ids)}, got {self.offsets[:3]} …")

    @classmethod
    def from_rows(cls, rows: list[IntArray]) -> KeptSets:
        lengths = np.array([0, *(len(row) for row in rows)], dtype=np.int64)
        ids = np.concatenate(rows) if rows else np.empty(0, dtype=np.int32)
        return cls(offsets=np.cumsum(lengths), ids=ids.astype(np.int32))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> IntArray:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


class Completion(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a policy sampled for one turn."""

    completion_ids: IntArray
    logprobs: FloatArray
    """One per token, under the distribution really sampled from (temperature, kept set, grammar)."""
    text: str
    finish_reason: FinishReason
    policy_version: int
    kept: KeptSets | None = None
    """None when nothing but `banned_ids` was cut."""
    banned_ids: IntArray = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """Ids that could not be sampled (image pads and other markers); they hold no probability."""
    is_token_exact: bool = True
    """False when a server returned text only; such episodes are never trained on."""

    def __post_init__(self) -> None:
        if len(self.completion_ids) != len(self.logprobs):
            raise ValueError(
                f"a completion has {len(self.completion_ids)} sampled tokens but {len(self.logprobs)} logprobs; "
                "the policy must return one per token"
            )
        if self.kept is not None and len(self.kept) != len(self.completion_ids):
            raise ValueError(
                f"a completion has {len(self.completion_ids)} tokens but {len(self.kept)} kept sets; "
                "the policy must return one per token"
            )


class TokenStream(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The exact tokens that the model saw and produced, in order."""

    ids: IntArray
    is_sampled: BoolArray
    logprobs: FloatArray
    """0 where the token was given."""
    kept: KeptSets | None = None
    """One row per sampled token, in order."""
    banned_ids: IntArray = msgspec.field(default_factory=lambda: np.empty(0, dtype=np.int32))
    images: tuple[Image, ...] = ()
    """In the order of their placeholders."""

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.is_sampled) == len(self.logprobs):
            raise ValueError(
                f"a stream has {len(self.ids)} ids, {len(self.is_sampled)} origins and {len(self.logprobs)} logprobs; "
                "all three need the same length"
            )


class Turn(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One observation, the completion that answered it, and what came of it."""

    turn_index: int
    stream: TokenStream
    """Shared by the turns that extend the same tokens."""
    prompt_start: int
    """Where the tokens begin that are new in this turn's prompt."""
    completion_start: int
    completion_end: int
    observation: Observation
    action: Action
    text: str
    """The completion as text, for people and rewards; never encoded again."""
    action_token_mask: BoolArray
    """One per generated token; only these carry loss."""
    masking_method: MaskingMethod
    masking_confidence: float
    finish_reason: FinishReason
    policy_version: int
    reward: float = 0.0
    """What the environment paid for the action; rewards functions have their own say later."""
    is_action_valid: bool = True
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.prompt_start <= self.completion_start <= self.completion_end <= len(self.stream.ids):
            raise ValueError(
                f"turn {self.turn_index} spans {self.prompt_start}, {self.completion_start}, {self.completion_end} "
                f"of a stream of {len(self.stream.ids)} tokens; the bounds must ascend within it"
            )
        if len(self.action_token_mask) != self.completion_end - self.completion_start:
            raise ValueError(
                f"turn {self.turn_index} has {self.completion_end - self.completion_start} sampled tokens but "
                f"a mask of {len(self.action_token_mask)}; the mask needs one entry per token"
            )

    @property
    def context_input_ids(self) -> IntArray:
        """Everything the model read before it answered."""
        return self.stream.ids[: self.completion_start]

    @property
    def prompt_ids(self) -> IntArray:
        """What this turn added to the prompt."""
        return self.stream.ids[self.prompt_start : self.completion_start]

    @property
    def generated_ids(self) -> IntArray:
        return self.stream.ids[self.completion_start : self.completion_end]

    @property
    def logprobs(self) -> FloatArray:
        return self.stream.logprobs[self.completion_start : self.completion_end]

    @property
    def input_token_length(self) -> int:
        return self.completion_start

    @property
    def num_action_tokens(self) -> int:
        return int(self.action_token_mask.sum())

    @property
    def action_token_start_index(self) -> int | None:
        """Index of the action's first token among the generated ones; None without an action."""
        found = np.flatnonzero(self.action_token_mask)
        return int(found[0]) if len(found) else None

    @property
    def action_token_end_index(self) -> int | None:
        """One past the action's last token, so that `generated_ids[start:end]` is the action."""
        found = np.flatnonzero(self.action_token_mask)
        return int(found[-1]) + 1 if len(found) else None

    @property
    def reasoning(self) -> str:
        """What the agent wrote before its action."""
        if not self.action.text:
            return self.text
        return self.text.partition(self.action.text)[0].strip()


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Which stage of a rollout raised, and what it said."""

    stage: str
    """reset, render, sample, step …"""
    error: str
    turn_index: int | None = None


class Episode(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One rollout from task to stop, as it happened."""

    episode_id: str
    group_id: str
    task: Task
    turns: tuple[Turn, ...]
    streams: tuple[TokenStream, ...]
    """One, or more when a chat template rewrote history; every sampled token is in exactly one."""
    stop_reason: StopReason
    sampling: SamplingParams
    seed: int = 0
    failure: Failure | None = None
    num_retries: int = 0
    """How often the rollout was started again after a failure."""
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)
    is_token_exact: bool = True
    history: str = "error"
    """What the renderer was told to do when a template rewrites history."""
    action_keys: tuple[str, ...] = ()
    """The keys that told an action from other JSON, so that masks can be derived again; empty when any object was one."""
    is_valid: bool = True
    masking_quality: str = "good"
    dropout_reason: str | None = None
    started_at: float = 0.0
    seconds: float = 0.0

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    @property
    def final_reward(self) -> float:
        """The sum of what the environment paid."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def terminal_reward(self) -> float:
        """What the environment paid for the last action."""
        return self.turns[-1].reward if self.turns else 0.0

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation as rewards see it."""
        spoken: list[Message] = []
        for turn in self.turns:
            spoken.extend(turn.observation.messages)
            spoken.append(Message(role=Role.ASSISTANT, content=turn.text))
        return tuple(spoken)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.generated_ids) for turn in self.turns)


class Group(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Episodes of the same task and seed, to be compared with each other."""

    group_id: str
    task: Task
    episodes: tuple[Episode, ...]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One reward's opinion of one episode."""

    episode_id: str
    reward_name: str
    score: float | None
    """None when the episode failed or could not be scored; `error` says why."""
    step_rewards: tuple[float | None, ...] = ()
    """One per turn when the reward gave step outputs, else empty. None where it gave none for that turn."""
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)
    reason: str = ""
    error: str | None = None
    sandbox: str = "none"
    """The tier the code ran in: bubblewrap, landlock, none (built in)."""


class TurnCredit(msgspec.Struct, frozen=True, kw_only=True):
    """Why one turn got the advantage it got."""

    episode_id: str
    turn_index: int
    advantage: float | None
    """None when the episode takes no part (failed, unscored)."""
    group_id: str | None = None
    """Whose episodes it was compared with."""
    step_reward: float | None = None
    step_return: float | None = None
    """G_k: discounted rewards from this turn on."""
    episode_advantage: float | None = None
    """A_E."""
    step_advantage: float | None = None
    """A_S."""
    anchor: str | None = None
    """Hash of the state key, equal for turns that were compared."""
    anchor_size: int | None = None
    """How many turns share the anchor."""


class Advantages(msgspec.Struct, frozen=True, kw_only=True):
    """One estimator's opinion of some groups: a credit per turn, by episode id."""

    estimator: str
    turns: Mapping[str, tuple[TurnCredit, ...]]
    metrics: Mapping[str, float] = msgspec.field(default_factory=dict)
