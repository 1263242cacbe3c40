"""Turns episodes into pictures: what the agent saw, where it was, and what it said, turn by turn, as an animated GIF."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from turnwise.environments.navigation.maps import draw_task
from turnwise.environments.navigation.scenes import Pose
from turnwise.environments.navigation.world import WorldCache
from turnwise.types import Episode

_SIDE = 240
_WORDS = 62
_INK, _PAPER, _GOOD, _BAD = (25, 28, 34), (250, 250, 248), (30, 140, 60), (190, 45, 40)


def film_episode(worlds: WorldCache, episode: Episode, title: str = "") -> list[PIL.Image.Image]:
    """One picture per turn and one for the outcome: frame on the left, map on the right, words below."""
    world = worlds.get(str(episode.task.data["scene_id"]))
    uid = episode.task.data.get("goal_uid")
    goal = None if uid is None else world.scene.find(str(uid))
    poses = [Pose(**turn.observation.info["pose"]) for turn in episode.turns]
    pictures = []
    for index, turn in enumerate(episode.turns):
        seen = PIL.Image.fromarray(turn.observation.images[0].pixels).resize(
            (_SIDE, _SIDE), PIL.Image.Resampling.NEAREST
        )
        floor = PIL.Image.fromarray(
            draw_task(world, goal, poses[: index + 1], fov_degrees=90.0, has_names=False)
        )
        said = turn.text.replace("<|im_end|>", "").strip()
        pictures.append(
            _compose(
                title or str(episode.task.data["question"]), seen, floor, turn.observation.text, said, _INK
            )
        )
    if pictures:
        is_success = bool(episode.metrics.get("success"))
        verdict = "Found it." if is_success else "Did not find it."
        last = pictures[-1].copy()
        _write(PIL.ImageDraw.Draw(last), verdict, 18, (12, last.height - 30), _GOOD if is_success else _BAD)
        pictures.append(last)
    return pictures


def side_by_side(left: Sequence[PIL.Image.Image], right: Sequence[PIL.Image.Image]) -> list[PIL.Image.Image]:
    """Two films next to each other; the shorter one holds its last picture."""
    joined = []
    for index in range(max(len(left), len(right))):
        a, b = left[min(index, len(left) - 1)], right[min(index, len(right) - 1)]
        sheet = PIL.Image.new("RGB", (a.width + b.width + 8, max(a.height, b.height)), _PAPER)
        sheet.paste(a, (0, 0))
        sheet.paste(b, (a.width + 8, 0))
        joined.append(sheet)
    return joined


def save_gif(path: Path, pictures: Sequence[PIL.Image.Image], seconds_per_turn: float = 1.2) -> None:
    """Write the pictures as a looping GIF; the last one stays a little longer."""
    if not pictures:
        raise ValueError("a film needs at least one picture; the episode has no turns")
    width, height = max(p.width for p in pictures), max(p.height for p in pictures)
    sheets = []
    for picture in pictures:
        sheet = PIL.Image.new("RGB", (width, height), _PAPER)
        sheet.paste(picture, (0, 0))
        sheets.append(sheet.quantize(128, dither=PIL.Image.Dither.NONE))
    durations = [round(seconds_per_turn * 1000)] * (len(sheets) - 1) + [round(seconds_per_turn * 2000)]
    path.parent.mkdir(parents=True, exist_ok=True)
    sheets[0].save(path, save_all=True, append_images=sheets[1:], duration=durations, loop=0, optimize=True)


def _compose(
    title: str,
    seen: PIL.Image.Image,
    floor: PIL.Image.Image,
    asked: str,
    said: str,
    color: tuple[int, int, int],
) -> PIL.Image.Image:
    floor = floor.copy()
    floor.thumbnail((_SIDE, _SIDE))
    sheet = PIL.Image.new("RGB", (2 * _SIDE + 36, _SIDE + 150), _PAPER)
    sheet.paste(seen, (12, 34))
    sheet.paste(floor, (_SIDE + 24, 34))
    draw = PIL.ImageDraw.Draw(sheet)
    _write(draw, title, 16, (12, 8), _INK)
    _write(draw, asked, 12, (12, _SIDE + 42), (95, 100, 110))
    for row, line in enumerate(textwrap.wrap(said, _WORDS)[:3]):
        _write(draw, line, 14, (12, _SIDE + 62 + 18 * row), color)
    return sheet


def _write(
    draw: PIL.ImageDraw.ImageDraw, text: str, size: int, at: tuple[int, int], color: tuple[int, int, int]
) -> None:
    draw.text(at, text, fill=color, font=PIL.ImageFont.load_default(size=size))
