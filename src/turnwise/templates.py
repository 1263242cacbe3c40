"""Configs to start from: a run of seconds, of minutes in text and in pictures, of days."""

from __future__ import annotations

from typing import Any

from turnwise.config import Config

SMALL_ROOMS: dict[str, Any] = {
    "generate": {
        "num_train_scenes": 512,
        "num_eval_scenes": 100,
        "max_rooms": 1,
        "min_room_m": 4.0,
        "max_room_m": 5.0,
        "min_objects": 2,
        "max_objects": 4,
        "classes": ["chair", "sofa", "table", "bed", "refrigerator", "bathtub", "shelf", "toilet"],
        "colors": ["red", "yellow", "green", "blue"],
        "distinct_colors": True,
    },
    "width": 96,
    "height": 96,
    "max_turns": 8,
    "instructions": False,
    "solvable_by": "sighted",
    "success_radius_m": 1.0,
    "min_distance_m": 1.0,
    "max_cached_scenes": 612,
}
"""The navigation world that the model `tiny-vision` was made for: one furnished room, small frames, short texts."""


def get_debug_config() -> Config:
    """A run of seconds: does everything once, learns nothing."""
    return Config.from_dict(
        {
            "rollout": {"tasks_per_step": 2, "group_size": 2, "max_turns": 4, "max_new_tokens": 32},
            "training": {"num_steps": 2, "learning_rate": 1e-3},
            "evaluation": {"num_tasks": 4},
            "storage": {"checkpoint_every": 1},
        }
    )


def get_small_scale_config() -> Config:
    """A run of minutes on a laptop CPU: the tiny model learns FrozenLake."""
    return Config.from_dict(
        {
            "environment": {
                "name": "frozenlake",
                "params": {"ice": 0.85, "progress_reward": 0.1, "hole_reward": -0.5},
            },
            "rollout": {
                "tasks_per_step": 16,
                "group_size": 8,
                "max_turns": 10,
                "max_new_tokens": 32,
                "max_concurrent": 128,
            },
            "credit": {"estimator": "rloo"},
            # Episodes that fail are longer: counted by token, they would push down what every answer has in common.
            "loss": {"name": "ppo", "aggregate": "episode", "kl_coefficient": 0.02},
            "training": {
                "num_steps": 60,
                "learning_rate": 1e-3,
                "warmup_steps": 5,
                "schedule": "linear",
                "num_minibatches": 4,
                "max_grad_norm": 0.2,
            },
            "evaluation": {"num_tasks": 200},
            "storage": {"checkpoint_every": 20},
        }
    )


def get_navigation_config() -> Config:
    """A run of minutes on a laptop CPU: the tiny vision-language model learns to find furniture."""
    return Config.from_dict(
        {
            "model": {"path": "tiny-vision"},
            "environment": {
                "name": "navigation",
                # A stride that meets furniture goes on along it, as in Habitat.
                "params": {**SMALL_ROOMS, "slide": True, "progress_reward": 0.5},
            },
            "rollout": {
                "tasks_per_step": 16,
                "group_size": 8,
                "max_turns": SMALL_ROOMS["max_turns"],
                "max_new_tokens": 24,
                "max_concurrent": 128,
                # Only actions of the right form come through, so that learning is about what to do.
                "use_grammar": True,
            },
            "credit": {"estimator": "gigpo", "gamma": 0.8},
            # The words decide the action: a goal that is not seen is looked for. So they are trained too.
            "loss": {"name": "ppo", "tokens": "completion", "aggregate": "episode", "kl_coefficient": 0.02},
            "training": {
                "num_steps": 32,
                "learning_rate": 5e-4,
                "warmup_steps": 3,
                "schedule": "linear",
                "num_minibatches": 4,
                "max_grad_norm": 0.2,
            },
            "evaluation": {"num_tasks": 200},
            "storage": {"checkpoint_every": 20},
        }
    )


def get_adapter_config() -> Config:
    """A run of minutes on a laptop CPU: SmolLM2, a pretrained model of 135 M parameters, learns small lakes by an adapter."""
    return Config.from_dict(
        {
            "model": {"path": "smollm2", "lora": {"rank": 8, "alpha": 16}},
            "environment": {
                "name": "frozenlake",
                "params": {
                    "size": 3,
                    "ice": 1.0,
                    "min_distance": 1,
                    "max_distance": 2,
                    "progress_reward": 0.5,
                    "instructions": True,
                },
            },
            "rollout": {
                "tasks_per_step": 8,
                "group_size": 6,
                "max_turns": 3,
                # It says a few words before its move; the grammar lets only moves through, so that learning is about which one.
                "max_new_tokens": 20,
                "use_grammar": True,
            },
            "credit": {"estimator": "rloo"},
            "loss": {"name": "ppo", "aggregate": "episode"},
            "training": {"num_steps": 10, "learning_rate": 5e-4, "num_minibatches": 2},
            "evaluation": {"num_tasks": 40},
        }
    )


def get_full_scale_config() -> Config:
    """A run of days on GPUs: Qwen3-VL learns to navigate, with an adapter and a reference."""
    return Config.from_dict(
        {
            "model": {"path": "Qwen/Qwen3-VL-8B-Instruct", "dtype": "bfloat16", "lora": {"rank": 64, "alpha": 128}},
            "environment": {"name": "navigation", "params": {"dataset_path": "ARKitScenes/3dod"}},
            "rollout": {
                "tasks_per_step": 32, "group_size": 8, "max_turns": 10, "max_new_tokens": 512, "top_p": 0.9, "top_k": 50,
                "schedule": "eager", "max_concurrent": 256,
            },
            "credit": {"estimator": "gigpo"},
            "loss": {"name": "ppo", "kl_coefficient": 0.01},
            "training": {
                "num_steps": 1000, "learning_rate": 1e-5, "schedule": "cosine", "warmup_steps": 20, "num_minibatches": 4,
                "tokens_per_pack": 32768, "use_amp": True, "gradient_checkpointing": True,
            },
            "evaluation": {"every": 50, "num_tasks": 200},
            "storage": {"checkpoint_every": 50},
        }
    )  # fmt: skip


TEMPLATES = {
    "debug": get_debug_config,
    "small": get_small_scale_config,
    "navigation": get_navigation_config,
    "adapter": get_adapter_config,
    "full": get_full_scale_config,
}
