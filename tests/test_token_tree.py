"""Token trees: every distinct token once, every sequence found again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import ModelError
from turnwise.token_tree import Segment, TreeBuilder, build_tree
from turnwise.tree_attention import (
    dense_mask,
    flex_tree_attention,
    plan_rectangles,
    tree_attention,
    tree_attention_forward,
)


def sequences(*rows: list[int]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int64) for row in rows]


def test_common_beginnings_are_there_once() -> None:
    tree = build_tree(sequences([5, 9, 2, 7], [5, 9, 2, 8, 1], [5, 9, 4]))
    assert tree.keys_T.tolist() == [5, 9, 2, 7, 8, 1, 4]
    assert tree.depths_T.tolist() == [0, 1, 2, 3, 3, 4, 2]
    assert [(s.start, s.end, s.subtree_end) for s in tree.segments] == [
        (0, 2, 7),
        (2, 3, 6),
        (3, 4, 4),
        (4, 6, 6),
        (6, 7, 7),
    ]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2, 3], [0, 1, 2, 4, 5], [0, 1, 6]]


def test_a_sequence_that_begins_another_adds_nothing() -> None:
    tree = build_tree(sequences([1, 2], [1, 2, 3, 4], [1]))
    assert tree.keys_T.tolist() == [1, 2, 3, 4]
    assert len(tree.segments) == 1


def test_without_sharing_each_sequence_is_a_root() -> None:
    tree = build_tree(sequences([1, 2], [1, 2, 3]), share_prefixes=False)
    assert tree.keys_T.tolist() == [1, 2, 1, 2, 3]
    assert tree.depths_T.tolist() == [0, 1, 0, 1, 2]


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        TreeBuilder().add(np.empty(0, dtype=np.int64))


rows_of_few_ids = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)


@given(rows_of_few_ids, st.booleans())
def test_any_sequences_are_found_again_and_see_exactly_their_own_beginning(
    rows: list[list[int]], share: bool
) -> None:
    given_rows = sequences(*rows)
    builder = TreeBuilder(share_prefixes=share)
    for row in given_rows:
        expected = builder.num_tokens + builder.count_new(row)
        builder.add(row)
        assert builder.num_tokens == expected
    tree = builder.build()
    assert len(tree) == builder.num_tokens
    distinct = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
    assert len(tree) == (len(distinct) if share else sum(map(len, rows)))
    mask_TT = np.zeros((len(tree), len(tree)), dtype=bool)
    for row, path in zip(given_rows, tree.paths, strict=True):
        assert (tree.keys_T[path] == row).all()
        assert (tree.depths_T[path] == np.arange(len(row))).all()
        for place in range(len(path)):
            mask_TT[path[place], path[: place + 1]] = True
    assert (tree.ancestor_mask() == mask_TT).all()
    layout = plan_rectangles(tree.segments)
    assert (dense_mask(layout, torch.device("cpu")).numpy() == mask_TT).all()


@given(rows_of_few_ids)
def test_rectangles_cover_every_pair_once(rows: list[list[int]]) -> None:
    tree = build_tree(sequences(*rows))
    covered_TT = np.zeros((len(tree), len(tree)), dtype=int)
    for rectangle in plan_rectangles(tree.segments).rectangles:
        length = (rectangle.rows.stop - rectangle.rows.start) // rectangle.copies
        for copy in range(rectangle.copies):
            start = rectangle.rows.start + copy * length
            rows_of = slice(start, start + length) if rectangle.is_diagonal else rectangle.rows
            columns = rows_of if rectangle.is_diagonal else rectangle.columns
            block = np.tri(length, dtype=int) if rectangle.is_diagonal else 1
            covered_TT[rows_of, columns] += block
    assert (covered_TT == tree.ancestor_mask()).all()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-13), (torch.bfloat16, 0.05)]
)
def test_attention_and_its_gradient_equal_those_of_a_dense_mask(dtype: torch.dtype, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 50, 20)
    rows = [np.concatenate([prompt, rng.integers(0, 3, 12)]) for _ in range(8)] + [rng.integers(0, 50, 7)]
    tree = build_tree(rows)
    layout = plan_rectangles(tree.segments)
    torch.manual_seed(0)
    shapes = ((1, 4, len(tree), 16), (1, 2, len(tree), 16), (1, 2, len(tree), 16))
    ours = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    dense = [tensor.detach().double().requires_grad_() for tensor in ours]
    pull = torch.randn(shapes[0])
    out = tree_attention(*ours, layout, 0.25)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *dense, attn_mask=torch.from_numpy(tree.ancestor_mask()), scale=0.25, enable_gqa=True
    )
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)
    grads = torch.autograd.grad(out, ours, pull.to(dtype))
    expected_grads = torch.autograd.grad(expected, dense, pull.double())
    for got, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=4 * tolerance)


def test_flex_attention_gives_the_same() -> None:
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 50, 30)
    tree = build_tree([np.concatenate([prompt, rng.integers(0, 3, 9)]) for _ in range(5)])
    layout = plan_rectangles(tree.segments)
    torch.manual_seed(0)
    query = torch.randn(1, 4, len(tree), 16)
    key, value = torch.randn(2, 1, 2, len(tree), 16)
    got = flex_tree_attention(query, key, value, layout, 0.25, is_compiled=False)
    torch.testing.assert_close(got, tree_attention(query, key, value, layout, 0.25), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dropout": 0.1}, "attention dropout is 0.1; tree attention has none"),
        ({"sliding_window": 4}, "a pack of 6 tokens meets a sliding window of 4"),
    ],
)
def test_attention_that_a_tree_cannot_compute_is_refused(settings: dict[str, Any], message: str) -> None:
    layout = plan_rectangles([Segment(start=0, end=6, subtree_end=6)])
    query = torch.zeros(1, 1, 6, 8)
    with pytest.raises(ModelError, match=message):
        tree_attention_forward(torch.nn.Identity(), query, query, query, None, token_tree=layout, **settings)
