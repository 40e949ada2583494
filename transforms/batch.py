"""The operation that makes one batch of several elements, and what a padded batch is."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millstream.checks import as_flag, as_integer, named_fields
from millstream.descriptions import function_name
from millstream.transforms.grouping import CountingGroup, Grouping
from millstream.transforms.transformation import Transformation


class PaddedBatch(NamedTuple):
    """A batch that always has `batch_size` rows, as `Batch(..., pad_remainder=True)` makes it; a pytree, as any tuple.

    Attributes:
        batch: the structure of the elements; each leaf an array of shape (batch_size, ...). Rows without an element
            are padding: zeros of the leaf's dtype, "" among strings, b"" among bytes.
        mask: bool, shape (batch_size,): True where the row is an element. These rows come first.

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
    """Makes one batch of every `batch_size` elements, in order.

    Attributes:
        batch_size: how many elements make a batch, at least 1. This is the size on one shard; the global batch is
            the batches of all shards.
        drop_remainder: whether elements at the end that do not fill a batch are left out, instead of making one
            short batch.
        batch_fn: makes the batch from the list of its elements. None stacks them: each leaf of the structure becomes
            one array with a new axis in front.
        pad_remainder: whether every batch is a `PaddedBatch` of `batch_size` rows, the last one filled up with padding.
            All shards then yield equally many batches, even those without an element in the last one, and every
            element is in exactly one batch. Such a Batch is the only one of its pipeline.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range, or two do not fit together. While
            reading, a StackError where elements of a batch differ in structure, shape or dtype.

    Examples:
        >>> records = [{"x": 1.0}, {"x": 2.0}, {"x": 3.0}]
        >>> list(millstream.load(records, num_epochs=1, transformations=[millstream.Batch(2)]))
        [{'x': array([1., 2.])}, {'x': array([3.])}]
    """

    is_complete: ClassVar[bool] = True
    gathers: ClassVar[bool] = True
    batch_size: int
    drop_remainder: bool = False
    batch_fn: Callable[[list[Any]], Any] | None = None
    pad_remainder: bool = False

    def __post_init__(self) -> None:
        # Plain values: code that saves or compares an operation need not know NumPy's.
        object.__setattr__(self, "batch_size", as_integer(self.batch_size, "batch_size", minimum=1, maximum=1 << 31))
        for name in ("drop_remainder", "pad_remainder"):
            object.__setattr__(self, name, as_flag(getattr(self, name), name))
        if self.batch_fn is not None and not callable(self.batch_fn):
            raise TypeError(
                f"batch_fn must be a function that gets the list of a batch's elements, or None to stack them, "
                f"got {self.batch_fn!r}."
            )
        if self.pad_remainder and self.drop_remainder:
            raise ValueError(
                "pad_remainder=True keeps the last elements and drop_remainder=True leaves them out: choose one."
            )
        if self.pad_remainder and self.batch_fn is not None:
            raise ValueError(
                "pad_remainder=True needs rows to fill up, and what batch_fn returns may have none: do the work of "
                "batch_fn in a Map before or after the Batch."
            )

    @property
    def keeps_remainder(self) -> bool:
        """Whether fewer elements than `batch_size`, at the end, make a batch."""
        return not self.drop_remainder

    def begin(self, skip: int = 0) -> CountingGroup:
        """Returns a group of `batch_size` elements, for those that positions do not group."""
        del skip
        return CountingGroup(self.batch_size)

    def __repr__(self) -> str:
        # In error texts and profiles, what was asked for is enough.
        size, *options = dataclasses.fields(self)
        shown = {size.name: self.batch_size}
        shown |= {o.name: getattr(self, o.name) for o in options if getattr(self, o.name) != o.default}
        texts = {name: function_name(value) if callable(value) else repr(value) for name, value in shown.items()}
        return f"Batch({', '.join(f'{name}={text}' for name, text in texts.items())})"
