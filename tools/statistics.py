"""Means, deviations and limits of the values in a stream of batches, found in one pass."""

import dataclasses
from collections.abc import Iterable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.core import tree
from millstream.core.checks import as_integer, named_arguments

_NUMBERS = "biuf"
"""The kinds of dtypes that are counted."""


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Statistics:
    """The statistics of an entry of batches. NaN, for missing values, is left out.

    Attributes:
        mean: the mean; float64.
        std: the standard deviation of these values (divided by their number); float64.
        min: the smallest value; float64.
        max: the largest value; float64.
        count: the number of values; int64.

    All have the shape of the axes that are kept, and are NaN where count is 0.

    Examples:
        >>> found = millstream.statistics_of([{"x": np.array([[1.0, 10.0], [3.0, np.nan]])}], keep=1)
        >>> found["x"].mean, found["x"].count
        (array([ 2., 10.]), array([2, 1]))
    """

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    min: NDArray[np.float64]
    max: NDArray[np.float64]
    count: NDArray[np.int64]


@named_arguments()
def statistics_of(batches: Any, *, keep: int | Iterable[int] = ()) -> Any:
    """Returns the statistics of each entry of batches, over all records: what normalises the data of a training set.

    Every batch is read once, and memory does not grow. Sums are compensated by the means of the batches, so a million
    values with a large mean lose no digits.

    Args:
        batches: batches of arrays, such as a loader; or pairs of a number and batches, `loader.epochs(1)`. Batches may
            be dicts, and the last one may be short.
        keep: the axes of the batches that stay, such as -1 for a mean per channel of images of shape (n, height, width,
            channels), or (1, 2) for one per pixel. The axis of the records, 0, cannot stay.

    Returns:
        The structure of a batch, with a `Statistics` for each entry of numbers, and None for the others.

    Raises:
        TypeError, ValueError: keep is not axes, a batch lacks one of them, batches differ in structure or in the sizes
            of kept axes, or there is none.

    Examples:
        >>> loader = millstream.load(np.arange(10.0), batch_size=4)
        >>> found = millstream.statistics_of(loader.epochs(1))
        >>> float(found.mean), float(found.max), int(found.count)
        (4.5, 9.0, 10)
    """
    kept = tuple(as_integer(axis, "An axis in keep") for axis in ((keep,) if isinstance(keep, int) else keep))
    if 0 in kept:
        raise ValueError("keep must not have 0, the axis of the records.")
    structure: Any = None
    paths: list[str] | None = None
    totals: list[_Total] = []
    for batch in _batches_in(batches):
        leaves = list(tree.leaves(batch))
        if paths is None:
            structure, paths = batch, [path for path, _ in leaves]
            totals = [_Total(path) for path in paths]
        if paths != [path for path, _ in leaves]:
            raise ValueError(f"All batches must have one structure, got {paths} and {[path for path, _ in leaves]}.")
        for total, (_, values) in zip(totals, leaves, strict=True):
            total.add(np.asarray(values), kept)
    if paths is None:
        raise ValueError("batches must have at least one batch, got none.")
    results = iter([total.result() for total in totals])
    return tree.map_leaves(lambda _: next(results), structure)


def _batches_in(batches: Any) -> Iterable[Any]:
    for item in batches:
        # An epoch of a loader: its number, and its iterator.
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], int) and hasattr(item[1], "__next__"):
            yield from item[1]
        else:
            yield item


class _Total:
    """The statistics of the batches so far, by the pairwise update of Chan, Golub and LeVeque."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._sums: tuple[NDArray[Any], ...] | None = None

    def add(self, values: NDArray[Any], kept: tuple[int, ...]) -> None:
        if values.dtype.kind not in _NUMBERS and values.dtype.name != "bfloat16":
            return
        stays = {axis + values.ndim if axis < 0 else axis for axis in kept}
        if not stays <= set(range(1, values.ndim)):
            raise ValueError(
                f"keep must be axes after that of the records, got {kept} for {self._path or 'batches'} of shape "
                f"{values.shape}."
            )
        axes = tuple(axis for axis in range(values.ndim) if axis not in stays)
        numbers = values.astype(np.float64)
        is_valid = ~np.isnan(numbers)
        count = is_valid.sum(axes)
        mean = np.where(is_valid, numbers, 0).sum(axes, keepdims=True) / np.maximum(1, count).reshape(
            [size if axis in stays else 1 for axis, size in enumerate(values.shape)]
        )
        squares = np.where(is_valid, (numbers - mean) ** 2, 0).sum(axes)
        low = np.where(is_valid, numbers, np.inf).min(axes, initial=np.inf)
        high = np.where(is_valid, numbers, -np.inf).max(axes, initial=-np.inf)
        own = count, mean.reshape(count.shape), squares, low, high
        self._sums = own if self._sums is None else self._merged(self._sums, own)

    def _merged(self, first: tuple[NDArray[Any], ...], second: tuple[NDArray[Any], ...]) -> tuple[NDArray[Any], ...]:
        if first[0].shape != second[0].shape:
            raise ValueError(
                f"The kept axes of {self._path or 'the batches'} must have one size in all batches, got "
                f"{first[0].shape} and {second[0].shape}."
            )
        count = first[0] + second[0]
        share = second[0] / np.maximum(1, count)
        difference = second[1] - first[1]
        squares = first[2] + second[2] + difference**2 * first[0] * share
        limits = np.minimum(first[3], second[3]), np.maximum(first[4], second[4])
        return count, first[1] + difference * share, squares, *limits

    def result(self) -> Statistics | None:
        if self._sums is None:
            return None
        count, *values = self._sums
        mean, squares, low, high = (np.where(count > 0, value, np.nan) for value in values)
        return Statistics(mean, np.sqrt(squares / np.maximum(1, count)), low, high, np.asarray(count, np.int64))
