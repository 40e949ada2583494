"""Batches of elements of similar length."""

import bisect
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_boundaries, as_integer, named_arguments
from millstream.core.columnar import Allocate
from millstream.core.segments import Segments
from millstream.transforms.batching.pad_to import PaddedFeatures
from millstream.transforms.grouping import CountingGroup, GroupId, GroupingOperation, Prepared


@final
class BucketBatch(GroupingOperation):
    """Builds batches of elements of similar length, so that there is little padding and few shapes.

    Elements of up to `boundaries[i]` tokens belong to bucket i, whose batches have `batch_sizes[i]` elements, padded to
    `boundaries[i]`. A compiled step therefore sees one shape per bucket. Elements are sorted into buckets within
    windows. The remainder of a bucket at the end of a window joins the next longer bucket, so that at most one batch of
    a window, its last, is shorter. No element is dropped. Batches of a step would differ in shape between shards, so a
    `DataLoader` of several shards refuses it.

    Args:
        boundaries: the maximum number of tokens of the elements of each bucket: integers from 1, ascending.
        batch_sizes: the number of elements per batch, for each bucket, at least 1.
        feature: the name of the feature that is counted and padded, or a list of names, of which the longest counts.
        window_size: the number of elements per window, at least 1. They are in memory together. Larger windows have
            fewer short batches.
        padding_struct: the padding value, per feature; 0 for the other features.
        mask: True to add `NAME_mask` for each feature: bool, shape (batch, length), True at what is not padding.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range. While reading, a ValueError if an
            element is longer than the last boundary, lacks a feature, or does not stack with the others of its batch.

    Examples:
        >>> elements = [{"tokens": np.ones(length)} for length in (2, 7, 3, 8, 1, 5)]
        >>> operations = [millstream.BucketBatch([4, 8], [2, 1], "tokens")]
        >>> loader = millstream.load(elements, num_epochs=1, transformations=operations)
        >>> [batch["tokens"].shape for batch in loader]
        [(1, 8), (2, 4), (1, 8), (1, 8), (1, 8)]
    """

    has_one_shape: ClassVar[bool] = False
    makes_batches: ClassVar[bool] = True

    @named_arguments()
    def __init__(
        self,
        boundaries: Sequence[int],
        batch_sizes: Sequence[int],
        feature: str | Collection[str],
        *,
        window_size: SupportsIndex = 4096,
        padding_struct: Mapping[str, Any] | None = None,
        mask: bool = False,
    ) -> None:
        self.boundaries = list(as_boundaries(boundaries))
        if not hasattr(batch_sizes, "__iter__"):
            raise TypeError(f"batch_sizes must be a list of integers, one per bucket, got {batch_sizes!r}.")
        self.batch_sizes = [as_integer(one, f"batch_sizes[{row}]", minimum=1) for row, one in enumerate(batch_sizes)]
        if len(self.boundaries) != len(self.batch_sizes):
            raise ValueError(
                f"batch_sizes must have one size per boundary, got {len(self.batch_sizes)} sizes and "
                f"{len(self.boundaries)} boundaries."
            )
        self.features = PaddedFeatures(feature, padding_struct, mask)
        self.window_size = as_integer(window_size, "window_size", minimum=1)

    def __repr__(self) -> str:
        return f"BucketBatch({self.boundaries}, {self.batch_sizes}, {self.features}, window_size={self.window_size})"

    def prepare(self, values: Sequence[Any]) -> Prepared:
        sizes = self.features.lengths(values)
        if (sizes > self.boundaries[-1]).any():
            raise ValueError(
                f"An element has {sizes.max()} tokens, but the last boundary is {self.boundaries[-1]}. Truncate it in "
                "a Map, filter it out, or add a longer boundary."
            )
        return Prepared(values, sizes)

    def begin(self, skip: int = 0) -> CountingGroup:
        del skip
        return CountingGroup(self.window_size)

    def arrange(self, measures: NDArray[np.int64], group: GroupId) -> Segments:
        """Returns the batches of a window, in the order in which they are complete."""
        del group
        buckets = np.searchsorted(self.boundaries, measures[0])
        batches: list[NDArray[np.int64]] = []
        left = np.empty(0, dtype=np.int64)
        for bucket, size in enumerate(self.batch_sizes):
            members = np.sort(np.concatenate([left, np.flatnonzero(buckets == bucket)]))
            whole = len(members) // size * size
            batches += np.split(members[:whole], range(size, whole, size)) if whole else []
            left = members[whole:]
        batches.sort(key=lambda batch: int(batch[-1]))
        batches += [left] if len(left) else []
        offsets = list(itertools.accumulate(map(len, batches), initial=0))
        return Segments(np.array(offsets), np.concatenate(batches))

    def make(self, values: Sequence[Any], segments: Segments, allocate: Allocate = np.empty) -> list[Any]:
        made = []
        for start, stop in itertools.pairwise(segments.offsets.tolist()):
            elements = [values[element] for element in segments.elements[start:stop].tolist()]
            made.append(self.features.batch(elements, self._length_of(elements), allocate))
        return made

    def _length_of(self, elements: Sequence[Any]) -> int:
        """Returns the shortest padded length for elements in a batch of their number.

        All may belong to shorter buckets than the one whose batch they fill, which nevertheless has its own shape.
        """
        first = bisect.bisect_left(self.boundaries, int(self.features.lengths(elements).max()))
        shapes = zip(self.boundaries[first:], self.batch_sizes[first:], strict=True)
        return next((length for length, size in shapes if size == len(elements)), self.boundaries[first])
