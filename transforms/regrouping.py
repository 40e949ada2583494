"""Operations that regroup a stream: a shuffle of neighbouring elements, and batches rebuilt in another size."""

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.core import tree
from millstream.core.checks import as_flag, as_integer, named_arguments
from millstream.core.columnar import Allocate
from millstream.core.randomness import as_seed
from millstream.core.segments import Segments
from millstream.errors import StackError
from millstream.transforms.grouping import CountingGroup, GroupId, GroupingOperation, Prepared, SplitGroup


@final
class WindowShuffle(GroupingOperation):
    """Shuffles elements within windows of `window_size` consecutive elements.

    It is for elements that the pipeline creates, such as the children of a FlatMap or packed rows, whose neighbours
    would otherwise stay neighbours. Shuffle records by the sampler instead: that is global, and costs nothing.

    Args:
        window_size: the number of elements per window, at least 1. They are in memory together.
        seed: selects the orders, 0 … 2**64 - 1. Each window has its own order. None derives the seed from that of the
            pipeline; it is 0 if the pipeline has none.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> list(millstream.load(range(8), num_epochs=1, transformations=[millstream.WindowShuffle(4, seed=0)]))
        [2, 0, 3, 1, 4, 6, 5, 7]
    """

    keeps_count: ClassVar[bool] = True

    @named_arguments()
    def __init__(self, window_size: SupportsIndex, seed: SupportsIndex | None = None) -> None:
        self.window_size = as_integer(window_size, "window_size", minimum=1)
        self.seed = None if seed is None else as_seed(seed)

    def __repr__(self) -> str:
        return f"WindowShuffle(window_size={self.window_size}, seed={self.seed})"

    def prepare(self, values: Sequence[Any]) -> Prepared:
        return Prepared(values, np.empty((0, len(values)), dtype=np.int64))

    def begin(self, skip: int = 0) -> CountingGroup:
        del skip
        return CountingGroup(self.window_size)

    def arrange(self, measures: NDArray[np.int64], group: GroupId) -> Segments:
        """Returns the elements in their new order."""
        return Segments.singletons(group.generator(self.seed).permutation(measures.shape[1]))

    def make(self, values: Sequence[Any], segments: Segments, allocate: Allocate = np.empty) -> list[Any]:
        del allocate
        return [values[element] for element in segments.elements.tolist()]


@final
class Rebatch(GroupingOperation):
    """Rebuilds batches of any sizes as batches of one size. Rows keep their order, and none is lost.

    Use it after operations that add or drop rows of batches, such as a Map that drops rows, or a FlatMap whose children
    are batches. Batches are nested structures of arrays with one row per element along their first axis.

    Args:
        batch_size: the number of rows per batch, at least 1.
        drop_remainder: True to drop a last, incomplete batch; False to return it.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range. While reading, a ValueError if the
            arrays of a batch have different numbers of rows, or two batches differ in structure, shape or dtype.

    Examples:
        >>> batches = [{"x": np.array([1, 2, 3])}, {"x": np.array([4])}, {"x": np.array([5, 6])}]
        >>> loader = millstream.load(batches, num_epochs=1, transformations=[millstream.Rebatch(2)])
        >>> [batch["x"].tolist() for batch in loader]
        [[1, 2], [3, 4], [5, 6]]
    """

    makes_batches = True

    @named_arguments()
    def __init__(self, batch_size: SupportsIndex, drop_remainder: bool = False) -> None:
        self.batch_size = as_integer(batch_size, "batch_size", minimum=1, maximum=1 << 62)
        self.drop_remainder = as_flag(drop_remainder, "drop_remainder")

    @property
    def keeps_remainder(self) -> bool:
        """True if the last rows form a batch even if they are fewer than `batch_size`."""
        return not self.drop_remainder

    @property
    def output_size(self) -> int:
        """The number of rows that a batch consumes: its size."""
        return self.batch_size

    @property
    def may_drop(self) -> bool:
        """True, because batches without rows are dropped."""
        return True

    def __repr__(self) -> str:
        return f"Rebatch(batch_size={self.batch_size}{', drop_remainder=True' if self.drop_remainder else ''})"

    def prepare(self, values: Sequence[Any]) -> Prepared:
        sizes = np.array([[_rows_in(value) for value in values]], dtype=np.int64)
        kept = sizes[0] > 0
        return Prepared(list(itertools.compress(values, kept)), sizes[:, kept], kept.astype(int).tolist())

    def begin(self, skip: int = 0) -> SplitGroup:
        return SplitGroup(self.batch_size, 1, skip)

    def arrange(self, measures: NDArray[np.int64], group: GroupId) -> Segments:
        """Returns the rows of each batch, as segments of the given batches."""
        del group
        return Segments.chunked(measures[-2], measures[-1], self.batch_size)

    def make(self, values: Sequence[Any], segments: Segments, allocate: Allocate = np.empty) -> list[Any]:
        if segments.starts is None or segments.stops is None:
            raise AssertionError("batches are cut")
        bounds = list(zip(segments.elements.tolist(), segments.starts.tolist(), segments.stops.tolist(), strict=True))
        outputs = itertools.pairwise(segments.offsets.tolist())
        return [_concatenated(values, bounds[start:stop], allocate) for start, stop in outputs]


