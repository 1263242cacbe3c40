"""A saved episode for people: what each turn saw, did, was paid and deserved."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnwise.errors import StoreError
from turnwise.types import Episode, Json, Message, Score, Turn, TurnCredit


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """One turn, as far as it is known; None was not computed."""

    episode_id: str
    step_index: int
    observation: str
    reasoning: str
    action: Json
    action_text: str
    is_action_valid: bool = True
    environment_reward: float | None = None
    base_reward: float | None = None
    """What the reward function paid for this turn."""
    step_return: float | None = None
    episode_advantage: float | None = None
    step_advantage: float | None = None
    advantage: float | None = None
    anchor: str | None = None
    anchor_size: int | None = None
    note: str = ""
    """How many tokens were sampled and how the action among them was found."""


class EpisodeView(msgspec.Struct, frozen=True, kw_only=True):
    """An episode and the opinions about it."""

    episode_id: str
    group_id: str
    task_id: str
    stop_reason: str
    seconds: float
    environment_reward: float
    score: float | None
    reward_name: str | None
    estimator: str | None
    failure: str | None
    metrics: Mapping[str, float]
    steps: tuple[StepView, ...]


def view_episode(
    episode: Episode,
    score: Score | None = None,
    credits: Sequence[TurnCredit] = (),
    *,
    estimator: str | None = None,
) -> EpisodeView:
    """Put an episode and the opinions about it together."""
    rewards = (score.step_rewards if score is not None else ()) or (None,) * episode.num_turns
    rows: Sequence[TurnCredit | None] = list(credits) or [None] * episode.num_turns
    failure = episode.failure
    return EpisodeView(
        episode_id=episode.episode_id,
        group_id=episode.group_id,
        task_id=episode.task.task_id,
        stop_reason=str(episode.stop_reason),
        seconds=episode.seconds,
        environment_reward=episode.final_reward,
        score=None if score is None else score.score,
        reward_name=None if score is None else score.reward_name,
        estimator=estimator if credits else None,
        failure=None if failure is None else f"{failure.stage}: {failure.error}",
        metrics=dict(episode.metrics),
        steps=tuple(
            _view_turn(episode.episode_id, turn, reward, credit)
            for turn, reward, credit in zip(episode.turns, rewards, rows, strict=True)
        ),
    )


def _view_turn(episode_id: str, turn: Turn, base_reward: float | None, credit: TurnCredit | None) -> StepView:
    opinions: dict[str, Json] = {} if credit is None else msgspec.structs.asdict(credit)
    shared = ("step_return", "episode_advantage", "step_advantage", "advantage", "anchor", "anchor_size")
    return StepView(
        episode_id=episode_id,
        step_index=turn.turn_index,
        observation="\n".join(map(describe_message, turn.observation.messages)),
        reasoning=turn.reasoning,
        action=turn.action.value,
        action_text=turn.action.text,
        is_action_valid=turn.is_action_valid,
        environment_reward=turn.reward,
        base_reward=base_reward,
        note=f"{turn.num_action_tokens} of {len(turn.generated_ids)} sampled tokens are the action ({turn.masking_method})",
        **{name: opinions.get(name) for name in shared},
    )


def describe_message(message: Message) -> str:
    """A message as text, each image by its first hexadecimal digits and size."""
    parts = (message.content,) if isinstance(message.content, str) else message.content
    shown = [
        part if isinstance(part, str) else f"[image {part.sha256[:8]} {part.width}×{part.height}]"
        for part in parts
    ]
    return f"{message.role}: {''.join(shown)}"


def read_steps(path: Path) -> Iterator[StepView]:
    """The steps of a saved steps file (one JSON object per line)."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield _read_step(json.loads(line))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise StoreError(
                f"{path}, line {number} is not a saved step ({type(error).__name__}: {error}); "
                "give a run folder or a file written by write_steps"
            ) from None


