"""The node that builds batches of elements."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from millstream.dataset.nodes.element_nodes import collected
from millstream.dataset.nodes.node import ENDLESS, Positions, UnaryNode, divided, joined
from millstream.descriptions import described
from millstream.errors import StackError
from millstream.loader.checkpoints.description import identity_of
from millstream.transforms import Batch
from millstream.transforms.batching.pad import pad
from millstream.transforms.batching.stack import stack


@dataclasses.dataclass(frozen=True, eq=False)
class Batched(UnaryNode):
    """Batches of consecutive elements, none of which span two epochs."""

    operation: Batch

    @functools.cached_property
    def length(self) -> int:
        if self.parent.length == ENDLESS:
            return ENDLESS
        whole, rest = divmod(self.parent.length, self.operation.batch_size)
        return whole + (rest > 0 and self.operation.keeps_remainder)

    @functools.cached_property
    def epoch_length(self) -> int:
        return self.length

    @functools.cached_property
    def width(self) -> int:
        return self.parent.width * self.operation.batch_size

    def locate(self, positions: Positions) -> Any:
        """Returns the positions, the bounds of each batch in the parent's rows, these rows, and their location."""
        size = self.operation.batch_size
        epochs, numbers = divided(positions, self.length)
        if numbers.size and int(numbers.max()) > ENDLESS // size - 1:
            raise IndexError(f"A batch at position {positions.max()} would have elements at or above position 2**63.")
        starts = numbers * size
        sizes = np.minimum(size, self.parent.length - starts)
        ends = np.cumsum(sizes)
        offsets = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)
        of_each = epochs if isinstance(epochs, int) else np.repeat(epochs, sizes)
        rows = joined(of_each, self.parent.length, offsets)
        return positions, np.concatenate([[0], ends]), rows, self.parent.locate(rows)

    def elements(self, located: Any, start: int, stop: int) -> Sequence[Any]:
        positions, bounds, rows, of_parent = located
        first, *ends = bounds[start : stop + 1].tolist()
        values = self.parent.elements(of_parent, first, ends[-1] if ends else first)

        def batches() -> Iterator[Any]:
            begin = first
            for end in ends:
                own = values if len(ends) == 1 else values[begin - first : end - first]
                yield self._batch(own, rows[begin:end])
                begin = end

        return collected(batches(), stop - start, positions[start:stop], self)

    def _batch(self, values: Sequence[Any], rows: Positions) -> Any:
        operation = self.operation
        if (
            type(values) in (list, tuple)
            and (missing := next((i for i, v in enumerate(values) if v is None), None)) is not None
        ):
            raise ValueError(
                f"Cannot batch the missing element at position {rows[missing]}: a map before .batch returned None, or "
                "the source contains None. Use .to_iter_dataset().batch(...), which skips missing elements."
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
        return f".batch({described(self.operation).removeprefix('Batch(')}"

    def identities(self) -> Iterator[str]:
        """Yields the operation, and the length of the epochs that it batches."""
        yield f"{identity_of(self.operation)}(of: {self.parent.length})"
