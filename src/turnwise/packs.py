"""Samples become packs: token trees of bounded size, with one row per trained token.

A pack is what goes through the model at once. Rows that ask for the same distribution (same position, temperature,
kept set and banned ids) share one head row, so that the LM head, too, computes it once.
"""

# Dimensions: T tokens of the tree, R loss rows, U distinct head rows, N turns.

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from turnwise.errors import SampleError
from turnwise.samples import Sample, Samples
from turnwise.token_tree import Int64Array, TokenTree, TreeBuilder
from turnwise.types import BoolArray, FloatArray, Image, IntArray


class HeadRows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Which distributions the LM head must give, and which of their tokens are trained."""

    positions_U: Int64Array
    """Tokens of the tree whose hidden state predicts."""
    temperatures_U: FloatArray
    banned_U: Int64Array
    """Index into `banned_sets`."""
    banned_sets: tuple[IntArray, ...]
    kept_offsets_U1: Int64Array
    kept_ids: IntArray
    """Row u may only be `kept_ids[offsets[u]:offsets[u + 1]]`; an empty row is not restricted."""
    rows_R: Int64Array
    """Ascending: the head row of each loss row."""
    target_ids_R: Int64Array


class Pack(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Trees that go through the model at once."""

    samples: tuple[Sample, ...]
    tree: TokenTree
    ids_T: Int64Array
    images: tuple[tuple[int, Image], ...]
    """Each with the position of its first placeholder, ascending."""
    head: HeadRows
    sample_R: Int64Array
    """Index into `samples`."""
    row_R: Int64Array
    """Which loss position of that sample."""
    advantages_R: FloatArray
    old_logprobs_R: FloatArray
    turn_indices_R: Int64Array

    @property
    def num_rows(self) -> int:
        return len(self.sample_R)


def build_packs(samples: Samples, *, image_token_id: int | None = None) -> list[Pack]:
    """Packs of at most `tokens_per_pack` tokens, in the order of the samples."""
    packs = []
    for members, tree in _trees(samples, image_token_id):
        packs.append(_build_pack(members, tree, image_token_id))
    return packs


def _trees(samples: Samples, image_token_id: int | None) -> Iterator[tuple[list[Sample], TokenTree]]:
    image_keys: dict[str, int] = {}
    builder = TreeBuilder(share_prefixes=samples.use_trees)
    members: list[Sample] = []
    for sample in samples.samples:
        keys = _keys(sample, image_token_id, image_keys)
        if len(keys) > samples.tokens_per_pack:
            raise SampleError(
                f"episode {sample.episode_id} has a stream of {len(keys)} tokens but training.tokens_per_pack is "
                f"{samples.tokens_per_pack}; raise it to at least {len(keys)}"
            )
        if members and builder.num_tokens + builder.count_new(keys) > samples.tokens_per_pack:
            yield members, builder.build()
            builder, members = TreeBuilder(share_prefixes=samples.use_trees), []
        builder.add(keys)
        members.append(sample)
    if members:
        yield members, builder.build()


def image_runs(sample: Sample, image_token_id: int) -> list[tuple[int, int, Image]]:
    """(start, end, image) of each run of placeholders in the part of the stream that is computed."""
    is_image: BoolArray = sample.stream.ids == image_token_id
    edges = np.flatnonzero(np.diff(is_image.astype(np.int8), prepend=0, append=0))
    starts, ends = edges[0::2], edges[1::2]
    if len(starts) != len(sample.stream.images):
        raise SampleError(
            f"episode {sample.episode_id} has {len(starts)} runs of image placeholders (id {image_token_id}) but "
            f"{len(sample.stream.images)} images; each image needs one run"
        )
    found = zip(starts.tolist(), ends.tolist(), sample.stream.images, strict=True)
    return [run for run in found if run[0] < sample.num_needed_tokens]


def _keys(sample: Sample, image_token_id: int | None, image_keys: dict[str, int]) -> Int64Array:
    """Token ids, with placeholders named by their image: equal keys mean equal input to the model."""
    keys = sample.stream.ids[: sample.num_needed_tokens].astype(np.int64)
    if not sample.stream.images:
        return keys
    if image_token_id is None:
        raise SampleError(
            f"episode {sample.episode_id} has images but the model reads text only; use a vision-language model"
        )
    for start, end, image in image_runs(sample, image_token_id):
        keys[start:end] = -1 - image_keys.setdefault(image.sha256, len(image_keys))
    return keys


