"""Documents laid end to end and cut into rows, but for those that are as long as a row: they are rows as they are.

Such a document comes after the row that is being filled when it arrives, or at once where none is. So rows have an
order of their own, which is not that of the documents. A group ends where nothing waits: no document that is a row, and
of the others at most the rest of the last one. What is used up of a group is, as ever, a number of tokens: those of one
row for each row that was given out, whichever it was, and what was used up of the first document before; of that, what
is not a whole row says where rows begin.
"""

from typing import final

import numpy as np
from numpy.typing import NDArray

from millstream.transforms.grouping import OpenGroup, Pieces


@final
class PassingGroup(OpenGroup):
    """Elements up to one after which some rows are complete, and none of the elements waits for a row to be filled.

    Args:
        unit: how long a row is.
        rows: how many of them fill the group, at least.
        skip: how much of the elements is used up.
    """

    def __init__(self, unit: int, rows: int, skip: int) -> None:
        self._unit = unit
        self._num_used, self._offset = divmod(skip, unit)
        self._goal = self._num_used + rows
        # Tokens of documents that are cut, from the first row on; documents that are rows.
        self._tokens, self._passed = -self._offset, 0
        self._is_full = self._is_cut = False
        self._sizes: list[NDArray[np.int64]] = []

    def take(self, sizes: NDArray[np.int64]) -> int:
        """Takes elements up to the one that fills the group."""
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
        """Whether there are as many rows as are wanted."""
        return self._is_full

    @property
    def used(self) -> int:
        """How much of the last element is used up, if it continues in the next group."""
        left = self._tokens % self._unit if self._is_full else 0
        return int(self._sizes[-1][-1]) - left if left else 0

    def cut(self) -> int:
        """Ends the group with the rows that are complete, and what came while they were filled."""
        self._is_cut = True
        _, rows_before = self._rows_before()
        complete = self._tokens // self._unit
        return max(0, complete + int((rows_before <= complete).sum()) - self._num_used)

    def decided(self) -> NDArray[np.int64]:
        """Returns where in each element its part of this group begins and ends, shape (2, elements)."""
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
        """Returns which elements are rows, and how many rows of other elements come before each of those."""
        sizes = np.concatenate(self._sizes)
        passes = sizes == self._unit
        tokens = np.cumsum(np.where(passes, 0, sizes)) - self._offset
        return passes, -(-tokens[passes] // self._unit)


def passing_pieces(sizes: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64], unit: int) -> Pieces:
    """Returns rows made of parts of elements: a `PassingGroup` has decided where those begin and end.

    Args:
        sizes: how long each element is, shape (elements,).
        begins: where in each its part begins.
        ends: where it ends.
        unit: how long a row is.
    """
    passes = (sizes == unit) & (ends > begins)
    whole, cuttable = np.flatnonzero(passes), np.flatnonzero(~passes & (ends > begins))
    if not len(whole):
        return Pieces.cut(begins, ends, unit)
    made = [Pieces(np.arange(len(whole) + 1), whole, begins[whole], ends[whole])]
    if len(cuttable):
        cut = Pieces.cut(begins[cuttable], ends[cuttable], unit)
        made.insert(0, cut._replace(elements=cuttable[cut.elements]))
    tokens = np.cumsum(np.where(passes, 0, ends - begins))
    rows_before = -(-tokens[whole] // unit)
    num_rows = -(-int(tokens[-1]) // unit)
    # Row n of those that are cut has the place n + 1/2: a document before which there are n of them comes before it.
    order = np.argsort(np.concatenate([np.arange(num_rows) + 0.5, rows_before]), kind="stable")
    return Pieces.concatenate(made).permuted(order)
