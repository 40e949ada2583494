"""Batches whose size is limited by a budget of tokens."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer, as_integer_or_none, named_arguments
from millstream.core.columnar import Allocate
from millstream.core.segments import Segments
from millstream.transforms.batching.pad_to import PaddedFeatures
from millstream.transforms.grouping import GroupId, GroupingOperation, OpenGroup, Prepared


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
        sizes = self.features.lengths(values)
        if (sizes > self.budget).any():
            raise ValueError(
                f"An element has {sizes.max()} tokens, but budget={self.budget}. Truncate it in a Map, filter it out, "
                "or increase the budget."
            )
        return Prepared(values, sizes)

    def begin(self, skip: int = 0) -> _Budget:
        del skip
        return _Budget(self.budget, self.max_batch_size)

    def arrange(self, measures: NDArray[np.int64], group: GroupId) -> Segments:
        del group
        return Segments.by_output(np.zeros(measures.shape[1], dtype=np.int64))

    def make(self, values: Sequence[Any], segments: Segments, allocate: Allocate = np.empty) -> list[Any]:
        elements = [values[element] for element in segments.elements.tolist()]
        return [self.features.batch(elements, int(self.features.lengths(elements).max()), allocate)]
