"""The node that makes one batch of several elements."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from millstream.dataset.nodes.element_nodes import collected
from millstream.dataset.nodes.node import ENDLESS, Positions, UnaryNode, divided, joined, words_of
from millstream.descriptions import described
from millstream.errors import StackError
from millstream.transforms import Batch
from millstream.transforms.pad import pad
from millstream.transforms.stack import stack


@dataclasses.dataclass(frozen=True, eq=False)
class Batched(UnaryNode):
    """Batches of elements in a row, none of which lie in two epochs.

    Attributes:
        operation: how many elements make a batch, and how.
    """

    operation: Batch

    @functools.cached_property
    def length(self) -> int:
        """How many batches an epoch has."""
        if self.parent.length == ENDLESS:
            return ENDLESS
        whole, rest = divmod(self.parent.length, self.operation.batch_size)
        return whole + (rest > 0 and self.operation.keeps_remainder)

    @functools.cached_property
    def epoch_length(self) -> int:
        """Its own."""
        return self.length

    @functools.cached_property
    def width(self) -> int:
        """As many as a batch has elements."""
        return self.parent.width * self.operation.batch_size

    def locate(self, positions: Positions) -> Any:
        """Returns the positions, between which of the parent's rows each batch lies, and what the parent needs."""
        size = self.operation.batch_size
        epochs, numbers = divided(positions, self.length)
        if numbers.size and int(numbers.max()) > ENDLESS // size - 1:
            raise IndexError(f"A batch at position {positions.max()} would have elements from position 2**63 on.")
        starts = numbers * size
        sizes = np.minimum(size, self.parent.length - starts)
        ends = np.cumsum(sizes)
        offsets = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)
        of_each = epochs if isinstance(epochs, int) else np.repeat(epochs, sizes)
        rows = joined(of_each, self.parent.length, offsets)
        return positions, np.concatenate([[0], ends]), rows, self.parent.locate(rows)

    def elements(self, located: Any, start: int, stop: int) -> Sequence[Any]:
        """Returns the batches; the elements of all of them are read at once."""
        positions, bounds, rows, of_parent = located
        first, *ends = bounds[start : stop + 1].tolist()
        values = self.parent.elements(of_parent, first, ends[-1] if ends else first)

        def batches() -> Iterator[Any]:
            begin = first
            for end in ends:
                part = values if len(ends) == 1 else values[begin - first : end - first]
                yield self._batch(part, rows[begin:end])
                begin = end

        return collected(batches(), stop - start, positions[start:stop], self)

    def _batch(self, values: Sequence[Any], rows: Positions) -> Any:
        operation = self.operation
        if (
            type(values) in (list, tuple)
            and (hole := next((i for i, v in enumerate(values) if v is None), None)) is not None
        ):
            raise ValueError(
                f"There is no element at position {rows[hole]}: a map before .batch returned None, or the source holds "
                "None. Batch what is there: write .to_iter_dataset().batch(...), which skips absent elements."
            )
        if operation.batch_fn is not None:
            return operation.batch_fn(list(values))
        try:
            batch = stack(values)
        except StackError as error:
            if error.rows:
                positions = ", ".join(str(rows[row]) for row in error.rows)
                error.add_note(f"millstream: the positions of these elements before .batch: {positions}.")
            raise
        return pad(batch, len(values), operation.batch_size) if operation.pad_remainder else batch

    @property
    def text(self) -> str:
        """The method, with its arguments."""
        return f".batch({described(self.operation).removeprefix('Batch(')}"

    def words(self) -> Iterator[str]:
        """Yields the operation, and where batches are cut."""
        yield f"{words_of(self.operation)}(of: {self.parent.length})"
