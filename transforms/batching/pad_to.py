"""Padding of features to a length, in one element or in a batch."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import named_arguments
from millstream.core.columnar import Allocate
from millstream.transforms.base import Map
from millstream.transforms.batching.stack import stack
from millstream.transforms.packing.rows import RowFormat


@final
class PadTo(Map):
    """Pads the ends of features to a length along their first axis.

    Elements are dicts; features that are not named stay unchanged. `TokenBudgetBatch` and `BucketBatch` pad their
    batches themselves.

    Args:
        length_struct: the new length of each feature's first axis, such as its number of tokens.
        padding_struct: the padding value, per feature; 0 for the other features.

    Raises:
        TypeError, ValueError: an argument has the wrong type, or names an unknown feature. While reading, a ValueError
            if an element lacks a feature, or has a longer one.

    Examples:
        >>> pad = millstream.PadTo({"tokens": 4}, padding_struct={"tokens": -1})
        >>> pad.map({"tokens": np.array([5, 6])})
        {'tokens': array([ 5,  6, -1, -1])}
    """

    @named_arguments()
    def __init__(self, length_struct: Mapping[str, int], padding_struct: Mapping[str, Any] | None = None) -> None:
        self.rows = RowFormat(length_struct, (), padding_struct, has_companions=False)

    def __repr__(self) -> str:
        return f"PadTo({self.rows})"

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
        return dict(element) | padded(arrays, self.rows.length_struct, self.rows)


def padded(arrays: Mapping[str, NDArray[Any]], lengths: Mapping[str, int], rows: RowFormat) -> dict[str, NDArray[Any]]:
    """Returns arrays of at least the given lengths, padded at the end."""
    full = {}
    for name, array in arrays.items():
        shape = (max(lengths[name], len(array)), *array.shape[1:])
        full[name] = np.full(shape, rows.padding(name, array.dtype), array.dtype)
        full[name][: len(array)] = array
    return full


@final
class PaddedFeatures:
    """Features whose lengths differ between elements, and which a batch pads to one length."""

    def __init__(self, features: str | Collection[str], padding_struct: Mapping[str, Any] | None) -> None:
        names = (features,) if isinstance(features, str) else features
        if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"feature must be a name or a list of names, got {features!r}.")
        self.names = tuple(names)
        self.rows = RowFormat(dict.fromkeys(self.names, 1), (), padding_struct, has_companions=False)
        self.padding_struct = self.rows.padding_struct

    def __repr__(self) -> str:
        shown = repr(self.names[0]) if len(self.names) == 1 else repr(list(self.names))
        return shown + (f", padding_struct={self.padding_struct!r}" if self.padding_struct else "")

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
        return stack(
            [
                {**element, **padded({n: np.asarray(element[n]) for n in self.names}, lengths, self.rows)}
                for element in elements
            ],
            allocate,
        )
