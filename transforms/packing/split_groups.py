"""Groups of concatenated elements that are cut into outputs of one size, where the next group may continue an element.

A group ends with the element in which its last output ends. If a remainder of that element is left, the next group
begins with the same element, and skips the consumed amount. The position of a stream is therefore two small numbers:
the first element that is not entirely consumed, and the consumed amount of it.

In a `WholeRowGroup`, documents as long as a row become rows unchanged. Such a full-length document comes after the row
that is being filled when it arrives, or immediately if none is. The order of the rows therefore differs from that of
the documents. A group ends after an element that leaves no full-length document waiting, and of the others at most the
remainder of the last one. The consumed amount of a group is a number of tokens: one row's for each row returned, of
either kind, plus the amount consumed of the first document before. Its remainder modulo the row length is the offset at
which rows begin.
"""

from typing import final

import numpy as np
from numpy.typing import NDArray

from millstream.core.segments import Segments
from millstream.transforms.grouping import OpenGroup


@final
class SplitGroup(OpenGroup):
    """Elements up to the one in which the last of a number of outputs of `unit` tokens ends."""

    def __init__(self, unit: int, outputs: int, skip: int) -> None:
        self._unit = unit
        self._skip = skip
        self._goal = skip + outputs * unit
        self._total = 0
        self._end: int | None = None
        self._sizes: list[NDArray[np.int64]] = []

    def take(self, sizes: NDArray[np.int64]) -> int:
        if self.is_full:
            return 0
        totals = self._total + np.cumsum(sizes[0])
        taken = min(len(totals), int(np.searchsorted(totals, self._goal)) + 1)
        self._sizes.append(sizes[0, :taken])
        self._total = int(totals[taken - 1])
        if self._total >= self._goal:
            self.truncate()
        return taken

    @property
    def is_full(self) -> bool:
        return self._total >= self._goal

    @property
    def used(self) -> int:
        left = 0 if self._end is None else self._total - self._end
        return int(self._sizes[-1][-1]) - left if left else 0

    def truncate(self) -> int:
        whole = max(0, self._total - self._skip) // self._unit
        self._end = self._skip + whole * self._unit
        return whole

    def decisions(self) -> NDArray[np.int64]:
        """Returns the start and stop of each element's slice in this group, shape (2, elements)."""
        sizes = np.concatenate(self._sizes)
        lasts = np.cumsum(sizes)
        end = self._total if self._end is None else self._end
        return np.stack([np.clip(bound - lasts + sizes, 0, sizes) for bound in (self._skip, end)])


@final
class WholeRowGroup(OpenGroup):
    """Elements up to one after which enough rows of `unit` tokens are complete, and no full-length document waits."""

    def __init__(self, unit: int, rows: int, skip: int) -> None:
        self._unit = unit
        self._num_used, self._offset = divmod(skip, unit)
        self._goal = self._num_used + rows
        # The number of tokens of documents to cut, from the first row on, and the number of full-length documents.
        self._tokens, self._passed = -self._offset, 0
        self._is_full = self._is_cut = False
        self._sizes: list[NDArray[np.int64]] = []

    def take(self, sizes: NDArray[np.int64]) -> int:
        if self._is_full:
            return 0
        passes = sizes[0] == self._unit
        tokens = self._tokens + np.cumsum(np.where(passes, 0, sizes[0]))
        passed = self._passed + np.cumsum(passes)
        rows = np.append(max(0, self._tokens), tokens) // self._unit
        waits = (tokens % self._unit > 0) & (rows[1:] == rows[:-1])
        ends = np.flatnonzero(~waits & (rows[1:] + passed >= self._goal))
        taken = int(ends[0]) + 1 if len(ends) else len(tokens)
        self._is_full = len(ends) > 0
        self._tokens, self._passed = int(tokens[taken - 1]), int(passed[taken - 1])
        self._sizes.append(sizes[0, :taken])
        return taken

    @property
    def is_full(self) -> bool:
        return self._is_full

    @property
    def used(self) -> int:
        left = self._tokens % self._unit if self._is_full else 0
        return int(self._sizes[-1][-1]) - left if left else 0

    def truncate(self) -> int:
        """Ends the group with the complete rows and the full-length documents that arrived while they were filled."""
        self._is_cut = True
        _, rows_before = self._rows_before()
        complete = self._tokens // self._unit
        return max(0, complete + int((rows_before <= complete).sum()) - self._num_used)

    def decisions(self) -> NDArray[np.int64]:
        sizes = np.concatenate(self._sizes)
        passes, rows_before = self._rows_before()
        cuttable = np.where(passes, 0, sizes)
        firsts = np.cumsum(cuttable) - cuttable
        num_used = int((rows_before + np.arange(len(rows_before)) < self._num_used).sum())
        begin = self._offset + (self._num_used - num_used) * self._unit
        complete = self._tokens // self._unit if self._is_full or self._is_cut else len(sizes) + self._tokens
        begins, ends = (np.clip(bound - firsts, 0, cuttable) for bound in (begin, self._offset + complete * self._unit))
        is_wanted = (np.arange(len(rows_before)) >= num_used) & (rows_before <= complete)
        ends[passes] = np.where(is_wanted, self._unit, 0)
        return np.stack([begins, ends])

    def _rows_before(self) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Returns the mask of full-length documents, and the number of cut rows before each of these."""
        sizes = np.concatenate(self._sizes)
        passes = sizes == self._unit
        tokens = np.cumsum(np.where(passes, 0, sizes)) - self._offset
        return passes, -(-tokens[passes] // self._unit)


def whole_row_segments(
    sizes: NDArray[np.int64], starts: NDArray[np.int64], stops: NDArray[np.int64], unit: int
) -> Segments:
    """Returns the rows, of `unit` tokens, of a `WholeRowGroup`, given the length and the slice of each element."""
    passes = (sizes == unit) & (stops > starts)
    whole, cuttable = np.flatnonzero(passes), np.flatnonzero(~passes & (stops > starts))
    if not len(whole):
        return Segments.chunked(starts, stops, unit)
    made = [Segments(np.arange(len(whole) + 1), whole, starts[whole], stops[whole])]
    if len(cuttable):
        cut = Segments.chunked(starts[cuttable], stops[cuttable], unit)
        made.insert(0, cut._replace(elements=cuttable[cut.elements]))
    tokens = np.cumsum(np.where(passes, 0, stops - starts))
    rows_before = -(-tokens[whole] // unit)
    num_rows = -(-int(tokens[-1]) // unit)
    # Cut row n sorts as n + 1/2, so a document with n cut rows before it precedes it.
    order = np.argsort(np.concatenate([np.arange(num_rows) + 0.5, rows_before]), kind="stable")
    return Segments.concatenate(made).permuted(order)
