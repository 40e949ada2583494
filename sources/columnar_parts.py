"""Records of several sources that hold theirs as columns: one batch of all of them, without taking any apart."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream import tree
from millstream.columnar import Allocate, ColumnarRecords
from millstream.sources.base import put_back


@final
class ColumnarParts(ColumnarRecords):
    """Records that were read part by part.

    Args:
        parts: the records of each part, at least one part.
        order: for each record, in the order of the parts, which row it is, shape (records,).
    """

    def __init__(self, parts: Sequence[ColumnarRecords], order: NDArray[np.intp]) -> None:
        self._parts = parts
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        return self._records[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._records)

    def stack(self, allocate: Allocate) -> Any:
        """Returns the batch, or None where the parts differ: whoever stacks the records says how."""
        batches = [part.stack(np.empty) for part in self._parts]
        if not all(alike(batches[0], batch) for batch in batches):
            return None
        stops = itertools.accumulate(map(len, self._parts))
        rows = np.split(self._order, list(stops)[:-1])
        leaves = zip(*([leaf for _, leaf in tree.leaves(batch)] for batch in batches), strict=True)
        stacked = (self._put_together(pieces, rows, allocate) for pieces in leaves)
        return tree.map_leaves(lambda _: next(stacked), batches[0])

    def _put_together(self, pieces: Sequence[Any], rows: Sequence[NDArray[np.intp]], allocate: Allocate) -> Any:
        whole = allocate((len(self), *pieces[0].shape[1:]), pieces[0].dtype)
        for piece, where in zip(pieces, rows, strict=True):
            whole[where] = piece
        return whole

    @functools.cached_property
    def _records(self) -> list[Any]:
        return put_back([record for part in self._parts for record in part], self._order)


def alike(one: Any, other: Any) -> bool:
    """Whether two batches have the same structure of arrays, which differ in nothing but their lengths."""
    if type(one) is not type(other):
        return False
    parts = tree.parts(one)
    if parts is None:
        is_array = isinstance(one, np.ndarray) and not one.dtype.hasobject
        return is_array and one.dtype == other.dtype and one.shape[1:] == other.shape[1:]
    same_names = list(tree.paths(one)) == list(tree.paths(other))
    return same_names and all(itertools.starmap(alike, zip(parts, tree.parts(other) or (), strict=True)))
