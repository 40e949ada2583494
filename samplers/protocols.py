"""What the loader asks of samplers whose positions are more than records: of mixtures, and of rows."""

from typing import Any, NamedTuple, Protocol, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray

from millstream.samplers.base import AdaptedSampler, VectorisedSampler


class Located(NamedTuple):
    """Where positions of a mixture lead; int64 arrays of shape (m,).

    Attributes:
        components: the number of the component.
        indices: the position in that component's own order; in the innermost, where a component is itself a mixture.
        record_keys: the keys in the sources laid end to end.
    """

    components: NDArray[np.int64]
    indices: NDArray[np.int64]
    record_keys: NDArray[np.int64]


class MixedSampler(VectorisedSampler, Protocol):
    """A sampler whose positions are dealt to components, each with a sampler of its own.

    Its `seed` and `num_records` are None. Random operations draw from the generators of a component's own sampler, at
    the position in that sampler's order.
    """

    @property
    def names(self) -> tuple[Any, ...]:
        """What the components are called."""
        ...

    @property
    def samplers(self) -> tuple[VectorisedSampler | AdaptedSampler, ...]:
        """The components' samplers."""
        ...

    @property
    def source_lengths(self) -> tuple[int, ...]:
        """How many records the source of each component has."""
        ...

    def shuffled_within(self, global_batch_size: int, seed: int) -> Self:
        """Returns the same order with the rows of each global batch permuted."""
        ...

    def drawn_before(self, position: int, /) -> tuple[int, ...]:
        """Returns the number of elements of each component before the first position of a global batch."""
        ...

    def locate(self, positions: NDArray[np.int64], /) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the number of the component, and the position in its own order, of any positions."""
        ...

    def located(self, positions: NDArray[np.int64], /) -> Located:
        """Returns the number of the component, the position in the innermost order, and the record key."""
        ...


class PackedSampler(VectorisedSampler, Protocol):
    """A sampler whose positions are rows made of several documents, which a `Pack` lays out."""

    @property
    def row_length(self) -> int:
        """How many tokens a row takes."""
        ...

    @property
    def num_source_records(self) -> int:
        """How many documents the source has."""
        ...

    def lengths_at(self, record_keys: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Returns how many tokens some documents have, shape (m,)."""
        ...

    def pieces_at(
        self, positions: NDArray[np.int64], /
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Returns where the pieces of each row begin; and record key, begin and end of each piece. No row is empty."""
        ...


class MixedPackedSampler(MixedSampler, PackedSampler, Protocol):
    """A mixture of rows: each has documents of one component."""

    def located_pieces(
        self, positions: NDArray[np.int64], /
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[NDArray[np.int64], ...]]:
        """Returns the number of the component, the position in the innermost order, and what the rows are made of."""
        ...


def is_packed(sampler: object) -> TypeGuard[PackedSampler]:
    """Whether the positions of a sampler are rows."""
    return getattr(sampler, "row_length", None) is not None and hasattr(sampler, "pieces_at")


def is_mixed(sampler: object) -> TypeGuard[MixedSampler]:
    """Whether a sampler deals its positions to components."""
    return hasattr(sampler, "located") and bool(getattr(sampler, "names", ()))


def is_mixed_and_packed(sampler: object) -> TypeGuard[MixedPackedSampler]:
    """Whether a sampler deals rows to components."""
    return is_mixed(sampler) and is_packed(sampler)
