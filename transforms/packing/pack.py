"""Packing of documents into the rows that a sampler has planned."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, final

import numpy as np

from millstream.core.checks import named_arguments
from millstream.core.columnar import Allocate
from millstream.core.segments import Segments
from millstream.transforms.grouping import Prepared, lengths_of
from millstream.transforms.packing.rows import RowFormat
from millstream.transforms.transformation import Transformation


@final
class Pack(Transformation):
    """Builds one row of the documents that a `PackingSampler` assigned to it.

    The operations before get single documents. Those after get rows, and a Batch batches rows. A document is a dict
    with the features named here (others are dropped) or, if there is only one, that feature's array itself. Features
    are arrays with one entry per token along their first axis, all of the same length.

    A row is a dict. For a feature "tokens", for instance, it contains

        tokens                the concatenated documents, then padding; of their dtype
        tokens_segment_ids    int32: 1 for the tokens of the first document, 2 for the second, …; 0 for padding
        tokens_positions      int32: 0, 1, 2, … from the first token of each document in the row; 0 for padding

    all of shape (length, …). The names are those of Grain.

    If lengths are not known in advance, `FirstFitPack`, `BestFitPack` and `ConcatThenSplit` pack documents as they
    arrive.

    Args:
        length_struct: the number of tokens per row, for each feature: at least the sampler's row_length.
        meta_features: features without segment ids and positions of their own.
        padding_struct: the padding value, per feature; 0 for the other features.

    Raises:
        TypeError, ValueError: an argument has the wrong type, or names an unknown feature. While reading, a ValueError
            if the length of a document differs from the sampler's, or if it lacks a feature or differs in dtype or
            shape from the others of its row.

    Examples:
        >>> documents = [{"tokens": np.full(length, length)} for length in (3, 5, 2)]
        >>> sampler = millstream.PackingSampler([3, 5, 2], row_length=9)
        >>> operations = [millstream.Pack({"tokens": 9})]
        >>> loader = millstream.DataLoader(data_source=documents, sampler=sampler, operations=operations)
        >>> row = next(iter(loader))
        >>> row["tokens"], row["tokens_positions"]
        (array([5, 5, 5, 5, 5, 3, 3, 3, 0]), array([0, 1, 2, 3, 4, 0, 1, 2, 0], dtype=int32))
    """

    is_complete: ClassVar[bool] = True
    gathers: ClassVar[bool] = True

    @named_arguments()
    def __init__(
        self,
        length_struct: Mapping[str, int],
        *,
        meta_features: Collection[str] = (),
        padding_struct: Mapping[str, Any] | None = None,
    ) -> None:
        self.rows = RowFormat(length_struct, meta_features, padding_struct)

    @property
    def length_struct(self) -> dict[str, int]:
        """The length of a row, per feature."""
        return self.rows.length_struct

    def __repr__(self) -> str:
        return f"Pack({self.rows})"

    def prepare(self, values: Sequence[Any]) -> Prepared:
        """Returns the features of documents, and their lengths."""
        columns = self.rows.columns(values)
        return Prepared(list(zip(*columns, strict=True)), lengths_of(columns))

    def make(self, values: Sequence[Any], segments: Segments, allocate: Allocate = np.empty) -> Sequence[Any]:
        """Builds rows of prepared documents."""
        return self.rows.lay_out(values, segments, allocate)
