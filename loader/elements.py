"""What flows between operations: a run of elements, and where each came from."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, slots=True)
class Origins:
    """Where elements came from: three arrays of one number an element, shape `(n,)` and dtype int64.

    A batch has the origin of its first element.

    Attributes:
        position: the place in the sampler's order.
        record_key: the record at that place.
        index: what `MapWithIndex` sees and random streams are keyed by. It is the position, until a FlatMap gives its
            children numbers of their own.
    """

    position: NDArray[np.int64]
    record_key: NDArray[np.int64]
    index: NDArray[np.int64]

    def take(self, which: slice | NDArray[Any]) -> Self:
        """Returns the origins of some of the elements: a slice, a mask or an array of places."""
        return type(self)(self.position[which], self.record_key[which], self.index[which])

    def to_bytes(self) -> bytes:
        """Returns the three arrays end to end: to pickle them takes ten times as long as this."""
        return np.concatenate((self.position, self.record_key, self.index)).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Returns what `to_bytes` was called on; the arrays are read-only."""
        return cls(*np.frombuffer(data, dtype=np.int64).reshape(3, -1))

    def fan_out(self, counts: Sequence[int], max_fan_out: int) -> Self:
        """Returns the origins of children, `counts[i]` of them for element i: child j has index `i * max_fan_out + j`.

        Raises:
            OverflowError: an index does not fit 63 bits.
        """
        if len(self.index) and int(self.index[-1]) > np.iinfo(np.int64).max // max_fan_out - 1:
            raise OverflowError(
                f"A FlatMap with max_fan_out={max_fan_out} at index {self.index[-1]}: the children's indices must be "
                "below 2**63. Use a smaller max_fan_out."
            )
        sizes = np.array(counts, dtype=np.int64)
        children = self.take(np.repeat(np.arange(len(self.index)), sizes))
        starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        child = np.arange(len(children.index)) - starts
        return dataclasses.replace(children, index=children.index * max_fan_out + child)

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Returns the origins of several runs laid end to end."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            position=np.concatenate([part.position for part in parts]),
            record_key=np.concatenate([part.record_key for part in parts]),
            index=np.concatenate([part.index for part in parts]),
        )


@dataclasses.dataclass(slots=True)
class Elements:
    """A run of elements in order, and the error that ends it, if any.

    A run that fails at some element holds the elements before that one: so an exception reaches the consumer at its
    turn, after everything that comes before it, however many elements were worked on at once.

    Attributes:
        values: the elements.
        origins: where each came from.
        error: what was raised instead of the next element.
    """

    values: Sequence[Any]
    origins: Origins
    error: BaseException | None = None

    @classmethod
    def failed(cls, error: BaseException) -> Self:
        """Returns a run of no elements, only an error."""
        nothing = np.empty(0, dtype=np.int64)
        return cls([], Origins(nothing, nothing, nothing), error)

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Returns runs laid end to end, up to and including the first error."""
        stop = next((i for i, part in enumerate(parts, 1) if part.error is not None), len(parts))
        kept = parts[:stop]
        if len(kept) == 1:
            return kept[0]
        values = [value for part in kept for value in part.values]
        return cls(values, Origins.concatenate([part.origins for part in kept]), kept[-1].error)


def describe_records(origins: Origins) -> str:
    """Returns which records some elements came from, for error texts."""
    keys = origins.record_key
    shown = ", ".join(map(str, keys[:16].tolist())) + (", …" if len(keys) > 16 else "")
    first, last = np.min(origins.position), np.max(origins.position)
    return f"the record{'s' if len(keys) > 1 else ''} {shown} (positions {first} to {last})"
