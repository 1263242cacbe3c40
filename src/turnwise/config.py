"""What a run is told: one frozen record per stage, read from YAML or JSON and overridden as `stage.field=value`.

A knob that belongs to one algorithm is None until that algorithm is chosen; then its default is filled in.
Setting a knob that the chosen algorithm does not read is an error, never a silent no-op.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from turnwise.errors import ConfigError
from turnwise.types import SamplingParams


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


_SectionT = TypeVar("_SectionT", bound=_Section)


class LoraConfig(_Section):
    rank: int = Field(8, ge=1)
    alpha: float = 16.0
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    targets: tuple[str, ...] | None = None
    """Module names that get an adapter; None finds the linear layers of the architecture."""


class ModelConfig(_Section):
    path: str = "tiny"
    """A name that ships with turnwise (tiny, tiny-vision), `smollm2`, or a model folder."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["cpu", "cuda", "auto"] = "auto"
    lora: LoraConfig | None = None
    """Train an adapter instead of all the weights."""


class EnvironmentConfig(_Section):
    name: str = "frozenlake"
    """frozenlake, navigation, gym:ID, or `file.py:Name` or `module:Name` of your own."""
    params: dict[str, Any] = Field(default_factory=dict)  # each environment checks its own
    """Keyword arguments of the environment."""
    timeout_s: float = Field(60.0, gt=0)
    """Deadline of one reset or step."""


