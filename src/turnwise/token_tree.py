"""Merges token sequences with common beginnings into one tree, so that every distinct token is computed once.

Tokens lie depth first: a segment (an unbranched run) is followed by everything that descends from it. That makes
"who may look at segment s" one contiguous range, `[end, subtree_end)`, and attention a list of plain rectangles.

    sequences        5 9 2 7     5 9 2 8 1     5 9 4
    ids_T            5 9 | 2 | 7 | 8 1 | 4          segments: 5 9;  2 (child);  7, 8 1 (its children);  4 (child)
    depths_T         0 1   2   3   3 4   2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Int64Array: TypeAlias = npt.NDArray[np.int64]


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A run of tokens without a branch."""

    start: int
    end: int
    subtree_end: int
    """Tokens in `[end, subtree_end)` descend from this segment; nothing else does."""


class TokenTree(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Token sequences laid out so that common beginnings are there once; may hold several roots."""

    keys_T: Int64Array
    depths_T: Int64Array
    """How many tokens come before this one on its path."""
    segments: tuple[Segment, ...]
    """In the order of their tokens."""
    paths: tuple[Int64Array, ...]
    """For each sequence, where each of its tokens lies in the tree."""

    def __len__(self) -> int:
        return len(self.keys_T)

    def ancestor_mask(self) -> npt.NDArray[np.bool_]:
        """[T, T], true where the row's token may attend to the column's: its ancestors and itself."""
        mask_TT = np.zeros((len(self), len(self)), dtype=np.bool_)
        for segment in self.segments:
            length = segment.end - segment.start
            own = slice(segment.start, segment.end)
            mask_TT[own, own] = np.tri(length, dtype=np.bool_)
            mask_TT[segment.end : segment.subtree_end, own] = True
        return mask_TT


@dataclass
class _Node:
    """A growing segment; the root of all has no tokens."""

    keys: Int64Array
    children: dict[int, _Node] = field(default_factory=dict)
    start: int = 0


class TreeBuilder:
    """Grows a tree sequence by sequence; without sharing each sequence is a root of its own."""

    def __init__(self, *, share_prefixes: bool = True) -> None:
        self.num_tokens = 0
        self._share_prefixes = share_prefixes
        self._roots: list[_Node] = []
        self._sequences: list[Int64Array] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def count_new(self, sequence: Int64Array) -> int:
        """How many tokens the sequence would add."""
        if not self._share_prefixes or not self._roots:
            return len(sequence)
        node, done = self._roots[0], 0
        while done < len(sequence) and (child := node.children.get(int(sequence[done]))) is not None:
            shared = _common_length(child.keys, sequence[done:])
            done += shared
            if shared < len(child.keys):
                break
            node = child
        return len(sequence) - done

    def add(self, sequence: Int64Array) -> None:
        if len(sequence) == 0:
            raise ValueError("a tree takes sequences of at least one token")
        self.num_tokens += self.count_new(sequence)
        if not self._share_prefixes or not self._roots:
            self._roots.append(_Node(keys=np.empty(0, dtype=np.int64)))
        self._sequences.append(sequence)
        _insert(self._roots[-1], sequence)

    def build(self) -> TokenTree:
        starts = self._roots if not self._share_prefixes else self._roots * len(self._sequences)
        return _lay_out(self._roots, starts, self._sequences)


def build_tree(sequences: Sequence[Int64Array], *, share_prefixes: bool = True) -> TokenTree:
    """The tree of these key sequences."""
    builder = TreeBuilder(share_prefixes=share_prefixes)
    for sequence in sequences:
        builder.add(sequence)
    return builder.build()


def _common_length(first: Int64Array, second: Int64Array) -> int:
    shared = min(len(first), len(second))
    differs = np.flatnonzero(first[:shared] != second[:shared])
    return int(differs[0]) if len(differs) else shared


def _insert(node: _Node, sequence: Int64Array) -> None:
    rest = sequence
    while len(rest):
        child = node.children.get(int(rest[0]))
        if child is None:
            node.children[int(rest[0])] = _Node(keys=rest)
            return
        shared = _common_length(child.keys, rest)
        if shared == len(rest):
            return
        if shared < len(child.keys):
            tail = _Node(keys=child.keys[shared:], children=child.children)
            child.keys, child.children = child.keys[:shared], {int(tail.keys[0]): tail}
        elif not child.children:
            child.keys = rest
            return
        node, rest = child, rest[shared:]


def _lay_out(roots: list[_Node], starts: list[_Node], sequences: list[Int64Array]) -> TokenTree:
    keys: list[Int64Array] = []
    depths: list[Int64Array] = []
    segments: list[Segment | None] = []
    position = 0
    # (node, depth of its first token, index of its segment once entered); a second visit closes the subtree.
    pending: list[tuple[_Node, int, int | None]] = [(root, 0, None) for root in reversed(roots)]
    while pending:
        node, depth, index = pending.pop()
        if index is not None:
            end = node.start + len(node.keys)
            segments[index] = Segment(start=node.start, end=end, subtree_end=position)
            continue
        node.start = position
        if len(node.keys):
            pending.append((node, depth, len(segments)))
            segments.append(None)
            keys.append(node.keys)
            depths.append(np.arange(depth, depth + len(node.keys)))
            position += len(node.keys)
        pending.extend((child, depth + len(node.keys), None) for child in reversed(node.children.values()))
    return TokenTree(
        keys_T=np.concatenate(keys) if keys else np.empty(0, dtype=np.int64),
        depths_T=np.concatenate(depths) if depths else np.empty(0, dtype=np.int64),
        segments=tuple(segment for segment in segments if segment is not None),
        paths=tuple(_path(start, sequence) for start, sequence in zip(starts, sequences, strict=True)),
    )


def _path(node: _Node, sequence: Int64Array) -> Int64Array:
    pieces: list[Int64Array] = []
    done = 0
    while done < len(sequence):
        node = node.children[int(sequence[done])]
        length = min(len(node.keys), len(sequence) - done)
        pieces.append(np.arange(node.start, node.start + length))
        done += length
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)