def _build_pack(members: list[Sample], tree: TokenTree, image_token_id: int | None) -> Pack:
    ids_T = tree.keys_T.copy()
    images: dict[int, Image] = {}
    for sample, path in zip(members, tree.paths, strict=True):
        if sample.stream.images and image_token_id is not None:
            images.update((int(path[start]), image) for start, _, image in image_runs(sample, image_token_id))
    if image_token_id is not None:
        ids_T[ids_T < 0] = image_token_id
    sample_R = np.concatenate([np.full(len(sample.targets_R), i) for i, sample in enumerate(members)])
    row_R = np.concatenate([np.arange(len(sample.targets_R)) for sample in members])
    positions_R = np.concatenate(
        [path[sample.targets_R - 1] for sample, path in zip(members, tree.paths, strict=True)]
    )
    head, order_R = _head_rows(members, positions_R, sample_R, row_R)
    sample_R, row_R = sample_R[order_R], row_R[order_R]

    def column(arrays: Sequence[np.ndarray]) -> np.ndarray:
        joined: np.ndarray = np.concatenate(arrays)[order_R]
        return joined

    return Pack(
        samples=tuple(members),
        tree=tree,
        ids_T=ids_T,
        images=tuple(sorted(images.items())),
        head=head,
        sample_R=sample_R,
        row_R=row_R,
        advantages_R=column([sample.advantages_R for sample in members]),
        old_logprobs_R=column([sample.logprobs_R for sample in members]),
        turn_indices_R=column([sample.turn_indices_R for sample in members]),
    )


def _head_rows(
    members: list[Sample], positions_R: Int64Array, sample_R: Int64Array, row_R: Int64Array
) -> tuple[HeadRows, Int64Array]:
    """The distinct distributions, restricted ones first and short before long, and the order of the loss rows."""
    banned_names = {tuple(sample.stream.banned_ids.tolist()): None for sample in members}
    banned_index = {name: index for index, name in enumerate(banned_names)}
    banned_of = [banned_index[tuple(sample.stream.banned_ids.tolist())] for sample in members]
    kept_of = [_kept_rows(sample) for sample in members]
    found: dict[tuple[int, float, int, bytes], int] = {}
    kept_U: list[IntArray] = []
    keys_U: list[tuple[int, float, int]] = []
    head_R = np.empty(len(positions_R), dtype=np.int64)
    for index, (position, owner, row) in enumerate(
        zip(positions_R.tolist(), sample_R.tolist(), row_R.tolist(), strict=True)
    ):
        kept = kept_of[owner][row] if kept_of[owner] else _NOTHING
        key = (position, members[owner].temperature, banned_of[owner])
        head_R[index] = found.setdefault((*key, kept.tobytes()), len(keys_U))
        if head_R[index] == len(keys_U):
            keys_U.append(key)
            kept_U.append(kept)
    lengths_U = np.array([len(kept) for kept in kept_U])
    # Unrestricted rows last; among equals the order of the tree.
    order_U = np.lexsort((np.array([key[0] for key in keys_U]), lengths_U, lengths_U == 0))
    rank_U = np.empty_like(order_U)
    rank_U[order_U] = np.arange(len(order_U))
    head_R = rank_U[head_R]
    order_R = np.argsort(head_R, kind="stable")
    target_ids_R = np.concatenate([sample.target_ids_R for sample in members])
    kept_sorted = [kept_U[index] for index in order_U]
    rows = HeadRows(
        positions_U=np.array([keys_U[index][0] for index in order_U], dtype=np.int64),
        temperatures_U=np.array([keys_U[index][1] for index in order_U], dtype=np.float32),
        banned_U=np.array([keys_U[index][2] for index in order_U], dtype=np.int64),
        banned_sets=tuple(np.array(name, dtype=np.int32) for name in banned_names),
        kept_offsets_U1=np.concatenate([[0], np.cumsum(lengths_U[order_U])]).astype(np.int64),
        kept_ids=np.concatenate([_NOTHING, *kept_sorted]).astype(np.int32),
        rows_R=head_R[order_R],
        target_ids_R=target_ids_R[order_R].astype(np.int64),
    )
    return rows, order_R


_NOTHING = np.empty(0, dtype=np.int32)


def _kept_rows(sample: Sample) -> list[IntArray]:
    kept = sample.stream.kept
    banned = sample.stream.banned_ids
    if len(banned) and np.isin(sample.target_ids_R, banned).any():
        raise SampleError(
            f"episode {sample.episode_id} sampled an id that its own stream bans; the policy's record contradicts itself"
        )
    if kept is None:
        return []
    rows = [kept.row(ordinal) for ordinal in sample.sampled_ordinals_R.tolist()]
    for row, target in zip(rows, sample.target_ids_R.tolist(), strict=True):
        if len(row) and target not in row:
            raise SampleError(
                f"episode {sample.episode_id} sampled id {target}, which is not among the {len(row)} ids it was chosen from; "
                "the policy must store the kept set it really used"
            )
    return rows
