"""Descriptions of the features of `tf.train.Example`, and the column type of those with variable length."""

import contextlib
import dataclasses
import reprlib
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer
from millstream.tf_example.wire import BYTES, FOUR_BYTES, VARINT

KINDS: dict[str, tuple[int, int]] = {"bytes": (1, BYTES), "float32": (2, FOUR_BYTES), "int64": (3, VARINT)}
"""For each dtype, the number of its list in a Feature, and the wire type of a value that is not packed."""


class RaggedColumn(NamedTuple):
    """A feature that has a different number of values in each element of a batch. As a tuple, it is a pytree.

    Attributes:
        values: the concatenated values of all elements, shape (sum of lengths,).
        lengths: the number of values of each element, int64, shape (n,).

    Examples:
        >>> column = millstream.RaggedColumn(values=np.array([1, 2, 3]), lengths=np.array([2, 0, 1]))
        >>> column.rows()
        [array([1, 2]), array([], dtype=int64), array([3])]
        >>> column.padded(2)
        array([[1, 2],
               [0, 0],
               [3, 0]])
    """

    values: NDArray[Any]
    lengths: NDArray[np.int64]

    def rows(self) -> list[NDArray[Any]]:
        """Returns the values of each element, as views of `values` of shape (its length,)."""
        return np.split(self.values, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []

    def padded(self, length: int, padding: Any = 0) -> NDArray[Any]:
        """Returns the values as an array of shape (n, length) and of the same dtype. Longer rows are truncated.

        Args:
            length: the number of values per row, at least 0.
            padding: the value at the end of shorter rows.

        Raises:
            TypeError, ValueError: the length is not an integer of at least 0.
        """
        length = as_integer(length, "length", minimum=0)
        table = np.full((len(self.lengths), length), padding, self.values.dtype)
        kept = np.minimum(self.lengths, length)
        starts = np.cumsum(self.lengths) - self.lengths
        within = np.arange(int(kept.sum())) - np.repeat(np.cumsum(kept) - kept, kept)
        table[np.repeat(np.arange(len(kept)), kept), within] = self.values[np.repeat(starts, kept) + within]
        return table


@final
@dataclasses.dataclass(frozen=True)
class FixedLengthFeature:
    """A feature that has the same number of values in each Example: an array of shape (n, *shape) in the batch.

    Attributes:
        shape: the shape of one element's values; `()` for one value.
        dtype: `np.int64`, `np.float32` or `bytes`, as in the Examples. Bytes become an array of objects.
        default: the value for an Example without the feature: one value, or an array of that shape. None makes such
            an Example an error.

    Raises:
        TypeError, ValueError: the dtype is unknown, the shape is invalid, or the default has another shape.

    Examples:
        >>> decode = millstream.decode_examples({"label": millstream.FixedLengthFeature((), np.int64, default=-1)})
        >>> decode.map([millstream.encode_example({"label": 3}), millstream.encode_example({})])
        {'label': array([ 3, -1])}
    """

    shape: Any
    dtype: Any
    default: Any = None

    def __post_init__(self) -> None:
        sizes = (self.shape,) if np.ndim(self.shape) == 0 else tuple(self.shape)
        object.__setattr__(self, "shape", tuple(as_integer(size, "A size in shape", minimum=0) for size in sizes))
        object.__setattr__(self, "dtype", _kind(self.dtype))
        if self.default is not None:
            try:
                self.default_values()
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(
                    f"default must be one value, or values of shape {self.shape} and dtype {self.dtype}, got "
                    f"{reprlib.repr(self.default)}."
                ) from error

    def default_values(self) -> NDArray[Any]:
        """Returns the default as an array of the feature's shape."""
        if self.dtype != "bytes":
            values = np.array(self.default, self.dtype)
            if self.dtype == "int64" and (values != np.asarray(self.default)).any():
                raise ValueError("a fraction is not an integer")
            return np.broadcast_to(values, self.shape)
        # NumPy's own bytes would lose trailing zeros.
        values = np.empty(self.shape, np.object_)
        if isinstance(self.default, bytes):
            values.fill(self.default)
        else:
            values[...] = np.array(self.default, np.object_)
        return values


@final
@dataclasses.dataclass(frozen=True)
class VariableLengthFeature:
    """A feature that has any number of values in each Example: a `RaggedColumn` in the batch.

    An Example without the feature has no values.

    Attributes:
        dtype: `np.int64`, `np.float32` or `bytes`, as in the Examples. Bytes become an array of objects.

    Raises:
        TypeError, ValueError: the dtype is unknown.

    Examples:
        >>> decode = millstream.decode_examples({"tokens": millstream.VariableLengthFeature(np.int64)})
        >>> decode.map([millstream.encode_example({"tokens": [1, 2]}), millstream.encode_example({})])
        {'tokens': RaggedColumn(values=array([1, 2]), lengths=array([2, 0]))}
    """

    dtype: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _kind(self.dtype))


def _kind(dtype: Any) -> str:
    name = None
    with contextlib.suppress(TypeError):
        name = "bytes" if dtype in (bytes, "bytes") else np.dtype(dtype).name
    if name not in KINDS:
        raise ValueError(f"dtype must be np.int64, np.float32 or bytes, as in Examples, got {dtype!r}.")
    return name
