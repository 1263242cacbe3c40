"""Settings that belong together: the rooms the tiny vision-language model learns in."""

from __future__ import annotations

from typing import Any

SMALL_ROOMS: dict[str, Any] = {
    "generate": {
        "num_train_scenes": 512,
        "num_eval_scenes": 100,
        "max_rooms": 1,
        "min_room_m": 4.0,
        "max_room_m": 5.0,
        "min_objects": 3,
        "max_objects": 5,
        "classes": ["chair", "sofa", "table", "bed", "refrigerator", "bathtub", "shelf", "toilet"],
        "colors": ["red", "yellow", "green", "blue", "purple", "white"],
    },
    "width": 96,
    "height": 96,
    "max_turns": 8,
    "instructions": False,
    "solvable_by": "sighted",
    "success_radius_m": 0.75,
    "min_distance_m": 1.0,
    "max_cached_scenes": 600,
}
"""One furnished room, small frames, short texts: what `tiny-vision` was made for."""
