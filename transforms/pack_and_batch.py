"""Whole documents packed and batched in one step, in the form of Grain's older operation."""

from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.checks import named_arguments
from millstream.columnar import Allocate
from millstream.transforms.bins import Bins
from millstream.transforms.first_fit import FirstFitPack
from millstream.transforms.grouping import GroupingOperation, Identity, Pieces, Prepared, lengths_of


@final
class PackAndBatchOperation(GroupingOperation):
    """Makes batches of rows packed from documents as they come, each of which goes into the first row with room for it.

    A batch is a tuple of three dicts, with the features as keys and arrays of shape (rows, length) as values: the
    tokens, the segment ids (from 1, 0 for padding), and the positions within segments. It has `batch_size` rows; those
    without a document are all zeros. `FirstFitPack` and `Batch` give dicts, as newer code expects them.

    Args:
        length_struct: how many tokens a row takes, for each feature; other features are left out.
        batch_size: how many rows a batch has, at least 1.
        max_sequences_per_bin: how many documents a row takes at most; None for any number.

    Raises:
        TypeError, ValueError: as `FirstFitPack`; while reading too, where a document is longer than a row.

    Examples:
        >>> documents = [{"tokens": np.full(length, length)} for length in (3, 5, 2)]
        >>> pack = millstream.experimental.PackAndBatchOperation({"tokens": 8}, batch_size=2)
        >>> loader = millstream.load(documents, num_epochs=1, transformations=[pack])
        >>> tokens, segment_ids, positions = next(iter(loader))
        >>> tokens["tokens"]
        array([[3, 3, 3, 5, 5, 5, 5, 5],
               [2, 2, 0, 0, 0, 0, 0, 0]])
    """

    @named_arguments()
    def __init__(
        self,
        length_struct: Mapping[str, int],
        batch_size: SupportsIndex,
        max_sequences_per_bin: SupportsIndex | None = None,
    ) -> None:
        self.packing = FirstFitPack(
            length_struct,
            num_packing_bins=batch_size,
            shuffle_bins=False,
            max_sequences_per_bin=max_sequences_per_bin,
        )

    def __repr__(self) -> str:
        return f"PackAndBatchOperation({self.packing.rows}, batch_size={self.packing.num_packing_bins})"

    def prepare(self, values: Sequence[Any]) -> Prepared:
        """Returns the features of the documents that have any token, and how many tokens each feature has.

        Raises:
            ValueError: a document lacks a feature, or is too long.
        """
        return self.packing.prepare(values)

    def begin(self, skip: int = 0) -> Bins:
        """Returns empty rows."""
        return self.packing.begin(skip)

    def arrange(self, numbers: NDArray[np.int64], identity: Identity) -> Pieces:
        """Returns that all documents are in one batch."""
        del identity
        return Pieces(np.array([0, numbers.shape[1]]), np.arange(numbers.shape[1]))

    def make(self, values: Sequence[Any], pieces: Pieces, allocate: Allocate = np.empty) -> Sequence[Any]:
        """Returns the batch: the documents go into the rows that they went into when they were counted."""
        documents = [values[element] for element in pieces.elements.tolist()]
        rows = self.packing.begin()
        rows.take(lengths_of(zip(*documents, strict=True)))
        laid_out = list(self.packing.make(documents, Pieces.by_number(rows.decided()[0]), allocate))
        parts = ({name: name + ending for name in self.packing.length_struct} for ending in _ENDINGS)
        return [
            tuple({name: self._stacked([row[key] for row in laid_out]) for name, key in part.items()} for part in parts)
        ]

    def _stacked(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        batch = np.zeros((self.packing.num_packing_bins, *rows[0].shape), rows[0].dtype)
        np.stack(rows, out=batch[: len(rows)])
        return batch


_ENDINGS = ("", "_segment_ids", "_positions")
