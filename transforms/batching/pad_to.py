"""Padding of features to a length, in one element or in a batch."""

import bisect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_boundaries, as_flag, named_arguments
from millstream.core.columnar import Allocate
from millstream.transforms.base import Map
from millstream.transforms.batching.stack import stack
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
        if not isinstance(length_struct, Mapping | str) and hasattr(length_struct, "__iter__"):
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
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
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

    def batch(self, elements: Sequence[Mapping[str, Any]], length: int, allocate: Allocate) -> Any:
        lengths = dict.fromkeys(self.names, length)
        return stack([self._filled(element, lengths) for element in elements], allocate)

    def _filled(self, element: Mapping[str, Any], lengths: Mapping[str, int]) -> dict[str, Any]:
        arrays = {name: np.asarray(element[name]) for name in self.names}
        return {**element, **padded(arrays, lengths, self.rows), **masks_of(element, arrays, lengths, self.mask)}
