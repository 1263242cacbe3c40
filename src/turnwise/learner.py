"""The learner: a network, its optimizer and its reference. `update(samples)` is one model update.

Nothing moves before everything was checked: samples that cannot be trained on, a first batch whose log-probs the
learner cannot reproduce, a loss or gradient that is not finite. Then `TrainingError` is raised, the weights are what
they were, and the batch is written down for inspection.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from turnwise.aborted import save_aborted
from turnwise.config import LossConfig, TrainingConfig
from turnwise.errors import ConfigError, TrainingError
from turnwise.losses import is_separable, measure, total_loss
from turnwise.minibatch import Portion, Tally, add_importance, add_reference, build_portions
from turnwise.models.forward import TreeModel
from turnwise.packs import build_packs
from turnwise.reference import KlController, build_reference, trainable
from turnwise.samples import Samples
from turnwise.schedule import learning_rate
from turnwise.types import FloatArray, Group, Json
from turnwise.value_head import ValueHead, turn_positions, value_loss, value_samples


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """What one call of `Learner.update` did."""

    index: int
    """0 for the first update of a run."""
    num_optimizer_steps: int
    metrics: Mapping[str, float]


class LearnerState(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Everything a bit-identical continuation needs: tensors by name, and plain values."""

    tensors: dict[str, Tensor]
    values: dict[str, Json]


_VALUE = "value_head."


