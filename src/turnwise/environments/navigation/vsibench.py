"""VSI-Bench: its rows as tasks, and its scoring rules."""

from __future__ import annotations

from turnwise.types import Task


def score_answer(answer: str, task: Task) -> float:
    """0 to 1 by the official definition of the task's question type."""
    raise NotImplementedError
