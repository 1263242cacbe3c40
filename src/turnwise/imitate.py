"""Teaches the tiny vision-language model to copy the expert: the warm start that reinforcement begins from.

Episodes are played by the expert with noise: some actions are replaced by random ones, so that the model also sees how
the expert recovers. The tokens are exactly those of a rollout (same conversation, same images); the loss is on what the
expert said and did, never on a random action.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from turnwise.environments.navigation import Expert, NavigationEnvironment, NavigationSpec
from turnwise.environments.navigation.actions import Command
from turnwise.environments.navigation.params import read_params
from turnwise.evaluate import Evaluation, evaluate
from turnwise.models.patches import quicken_patches
from turnwise.models.tiny_vision import (
    build_image_processor,
    build_network,
    build_tokenizer,
    save_tiny_vision,
)
from turnwise.renderer import Renderer
from turnwise.streams import Conversation
from turnwise.templates import SMALL_ROOMS, get_navigation_config
from turnwise.trainer import build_stages
from turnwise.types import Action, BoolArray, Completion, FinishReason, Image, IntArray

# Dimensions: B lessons, T tokens, P patches, X values of a patch.


class ImitationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the warm start is made."""

    seed: int = 0
    num_lessons: int = 3500
    """Expert episodes."""
    noise: float = 0.25
    """Share of the actions that are replaced by random ones."""
    any_stride: bool = True
    """The teacher shows which way to go, and walks any part of the expert's stride: how far to go is left to be found out."""
    num_epochs: int = 5
    batch_size: int = 8
    learning_rate: float = 2e-3
    num_threads: int = 2


