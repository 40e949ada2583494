"""The operation that builds one batch of consecutive elements, and batches padded with rows that are not elements."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from millstream.core import tree
from millstream.core.checks import as_flag, as_integer, named_fields
from millstream.core.columnar import Allocate
from millstream.core.descriptions import function_name
from millstream.transforms.base import Transformation
from millstream.transforms.batching.stack import stack
from millstream.transforms.grouping import CountingGroup, Grouping


class PaddedBatch(NamedTuple):
    """A batch of always `batch_size` rows, from `Batch(..., pad_remainder=True)`. As a tuple, it is a pytree.

    Attributes:
        batch: the structure of the elements; each leaf is an array of shape (batch_size, ...). Rows without an element
            are padding: zeros of the leaf's dtype, "" among strings, b"" among bytes.
        mask: bool, shape (batch_size,): True if the row is an element. These rows come first.

    Examples:
        >>> loader = millstream.load([1, 2, 3], num_epochs=1, transformations=[millstream.Batch(2, pad_remainder=True)])
        >>> for batch, mask in loader:
        ...     print(batch, mask, batch[mask].sum())
        [1 2] [ True  True] 3
        [3 0] [ True False] 3
    """

    batch: Any
    mask: NDArray[np.bool_]


@named_fields
@dataclasses.dataclass(frozen=True)
class Batch(Transformation, Grouping):
    """Builds one batch of every `batch_size` consecutive elements.

    Attributes:
        batch_size: the number of elements per batch, at least 1. This is the size per shard; the global batch consists
            of the batches of all shards.
        drop_remainder: True to drop a last, incomplete batch; False to return it. The stream then ends where too few
            records are left to fill a batch. They are not read, unless records before them were dropped, and none of
            them is an error or counts as one. After an operation that splits or regroups elements, and after a
            combination of streams, all are read, and may be errors.
        batch_fn: the function that builds the batch from the list of its elements. None stacks them: each leaf of the
            structure becomes one array with a new first axis.
        pad_remainder: True to return every batch as a `PaddedBatch` of `batch_size` rows, with padding in the last one.
            All shards then yield the same number of batches, even if their last one has no element, and every element
            is in exactly one batch, unless an operation before it regroups. It must be the only Batch of its pipeline.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range, or two arguments conflict. While
            reading, a StackError if the elements of a batch differ in structure, shape or dtype.

    Examples:
        >>> records = [{"x": 1.0}, {"x": 2.0}, {"x": 3.0}]
        >>> list(millstream.load(records, num_epochs=1, transformations=[millstream.Batch(2)]))
        [{'x': array([1., 2.])}, {'x': array([3.])}]
    """

    is_complete: ClassVar[bool] = True
    gathers: ClassVar[bool] = True
    makes_batches: ClassVar[bool] = True
    batch_size: int
    drop_remainder: bool = False
    batch_fn: Callable[[list[Any]], Any] | None = None
    pad_remainder: bool = False

    def __post_init__(self) -> None:
        # Plain values, because code that saves or compares an operation need not handle NumPy's.
        object.__setattr__(self, "batch_size", as_integer(self.batch_size, "batch_size", minimum=1, maximum=1 << 31))
        for name in ("drop_remainder", "pad_remainder"):
            object.__setattr__(self, name, as_flag(getattr(self, name), name))
        if self.batch_fn is not None and not callable(self.batch_fn):
            raise TypeError(
                f"batch_fn must be a function of the list of a batch's elements, or None to stack them, got "
                f"{self.batch_fn!r}."
            )
        if self.pad_remainder and self.drop_remainder:
            raise ValueError(
                "Cannot combine pad_remainder=True, which keeps the last elements, with drop_remainder=True."
            )
        if self.pad_remainder and self.batch_fn is not None:
            raise ValueError(
                "Cannot combine pad_remainder=True with batch_fn, whose result may not have rows to pad. Move the work "
                "of batch_fn to a Map before or after the Batch."
            )

    @property
    def keeps_remainder(self) -> bool:
        """True if the last elements form a batch even if they are fewer than `batch_size`."""
        return not self.drop_remainder

    @property
    def fixed_size(self) -> int:
        return self.batch_size

    def begin(self, skip: int = 0) -> CountingGroup:
        """Returns a group of `batch_size` elements, for elements that positions do not group."""
        del skip
        return CountingGroup(self.batch_size)

    def __repr__(self) -> str:
        # Errors and profiles show only the values that differ from their defaults.
        size, *options = dataclasses.fields(self)
        shown = {size.name: self.batch_size}
        shown |= {o.name: getattr(self, o.name) for o in options if getattr(self, o.name) != o.default}
        texts = {name: function_name(value) if callable(value) else repr(value) for name, value in shown.items()}
        return f"Batch({', '.join(f'{name}={text}' for name, text in texts.items())})"


def pad(batch: Any, num_real: int, size: int, allocate: Allocate = np.empty) -> PaddedBatch:
    """Returns the first rows of a batch followed by padding, and the mask that tells them apart.

    Args:
        batch: a result of `stack`: a structure of None and of arrays with at least one row.
        num_real: the number of rows that are elements: all of the batch, or 0 if it is only a template.
        size: the number of rows of the padded batch.
        allocate: allocates each array; arrays of objects have their own memory.
    """
    mask = allocate((size,), np.dtype(np.bool_))
    mask[:num_real] = True
    mask[num_real:] = False

    def fill(leaf: Any) -> Any:
        return None if leaf is None else _padded_array(leaf, num_real, size, allocate)

    return PaddedBatch(batch if num_real == size else tree.map_leaves(fill, batch), mask)


def _padded_array(rows: NDArray[Any], num_real: int, size: int, allocate: Allocate) -> NDArray[Any]:
    """Returns an array of `size` rows: the first `num_real` of the given rows, then zeros."""
    shape = (size, *rows.shape[1:])
    filled = np.empty(shape, rows.dtype) if rows.dtype.hasobject else allocate(shape, rows.dtype)
    filled[:num_real] = rows[:num_real]
    filled[num_real:] = _zero(rows)
    return filled


def _zero(rows: NDArray[Any]) -> Any:
    """Returns the value of padding: the zero of the dtype, or an empty text."""
    if rows.dtype == np.object_:
        first = next(rows.flat, None)
        return first[:0] if isinstance(first, (str, bytes)) else None
    # Not 0, which would be the text "0" in an array of strings.
    return np.zeros((), rows.dtype)


def batch_and_pad(values: Sequence[Any], *, batch_size: SupportsIndex, pad_value: Any = 0) -> Any:
    """Returns a batch of `batch_size` rows: the elements, followed by rows of padding.

    It is meant as a batch function: `.batch(8, batch_fn=functools.partial(batch_and_pad, batch_size=8))`.

    Args:
        values: 1 to `batch_size` elements of the same structure.
        batch_size: the number of rows of the batch.
        pad_value: the padding, which is converted to the dtype of each leaf.

    Raises:
        ValueError: there are no elements, or too many.

    Examples:
        >>> millstream.experimental.batch_and_pad([1, 2], batch_size=4, pad_value=-1)
        array([ 1,  2, -1, -1])
    """
    size = as_integer(batch_size, "batch_size", minimum=1)
    if not 1 <= len(values) <= size:
        raise ValueError(f"batch_and_pad makes a batch of 1 to batch_size={size} elements, got {len(values)}.")
    batch = stack(list(values))
    if len(values) == size:
        return batch

    def fill(rows: Any) -> Any:
        if rows is None:
            return None
        return np.concatenate([rows, np.full((size - len(values), *rows.shape[1:]), pad_value, rows.dtype)])

    return tree.map_leaves(fill, batch)
