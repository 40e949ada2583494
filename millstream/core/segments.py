"""Rows made of segments of documents, and the outputs of groups made of segments of elements."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Segments(NamedTuple):
    """The composition of rows or other outputs: each is a list of segments, each segment a slice of an element.

    All arrays are int64. Every output has at least one segment.

    Attributes:
        offsets: shape (outputs + 1,). Output i has the segments offsets[i] … offsets[i + 1] - 1, as in an Arrow list.
        elements: the element that each segment is cut from, shape (segments,): the record key of a document if a
            sampler has planned the rows, else an index into a group.
        starts: the start of each segment in its element, shape (segments,). If it and `stops` are None, every segment
            is a whole element.
        stops: the end of each segment in its element, exclusive, shape (segments,).

    Examples:
        >>> sampler = millstream.PackingSampler([3, 5, 2], row_length=8)
        >>> rows = sampler.segments(0, 2)
        >>> rows.elements, rows.offsets
        (array([1, 0, 2]), array([0, 2, 3]))
    """

    offsets: NDArray[np.int64]
    elements: NDArray[np.int64]
    starts: NDArray[np.int64] | None = None
    stops: NDArray[np.int64] | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The length of each segment, shape (segments,), if there are starts and stops."""
        return self.stops - self.starts  # type: ignore[operator]

    @classmethod
    def singletons(cls, elements: NDArray[np.int64]) -> "Segments":
        """Returns one output per element, in the given order.

        Args:
            elements: the elements, shape (outputs,).
        """
        return cls(np.arange(len(elements) + 1), elements)

    @classmethod
    def by_output(cls, outputs: NDArray[np.int64]) -> "Segments":
        """Returns outputs of whole elements, given the output number of each element.

        Outputs are sorted by number, and numbers without an element are omitted. Within an output, elements keep their
        order.

        Args:
            outputs: the output number of each element, shape (elements,).
        """
        elements = np.argsort(outputs, kind="stable")
        sorted_outputs = outputs[elements]
        return cls(np.flatnonzero(np.diff(sorted_outputs, prepend=-1, append=sorted_outputs[-1] + 1)), elements)

    @classmethod
    def chunked(cls, starts: NDArray[np.int64], stops: NDArray[np.int64], size: int) -> "Segments":
        """Concatenates one slice of each element and cuts the result into outputs of `size`.

        The last output may be shorter.

        Args:
            starts: the start of each element's slice, shape (elements,).
            stops: the end of each element's slice, exclusive, shape (elements,).
            size: at least 1.
        """
        slice_ends = np.cumsum(stops - starts)
        total = int(slice_ends[-1])
        output_starts = np.arange(0, total, size)
        # A stable sort is fast here, because both arrays are sorted. np.unique hashes, and takes five times as long.
        bounds = np.sort(np.concatenate([output_starts, slice_ends[slice_ends < total], [total]]), kind="stable")
        bounds = bounds[np.append(True, bounds[1:] != bounds[:-1])]
        elements = np.searchsorted(slice_ends, bounds[:-1], side="right")
        shifts = stops[elements] - slice_ends[elements]
        offsets = np.append(np.searchsorted(bounds, output_starts), len(elements))
        return cls(offsets, elements, bounds[:-1] + shifts, bounds[1:] + shifts)

    @classmethod
    def concatenate(cls, groups: Sequence["Segments"]) -> "Segments":
        """Returns the outputs of all groups, in order.

        Args:
            groups: the groups, with starts and stops; none for no output.
        """
        nothing = np.empty(0, dtype=np.int64)
        bases = np.cumsum([0, *(len(group.elements) for group in groups)])
        offsets = [group.offsets[:-1] + base for group, base in zip(groups, bases, strict=False)]
        columns = zip((nothing,) * 3, *((group.elements, group.starts, group.stops) for group in groups), strict=True)
        return cls(np.concatenate([*offsets, bases[-1:]]), *map(np.concatenate, columns))

    @classmethod
    def scattered(cls, found: Sequence[tuple[NDArray[np.intp] | slice, "Segments"]]) -> "Segments":
        """Returns all outputs, given those of subsets of them.

        Args:
            found: the numbers of the outputs of each subset, and the outputs in that order, with starts and stops. Each
                output is in one subset. A single subset may be given by a slice of all outputs.
        """
        if len(found) == 1 and isinstance(found[0][0], slice):
            return found[0][1]
        numbers = np.concatenate([np.empty(0, dtype=np.int64), *(rows for rows, _ in found)])
        return cls.concatenate([group for _, group in found]).permuted(np.argsort(numbers))

    def of_output(self, output: int) -> "Segments":
        """Returns the segments of one output.

        Args:
            output: its number.
        """
        own = slice(*self.offsets[output : output + 2].tolist())
        starts, stops = (None if column is None else column[own] for column in (self.starts, self.stops))
        return Segments(np.array([0, own.stop - own.start]), self.elements[own], starts, stops)

    def permuted(self, order: NDArray[np.int64]) -> "Segments":
        """Returns the same outputs in another order.

        Args:
            order: the numbers of the outputs, shape (outputs,).
        """
        counts = np.diff(self.offsets)[order]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        rows = np.repeat(self.offsets[:-1][order] - offsets[:-1], counts) + np.arange(len(self.elements))
        starts, stops = (None if column is None else column[rows] for column in (self.starts, self.stops))
        return Segments(offsets, self.elements[rows], starts, stops)
