"""What a reward author writes: a function from messages to an `EvaluateResult`, marked with `@reward_function`.

This module is imported inside the sandbox, so it needs pydantic and nothing else of turnwise but its errors.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, overload

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from turnwise.errors import RewardError

Mode = Literal["pointwise", "batch"]
StepIndexKind = Literal["turn", "message"]
ScoreFromSteps = Literal["sum", "mean"]


def finite_number(value: Any) -> float:  # authors return anything; this says no to what is not a number
    """`value` as a float. Integers and numpy's real scalars are numbers; bool, str, complex, NaN and inf are not."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"needs a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError("is an integer too large for a float") from None
    if not math.isfinite(number):
        raise ValueError(f"is {number}; it must be finite")
    return number


Number = Annotated[float, BeforeValidator(finite_number)]


class _Result(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class MetricResult(_Result):
    """One figure beside the score; it is recorded and plotted, and never trained on."""

    score: Number
    reason: str = ""
    is_score_valid: bool = True


def _metric(value: Any) -> Any:  # a bare number is the common case
    return value if isinstance(value, (MetricResult, Mapping)) else {"score": value}


Metrics = dict[str, Annotated[MetricResult, BeforeValidator(_metric)]]


def as_metrics(figures: Mapping[str, float]) -> dict[str, MetricResult]:
    """Plain numbers as metrics, for type checkers; a result also accepts the numbers themselves."""
    return {name: MetricResult(score=figure) for name, figure in figures.items()}


class StepOutput(_Result):
    """What one step of the episode deserves."""

    step_index: Annotated[int, Field(ge=0)]
    """The ordinal of the assistant turn, or a message's index with `step_index_kind="message"`."""
    base_reward: Number
    metrics: Metrics = Field(default_factory=dict)
    reason: str = ""


class EvaluateResult(_Result):
    """A reward function's opinion of one episode.

    >>> EvaluateResult(score=1, step_outputs=[StepOutput(step_index=0, base_reward=0.5)]).score
    1.0
    """

    score: Number | None = None
    """The whole episode's worth. Required, unless the function is declared with `score_from_steps`."""
    step_outputs: list[StepOutput] | None = None
    """The steps' worth; kept apart from the score all the way to the advantages."""
    metrics: Metrics = Field(default_factory=dict)
    reason: str = ""
    is_score_valid: bool = True
    """False leaves the episode unscored: it takes no part in its group's baseline."""
    error: str | None = None
    """Why the episode cannot be scored; same effect as `is_score_valid=False`."""

    @model_validator(mode="after")
    def _says_something(self) -> EvaluateResult:
        if self.score is None and self.step_outputs is None and self.error is None and self.is_score_valid:
            raise ValueError("needs a score, step_outputs or an error")
        return self


def to_result(value: Any, function: str) -> EvaluateResult:  # whatever the author returned
    """`value` as an `EvaluateResult`: one already, a bare number, or a mapping with its fields."""
    try:
        if isinstance(value, EvaluateResult):
            # `model_construct` skips the checks, so what came from there is checked now.
            return EvaluateResult.model_validate(value.model_dump(warnings=False))
        if isinstance(value, Mapping):
            return EvaluateResult.model_validate(dict(value))
        return EvaluateResult(score=finite_number(value))
    except ValidationError as error:
        raise RewardError(f"reward {function} returned a bad result: {explain_validation(error)}") from None
    except ValueError as error:
        raise RewardError(
            f"reward {function} returned {type(value).__name__}: the score {error}; "
            "return an EvaluateResult or a finite number"
        ) from None


def explain_validation(error: ValidationError) -> str:
    """`step_outputs.1.base_reward is nan; it must be finite`, one clause per mistake."""
    clauses = []
    for item in error.errors(include_url=False, include_input=False):
        where = ".".join(str(part) for part in item["loc"])
        clauses.append(f"{where} {item['msg'].removeprefix('Value error, ')}".strip())
    return "; ".join(clauses[:5])


class RewardFunction:
    """A function that scores episodes, with what it declared about itself.

    Call it like the function it wraps; it returns a checked `EvaluateResult` (a list of them in batch mode).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        mode: Mode = "pointwise",
        name: str | None = None,
        step_index_kind: StepIndexKind = "turn",
        score_from_steps: ScoreFromSteps | None = None,
        requires: tuple[str, ...] = (),
    ) -> None:
        self.function = function
        self.name: str = name or str(getattr(function, "__name__", type(function).__name__))
        for what, value, known in (
            ("mode", mode, ("pointwise", "batch")),
            ("step_index_kind", step_index_kind, ("turn", "message")),
            ("score_from_steps", score_from_steps, (None, "sum", "mean")),
        ):
            if value not in known:
                raise RewardError(
                    f"reward {self.name}: {what} is {value!r}; use {' or '.join(map(repr, known))}"
                )
        self.mode: Mode = mode
        self.step_index_kind: StepIndexKind = step_index_kind
        self.score_from_steps: ScoreFromSteps | None = score_from_steps
        self.requires = requires
        """Packages it imports; loading says which of them is missing instead of failing in the middle."""
        self.__doc__ = function.__doc__
        self.__name__ = self.name
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters or parameters[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            first = "messages" if mode == "pointwise" else "rollouts_messages"
            raise RewardError(f"reward {self.name} takes no messages; its first parameter must be {first}")
        keywords = [p for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.accepted = tuple(p.name for p in keywords)
        self.required = tuple(p.name for p in keywords if p.default is p.empty)
        self.accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def declare(self) -> dict[str, Any]:
        """What the scoring side needs to know to call it, as plain JSON; `arguments.Declaration` reads it."""
        names = ("name", "mode", "step_index_kind", "score_from_steps", "accepted", "required", "accepts_any")
        return {name: getattr(self, name) for name in names}

    def __call__(self, messages: Any, /, **arguments: Any) -> Any:  # async functions give an awaitable
        value = self.function(messages, **arguments)
        if inspect.isawaitable(value):
            return self._awaited(value, messages)
        return self.check(value, messages)

    async def _awaited(self, value: Any, messages: Any) -> Any:
        return self.check(await value, messages)

    def run(self, messages: Any, arguments: Mapping[str, Any]) -> Any:
        """Call it to the end, outside any event loop; used where reward code has a process of its own."""
        value = self(messages, **arguments)
        if not inspect.iscoroutine(value):
            return value
        import asyncio  # slow to import, and most rewards do without

        return asyncio.run(value)

    def check(self, value: Any, messages: Any) -> EvaluateResult | list[EvaluateResult]:
        """What the function returned, made sure of; in batch mode one result per rollout."""
        if self.mode == "pointwise":
            return to_result(value, self.name)
        if not isinstance(value, (list, tuple)):
            raise RewardError(
                f"batch reward {self.name} returned {type(value).__name__}; return a list with one result per rollout"
            )
        if len(value) != len(messages):
            raise RewardError(
                f"batch reward {self.name} returned {len(value)} results for {len(messages)} rollouts; "
                "return one per rollout, in order"
            )
        return [to_result(item, self.name) for item in value]


@overload
def reward_function(function: Callable[..., Any], /) -> RewardFunction: ...
@overload
def reward_function(
    *,
    mode: Mode = ...,
    name: str | None = ...,
    step_index_kind: StepIndexKind = ...,
    score_from_steps: ScoreFromSteps | None = ...,
    requires: tuple[str, ...] = ...,
) -> Callable[[Callable[..., Any]], RewardFunction]: ...
def reward_function(
    function: Callable[..., Any] | None = None,
    /,
    *,
    mode: Mode = "pointwise",
    name: str | None = None,
    step_index_kind: StepIndexKind = "turn",
    score_from_steps: ScoreFromSteps | None = None,
    requires: tuple[str, ...] = (),
) -> RewardFunction | Callable[[Callable[..., Any]], RewardFunction]:
    """Mark a function as a reward: `pointwise` gets one episode's messages, `batch` those of a whole group."""

    def wrap(wrapped: Callable[..., Any]) -> RewardFunction:
        return RewardFunction(
            wrapped,
            mode=mode,
            name=name,
            step_index_kind=step_index_kind,
            score_from_steps=score_from_steps,
            requires=requires,
        )

    return wrap if function is None else wrap(function)


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a message, images left out."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def assistant_turns(messages: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The agent's answers with their `step_index`: 0 for its first, 1 for the next.

    Messages written by hand carry no `step_index`; then every assistant message counts as the agent's.
    """
    answers = [message for message in messages if "step_index" in message]
    return enumerate(answers or [message for message in messages if message["role"] == "assistant"])