class Lesson(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One expert episode as tokens."""

    ids: IntArray
    is_learned: BoolArray
    """The tokens that carry loss."""
    images: tuple[Image, ...]


class ImitationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What teaching took."""

    num_lessons: int
    num_tokens: int
    losses: tuple[float, ...]
    """Mean of each epoch."""
    seconds: float


Watch = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""


def make_warm_start(out: Path, options: ImitationOptions, watch: Watch) -> ImitationReport:
    """Build the tiny vision model, teach it, and save it to `out`."""
    torch.set_num_threads(options.num_threads)
    started = time.monotonic()
    tokenizer = build_tokenizer()
    network = build_network(tokenizer, options.seed)
    quicken_patches(network)
    renderer = Renderer(tokenizer, image_processor=build_image_processor(), history="error")
    lessons = collect_lessons(renderer, options, watch)
    losses = teach(network, tokenizer, lessons, options, watch)
    out.mkdir(parents=True, exist_ok=True)
    save_tiny_vision(out, network, tokenizer)
    return ImitationReport(
        num_lessons=len(lessons), num_tokens=sum(len(lesson.ids) for lesson in lessons), losses=losses,
        seconds=time.monotonic() - started,
    )  # fmt: skip


async def measure(model_path: str, num_tasks: int = 200, temperature: float = 0.0) -> Evaluation:
    """How well a model folder acts on held-out tasks in held-out rooms; greedily unless given a temperature."""
    config = get_navigation_config().with_overrides(
        [
            f"model.path={model_path}",
            f"evaluation.num_tasks={num_tasks}",
            f"evaluation.temperature={temperature}",
        ]
    )
    stages = build_stages(config)
    try:
        return await evaluate(
            stages.rollouts, stages.environment.tasks, stages.rewards, config.evaluation, label="warm-start"
        )
    finally:
        stages.rewards.close()
        await stages.rollouts.agent.policy.close()


def write_model_card(
    out: Path, options: ImitationOptions, report: ImitationReport, greedy: Evaluation, sampled: Evaluation
) -> None:
    """Say in the model folder how the model was made and how good it is."""
    stride = (
        "any part of its stride, so the model copies which way, not how far"
        if options.any_stride
        else "all of its stride"
    )
    text = f"""# tiny-vision

Qwen3-VL architecture at 1.6 million parameters, taught to copy an expert that finds furniture in made-to-order rooms. It writes
one sentence about what it sees and then a JSON action.

- Made by `turnwise models make-tiny --vision --imitate --seed {options.seed}` in {report.seconds / 60:.0f} minutes on {options.num_threads} cores.
- {report.num_lessons} expert episodes ({report.num_tokens:,} tokens) in the training rooms of `turnwise.templates.SMALL_ROOMS`. The teacher sees
  what the camera shows, looks around until the goal is in view, turns to where the way is shortest, and walks {stride}.
  {options.noise:.0%} of the actions are replaced by random ones that are shown but not learned.
- {options.num_epochs} epochs of batches of {options.batch_size} at a learning rate of {options.learning_rate:g}. Loss per epoch:
  {", ".join(f"{loss:.3f}" for loss in report.losses)}.
- On {greedy.num_episodes} held-out tasks in held-out rooms: {_in_words("greedy", greedy)}; {_in_words("sampled at temperature 1", sampled)}.
- No pretrained weights and no outside data were used.
"""
    (out / "README.md").write_text(text, encoding="utf-8")


def _in_words(how: str, evaluation: Evaluation) -> str:
    low, high = evaluation.intervals["success"]
    return (
        f"{how}, success {evaluation.metrics['success']:.3f} (95 % interval {low:.3f} to {high:.3f}), "
        f"SPL {evaluation.metrics['spl']:.3f}"
    )


def collect_lessons(renderer: Renderer, options: ImitationOptions, watch: Watch) -> list[Lesson]:
    """Expert episodes on training tasks, one per task."""
    spec = NavigationSpec(read_params({**SMALL_ROOMS, "seed": options.seed}))
    env = spec.make()
    rng = np.random.default_rng(options.seed)
    lessons = []
    for index in range(options.num_lessons):
        lessons.append(play_lesson(spec, env, index, renderer, options, rng))
        watch("expert episodes", index + 1, options.num_lessons)
    return lessons


def play_lesson(
    spec: NavigationSpec, env: NavigationEnvironment, index: int, renderer: Renderer, options: ImitationOptions, rng: np.random.Generator
) -> Lesson:  # fmt: skip
    """The expert plays one task with noise, in the tokens a rollout would have."""
    params = spec.params
    expert = Expert(params.solvable_by, limits=params.limits())
    conversation = Conversation(renderer)
    observation = env.reset(spec.tasks.task(index, "train"))
    learned: list[BoolArray] = []
    while True:
        conversation.observe(observation.messages)
        turn = expert.act(env.situation())
        is_noisy = bool(rng.random() < options.noise)
        shown = _part_of_stride(turn.command, rng) if options.any_stride else turn.command
        command = _random_command(rng) if is_noisy else shown
        said = _encode(renderer, f"{turn.reasoning} ")
        # The reasoning is the expert's either way; a random action is shown but not learned.
        ids = _encode(renderer, f"{turn.reasoning} {json.dumps(command.as_value())}")
        mask = np.ones(len(ids), dtype=bool)
        if is_noisy:
            mask[_common_prefix(said, ids) :] = False
        learned.append(mask)
        conversation.answer(_given(ids, renderer))
        transition = env.step(Action(value=command.as_value()))
        observation = transition.observation
        if transition.is_terminal:
            return _lesson(conversation, learned)


def _encode(renderer: Renderer, text: str) -> IntArray:
    return np.asarray(renderer.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def _common_prefix(first: IntArray, second: IntArray) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


def _random_command(rng: np.random.Generator) -> Command:
    return Command(
        rotation_degrees=float(rng.integers(-12, 13)) * 15.0, forward_m=float(rng.integers(0, 5)) * 0.25
    )


def _part_of_stride(command: Command, rng: np.random.Generator, step_m: float = 0.25) -> Command:
    """The same turn, and 0.25 m, 0.5 m … or all of the way ahead."""
    num_steps = round(command.forward_m / step_m)
    if num_steps < 1:
        return command
    return msgspec.structs.replace(command, forward_m=step_m * int(rng.integers(1, num_steps + 1)))


def _given(ids: IntArray, renderer: Renderer) -> Completion:
    return Completion(
        completion_ids=ids, logprobs=np.zeros(len(ids), dtype=np.float32), text=renderer.tokenizer.decode(ids),
        finish_reason=FinishReason.ACTION, policy_version=0,
    )  # fmt: skip


def _lesson(conversation: Conversation, learned: list[BoolArray]) -> Lesson:
    (stream,) = conversation.streams()
    is_learned = np.zeros(len(stream.ids), dtype=bool)
    for span, mask in zip(conversation.spans, learned, strict=True):
        is_learned[span.completion_start : span.completion_end] = mask
    return Lesson(ids=stream.ids, is_learned=is_learned, images=stream.images)


def teach(
    network: Any, tokenizer: Any, lessons: Sequence[Lesson], options: ImitationOptions, watch: Watch
) -> tuple[float, ...]:
    """Cross-entropy on the learned tokens; the mean loss of each epoch. Network and tokenizer are Hugging Face's."""
    steps_per_epoch = -(-len(lessons) // options.batch_size)
    num_steps = steps_per_epoch * options.num_epochs
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=options.learning_rate, weight_decay=0.01, betas=(0.9, 0.98), fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=options.learning_rate, total_steps=num_steps, pct_start=0.1
    )
    network.train()
    losses = [0.0] * options.num_epochs
    for step, batch in enumerate(_batches(lessons, options)):
        loss = lesson_loss(network, tokenizer.pad_token_id, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses[step // steps_per_epoch] += float(loss.detach()) / steps_per_epoch
        watch(f"teaching, loss {float(loss.detach()):.3f}", step + 1, num_steps)
    network.eval()
    return tuple(losses)


def _batches(lessons: Sequence[Lesson], options: ImitationOptions) -> Iterator[list[Lesson]]:
    """Every lesson once an epoch; batches of like length, so that little is padding, in random order."""
    rng = np.random.default_rng([options.seed, 1])
    for _ in range(options.num_epochs):
        lengths = np.array([len(lesson.ids) for lesson in lessons]) + rng.uniform(0, 40, len(lessons))
        order = np.argsort(lengths)
        chunks = [order[i : i + options.batch_size] for i in range(0, len(order), options.batch_size)]
        for index in rng.permutation(len(chunks)):
            yield [lessons[int(i)] for i in chunks[int(index)]]


def lesson_loss(network: Any, pad_token_id: int, batch: Sequence[Lesson]) -> torch.Tensor:
    """Mean cross-entropy over the learned tokens of a batch."""
    width = max(len(lesson.ids) for lesson in batch)
    ids_BT = torch.full((len(batch), width), pad_token_id, dtype=torch.long)
    labels_BT = torch.full((len(batch), width), -100, dtype=torch.long)
    is_real_BT = torch.zeros((len(batch), width), dtype=torch.long)
    for row, lesson in enumerate(batch):
        ids = torch.from_numpy(lesson.ids.astype(np.int64))
        ids_BT[row, : len(ids)], is_real_BT[row, : len(ids)] = ids, 1
        labels_BT[row, : len(ids)] = torch.where(torch.from_numpy(lesson.is_learned), ids, -100)
    images = list(itertools.chain.from_iterable(lesson.images for lesson in batch))
    patches_PX, grids = to_patches(images)
    output = network(
        input_ids=ids_BT, attention_mask=is_real_BT, labels=labels_BT, pixel_values=patches_PX, image_grid_thw=grids,
        mm_token_type_ids=(ids_BT == network.config.image_token_id).int(),
    )  # fmt: skip
    loss: torch.Tensor = output.loss
    return loss


def to_patches(images: Sequence[Image], side: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Equal-sized images as the tiny model's image processor cuts them, many at once: patches and grids.

    Two by two patches that will be merged follow each other; each patch holds its colours twice, for two moments.
    """
    pixels = torch.from_numpy(np.stack([image.pixels for image in images])).permute(0, 3, 1, 2)
    count, channels, height, width = pixels.shape
    rows, columns = height // side, width // side
    values = pixels.float() / 255.0 * 2.0 - 1.0
    cut = values.reshape(count, channels, rows // 2, 2, side, columns // 2, 2, side).permute(
        0, 2, 5, 3, 6, 1, 4, 7
    )
    twice = cut.reshape(count * rows * columns, channels, 1, side * side).expand(-1, -1, 2, -1)
    grids = torch.tensor([[1, rows, columns]] * count)
    return twice.reshape(count * rows * columns, -1), grids
