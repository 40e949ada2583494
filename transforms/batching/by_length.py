"""Padding of features to a length, and batches by the length of elements: within a budget of tokens, or in buckets."""

import bisect
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import (
    as_boundaries,
    as_flag,
    as_integer,
    as_integer_or_none,
    is_listed,
    named_arguments,
)
from millstream.core.columnar import Allocate
from millstream.core.segments import Segments
from millstream.transforms.base import Map
from millstream.transforms.batching.stack import stack
from millstream.transforms.grouping import CountingGroup, GroupId, GroupingOperation, OpenGroup, Prepared
from millstream.transforms.packing.rows import RowFormat


@final
class PadTo(Map):
    """Pads the ends of features to a length along their first axis, or to the smallest of several that holds them.

    Elements are dicts; features that are not named stay unchanged. `TokenBudgetBatch` and `BucketBatch` pad their
    batches themselves. Several lengths go with a `BucketSampler` of the same boundaries, whose batches have one each.

    Args:
        length_struct: the new length of each feature's first axis, such as its number of tokens; or boundaries, the
            possible lengths of `feature`: integers from 1 on, ascending.
        padding_struct: the padding value, per feature; 0 for the other features.
        feature: with boundaries, the name of the feature, or a list of names, of which the longest decides; None for
            "tokens".
        mask: True to add `NAME_mask` for each feature: bool, shape (length,), True at what is not padding.

    Raises:
        TypeError, ValueError: an argument has the wrong type, or names an unknown feature. While reading, a ValueError
            if an element lacks a feature, or has a longer one, or has a mask already.

    Examples:
        >>> pad = millstream.PadTo({"tokens": 4}, padding_struct={"tokens": -1})
        >>> pad.map({"tokens": np.array([5, 6])})
        {'tokens': array([ 5,  6, -1, -1])}
        >>> pad = millstream.PadTo([2, 4, 8], feature="tokens", mask=True)
        >>> pad.map({"tokens": np.array([5, 6, 7])})
        {'tokens': array([5, 6, 7, 0]), 'tokens_mask': array([ True,  True,  True, False])}
    """

    @named_arguments()
    def __init__(
        self,
        length_struct: Mapping[str, int] | Sequence[int],
        padding_struct: Mapping[str, Any] | None = None,
        *,
        feature: str | Collection[str] | None = None,
        mask: bool = False,
    ) -> None:
        self.boundaries: tuple[int, ...] | None = None
        lengths: Any = length_struct
        if not isinstance(length_struct, Mapping) and is_listed(length_struct):
            self.boundaries = as_boundaries(length_struct)
            lengths = dict.fromkeys(_names_of("tokens" if feature is None else feature), self.boundaries[-1])
        elif feature is not None:
            raise ValueError(f"feature must be left out if length_struct names the features, got {feature!r}.")
        self.rows = RowFormat(lengths, (), padding_struct, has_companions=False)
        # None if not, so that operations without masks are described as they always were.
        self.mask = as_flag(mask, "mask") or None

    def __repr__(self) -> str:
        lengths = "" if self.boundaries is None else f", boundaries={list(self.boundaries)}"
        return f"PadTo({self.rows}{lengths}{', mask=True' * bool(self.mask)})"

    def map(self, element: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the element with its features padded: arrays of shape (length, …), dtypes unchanged.

        Args:
            element: a dict with the named features, each an array or a list. It is not changed.

        Raises:
            ValueError: the element lacks a feature, or has a longer one.
        """
        columns = self.rows.columns([dict(element)])
        arrays = {name: array for name, (array,) in zip(self.rows.length_struct, columns, strict=True)}
        for name, length in self.rows.length_struct.items():
            if len(arrays[name]) > length:
                raise ValueError(
                    f"Cannot pad {name!r} to {length}: an element has {len(arrays[name])}. Truncate it in a Map, or "
                    "pad to a larger length."
                )
        lengths: Mapping[str, int] = self.rows.length_struct
        if self.boundaries is not None:
            longest = max(map(len, arrays.values()))
            lengths = dict.fromkeys(arrays, self.boundaries[bisect.bisect_left(self.boundaries, longest)])
        return dict(element) | padded(arrays, lengths, self.rows) | masks_of(element, arrays, lengths, self.mask)


def padded(arrays: Mapping[str, NDArray[Any]], lengths: Mapping[str, int], rows: RowFormat) -> dict[str, NDArray[Any]]:
    """Returns arrays of at least the given lengths, padded at the end."""
    full = {}
    for name, array in arrays.items():
        shape = (max(lengths[name], len(array)), *array.shape[1:])
        full[name] = np.full(shape, rows.padding(name, array.dtype), array.dtype)
        full[name][: len(array)] = array
    return full


def masks_of(
    element: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], lengths: Mapping[str, int], mask: bool | None
) -> dict[str, NDArray[np.bool_]]:
    """Returns the masks of the padded features of an element, by name; none if mask is None."""
    if not mask:
        return {}
    for name in arrays:
        if f"{name}_mask" in element:
            raise ValueError(f"Cannot add '{name}_mask': the element has it already. Rename it in a Map.")
    return {f"{name}_mask": np.arange(max(lengths[name], len(array))) < len(array) for name, array in arrays.items()}


def _names_of(features: object) -> tuple[str, ...]:
    names = (features,) if isinstance(features, str) else features
    if not isinstance(names, Collection) or not is_listed(names) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"feature must be a name or a list of names, got {features!r}.")
    return tuple(names)


@final
class PaddedFeatures:
    """Features whose lengths differ between elements, and which a batch pads to one length."""

    def __init__(
        self, features: str | Collection[str], padding_struct: Mapping[str, Any] | None, mask: bool = False
    ) -> None:
        self.names = _names_of(features)
        self.mask = as_flag(mask, "mask") or None
        self.rows = RowFormat(dict.fromkeys(self.names, 1), (), padding_struct, has_companions=False)
        self.padding_struct = self.rows.padding_struct

    def __repr__(self) -> str:
        shown = repr(self.names[0]) if len(self.names) == 1 else repr(list(self.names))
        shown += f", padding_struct={self.padding_struct!r}" if self.padding_struct else ""
        return shown + ", mask=True" * bool(self.mask)

    def lengths(self, elements: Sequence[Any]) -> NDArray[np.int64]:
        """Returns the length of each element's longest feature, shape (1, elements)."""
        for element in elements:
            if not isinstance(element, Mapping):
                raise ValueError(f"Elements must be dicts with {list(self.names)}, got {type(element).__name__}.")  # noqa: TRY004  (data, not an argument)
        columns = self.rows.columns([dict(element) for element in elements])
        sizes = np.array([list(map(len, column)) for column in columns], dtype=np.int64)
        longest: NDArray[np.int64] = sizes.max(axis=0, keepdims=True)
        return longest

    def prepared(self, values: Sequence[Any], limit: int, name: str, remedy: str) -> Prepared:
        """Returns elements with their lengths. ValueError for one longer than a limit, which the error calls `name`."""
        sizes = self.lengths(values)
        if (sizes > limit).any():
            raise ValueError(
                f"An element has {sizes.max()} tokens, but {name} is {limit}. Truncate it in a Map, filter it out, or "
                f"{remedy}."
            )
        return Prepared(values, sizes)

    def batch(self, elements: Sequence[Mapping[str, Any]], length: int, allocate: Allocate) -> Any:
        lengths = dict.fromkeys(self.names, length)
        return stack([self._filled(element, lengths) for element in elements], allocate)

    def _filled(self, element: Mapping[str, Any], lengths: Mapping[str, int]) -> dict[str, Any]:
        arrays = {name: np.asarray(element[name]) for name in self.names}
        return {**element, **padded(arrays, lengths, self.rows), **masks_of(element, arrays, lengths, self.mask)}


@final
class _Budget(OpenGroup):
    """Elements whose number times the length of the longest stays within a budget."""

    def __init__(self, budget: int, limit: int | None) -> None:
        self._budget = budget
        self._limit = limit
        # Elements without tokens count as one: a batch of nothing else would never be full.
        self._count, self._longest = 0, 1
        self._is_full = False

    def take(self, sizes: NDArray[np.int64]) -> int:
        if self._is_full:
            return 0
        longest = np.maximum(np.maximum.accumulate(sizes[0]), self._longest)
        counts = np.arange(self._count + 1, self._count + 1 + len(longest))
        fits = counts * longest <= self._budget
        if self._limit is not None:
            fits &= counts <= self._limit
        taken = len(fits) if fits.all() else int(np.argmin(fits))
        if taken:
            self._count, self._longest = int(counts[taken - 1]), int(longest[taken - 1])
        self._is_full = taken < len(fits) or self._count == self._limit
        return taken

    @property
    def is_full(self) -> bool:
        return self._is_full


@final
class TokenBudgetBatch(GroupingOperation):
    """Builds batches of as many consecutive elements as fit into a budget of tokens: few long ones, or many short ones.

    The named features are padded to the longest element of the batch. Padding counts: a batch has at most `budget`
    tokens of each feature, so each step takes about the same memory and time on the device. An element without tokens
    counts as one token. Shapes differ between batches. If a compiled step needs few shapes, use `BucketBatch`. Shapes
    would also differ between shards, so a `DataLoader` of several shards refuses both.

    Args:
        budget: the maximum number of tokens per batch, at least 1.
        feature: the name of the feature that is counted and padded, or a list of names, of which the longest counts.
        max_batch_size: the maximum number of elements per batch; None for no limit.
        padding_struct: the padding value, per feature; 0 for the other features.
        mask: True to add `NAME_mask` for each feature: bool, shape (batch, length), True at what is not padding.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range. While reading, a ValueError if an
            element is longer than the budget, lacks a feature, or does not stack with the others of its batch.

    Examples:
        >>> elements = [{"tokens": np.ones(length)} for length in (2, 7, 3, 8, 1, 5)]
        >>> operations = [millstream.TokenBudgetBatch(16, "tokens")]
        >>> loader = millstream.load(elements, num_epochs=1, transformations=operations)
        >>> [batch["tokens"].shape for batch in loader]
        [(2, 7), (2, 8), (2, 5)]
    """

    has_one_shape: ClassVar[bool] = False
    makes_batches: ClassVar[bool] = True

    @named_arguments()
    def __init__(
        self,
        budget: SupportsIndex,
        feature: str | Collection[str],
        *,
        max_batch_size: SupportsIndex | None = None,
        padding_struct: Mapping[str, Any] | None = None,
        mask: bool = False,
    ) -> None:
        self.budget = as_integer(budget, "budget", minimum=1)
        self.max_batch_size = as_integer_or_none(max_batch_size, "max_batch_size")
        self.features = PaddedFeatures(feature, padding_struct, mask)

    def __repr__(self) -> str:
        return f"TokenBudgetBatch({self.budget}, {self.features})"

    def prepare(self, values: Sequence[Any]) -> Prepared:
        return self.features.prepared(values, self.budget, "budget", "increase the budget")

    def begin(self, skip: int = 0) -> _Budget:
        del skip
        return _Budget(self.budget, self.max_batch_size)

    def arrange(self, measures: NDArray[np.int64], group: GroupId) -> Segments:
        del group
        return Segments.by_output(np.zeros(measures.shape[1], dtype=np.int64))

    def make(self, values: Sequence[Any], segments: Segments, allocate: Allocate = np.empty) -> list[Any]:
        elements = [values[element] for element in segments.elements.tolist()]
        return [self.features.batch(elements, int(self.features.lengths(elements).max()), allocate)]


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
        if not is_listed(batch_sizes):
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
        return self.features.prepared(values, self.boundaries[-1], "the last boundary", "add a longer boundary")

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