class RolloutConfig(_Section):
    tasks_per_step: int = Field(8, ge=1)
    group_size: int = Field(8, ge=1)
    """Episodes per task; RLOO, GRPO and GiGPO compare them with each other."""
    max_turns: int = Field(10, ge=1)
    max_new_tokens: int = Field(100, ge=1)
    temperature: float = Field(1.0, ge=0.0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    min_p: float = Field(0.0, ge=0.0, lt=1.0)
    stop_at_action: bool = True
    use_grammar: bool = False
    """Let only actions through that fit the environment's schema (needs the extra `grammar`)."""
    min_action_tokens: int = Field(1, ge=0)
    max_action_tokens: int = Field(100, ge=1)
    drop_masking_failures: bool = False
    """Leave an episode out of baselines and training when the action tokens of a turn could not be found."""
    history: Literal["keep", "fork", "error"] = "fork"
    """When the chat template rewrites history: keep the sampled tokens, open a new stream, or stop."""
    schedule: Literal["lockstep", "eager"] = "lockstep"
    """lockstep is reproducible to the bit; eager lets episodes run ahead."""
    max_concurrent: int = Field(64, ge=1)
    """Episodes under way at once."""
    turn_timeout_s: float = Field(600.0, gt=0)
    """Deadline of one completion."""
    max_retries: int = Field(1, ge=0)
    """How often a failed episode is started again before it is recorded as failed."""
    kv_budget_mb: int = Field(2048, ge=16)
    """Memory for the local policy's key-value cache."""

    def sampling(self) -> SamplingParams:
        """The part of this record that a policy sees."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p,
            min_p=self.min_p, stop_at_action=self.stop_at_action, use_grammar=self.use_grammar,
        )  # fmt: skip


class RewardConfig(_Section):
    name: str = "environment"
    """A built-in (environment, text, language, json, exact …), `file.py:function`, an import path or an entry point."""
    weight: float = 1.0
    label: str | None = None
    """What its metrics are called; the function's own name when not given."""
    params: dict[str, Any] = Field(default_factory=dict)  # each reward checks its own


class RewardsConfig(_Section):
    functions: tuple[RewardConfig, ...] = (RewardConfig(),)
    """Their scores are added up, weighted."""
    sandbox: Literal["auto", "bubblewrap", "landlock", "none"] = "auto"
    """How user code is confined; `none` runs it in this process and must be asked for."""
    allow_weak_sandbox: bool = False
    """Where neither bubblewrap nor Landlock works, go on with resource limits alone instead of refusing."""
    reads: tuple[str, ...] = ()
    """Files and folders that user code may read besides installed packages; modules in these folders can be imported."""
    timeout_s: float = Field(10.0, gt=0)
    """Deadline of one call of user code."""
    import_timeout_s: float = Field(60.0, gt=0)
    memory_mb: int = Field(1024, ge=64)
    """What one call of user code may allocate."""
    num_workers: int = Field(2, ge=1)


_CREDIT_KNOBS: dict[str, dict[str, Any]] = {
    "rloo": {"normalize": False},
    "grpo": {"scale": "group"},
    "gigpo": {
        "gamma": 0.95,
        "omega": 1.0,
        "combine": "paper",
        "episode_stats": "episodes",
        "step_norm": "mean_std",
        "state_key": "environment",
        "similarity": None,
    },
    "reinforce_plus_plus": {"gamma": 1.0},
    "gae": {"gamma": 1.0, "lam": 0.95, "normalize": True, "state_key": "environment"},
}


class CreditConfig(_Section):
    estimator: Literal["rloo", "grpo", "gigpo", "reinforce_plus_plus", "gae"] = "rloo"
    normalize: bool | None = None
    """rloo, gae: whiten over the batch (mean 0, deviation 1)."""
    scale: Literal["group", "batch", "none"] | None = None
    """grpo: whose standard deviation divides."""
    gamma: float | None = Field(None, ge=0.0, le=1.0)
    """gigpo, gae, reinforce_plus_plus: discount per turn."""
    lam: float | None = Field(None, ge=0.0, le=1.0)
    """gae: trust in the value head, 1 for none."""
    omega: float | None = Field(None, ge=0.0)
    """gigpo: weight of the step advantage."""
    combine: Literal["paper", "convex"] | None = None
    """gigpo: A_E + omega A_S, or omega A_E + (1 - omega) A_S."""
    episode_stats: Literal["episodes", "rows"] | None = None
    """gigpo: count an episode once, or once per turn as verl-agent does."""
    step_norm: Literal["mean_std", "mean"] | None = None
    """gigpo: divide by the standard deviation or not."""
    state_key: str | None = None
    """gigpo, gae: what makes two states the same: environment, last_observation, last_messages:N, normalised_text,
    pose_grid[:METRES:DEGREES] or module:function."""
    similarity: float | None = Field(None, gt=0.0, le=1.0)
    """gigpo: also compare text states whose difflib ratio reaches this; slow, and only for text keys."""
    default_step_reward: float = 0.0
    """gigpo, gae, reinforce_plus_plus: for turns a reward gave no step output for."""
    invalid_action_penalty: float = Field(0.0, ge=0.0)
    """Taken from the reward of a turn whose action was invalid, before discounting, and so from the episode's score."""

    @model_validator(mode="after")
    def _fill_knobs(self) -> Self:
        if self.default_step_reward != 0.0 and self.estimator in ("rloo", "grpo"):
            raise ValueError(
                f"credit.default_step_reward is {self.default_step_reward} but credit.estimator {self.estimator} reads "
                "episode scores only; remove the line or choose gigpo, gae or reinforce_plus_plus"
            )
        if self.combine == "convex" and self.omega is None:
            # As a share, the paper's weight of 1 would leave the steps out.
            object.__setattr__(self, "omega", 0.5)
        if self.combine == "convex" and self.omega is not None and self.omega > 1.0:
            raise ValueError(
                f"credit.omega is {self.omega}; with credit.combine convex it is a share and must lie in [0, 1]"
            )
        return _resolve_knobs(self, "credit", "estimator", self.estimator, _CREDIT_KNOBS)


_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
_LOSS_KNOBS: dict[str, dict[str, Any]] = {
    "reinforce": {},
    "ppo": {**_CLIP, "dual_clip": 3.0},
    "grpo": {**_CLIP},
    "dr_grpo": {**_CLIP},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip_high": 4.0},
}


# What counts once in a loss's mean, and how the tokens of a turn or an episode are joined before that.
LOSS_AGGREGATION = {
    "reinforce": ("episode", "sum"),
    "ppo": ("token", "mean"),
    "grpo": ("episode", "mean"),
    "dr_grpo": ("turn", "constant"),
    "dapo": ("token", "mean"),
    "gspo": ("turn", "mean"),
    "cispo": ("token", "mean"),
}


class LossConfig(_Section):
    name: Literal["reinforce", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo"] = "ppo"
    tokens: Literal["action", "completion"] = "action"
    """Which sampled tokens carry loss: the action's, or the reasoning's too. A turn without an action trains whole."""
    aggregate: Literal["token", "turn", "episode"] | None = None
    """What counts once in the mean: every token, every turn or every episode; None takes the loss's own choice."""
    clip_low: float | None = Field(None, ge=0.0)
    clip_high: float | None = Field(None, ge=0.0)
    dual_clip: float | None = Field(None, gt=1.0)
    """ppo: bound on the loss of negative advantages."""
    entropy_coefficient: float = 0.0
    value_coefficient: float = Field(0.0, ge=0.0)
    """Weight of the value head's squared error, for credit.estimator gae; 0 keeps no value head."""
    kl_coefficient: float = Field(0.0, ge=0.0)
    """0 keeps no reference model."""
    kl_kind: Literal["k1", "k2", "k3"] | None = None
    kl_place: Literal["loss", "reward"] | None = None
    kl_target: float | None = Field(None, gt=0.0)
    """Adapt the coefficient so that the measured divergence stays near this."""
    reference: Literal["frozen", "adapter_off", "ema"] | None = None
    """What the divergence is measured against; None takes adapter_off with LoRA, frozen without."""
    ema_decay: float | None = Field(None, ge=0.0, lt=1.0)
    """ema: how much of the old reference stays when it moves; 0 copies the weights."""
    ema_every: int | None = Field(None, ge=1)
    """ema: updates between two moves of the reference."""
    importance_cap: float | None = Field(None, gt=0.0)
    """Truncated importance sampling for episodes of an older policy version."""

    @model_validator(mode="after")
    def _fill_knobs(self) -> Self:
        resolved = _resolve_knobs(self, "loss", "name", self.name, _LOSS_KNOBS)
        kl_knobs = ("kl_kind", "kl_place", "kl_target", "reference", "ema_decay", "ema_every")
        if self.kl_coefficient == 0.0:
            for knob in kl_knobs:
                if getattr(resolved, knob) is not None:
                    raise ValueError(
                        f"loss.{knob} is {getattr(resolved, knob)!r} but loss.kl_coefficient is 0, so nothing reads it; "
                        "set loss.kl_coefficient or remove the line"
                    )
            return resolved
        for knob in ("ema_decay", "ema_every"):
            if getattr(self, knob) is not None and self.reference != "ema":
                raise ValueError(
                    f"loss.{knob} is {getattr(self, knob)} but loss.reference is {self.reference!r}; "
                    "set it to ema or remove the line"
                )
        defaults: dict[str, Any] = {"kl_kind": "k3", "kl_place": "loss"}
        if self.reference == "ema":
            defaults.update({"ema_decay": 0.99, "ema_every": 1})
        for knob, default in defaults.items():
            if getattr(resolved, knob) is None:
                object.__setattr__(resolved, knob, default)
        return resolved


class TrainingConfig(_Section):
    num_steps: int = Field(100, ge=0)
    """Model updates; each collects new episodes first."""
    seed: int = 0
    learning_rate: float = Field(1e-4, gt=0.0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0.0)
    max_grad_norm: float = Field(1.0, gt=0.0)
    num_epochs: int = Field(1, ge=1)
    """Passes over each batch of episodes."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps per pass."""
    tokens_per_pack: int = Field(8192, ge=64)
    """How many tokens go through the model at once; gradients add up over the packs of a minibatch."""
    logit_chunk: int = Field(1024, ge=1)
    """How many positions reach the LM head at once."""
    use_token_trees: bool = True
    """Compute shared prefixes once."""
    use_amp: bool = False
    """bfloat16 autocast."""
    gradient_checkpointing: bool = False
    max_logprob_gap: float = Field(0.05, gt=0.0)
    """Refuse the first update when sampler and learner disagree by more than this on any token."""


class EvaluationConfig(_Section):
    every: int = Field(0, ge=0)
    """Evaluate after this many updates; 0 only at the end."""
    num_tasks: int = Field(32, ge=1)
    temperature: float = Field(0.0, ge=0.0)
    """0 acts greedily."""


class StorageConfig(_Section):
    checkpoint_every: int = Field(10, ge=1)
    keep_checkpoints: int = Field(3, ge=1)
    """Older ones are removed; the best one stays."""
    save_format: Literal["jsonl", "full", "both"] = "jsonl"
    """full and both also write `.pt` files, one per turn."""
    keep_weights_mb: int = Field(64, ge=0)
    """Keep every policy version's weights up to this size, so that `turnwise verify` can score every token again."""
    durability: Literal["batch", "episode", "none"] = "batch"
    """When a write is on disk for sure: once per batch, per episode, or when the system likes."""


class TrackingConfig(_Section):
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    wandb_project: str | None = None
    tensorboard: bool = False


class Config(_Section):
    """Everything a run needs to be repeated."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    credit: CreditConfig = Field(default_factory=CreditConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    storage: StorageConfig = Field(default_factory=StorageConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.loss.reference == "adapter_off" and self.model.lora is None:
            raise ValueError(
                "loss.reference is adapter_off but model.lora is not set; add a LoRA section or use frozen"
            )
        if self.loss.value_coefficient and self.credit.estimator != "gae":
            raise ValueError(
                f"loss.value_coefficient is {self.loss.value_coefficient} but credit.estimator {self.credit.estimator} reads no "
                "values; choose gae or remove the line"
            )
        if self.credit.estimator in ("rloo", "grpo", "gigpo") and self.rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size is {self.rollout.group_size} but credit.estimator {self.credit.estimator} compares "
                "the episodes of a group; use at least 2"
            )
        return self

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The config these nested values describe; unknown keys are errors that name the nearest known one."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(_explain(cls, error)) from None

    @classmethod
    def from_file(cls, path: Path | str, overrides: Iterable[str] = ()) -> Self:
        """Read a YAML or JSON file, then apply `stage.field=value` overrides."""
        return cls.from_dict(_apply_overrides(_read_mapping(Path(path)), overrides))

    def with_overrides(self, overrides: Iterable[str]) -> Self:
        # Knobs that were only filled in must not outlive a change of the algorithm that read them.
        chosen = self.model_dump(mode="json", exclude_unset=True)
        return self.from_dict(_apply_overrides(chosen, overrides))

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True)

    def to_yaml(self, path: Path | str | None = None) -> str:
        """The config as YAML; also written to `path` when given."""
        text = yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def to_json(self, path: Path | str | None = None) -> str:
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text


def _resolve_knobs(
    section: _SectionT, stage: str, chooser: str, choice: str, table: Mapping[str, Mapping[str, Any]]
) -> _SectionT:
    """Fill in the defaults of the knobs that `choice` reads, and refuse the others."""
    read = table[choice]
    for knob in sorted({knob for knobs in table.values() for knob in knobs}):
        value = getattr(section, knob)
        if knob in read and value is None:
            object.__setattr__(section, knob, read[knob])
        elif knob not in read and value is not None:
            readers = ", ".join(name for name, knobs in table.items() if knob in knobs)
            raise ValueError(
                f"{stage}.{knob} is {value!r} but {stage}.{chooser} {choice} does not read it (read by: {readers}); "
                "remove the line or choose another"
            )
    return section


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"config file {path} does not exist; `turnwise init --template small --out {path}` writes one"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    try:
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"config file {path} is not valid {path.suffix.lstrip('.') or 'YAML'}: {error}"
        ) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"config file {path} holds a {type(values).__name__}; it needs sections such as `training:`"
        )
    return values


def _apply_overrides(values: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`["training.seed=3"]` on `{}` gives `{"training": {"seed": 3}}`; values are read as YAML."""
    merged: dict[str, Any] = json.loads(json.dumps(values))
    overrides = list(overrides)
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator or not name:
            raise ConfigError(f"override {override!r} is not of the form stage.field=value")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        if isinstance(value, str):
            value = _number_or_text(value)
        *parents, leaf = name.split(".")
        target = merged
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ConfigError(f"override {override!r}: {parent} is not a section")
        target[leaf] = value
    _drop_filled_knobs(values, merged, {name.partition("=")[0] for name in overrides})
    return merged


def _drop_filled_knobs(before: dict[str, Any], merged: dict[str, Any], overridden: set[str]) -> None:
    """A written config holds the filled-in knobs of its algorithm; they must not outlive an override of the algorithm."""
    for stage, chooser, table in (("credit", "estimator", _CREDIT_KNOBS), ("loss", "name", _LOSS_KNOBS)):
        old, section = (before.get(stage) or {}).get(chooser), merged.get(stage) or {}
        if old not in table or section.get(chooser) == old:
            continue
        for knob, default in table[old].items():
            if f"{stage}.{knob}" not in overridden and section.get(knob) == default:
                section.pop(knob, None)


def _number_or_text(text: str) -> float | str:
    # YAML 1.1 reads 1e-4 as text; people mean the number.
    try:
        return float(text)
    except ValueError:
        return text


def _explain(root: type[BaseModel], error: ValidationError) -> str:
    """One sentence per mistake, with the value and what to do."""
    sentences = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            known = _fields_at(root, item["loc"][:-1])
            nearest = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known here: {', '.join(known)}"
            sentences.append(f"unknown setting {where}; {hint}")
        elif item["type"] == "value_error":
            sentences.append(str(item["msg"]).removeprefix("Value error, "))
        else:
            sentences.append(f"{where} is {item['input']!r}: {item['msg'].lower()}")
    return "; ".join(sentences)


def _fields_at(root: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The names a section knows; an empty location is the whole config."""
    section: Any = root  # walks through generic annotations such as `LoraConfig | None`
    for part in location:
        if isinstance(part, int):
            continue
        annotation = section.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        section = next(kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel))
    return list(section.model_fields)
