"""The operation that makes one batch of several elements."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


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
    """

    batch_size: int
    drop_remainder: bool = False
    batch_fn: Callable[[Sequence[Any]], Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.batch_size, bool):
            raise TypeError(f"batch_size must be an int, got {self.batch_size}.")
        try:
            batch_size = operator.index(self.batch_size)
        except TypeError:
            raise TypeError(f"batch_size must be an int, got {self.batch_size!r}.") from None
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        if not isinstance(self.drop_remainder, bool | np.bool_):
            raise TypeError(f"drop_remainder must be True or False, got {self.drop_remainder!r}.")
        if self.batch_fn is not None and not callable(self.batch_fn):
            raise TypeError(
                f"batch_fn must be a function that gets the list of a batch's elements, or None to stack them, "
                f"got {self.batch_fn!r}."
            )
        # Plain numbers: whoever saves or compares an operation need not know numpy's.
        object.__setattr__(self, "batch_size", batch_size)
        object.__setattr__(self, "drop_remainder", bool(self.drop_remainder))
