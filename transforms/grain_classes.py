"""Classes that only Grain's users know: packing and batching in one operation, and maps for `select_from_datasets`."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import named_arguments
from millstream.core.columnar import Allocate
from millstream.core.segments import Segments
from millstream.transforms.grouping import GroupId, GroupingOperation, Prepared, lengths_of
from millstream.transforms.packing.bins import Bins, FirstFitPack


@final
class PackAndBatchOperation(GroupingOperation):
    """Packs each document into the first row with room for it, and returns batches of rows.

    A batch is a tuple of three dicts, with the features as keys and arrays of shape (rows, length) as values: the
    tokens, the segment ids (from 1, 0 for padding), and the positions within segments. It has `batch_size` rows; rows
    without a document are all zeros. New code should use `FirstFitPack` and `Batch`, which return dicts.

    Args:
        length_struct: the number of tokens per row, for each feature; other features are dropped.
        batch_size: the number of rows per batch, at least 1.
        max_sequences_per_bin: the maximum number of documents per row; None for no limit.

    Raises:
        TypeError, ValueError: as `FirstFitPack`. While reading also if a document is longer than a row.

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
        return self.packing.prepare(values)

    def begin(self, skip: int = 0) -> Bins:
        return self.packing.begin(skip)

    def arrange(self, measures: NDArray[np.int64], group: GroupId) -> Segments:
        del group
        return Segments(np.array([0, measures.shape[1]]), np.arange(measures.shape[1]))

    def make(self, values: Sequence[Any], segments: Segments, allocate: Allocate = np.empty) -> Sequence[Any]:
        """Returns the batch: the documents go into the same rows as when their sizes were taken."""
        documents = [values[element] for element in segments.elements.tolist()]
        rows = self.packing.begin()
        rows.take(lengths_of(zip(*documents, strict=True)))
        packed = list(self.packing.make(documents, Segments.by_output(rows.decisions()[0]), allocate))

        def of_rows(ending: str) -> dict[str, NDArray[Any]]:
            return {name: self._stacked([row[name + ending] for row in packed]) for name in self.packing.length_struct}

        return [tuple(map(of_rows, _ENDINGS))]

    def _stacked(self, rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
        batch = np.zeros((self.packing.num_packing_bins, *rows[0].shape), rows[0].dtype)
        np.stack(rows, out=batch[: len(rows)])
        return batch


_ENDINGS = ("", "_segment_ids", "_positions")


class DatasetSelectionMap(abc.ABC):
    """The argument of `MapDataset.select_from_datasets`. Subclass it, or use any sequence of pairs instead.

    Examples:
        >>> class InTurn(millstream.transforms.DatasetSelectionMap):
        ...     def __len__(self):
        ...         return 4
        ...
        ...     def __getitem__(self, index):
        ...         return index % 2, index // 2
        >>> datasets = [millstream.MapDataset.source(["a", "b"]), millstream.MapDataset.source(["X", "Y"])]
        >>> list(millstream.MapDataset.select_from_datasets(datasets, InTurn()))
        ['a', 'X', 'b', 'Y']
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of positions per epoch."""

    @abc.abstractmethod
    def __getitem__(self, index: int) -> tuple[int, int]:
        """Returns the number of a dataset and a position in it, for any position from 0, also beyond the length."""