def _rows_in(batch: Any) -> int:
    shapes = {path: np.shape(leaf) for path, leaf in tree.leaves(batch) if leaf is not None}
    if not shapes or not all(shapes.values()):
        path = next((path for path, shape in shapes.items() if not shape), "")
        raise ValueError(
            f"Rebatch needs batches, which are structures of arrays with rows, got none{f' at {path}' * bool(path)}."
        )
    counts = {path: shape[0] for path, shape in shapes.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"The arrays of a batch must have the same number of rows, got {counts}.")
    return int(next(iter(counts.values())))


def _concatenated(values: Sequence[Any], bounds: Sequence[tuple[int, int, int]], allocate: Allocate) -> Any:
    """Returns the concatenation of rows `start … stop - 1` of batches, given the number, start and stop of each."""
    first = values[bounds[0][0]]
    batches = [dict(tree.leaves(values[number])) for number, _, _ in bounds]
    columns = []
    for path, leaf in batches[0].items():
        for (number, _, _), batch in zip(bounds, batches, strict=True):
            if list(batch) != list(batches[0]) or _kind(batch[path]) != _kind(leaf):
                names = f"{list(batches[0])} and {list(batch)}"
                raise StackError(
                    f"Batches to concatenate must have the same structure, dtypes and row shapes, got {_kind(leaf)} "
                    f"and {_kind(batch.get(path))}{f' at {path}' * bool(path)}, of {names}.",
                    path,
                    (bounds[0][0], number),
                )
        columns.append(None if leaf is None else _joined([batch[path] for batch in batches], bounds, allocate))
    remaining = iter(columns)
    return tree.map_leaves(lambda _: next(remaining), first)


def _joined(arrays: Sequence[Any], bounds: Sequence[tuple[int, int, int]], allocate: Allocate) -> NDArray[Any]:
    rows = [np.asarray(array)[start:stop] for array, (_, start, stop) in zip(arrays, bounds, strict=True)]
    shape = (sum(map(len, rows)), *rows[0].shape[1:])
    joined = np.empty(shape, rows[0].dtype) if rows[0].dtype.hasobject else allocate(shape, rows[0].dtype)
    np.concatenate(rows, axis=0, out=joined, casting="no")
    return joined


def _kind(leaf: Any) -> tuple[Any, ...]:
    """Returns the dtype and row shape, which must be equal in all batches to concatenate."""
    return (None,) if leaf is None else (np.asarray(leaf).dtype, np.shape(leaf)[1:])
