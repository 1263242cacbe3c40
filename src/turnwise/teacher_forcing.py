"""Scores sampled tokens again by teacher forcing: one plain forward over each stream, nothing shared with sampler or learner.

Dimensions: B streams of a batch, T tokens, R scored tokens, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from turnwise.types import IntArray, TokenStream

_TOKENS_PER_BATCH = 8192
_ROWS_PER_CHUNK = 512
# A token that could not have been sampled has no finite gap; JSON needs a number.
IMPOSSIBLE = 1e9


class ScoreJob(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The sampled tokens of one stream that came from one policy version."""

    stream: TokenStream
    places: npt.NDArray[np.int64]
    """Where they lie in the stream."""
    kept_rows: tuple[IntArray, ...]
    """For each, the ids it was chosen among; empty when nothing but the banned ids was cut."""
    temperature: float
    use_grammar: bool = False

    @property
    def length(self) -> int:
        """How much of the stream has to be read."""
        return int(self.places[-1])


class TeacherForcing:
    """Scores streams under whatever weights `network` holds."""

    def __init__(self, network: Any, image_processor: Any = None) -> None:  # transformers objects
        self.network = network
        self._base = network.get_base_model() if hasattr(network, "get_base_model") else network
        self._image_processor = image_processor

    def gaps(self, jobs: Sequence[ScoreJob]) -> list[npt.NDArray[np.float64]]:
        """For each job, how far the stored log-probability of each token lies from the one found now."""
        found: dict[int, npt.NDArray[np.float64]] = {}
        for batch in _batches(jobs):
            with torch.inference_mode():
                hidden_RD = self._hidden(batch)
                rows = np.cumsum([0, *(len(job.places) for job in batch)])
                for job, first, last in zip(batch, rows[:-1], rows[1:], strict=True):
                    found[id(job)] = self._job_gaps(job, hidden_RD[first:last])
        return [found[id(job)] for job in jobs]

    def _hidden(self, batch: Sequence[ScoreJob]) -> torch.Tensor:
        """The hidden state before each scored token, [R, D]."""
        device = self._base.get_input_embeddings().weight.device
        longest = max(job.length for job in batch)
        ids_BT = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, job in enumerate(batch):
            ids_BT[row, : job.length] = torch.from_numpy(job.stream.ids[: job.length].astype(np.int64))
        # Streams begin together and are filled up at the end, so the causal mask alone keeps the filling out.
        inputs: dict[str, Any] = {"input_ids": ids_BT}
        if any(job.stream.images for job in batch):
            inputs |= self._image_inputs(batch, ids_BT)
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        hidden_BTD = self._base.base_model(**inputs, use_cache=False).last_hidden_state
        return torch.cat([hidden_BTD[row, job.places - 1] for row, job in enumerate(batch)])

    def _image_inputs(self, batch: Sequence[ScoreJob], ids_BT: torch.Tensor) -> dict[str, torch.Tensor]:
        is_image_BT = ids_BT == self._base.config.image_token_id
        # Images whose placeholders come after the last scored token were not read yet.
        is_start_BT = is_image_BT & ~torch.nn.functional.pad(is_image_BT, (1, 0))[:, :-1]
        num_images_B = is_start_BT.sum(dim=1).tolist()
        images = [
            image
            for job, count in zip(batch, num_images_B, strict=True)
            for image in job.stream.images[:count]
        ]
        if not images:
            return {}
        processed = self._image_processor(images=[image.pixels for image in images], return_tensors="pt")
        return {
            "pixel_values": processed["pixel_values"],
            "image_grid_thw": processed["image_grid_thw"],
            "mm_token_type_ids": is_image_BT.int(),
        }

    def _job_gaps(self, job: ScoreJob, hidden_RD: torch.Tensor) -> npt.NDArray[np.float64]:
        chunks = []
        for first in range(0, len(job.places), _ROWS_PER_CHUNK):
            rows = slice(first, first + _ROWS_PER_CHUNK)
            logits_RV = self._base.get_output_embeddings()(hidden_RD[rows]).float()
            logits_RV[:, torch.from_numpy(job.stream.banned_ids.astype(np.int64))] = -torch.inf
            ids_R1 = torch.from_numpy(job.stream.ids[job.places[rows]].astype(np.int64))[:, None].to(
                logits_RV.device
            )
            if job.temperature == 0:
                gaps_R = self._greedy_gaps(job, logits_RV, ids_R1)
            else:
                logprobs_R = _logprobs(logits_RV / job.temperature, ids_R1, job.kept_rows[rows])
                stored_R = torch.from_numpy(job.stream.logprobs[job.places[rows]].astype(np.float64))
                gaps_R = (logprobs_R.cpu() - stored_R).abs()
            chunks.append(torch.nan_to_num(gaps_R.cpu(), nan=IMPOSSIBLE, posinf=IMPOSSIBLE).numpy())
        return np.concatenate(chunks)

    def _greedy_gaps(self, job: ScoreJob, logits_RV: torch.Tensor, ids_R1: torch.Tensor) -> torch.Tensor:
        """How much better the best token was than the one taken; a grammar may have excluded the best."""
        if job.use_grammar:
            return torch.zeros(len(ids_R1), dtype=torch.float64)
        return (logits_RV.amax(dim=-1) - logits_RV.gather(1, ids_R1)[:, 0]).double()


def _logprobs(scaled_RV: torch.Tensor, ids_R1: torch.Tensor, kept_rows: Sequence[IntArray]) -> torch.Tensor:
    is_cut_RV = torch.zeros_like(scaled_RV, dtype=torch.bool)
    for row, kept in enumerate(kept_rows):
        if len(kept):
            is_cut_RV[row] = True
            is_cut_RV[row, torch.from_numpy(kept.astype(np.int64))] = False
    scaled_RV = scaled_RV.masked_fill(is_cut_RV, -torch.inf)
    return torch.log_softmax(scaled_RV.double(), dim=-1).gather(1, ids_R1)[:, 0]


def _batches(jobs: Sequence[ScoreJob]) -> Iterator[list[ScoreJob]]:
    """Streams of similar length together."""
    batch: list[ScoreJob] = []
    for job in sorted(jobs, key=lambda job: job.length, reverse=True):
        if batch and (len(batch) + 1) * batch[0].length > _TOKENS_PER_BATCH:
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch
