"""The arithmetic of grouped columns: ids numbered, values compared inside their group, None kept apart.

`codes` number the group of each row from 0; values and codes have one entry per row.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from turnwise.errors import CreditError

Float64Array: TypeAlias = npt.NDArray[np.float64]
CodeArray: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]
# float64, or object with None for the rows that took no part
Column: TypeAlias = npt.NDArray[Any]

Singleton = Literal["raw", "zero"]


def number_ids(ids: Sequence[Hashable]) -> tuple[CodeArray, list[Hashable]]:
    """Number ids by first appearance."""
    codes: defaultdict[Hashable, int] = defaultdict(itertools.count().__next__)
    # One pass: each look at a scattered object may be a cache miss.
    return np.fromiter(map(codes.__getitem__, ids), dtype=np.int64, count=len(ids)), list(codes)


def first_rows(codes: CodeArray, count: int) -> CodeArray:
    """The row where each of `count` codes appears first, -1 where it does not."""
    first = np.full(count, -1, dtype=np.int64)
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)
    return first


def centre(values: Float64Array, codes: CodeArray) -> tuple[Float64Array, CodeArray]:
    """Values minus their group's mean, and the groups' sizes; exactly 0 in a group of equal values."""
    num_groups = int(codes.max()) + 1 if len(codes) else 0
    first = first_rows(codes, num_groups)
    # Shifted by one of their own, equal values are zeros, and no rounding of the mean can tell them apart.
    shifted = values - values[first][codes]
    count = np.bincount(codes, minlength=num_groups)
    mean = np.bincount(codes, weights=shifted, minlength=num_groups) / np.maximum(count, 1)
    return shifted - mean[codes], count


def compare(
    values: Float64Array, codes: CodeArray, *, divides: bool, epsilon: float, singleton: Singleton
) -> Float64Array:
    """Values against their group; a group of one gives its raw value (over 1 + epsilon when dividing) or 0."""
    centred, count = centre(values, codes)
    alone = count[codes] == 1
    centred = np.where(alone, stand_alone(values, singleton), centred)
    if not divides:
        return centred
    squares = np.bincount(codes, weights=np.where(alone, 0.0, centred * centred), minlength=len(count))
    deviation = np.where(count > 1, np.sqrt(squares / np.maximum(count - 1, 1)), 1.0)[codes] + epsilon
    return np.divide(centred, deviation, out=np.zeros_like(centred), where=deviation > 0.0)


def stand_alone(values: Float64Array, singleton: Singleton) -> Float64Array:
    """What a value is worth that has nothing to be compared with."""
    check_choice("singleton", singleton, ("raw", "zero"))
    return values if singleton == "raw" else np.zeros_like(values)


def to_float(what: str, column: Any) -> tuple[Float64Array, Mask]:
    """The column as float64 and which entries are not None; NaN and infinities are errors."""
    if hasattr(column, "detach"):
        column = column.detach().cpu().numpy()
    try:
        values: Float64Array = np.asarray(column, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise CreditError(f"the {what}s cannot be read as numbers: {error}") from None
    if values.ndim != 1:
        raise CreditError(f"the {what}s have shape {values.shape}; one number per row is needed")
    is_given = np.ones(len(values), dtype=bool)
    for row in np.flatnonzero(~np.isfinite(values)).tolist():
        if column[row] is not None:
            raise CreditError(f"{what} {row} is {column[row]}; it must be finite, or None to take no part")
        is_given[row] = False
    return values, is_given


def spread(values: Float64Array, takes_part: Mask) -> Column:
    """Put the values back where they belong, None elsewhere."""
    if takes_part.all():
        return values
    column = np.full(len(takes_part), None, dtype=object)
    column[takes_part] = values.tolist()
    return column


def like(original: Any, column: Column) -> Any:  # tensors of torch, which this module does not import
    """The column as a tensor when the original was one."""
    return original.new_tensor(column.tolist()) if hasattr(original, "new_tensor") else column


def check_lengths(**columns: Any) -> None:  # sequences, arrays or tensors
    """Refuse columns that differ in length."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        described = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise CreditError(f"the columns differ in length ({described}); each needs one entry per row")


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a value that is none of the known ones."""
    if value not in known:
        raise CreditError(f"{name} is {value!r}; use {' or '.join(map(repr, known))}")
