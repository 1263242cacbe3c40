"""turnwise turns episodes into better agents, and can prove every token of it.

Public names are loaded when first used, so that `import turnwise` stays light.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Each public name and the module it lives in.
_HOMES = {
    "turnwise.advantages": (
        "Gigpo", "compute_advantages", "compute_loo_baseline", "gae", "gigpo", "grpo", "reinforce_plus_plus", "rloo",
    ),
    "turnwise.collector": ("EpisodeBatchCollector",),
    "turnwise.batch": ("EpisodeBatch", "prepare_batch", "train_epoch", "train_step"),
    "turnwise.config": ("Config",),
    "turnwise.templates": (
        "get_adapter_config", "get_debug_config", "get_full_scale_config", "get_navigation_config", "get_small_scale_config",
    ),
    "turnwise.credit": ("assign_advantages",),
    "turnwise.environment": ("Environment",),
    "turnwise.environments.navigation": ("NavigationEnvironment",),
    "turnwise.errors": ("TurnwiseError",),
    "turnwise.learner": ("Learner", "LearnerState", "Update"),
    "turnwise.objective": ("describe_objective",),
    "turnwise.samples": ("Sample", "Samples", "build_samples"),
    "turnwise.masking": ("ActionTokenMasker", "ActionTracker", "TokenBytes"),
    "turnwise.policies.delivery": ("Delivery",),
    "turnwise.policies.endpoint": ("EndpointPolicy",),
    "turnwise.policies.local": ("LocalPolicy",),
    "turnwise.policy": ("Policy", "Request"),
    "turnwise.renderer": ("Renderer",),
    "turnwise.simulator": ("EpisodeSimulator",),
    "turnwise.streams": ("Conversation",),
    "turnwise.rewards.interface": ("EvaluateResult", "MetricResult", "StepOutput", "reward_function"),
    "turnwise.rewards.score": ("Rewards", "build_rewards", "score_groups"),
    "turnwise.rewards.align": ("align_rewards",),
    "turnwise.rewards.steps": ("StepData",),
    "turnwise.types": (
        "Action", "Completion", "Episode", "Group", "Image", "Message", "Observation", "Role", "SamplingParams", "Task",
        "TokenStream", "Transition", "Turn",
    ),
    "turnwise.worker": ("AgentPolicy", "RLRolloutWorker", "TaskDefinition"),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:  # the public names have many types
    if name not in _HOME_OF:
        raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
