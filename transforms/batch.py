"""The operation that makes one batch of several elements, and what a padded batch is."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class PaddedBatch(NamedTuple):
    """A batch of `batch_size` rows in any case, as `Batch(..., pad_remainder=True)` makes it; a pytree, as any tuple.

    Attributes:
        batch: the structure of the elements; each leaf an array of shape (batch_size, ...). Rows without an element
            are padding: zeros of the leaf's dtype, "" among strings, b"" among bytes.
        mask: bool, shape (batch_size,): True where the row is an element's. These rows come first.
    """

    batch: Any
    mask: NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Makes one batch of every `batch_size` elements, in order.

    Attributes:
        batch_size: how many elements make a batch, at least 1. This is the size on one shard; the global batch is
            the batches of all shards.
        drop_remainder: whether elements at the end that do not fill a batch are left out, instead of making one
            short batch.
        batch_fn: makes the batch from the list of its elements. None stacks them: each leaf of the structure becomes
            one array with a new axis in front.
        pad_remainder: whether every batch is a `PaddedBatch` of `batch_size` rows, the last one filled up with padding.
            All shards then yield equally many batches, shards without an element in the last one too, and every
            element is in exactly one of them. Such a Batch is the only one of its pipeline.
    """

    batch_size: int
    drop_remainder: bool = False
    batch_fn: Callable[[Sequence[Any]], Any] | None = None
    pad_remainder: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.batch_size, bool):
            raise TypeError(f"batch_size must be an int, got {self.batch_size}.")
        try:
            batch_size = operator.index(self.batch_size)
        except TypeError:
            raise TypeError(f"batch_size must be an int, got {self.batch_size!r}.") from None
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        for name in ("drop_remainder", "pad_remainder"):
            value = getattr(self, name)
            if not isinstance(value, bool | np.bool_):
                raise TypeError(f"{name} must be True or False, got {value!r}.")
            # Plain values: whoever saves or compares an operation need not know numpy's.
            object.__setattr__(self, name, bool(value))
        if self.batch_fn is not None and not callable(self.batch_fn):
            raise TypeError(
                f"batch_fn must be a function that gets the list of a batch's elements, or None to stack them, "
                f"got {self.batch_fn!r}."
            )
        if self.pad_remainder and self.drop_remainder:
            raise ValueError(
                "pad_remainder=True keeps the last elements and drop_remainder=True leaves them out: give one of them."
            )
        if self.pad_remainder and self.batch_fn is not None:
            raise ValueError(
                "pad_remainder=True needs rows to fill up, and what batch_fn returns may have none: do the work of "
                "batch_fn in a Map before or behind the Batch."
            )
        object.__setattr__(self, "batch_size", batch_size)

    def __repr__(self) -> str:
        # In error texts and profiles what was asked for is enough.
        size, *options = dataclasses.fields(self)
        shown = [size, *(option for option in options if getattr(self, option.name) != option.default)]
        return f"Batch({', '.join(f'{field.name}={getattr(self, field.name)!r}' for field in shown)})"