def _read_step(record: Mapping[str, Json]) -> StepView:
    *seen, answer = record["messages"]
    action = record["action"]
    text = answer["content"]
    names = (
        "environment_reward",
        "base_reward",
        "step_return",
        "episode_advantage",
        "step_advantage",
        "advantage",
    )
    return StepView(
        episode_id=record["episode_id"],
        step_index=record["step_index"],
        observation="\n".join(f"{message['role']}: {_plain_content(message['content'])}" for message in seen),
        reasoning=text.partition(action["text"])[0].strip() if action["text"] else text,
        action=action["value"],
        action_text=action["text"],
        is_action_valid=action["value"] is not None,
        note=f"{len(record['policy_logprobs'])} sampled tokens",
        **{name: record.get(name) for name in names},
    )


def _plain_content(content: Json) -> str:
    if isinstance(content, str):
        return content
    return "".join(
        part["text"]
        if part["type"] == "text"
        else f"[image {part['sha256'][:8]} {part['width']}×{part['height']}]"
        for part in content
    )


def print_episode(view: EpisodeView, console: Console) -> None:
    """The whole episode, turn by turn."""
    heading = f"episode {view.episode_id}  group {view.group_id}  task {view.task_id}"
    console.print(Text(heading, style="bold"), soft_wrap=True)
    facts = [f"stopped: {view.stop_reason}", f"{len(view.steps)} turns", f"{view.seconds:.1f} s"]
    facts.append(f"environment reward {view.environment_reward:+.3f}")
    if view.reward_name is not None:
        shown = "none" if view.score is None else f"{view.score:+.3f}"
        facts.append(f"score {shown} ({view.reward_name})")
    if view.estimator is not None:
        facts.append(f"credit by {view.estimator}")
    facts += [f"{name} {value:g}" for name, value in view.metrics.items()]
    console.print(Text("  " + "   ".join(facts)), soft_wrap=True)
    if view.failure is not None:
        console.print(Text(f"  failed in {view.failure}", style="red"), soft_wrap=True)
    print_steps(view.steps, console)


def print_steps(steps: Iterable[StepView], console: Console) -> None:
    """A paragraph per turn."""
    for step in steps:
        console.print()
        console.print(_headline(step), soft_wrap=True)
        _print_labelled("sees", step.observation, console)
        _print_labelled("thinks", step.reasoning, console, style="italic")
        action = step.action_text or ("nothing" if step.action is None else json.dumps(step.action))
        label = "does" if step.is_action_valid else "tries"
        _print_labelled(label, action, console, style="bold" if step.is_action_valid else "red")
        _print_labelled("", step.note, console, style="dim")


def _headline(step: StepView) -> Text:
    text = Text(f"turn {step.step_index}", style="bold cyan")
    named = {
        "reward": step.environment_reward if step.base_reward is None else step.base_reward,
        "return": step.step_return, "A_E": step.episode_advantage, "A_S": step.step_advantage,
    }  # fmt: skip
    for name, value in named.items():
        if value is not None:
            text.append(f"   {name} {value:+.3f}", style="not bold default")
    if step.anchor is not None:
        text.append(f"   anchor {step.anchor} ({step.anchor_size} turns)", style="not bold dim")
    if step.advantage is not None:
        colour = "green" if step.advantage > 0 else "red" if step.advantage < 0 else "default"
        text.append(f"   advantage {step.advantage:+.3f}", style=colour)
    return text


def _print_labelled(label: str, content: str, console: Console, style: str = "") -> None:
    if not content:
        return
    for number, line in enumerate(content.splitlines()):
        prefix = f"  {label if number == 0 else '':7s}"
        console.print(
            Text(prefix, style="dim").append(line, style=f"not dim {style}".strip()), soft_wrap=True
        )


def print_episodes(views: Sequence[EpisodeView], console: Console) -> None:
    """One line per episode."""
    table = Table(box=None)
    for heading in ("episode", "group", "task", "turns", "stopped", "reward", "score", "metrics"):
        table.add_column(
            heading, justify="right" if heading in ("turns", "reward", "score") else "left", no_wrap=True
        )
    for view in views:
        table.add_row(
            view.episode_id,
            view.group_id,
            view.task_id,
            str(len(view.steps)),
            view.stop_reason if view.failure is None else f"{view.stop_reason}: {view.failure}",
            f"{view.environment_reward:+.2f}",
            "–" if view.score is None else f"{view.score:+.2f}",
            " ".join(f"{name}={value:g}" for name, value in view.metrics.items()),
        )
    console.print(table)