class Learner:
    """Owns its network: nobody else may move its weights."""

    def __init__(
        self,
        network: nn.Module,
        *,
        loss: LossConfig,
        training: TrainingConfig,
        image_processor: Any = None,  # transformers' processors share no annotated type
        abort_folder: Path | str | None = None,
    ) -> None:
        self.network = network
        self.loss = loss
        self.training = training
        self.num_updates = 0
        self._parameters = trainable(network)
        if not self._parameters:
            raise ConfigError("the model has no trainable parameter; unfreeze some or add an adapter")
        self._model = TreeModel(network, image_processor=image_processor)
        self._has_dropout = any(
            module.p > 0 for module in network.modules() if isinstance(module, nn.Dropout)
        )
        self._reference = build_reference(network, loss)
        self._kl = KlController(loss.kl_coefficient, loss.kl_target)
        self.abort_folder = Path(abort_folder) if abort_folder is not None else None
        self._value_head: ValueHead | None = None
        self._optimized: dict[str, nn.Parameter] = dict(self._parameters)
        if loss.value_coefficient:
            self._value_head = ValueHead(self._model.hidden_width).to(self._model.device)
            self._optimized.update(
                (f"{_VALUE}{name}", tensor) for name, tensor in self._value_head.named_parameters()
            )
        self._optimizer = torch.optim.AdamW(
            list(self._optimized.values()),
            lr=training.learning_rate,
            # Rewards change the gradient's size from one batch to the next; a long memory would answer with too large a step.
            betas=(0.9, 0.95),
            weight_decay=training.weight_decay,
            fused=True,
        )
        if training.gradient_checkpointing:
            self._model.base.gradient_checkpointing_enable()

    @property
    def kl_coefficient(self) -> float:
        """As the controller has set it."""
        return self._kl.coefficient

    def update(self, samples: Samples) -> Update:
        """Learn from these samples: `num_epochs` passes of `num_minibatches` optimizer steps each."""
        training = self.training
        minibatches = [self._portions(part) for part in samples.split(training.num_minibatches)]
        self._prepare(minibatches)
        rate = learning_rate(training, self.num_updates)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        num_steps = training.num_epochs * len(minibatches)
        before = self.state() if num_steps > 1 else None
        tally = Tally()
        try:
            for _ in range(training.num_epochs):
                for minibatch in minibatches:
                    self._optimizer_step(minibatch, tally)
        except TrainingError as error:
            self._optimizer.zero_grad(set_to_none=True)
            if before is not None:
                self.load_state(before.tensors, before.values)
            raise TrainingError(f"{error}{self._write_down(samples, str(error))}") from None
        finally:
            self._model.forget_images()
        return self._finish(samples, minibatches, tally, rate)

    def logprobs(self, samples: Samples) -> list[FloatArray]:
        """For each sample, what the model now gives its trained tokens; no gradient."""
        found = [np.empty(len(sample.targets_R), dtype=np.float32) for sample in samples.samples]
        index_of = {id(sample): index for index, sample in enumerate(samples.samples)}
        for portion in self._portions(samples):
            values_R = self._logprobs(portion).cpu().numpy()
            pack = portion.pack
            for owner in range(len(pack.samples)):
                mine = pack.sample_R == owner
                found[index_of[id(pack.samples[owner])]][pack.row_R[mine]] = values_R[mine]
        self._model.forget_images()
        return found

    @torch.no_grad()
    def values(self, groups: Sequence[Group]) -> dict[str, tuple[float, ...]] | None:
        """What the value head expects of every turn of every finished episode, by episode id; None without a value head."""
        if self._value_head is None:
            return None
        training = self.training
        samples = value_samples(
            groups, tokens_per_pack=training.tokens_per_pack, use_trees=training.use_token_trees
        )
        found: dict[str, dict[int, float]] = {}
        self.network.eval()
        for pack in build_packs(samples, image_token_id=self._model.image_token_id):
            self._model.check(pack)
            with self._autocast():
                hidden_TD = self._model.hidden_states(pack)
            positions_N, _ = turn_positions(pack)
            values = self._value_head(hidden_TD[torch.from_numpy(positions_N).to(hidden_TD.device)]).tolist()
            names = [
                (sample.episode_id, turn)
                for sample in pack.samples
                for turn in sample.turns.turn_indices_N.tolist()
            ]
            for (name, turn), value in zip(names, values, strict=True):
                found.setdefault(name, {})[turn] = value
        self._model.forget_images()
        return {name: tuple(turns[index] for index in sorted(turns)) for name, turns in found.items()}

    def weights(self) -> dict[str, Tensor]:
        """The trainable weights, all or the adapter's, as a policy takes them over."""
        return {name: tensor.detach() for name, tensor in self._parameters.items()}

    def state(self) -> LearnerState:
        """A copy of weights, optimizer, reference, KL coefficient and counters."""
        tensors = {f"model/{name}": tensor.detach().clone() for name, tensor in self._optimized.items()}
        steps: dict[str, float] = {}
        for name, parameter in self._optimized.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if key == "step":
                    steps[name] = float(value)
                else:
                    tensors[f"optimizer/{name}/{key}"] = value.detach().clone()
        if self._reference is not None:
            tensors.update(
                (f"reference/{name}", tensor.clone()) for name, tensor in self._reference.state().items()
            )
        values = {
            "num_updates": self.num_updates,
            "kl_coefficient": self._kl.coefficient,
            "optimizer_steps": steps,
        }
        return LearnerState(tensors=tensors, values=values)

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Json]) -> None:
        """Continue from the `state()` of a learner of the same model and config; other values are ignored."""
        by_room = {room: _room(tensors, room) for room in ("model", "optimizer", "reference")}
        if set(by_room["model"]) != set(self._optimized):
            strange = sorted(set(by_room["model"]) ^ set(self._optimized))[:3]
            raise TrainingError(
                f"the checkpoint's weights are not those of this model: {', '.join(strange)} …; resume with the same model section"
            )
        with torch.no_grad():
            for name, parameter in self._optimized.items():
                parameter.copy_(by_room["model"][name])
        if self._reference is not None:
            self._reference.load_state(by_room["reference"])
        self._optimizer.state.clear()
        for name, count in values["optimizer_steps"].items():
            parameter = self._optimized[name]
            moments = _room(by_room["optimizer"], name)
            self._optimizer.state[parameter] = {
                "step": torch.tensor(count, dtype=torch.float32, device=parameter.device),
                **{key: value.to(parameter.device, copy=True) for key, value in moments.items()},
            }
        self.num_updates = int(values["num_updates"])
        self._kl.coefficient = float(values["kl_coefficient"])

    def _portions(self, samples: Samples) -> list[Portion]:
        portions = build_portions(
            samples, self.loss, image_token_id=self._model.image_token_id, device=self._model.device
        )
        for portion in portions:
            self._model.check(portion.pack)
        return portions

    def _prepare(self, minibatches: list[list[Portion]]) -> None:
        """Ask the reference, and the model as it is before the update where the loss needs it."""
        portions = [portion for minibatch in minibatches for portion in minibatch]
        if self._reference is not None:
            with self._reference.in_force():
                for portion in portions:
                    add_reference(portion, self._logprobs(portion), self.loss, self._kl.coefficient)
        if self.loss.importance_cap is not None:
            for portion in portions:
                add_importance(portion, self._logprobs(portion), self.loss.importance_cap)
        if self._has_dropout and self.num_updates == 0:
            self._check_gap(max(_gap(portion, self._logprobs(portion)) for portion in portions))

    @torch.no_grad()
    def _logprobs(self, portion: Portion) -> Tensor:
        self.network.eval()
        with self._autocast():
            hidden_TD = self._model.hidden_states(portion.pack)
        positions_U = torch.from_numpy(portion.pack.head.positions_U).to(hidden_TD.device)
        head = self._model.head(chunk=self.training.logit_chunk, use_amp=self.training.use_amp)
        logprobs_R, _ = head.logprobs(hidden_TD[positions_U], portion.pack.head)
        return logprobs_R

    def _optimizer_step(self, minibatch: list[Portion], tally: Tally) -> None:
        # Forgotten, not zeroed: a layer without gradient must be skipped, in a resumed run as in this one.
        self._optimizer.zero_grad(set_to_none=True)
        loss, gap = 0.0, 0.0
        for portion in minibatch:
            value, logprobs_R = self._backward(portion, tally)
            loss += value
            gap = max(gap, _gap(portion, logprobs_R))
        if tally.num_steps == 0:
            tally.gap = gap
            if self.num_updates == 0 and not self._has_dropout:
                self._check_gap(gap)
        grad_norm = nn.utils.clip_grad_norm_(self._optimized.values(), self.training.max_grad_norm)
        if not torch.isfinite(grad_norm):
            raise TrainingError(
                f"the gradient's norm is {float(grad_norm)} in optimizer step {tally.num_steps}"
            )
        self._optimizer.step()
        tally.add_step(loss, float(grad_norm))

    def _backward(self, portion: Portion, tally: Tally) -> tuple[float, Tensor]:
        """Add one pack's gradients; returns its share of the loss and the log-probs on the way."""
        self.network.train()
        pack, terms = portion.pack, portion.terms
        with self._seeded(tally), self._autocast():
            hidden_TD = self._model.hidden_states(pack)
        positions_U = torch.from_numpy(pack.head.positions_U).to(hidden_TD.device)
        hidden_UD = hidden_TD.index_select(0, positions_U)
        extra = self._value_term(portion, hidden_TD, tally)
        head = self._model.head(chunk=self.training.logit_chunk, use_amp=self.training.use_amp)

        def loss_of(rows: slice, logprobs: Tensor, entropies: Tensor) -> Tensor:
            part = terms.part(rows)
            return total_loss(logprobs, entropies, part, self.loss, kl_coefficient=self._kl.coefficient)

        if is_separable(self.loss):
            done = head.backward(hidden_UD, pack.head, loss_of)
            value, logprobs_R, entropies_R = done.loss, done.logprobs_R, done.entropies_R
            roots, grads = [hidden_UD], [done.grad_UD]
            if extra is not None:
                value += float(extra.detach())
                roots, grads = [hidden_UD, extra], [done.grad_UD, torch.ones_like(extra)]
            _check_loss(value, portion)
            torch.autograd.backward(roots, grads)
        else:
            logprobs_R, entropies_R = head.logprobs(hidden_UD, pack.head)
            loss = loss_of(slice(None), logprobs_R, entropies_R)
            loss = loss if extra is None else loss + extra
            value = float(loss.detach())
            _check_loss(value, portion)
            torch.autograd.backward(loss)
        with torch.no_grad():
            tally.add_figures(measure(logprobs_R.detach(), entropies_R.detach(), terms, self.loss))
        return value, logprobs_R.detach()

    def _value_term(self, portion: Portion, hidden_TD: Tensor, tally: Tally) -> Tensor | None:
        """c_V Σ (V - G)² / N_turns"""
        if self._value_head is None:
            return None
        positions_N, returns_N = turn_positions(portion.pack)
        if not np.isfinite(returns_N).any():
            raise TrainingError(
                "loss.value_coefficient is set but no turn has a return; credit with the estimator gae"
            )
        values_N = self._value_head(hidden_TD[torch.from_numpy(positions_N).to(hidden_TD.device)])
        error = value_loss(values_N, torch.from_numpy(returns_N).to(values_N.device), portion.num_turns)
        tally.add_value_error(float(error.detach()))
        return self.loss.value_coefficient * error

    def _check_gap(self, gap: float) -> None:
        # With an importance cap episodes of an older policy are expected, and weighed.
        if self.loss.importance_cap is None and gap > self.training.max_logprob_gap:
            raise TrainingError(
                f"sampler and learner disagree by {gap:.4g} on a token's log-prob before the first update "
                f"(training.max_logprob_gap is {self.training.max_logprob_gap}); check that the policy has the learner's weights "
                "and records the distribution it sampled from"
            )

    def _finish(
        self, samples: Samples, minibatches: list[list[Portion]], tally: Tally, rate: float
    ) -> Update:
        metrics = tally.metrics()
        metrics.update(samples.metrics)
        portions = [portion for minibatch in minibatches for portion in minibatch]
        distinct = sum(len(portion.pack.tree) for portion in portions)
        metrics.update(
            {
                "learning_rate": rate,
                "trained_tokens": float(samples.num_loss_tokens),
                "distinct_tokens": float(distinct),
                "shared_prefix_factor": sum(sample.num_needed_tokens for sample in samples.samples)
                / distinct,
                "packs": float(len(portions)),
            }
        )
        if self._reference is not None:
            metrics["kl_coefficient"] = self._kl.coefficient
            self._kl.observe(metrics["kl"])
        update = Update(index=self.num_updates, num_optimizer_steps=tally.num_steps, metrics=metrics)
        self.num_updates += 1
        if self._reference is not None:
            self._reference.follow(self.num_updates)
        return update

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self._model.device.type, dtype=torch.bfloat16, enabled=self.training.use_amp)

    @contextlib.contextmanager
    def _seeded(self, tally: Tally) -> Iterator[None]:
        """Dropout depends on seed, update and pack only, so a resumed run needs no generator state."""
        if not self._has_dropout:
            yield
            return
        with torch.random.fork_rng():
            key = (self.training.seed, self.num_updates, tally.num_steps, tally.num_packs)
            torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
            yield

    def _write_down(self, samples: Samples, reason: str) -> str:
        if self.abort_folder is None:
            return "; the weights are unchanged"
        path = save_aborted(samples, self.abort_folder, update=self.num_updates, reason=reason)
        return f"; the weights are unchanged and the batch is in {path}"


def _gap(portion: Portion, logprobs_R: Tensor) -> float:
    return float((logprobs_R - portion.sampled_logprobs_R).abs().max())


def _check_loss(value: float, portion: Portion) -> None:
    if not np.isfinite(value):
        names = ", ".join(dict.fromkeys(sample.episode_id for sample in portion.pack.samples))
        raise TrainingError(f"the loss is {value} on a pack of episodes {names[:200]}")


def _room(tensors: Mapping[str, Tensor], room: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(f"{room}/"): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{room}/")
    }
