"""Batches of as many elements as fit into a budget of tokens."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.checks import as_integer, named_arguments
from millstream.columnar import Allocate
from millstream.transforms.grouping import GroupingOperation, Identity, OpenGroup, Pieces, Prepared
from millstream.transforms.pad_to import PaddedFeatures


@final
class _Budget(OpenGroup):
    """Elements whose number times the length of the longest stays within a budget."""

    def __init__(self, budget: int, most: int | None) -> None:
        self._budget = budget
        self._most = most
        self._count = self._longest = 0
        self._is_full = False

    def take(self, sizes: NDArray[np.int64]) -> int:
        """Takes elements up to the first that the budget has no room for."""
        if self._is_full:
            return 0
        longest = np.maximum(np.maximum.accumulate(sizes[0]), self._longest)
        counts = np.arange(self._count + 1, self._count + 1 + len(longest))
        fits = counts * longest <= self._budget
        if self._most is not None:
            fits &= counts <= self._most
        taken = len(fits) if fits.all() else int(np.argmin(fits))
        if taken:
            self._count, self._longest = int(counts[taken - 1]), int(longest[taken - 1])
        self._is_full = taken < len(fits) or self._count == self._most
        return taken

    @property
    def is_full(self) -> bool:
        """Whether an element has come for which there is no room, or there are as many as may be."""
        return self._is_full


@final
class TokenBudgetBatch(GroupingOperation):
    """Makes batches of elements in a row, as many as fit into a budget: few long ones, or many short ones.

    The features named are padded to the longest element of the batch. An element counts with the padding: a batch has
    at most `budget` tokens of each feature. So each step takes about the same memory and time on the device. Shapes
    differ from batch to batch: where a compiled step needs few of them, use `BucketBatch`.

    Args:
        budget: how many tokens a batch has at most, at least 1.
        feature: the name of the feature that is counted and padded, or of several; the longest of them counts.
        max_batch_size: how many elements a batch has at most; None for any number.
        padding_struct: what fills up each feature; 0 for those that are not named.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range. While reading, a ValueError where an
            element is longer than the budget, lacks a feature, or does not stack with the others of its batch.

    Examples:
        >>> elements = [{"tokens": np.ones(length)} for length in (2, 7, 3, 8, 1, 5)]
        >>> operations = [millstream.TokenBudgetBatch(16, "tokens")]
        >>> loader = millstream.load(elements, num_epochs=1, transformations=operations)
        >>> [batch["tokens"].shape for batch in loader]
        [(2, 7), (2, 8), (2, 5)]
    """

    @named_arguments()
    def __init__(
        self,
        budget: SupportsIndex,
        feature: str | Collection[str],
        *,
        max_batch_size: SupportsIndex | None = None,
        padding_struct: Mapping[str, Any] | None = None,
    ) -> None:
        self.budget = as_integer(budget, "budget", minimum=1)
        self.max_batch_size = (
            None if max_batch_size is None else as_integer(max_batch_size, "max_batch_size", minimum=1)
        )
        self.features = PaddedFeatures(feature, padding_struct)

    def __repr__(self) -> str:
        return f"TokenBudgetBatch({self.budget}, {self.features})"

    def prepare(self, values: Sequence[Any]) -> Prepared:
        """Returns the elements as they are, and how long they are.

        Raises:
            ValueError: an element lacks a feature, or is longer than the budget.
        """
        sizes = self.features.lengths(values)
        if (sizes > self.budget).any():
            raise ValueError(
                f"An element has {sizes.max()} tokens, but budget={self.budget}: truncate it in a Map, filter it out, "
                "or raise the budget."
            )
        return Prepared(values, sizes)

    def begin(self, skip: int = 0) -> _Budget:
        """Returns an empty batch."""
        del skip
        return _Budget(self.budget, self.max_batch_size)

    def arrange(self, numbers: NDArray[np.int64], identity: Identity) -> Pieces:
        """Returns one batch of all."""
        del identity
        return Pieces.by_number(np.zeros(numbers.shape[1], dtype=np.int64))

    def make(self, values: Sequence[Any], pieces: Pieces, allocate: Allocate = np.empty) -> list[Any]:
        """Returns the batch."""
        elements = [values[element] for element in pieces.elements.tolist()]
        return [self.features.batch(elements, int(self.features.lengths(elements).max()), allocate)]
