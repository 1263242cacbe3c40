"""Runs the network for sequences: prefills what is new, decodes one token for each, samples.

The only code that touches the network. It knows nothing of who waits or when to start; that is the scheduler's subject.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from turnwise.errors import PolicyError
from turnwise.policies.attention import NO_MASK, DecodePlan, Plan, PrefillPlan, make_store, serve_slots
from turnwise.policies.prefixes import MIN_SHARED_TOKENS, common_prefix
from turnwise.policies.residents import Residents
from turnwise.policies.sequences import Sequence, Vocabulary
from turnwise.policies.vision import PreparedImage, pack_images
from turnwise.sampling import draw_tokens
from turnwise.types import SamplingParams

# Prompt tokens in one forward pass: enough to keep matrix products busy, few enough to bound their memory.
_PREFILL_TOKENS = 4096

_Ids = npt.NDArray[np.int64]


class Statistics(msgspec.Struct, kw_only=True):
    """What a runner has done so far."""

    num_steps: int = 0
    """Forward passes."""
    num_prefilled: int = 0
    """Prompt tokens computed."""
    num_shared: int = 0
    """Prompt tokens copied from another stream's slot."""
    num_decoded: int = 0
    """Sampled tokens fed back."""
    model_s: float = 0.0
    """Seconds inside forward passes."""


class Runner:
    """A network, its slots and its sampler."""

    def __init__(
        self,
        network: Any,  # a transformers model, or a PEFT wrapper of one
        vocabulary: Vocabulary,
        *,
        image_token_id: int | None,
        budget_bytes: int,
    ) -> None:
        self.network = network
        self.image_token_id = image_token_id
        self._budget_bytes = budget_bytes
        self.store = make_store(network, budget_bytes)
        self._device = self.store.keys[0].device
        self._banned_V = torch.zeros(vocabulary.size, device=self._device)
        self._banned_V[torch.from_numpy(vocabulary.banned_ids.astype(np.int64))] = float("-inf")
        self.statistics = Statistics()
        self._plan: DecodePlan | None = None
        self._planned: list[Sequence] = []
        # After logits that were not finite, what is cached may not be either, and attention lets that through its masks.
        self._is_spoiled = False

    def forget(self) -> None:
        """Drop every cached key and value: the weights changed."""
        if self._is_spoiled:
            self.store, self._is_spoiled = make_store(self.network, self._budget_bytes), False
        else:
            self.store.clear()
        self._plan = None

    @torch.inference_mode()
    def prefill(self, sequences: Many[Sequence], residents: Residents) -> None:
        """Compute the prompt tokens that no slot holds yet, and sample each sequence's first token."""
        if self.network.training:
            self.network.eval()
        # Between turns others may have chosen another attention function for the network.
        serve_slots(self.network)
        logits: dict[Sequence, torch.Tensor] = {}
        for phase in _phases(sequences, residents, self.image_token_id):
            for sequence, source, length in phase:
                self._copy(sequence, source, length, logits, residents)
            fresh = [sequence for sequence, _, _ in phase if sequence not in logits]
            for pack in _packs(fresh):
                logits.update(zip(pack, self._prefill_pack(pack), strict=True))
        self._sample(sequences, torch.stack([logits[sequence] for sequence in sequences]))

    def _copy(
        self,
        sequence: Sequence,
        source: Sequence | None,
        length: int,
        logits: dict[Sequence, torch.Tensor],
        residents: Residents,
    ) -> None:
        """Take over what another slot has already computed of this prompt."""
        slot = sequence.slot
        assert slot is not None
        if source is not None:
            assert source.slot is not None
            self.store.copy_prefix(source.slot, slot, length)
            self.statistics.num_shared += length
            if length == len(sequence.request.prompt_ids) == source.slot.length:
                logits[sequence] = logits[source]
                sequence.next_position = source.next_position
                return
        elif slot.length == 0 and (found := residents.best_source(sequence)) is not None:
            self.store.copy_prefix(found[0], slot, found[1])
            self.statistics.num_shared += found[1]
        # At least one token is computed, for its logits.
        slot.length = min(slot.length, len(sequence.request.prompt_ids) - 1)

    def _prefill_pack(self, sequences: Many[Sequence]) -> torch.Tensor:
        """Logits after the last prompt token of each sequence: [R, V]."""
        slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
        starts = [slot.length for slot in slots]
        parts = [
            sequence.request.prompt_ids[start:] for sequence, start in zip(sequences, starts, strict=True)
        ]
        counts = [len(part) for part in parts]
        positions, extra = self._positions(sequences, starts)
        self.statistics.num_prefilled += sum(counts)
        last = torch.from_numpy(np.cumsum(counts) - 1).to(self._device)
        plan = PrefillPlan(self.store, list(zip(slots, counts, strict=True)))
        logits = self._forward(
            np.concatenate(parts)[None].astype(np.int64), positions, plan, logits_to_keep=last, **extra
        )
        for sequence, slot, part in zip(sequences, slots, parts, strict=True):
            slot.append(part)
            slot.images = sequence.request.images
        return logits[0]

    def _positions(self, sequences: Many[Sequence], starts: Many[int]) -> tuple[_Ids, dict[str, Any]]:
        """Rotary positions of the packed new tokens ([1, T], or [3, 1, T] with M-RoPE), and the new images."""
        parts: list[_Ids] = []
        images: list[PreparedImage] = []
        for sequence, start in zip(sequences, starts, strict=True):
            if sequence.preparation is None:
                sequence.next_position = len(sequence.request.prompt_ids)
                parts.append(np.arange(start, sequence.next_position))
            else:
                prompt = sequence.preparation.result()
                sequence.next_position = prompt.next_position
                parts.append(prompt.positions[:, start:])
                images.extend(prompt.images_from(start))
        return np.concatenate(parts, axis=-1)[..., None, :], pack_images(images, self._device)

    @torch.inference_mode()
    def decode(self, sequences: Many[Sequence]) -> None:
        """Sample one more token for each; the sequences must be in the order of their slots."""
        plan = self._decode_plan(sequences)
        ids = np.array([[sequence.ids[-1]] for sequence in sequences], dtype=np.int64)
        positions = np.array([[sequence.next_position] for sequence in sequences], dtype=np.int64)
        if self.image_token_id is not None:
            positions = np.broadcast_to(positions, (3, *positions.shape)).copy()
        logits = self._forward(ids, positions, plan)
        for sequence in sequences:
            sequence.take_in_last_token()
        self.statistics.num_decoded += len(sequences)
        self._sample(sequences, logits[:, 0])

    def _decode_plan(self, sequences: Many[Sequence]) -> DecodePlan:
        if self._plan is not None and self._planned == sequences:
            self._plan.advance()
        else:
            slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
            self._plan, self._planned = DecodePlan(self.store, slots), list(sequences)
        return self._plan

    def _forward(self, ids: _Ids, positions: _Ids, plan: Plan, **kwargs: Any) -> torch.Tensor:
        started_at = time.perf_counter()
        output = self.network(
            input_ids=torch.from_numpy(ids).to(self._device),
            position_ids=torch.from_numpy(positions).to(self._device),
            attention_mask=NO_MASK,
            use_cache=False,
            slot_plan=plan,
            **kwargs,
        )
        logits: torch.Tensor = output.logits
        self.statistics.num_steps += 1
        self.statistics.model_s += time.perf_counter() - started_at
        return logits

    def _sample(self, sequences: Many[Sequence], logits_RV: torch.Tensor) -> None:
        logits_RV = logits_RV.float().add_(self._banned_V)
        allowed_RV = self._apply_grammars(sequences, logits_RV)
        by_sampling: dict[SamplingParams, list[int]] = {}
        for row, sequence in enumerate(sequences):
            by_sampling.setdefault(sequence.request.sampling, []).append(row)
        for sampling, rows in by_sampling.items():
            chosen = [sequences[row] for row in rows]
            is_whole = len(by_sampling) == 1
            try:
                draw = draw_tokens(
                    logits_RV if is_whole else logits_RV[rows],
                    sampling,
                    np.array([sequence.next_uniform for sequence in chosen]),
                    allowed_RV=allowed_RV if is_whole or allowed_RV is None else allowed_RV[rows],
                )
            except PolicyError:
                self._is_spoiled = True
                raise
            for sequence, token_id, logprob, kept in zip(
                chosen, draw.token_ids.tolist(), draw.logprobs.tolist(), draw.kept, strict=True
            ):
                sequence.push(token_id, logprob, kept)

    def _apply_grammars(self, sequences: Many[Sequence], logits_RV: torch.Tensor) -> torch.Tensor | None:
        """Ban what a grammar bans throughout; return what may be sampled where an action is open, or None."""
        allowed_RV: torch.Tensor | None = None
        for row, sequence in enumerate(sequences):
            if sequence.grammar is None or sequence.constraint is None:
                continue
            banned = torch.from_numpy(sequence.grammar.banned_ids.astype(np.int64)).to(self._device)
            logits_RV[row].index_fill_(0, banned, float("-inf"))
            allowed = sequence.constraint.allowed()
            if allowed is not None:
                if allowed_RV is None:
                    allowed_RV = torch.ones(logits_RV.shape, dtype=torch.bool, device=self._device)
                allowed_RV[row] = torch.from_numpy(allowed).to(self._device)
        return allowed_RV


