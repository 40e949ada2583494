"""Batches of other sizes."""

import itertools
from collections.abc import Sequence
from typing import Any, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream import tree
from millstream.checks import as_flag, as_integer, named_arguments
from millstream.columnar import Allocate
from millstream.errors import StackError
from millstream.transforms.grouping import GroupingOperation, Identity, Pieces, Prepared
from millstream.transforms.split_group import ContinuedGroup


@final
class Rebatch(GroupingOperation):
    """Makes batches of one size of batches of any size: rows keep their order, and none is lost.

    For operations that make or take away rows of batches, such as a Map that drops some, or a FlatMap whose children
    are batches. Batches are nested structures of arrays with one row for each element in their first axis.

    Args:
        batch_size: how many rows a batch has, at least 1.
        drop_remainder: whether rows at the end that do not fill a batch are left out, instead of making a short one.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range. While reading, a ValueError where the
            arrays of a batch have different numbers of rows, or two batches differ in structure, shape or dtype.

    Examples:
        >>> batches = [{"x": np.array([1, 2, 3])}, {"x": np.array([4])}, {"x": np.array([5, 6])}]
        >>> loader = millstream.load(batches, num_epochs=1, transformations=[millstream.Rebatch(2)])
        >>> [batch["x"].tolist() for batch in loader]
        [[1, 2], [3, 4], [5, 6]]
    """

    @named_arguments()
    def __init__(self, batch_size: SupportsIndex, drop_remainder: bool = False) -> None:
        self.batch_size = as_integer(batch_size, "batch_size", minimum=1)
        self.drop_remainder = as_flag(drop_remainder, "drop_remainder")

    @property
    def keeps_remainder(self) -> bool:
        """Whether fewer rows, at the end, are a batch."""
        return not self.drop_remainder

    @property
    def unit(self) -> int:
        """A batch uses up as many rows as it has."""
        return self.batch_size

    @property
    def may_drop(self) -> bool:
        """True: batches without rows are dropped."""
        return True

    def __repr__(self) -> str:
        return f"Rebatch(batch_size={self.batch_size}{', drop_remainder=True' if self.drop_remainder else ''})"

    def prepare(self, values: Sequence[Any]) -> Prepared:
        """Returns the batches that have any row, and how many each has.

        Raises:
            ValueError: a batch has no rows, or its arrays differ in how many.
        """
        sizes = np.array([[_rows_in(value) for value in values]], dtype=np.int64)
        kept = sizes[0] > 0
        return Prepared(list(itertools.compress(values, kept)), sizes[:, kept], kept.astype(int).tolist())

    def begin(self, skip: int = 0) -> ContinuedGroup:
        """Returns a group for a batch."""
        return ContinuedGroup(self.batch_size, 1, skip)

    def arrange(self, numbers: NDArray[np.int64], identity: Identity) -> Pieces:
        """Returns which rows of which batches are in which batch."""
        del identity
        return Pieces.cut(numbers[-2], numbers[-1], self.batch_size)

    def make(self, values: Sequence[Any], pieces: Pieces, allocate: Allocate = np.empty) -> list[Any]:
        """Returns the batches.

        Raises:
            StackError: two that become one differ in structure, shape or dtype.
        """
        if pieces.begins is None or pieces.ends is None:
            raise AssertionError("batches are cut")
        bounds = list(zip(pieces.elements.tolist(), pieces.begins.tolist(), pieces.ends.tolist(), strict=True))
        outputs = itertools.pairwise(pieces.starts.tolist())
        return [_concatenated(values, bounds[start:stop], allocate) for start, stop in outputs]


def _rows_in(batch: Any) -> int:
    """Returns how many rows a batch has."""
    shapes = {path: np.shape(leaf) for path, leaf in tree.leaves(batch) if leaf is not None}
    if not shapes or not all(shapes.values()):
        path = next((path for path, shape in shapes.items() if not shape), "")
        raise ValueError(
            f"Rebatch needs batches, whose arrays have rows, but there are none{f' at {path}' * bool(path)}."
        )
    counts = {path: shape[0] for path, shape in shapes.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"The arrays of a batch must have equally many rows, got {counts}.")
    return int(next(iter(counts.values())))


def _concatenated(values: Sequence[Any], bounds: Sequence[tuple[int, int, int]], allocate: Allocate) -> Any:
    """Returns one batch of rows `begin … end - 1` of some batches, given the number, begin and end of each."""
    first = values[bounds[0][0]]
    parts = [dict(tree.leaves(values[number])) for number, _, _ in bounds]
    columns = []
    for path, leaf in parts[0].items():
        for (number, _, _), part in zip(bounds, parts, strict=True):
            if list(part) != list(parts[0]) or _kind(part[path]) != _kind(leaf):
                raise StackError(
                    f"Batches that become one must be alike{f' at {path}' * bool(path)}, got {_kind(leaf)} and "
                    f"{_kind(part.get(path))}, of {list(parts[0])} and {list(part)}.",
                    path,
                    (bounds[0][0], number),
                )
        columns.append(None if leaf is None else _joined([part[path] for part in parts], bounds, allocate))
    remaining = iter(columns)
    return tree.map_leaves(lambda _: next(remaining), first)


def _joined(arrays: Sequence[Any], bounds: Sequence[tuple[int, int, int]], allocate: Allocate) -> NDArray[Any]:
    rows = [np.asarray(array)[begin:end] for array, (_, begin, end) in zip(arrays, bounds, strict=True)]
    shape = (sum(map(len, rows)), *rows[0].shape[1:])
    joined = np.empty(shape, rows[0].dtype) if rows[0].dtype.hasobject else allocate(shape, rows[0].dtype)
    np.concatenate(rows, axis=0, out=joined, casting="no")
    return joined


def _kind(leaf: Any) -> tuple[Any, ...]:
    """Returns what must be the same in all batches that become one."""
    return (None,) if leaf is None else (np.asarray(leaf).dtype, np.shape(leaf)[1:])
