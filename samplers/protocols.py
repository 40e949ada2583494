"""Protocols of samplers whose positions are more than records: mixtures, and rows."""

from typing import Any, NamedTuple, Protocol, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray

from millstream.core.segments import Segments
from millstream.samplers.base import AdaptedSampler, VectorisedSampler


class Located(NamedTuple):
    """The elements at positions of a mixture; int64 arrays of shape (m,).

    Attributes:
        components: the number of the component.
        indices: the position in that component's own order; in the innermost one if a component is itself a mixture.
        record_keys: the keys in the concatenated sources.
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
    def names(self) -> tuple[Any, ...]: ...

    @property
    def samplers(self) -> tuple[VectorisedSampler | AdaptedSampler, ...]: ...

    @property
    def source_lengths(self) -> tuple[int, ...]: ...

    @property
    def rows_seed(self) -> int | None: ...

    def shuffled_within(self, global_batch_size: int, seed: int) -> Self: ...

    def drawn_before(self, position: int, /) -> tuple[int, ...]: ...

    def locate(self, positions: NDArray[np.int64], /) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...

    def located(self, positions: NDArray[np.int64], /) -> Located: ...


class PackedSampler(VectorisedSampler, Protocol):
    """A sampler whose positions are rows made of several documents, for a `Pack`."""

    @property
    def row_length(self) -> int: ...

    @property
    def num_source_records(self) -> int: ...

    def lengths_at(self, record_keys: NDArray[np.int64], /) -> NDArray[np.int64]: ...

    def segments_at(self, positions: NDArray[np.int64], /) -> Segments:
        """Returns the rows at any positions, in their order: segments of documents, which are given by record key."""
        ...


class MixedPackedSampler(MixedSampler, PackedSampler, Protocol):
    """A mixture of rows: each has documents of one component."""

    def located_segments(
        self, positions: NDArray[np.int64], /
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Segments]: ...


class VaryingBatches(VectorisedSampler, Protocol):
    """A sampler whose global batches differ in size: `are_used` finds the positions of a step that its batch has."""

    @property
    def batch_sizes(self) -> tuple[int, ...]: ...

    def are_used(self, positions: NDArray[np.int64], /) -> NDArray[np.bool_]: ...


def has_varying_batches(sampler: object) -> TypeGuard[VaryingBatches]:
    return getattr(sampler, "batch_sizes", None) is not None and hasattr(sampler, "are_used")


def is_packed(sampler: object) -> TypeGuard[PackedSampler]:
    return getattr(sampler, "row_length", None) is not None and hasattr(sampler, "segments_at")


def is_mixed(sampler: object) -> TypeGuard[MixedSampler]:
    return hasattr(sampler, "located") and bool(getattr(sampler, "names", ()))


def is_mixed_and_packed(sampler: object) -> TypeGuard[MixedPackedSampler]:
    return is_mixed(sampler) and is_packed(sampler)
