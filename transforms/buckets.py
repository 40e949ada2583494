"""Batches of elements of similar length."""

import bisect
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.checks import as_integer, named_arguments
from millstream.columnar import Allocate
from millstream.transforms.grouping import CountingGroup, GroupingOperation, Identity, Pieces, Prepared
from millstream.transforms.pad_to import PaddedFeatures


@final
class BucketBatch(GroupingOperation):
    """Makes batches of elements of similar length, so that little is padding and shapes are few.

    Elements of up to `boundaries[i]` tokens belong to bucket i, whose batches have `batch_sizes[i]` elements, padded to
    `boundaries[i]`: the compiled step sees one shape for each bucket. Elements are sorted into buckets within windows.
    What is left of a bucket at the end of a window goes with the next longer bucket's, so that at most one batch of a
    window, its last, is shorter. Nothing is left out.

    Args:
        boundaries: how many tokens the elements of each bucket have at most: integers from 1 on, ascending.
        batch_sizes: how many elements a batch of each bucket has, at least 1; as many as there are boundaries.
        feature: the name of the feature that is counted and padded, or of several; the longest of them counts.
        window_size: how many elements a window has, at least 1. They are in memory together; the more, the fewer
            short batches.
        padding_struct: what fills up each feature; 0 for those that are not named.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range. While reading, a ValueError where an
            element is longer than the last boundary, lacks a feature, or does not stack with the others of its batch.

    Examples:
        >>> elements = [{"tokens": np.ones(length)} for length in (2, 7, 3, 8, 1, 5)]
        >>> operations = [millstream.BucketBatch([4, 8], [2, 1], "tokens")]
        >>> loader = millstream.load(elements, num_epochs=1, transformations=operations)
        >>> [batch["tokens"].shape for batch in loader]
        [(1, 8), (2, 4), (1, 8), (1, 8), (1, 8)]
    """

    @named_arguments()
    def __init__(
        self,
        boundaries: Sequence[int],
        batch_sizes: Sequence[int],
        feature: str | Collection[str],
        *,
        window_size: SupportsIndex = 4096,
        padding_struct: Mapping[str, Any] | None = None,
    ) -> None:
        for name, given in (("boundaries", boundaries), ("batch_sizes", batch_sizes)):
            if not hasattr(given, "__iter__"):
                raise TypeError(f"{name} must be a list of integers, one for each bucket, got {given!r}.")
        self.boundaries = [as_integer(one, f"boundaries[{row}]", minimum=1) for row, one in enumerate(boundaries)]
        self.batch_sizes = [as_integer(one, f"batch_sizes[{row}]", minimum=1) for row, one in enumerate(batch_sizes)]
        if not self.boundaries or sorted(set(self.boundaries)) != self.boundaries:
            raise ValueError(f"boundaries must be at least one length, and ascend, got {self.boundaries}.")
        if len(self.boundaries) != len(self.batch_sizes):
            raise ValueError(
                f"There must be a batch size for each boundary, got {len(self.boundaries)} boundaries and "
                f"{len(self.batch_sizes)} batch_sizes."
            )
        self.features = PaddedFeatures(feature, padding_struct)
        self.window_size = as_integer(window_size, "window_size", minimum=1)

    def __repr__(self) -> str:
        return f"BucketBatch({self.boundaries}, {self.batch_sizes}, {self.features}, window_size={self.window_size})"

    def prepare(self, values: Sequence[Any]) -> Prepared:
        """Returns the elements as they are, and how long they are.

        Raises:
            ValueError: an element lacks a feature, or is longer than the last boundary.
        """
        sizes = self.features.lengths(values)
        if (sizes > self.boundaries[-1]).any():
            raise ValueError(
                f"An element has {sizes.max()} tokens, but the last of boundaries is {self.boundaries[-1]}: truncate "
                "it in a Map, filter it out, or add a longer boundary."
            )
        return Prepared(values, sizes)

    def begin(self, skip: int = 0) -> CountingGroup:
        """Returns an empty window."""
        del skip
        return CountingGroup(self.window_size)

    def arrange(self, numbers: NDArray[np.int64], identity: Identity) -> Pieces:
        """Returns the batches of a window, in the order in which they are complete."""
        del identity
        buckets = np.searchsorted(self.boundaries, numbers[0])
        batches: list[NDArray[np.int64]] = []
        left = np.empty(0, dtype=np.int64)
        for bucket, size in enumerate(self.batch_sizes):
            members = np.sort(np.concatenate([left, np.flatnonzero(buckets == bucket)]))
            whole = len(members) // size * size
            batches += np.split(members[:whole], range(size, whole, size)) if whole else []
            left = members[whole:]
        batches.sort(key=lambda batch: int(batch[-1]))
        batches += [left] if len(left) else []
        starts = list(itertools.accumulate(map(len, batches), initial=0))
        return Pieces(np.array(starts), np.concatenate(batches))

    def make(self, values: Sequence[Any], pieces: Pieces, allocate: Allocate = np.empty) -> list[Any]:
        """Returns the batches."""
        made = []
        for start, stop in itertools.pairwise(pieces.starts.tolist()):
            elements = [values[element] for element in pieces.elements[start:stop].tolist()]
            made.append(self.features.batch(elements, self._length_of(elements), allocate))
        return made

    def _length_of(self, elements: Sequence[Any]) -> int:
        """Returns the least length that the elements can be padded to in a batch of their number.

        All may be of shorter buckets than the one whose batch they are: it has a shape of its own, all the same.
        """
        first = bisect.bisect_left(self.boundaries, int(self.features.lengths(elements).max()))
        shapes = zip(self.boundaries[first:], self.batch_sizes[first:], strict=True)
        return next((length for length, size in shapes if size == len(elements)), self.boundaries[first])