def _phases(
    sequences: Many[Sequence], residents: Residents, image_token_id: int | None
) -> Iterator[list[tuple[Sequence, Sequence | None, int]]]:
    """Orders a prefill so that whatever two prompts begin with is computed once: (sequence, whom to copy from, how much).

    Eight equal prompts: the first is computed in phase 0, the others copy it in phase 1.
    """
    depth: dict[Sequence, int] = {}
    phases: list[list[tuple[Sequence, Sequence | None, int]]] = []
    sources: list[Sequence] = []
    for sequence in sequences:
        source, shared = None, 0
        assert sequence.slot is not None
        if sequence.slot.length == 0:
            for other in sources:
                length = common_prefix(other.prompt, sequence.prompt, image_token_id)
                if length >= MIN_SHARED_TOKENS and length > shared:
                    source, shared = other, length
            if source is None or shared < len(sequence.request.prompt_ids):
                sources.append(sequence)
        depth[sequence] = 0 if source is None else depth[source] + 1
        while len(phases) <= depth[sequence]:
            phases.append([])
        phases[depth[sequence]].append((sequence, source, shared))
    yield from phases


def _packs(sequences: Many[Sequence]) -> Iterator[list[Sequence]]:
    """Sequences whose new tokens go through the network together."""
    pack: list[Sequence] = []
    size = 0
    for sequence in sequences:
        assert sequence.slot is not None
        count = len(sequence.request.prompt_ids) - sequence.slot.length
        if pack and size + count > _PREFILL_TOKENS:
            yield pack
            pack, size = [], 0
        pack.append(sequence)
        size += count
    if pack:
        yield pack
