"""Rows of the documents that a sampler has planned."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, final

import numpy as np

from millstream.checks import named_arguments
from millstream.columnar import Allocate
from millstream.transforms.grouping import Pieces, Prepared, lengths_of
from millstream.transforms.rows import RowFormat
from millstream.transforms.transformation import Transformation


@final
class Pack(Transformation):
    """Makes one row of the documents that a `PackingSampler` puts into it.

    The operations before see documents, one by one; those after see rows, and a Batch batches rows. A document is a
    dict with the features named here (others are left out), or, where there is one only, that feature's array itself.
    Features are arrays with one entry for each token: equally long, in their first axis.

    A row is a dict. For each feature, say "tokens", it has

        tokens                the documents one after the other, then padding; of their dtype
        tokens_segment_ids    int32: 1 for the tokens of the first document, 2 for the second, …; 0 is padding
        tokens_positions      int32: 0, 1, 2, … from each document's first token in the row on; 0 in the padding

    all of shape (length, …). The names are those of Grain.

    Where lengths are not known ahead, `FirstFitPack`, `BestFitPack` and `ConcatThenSplit` pack documents as they come.

    Args:
        length_struct: how many tokens a row takes, for each feature: at least the sampler's row_length.
        meta_features: features that need no segment ids and positions of their own.
        padding_struct: what fills up each feature; 0 for those that are not named.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, or names what is not a feature. While reading, a
            ValueError where a document is not as long as the sampler's lengths say, lacks a feature, or has another
            dtype or shape than the others of its row.

    Examples:
        >>> documents = [{"tokens": np.full(length, length)} for length in (3, 5, 2)]
        >>> sampler = millstream.PackingSampler([3, 5, 2], row_length=9, shuffle=False)
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
        self.rows = RowFormat.of_rows(length_struct, meta_features, padding_struct)

    @property
    def length_struct(self) -> dict[str, int]:
        """How long a row is, for each feature."""
        return self.rows.length_struct

    def __repr__(self) -> str:
        return f"Pack({self.rows})"

    def prepare(self, values: Sequence[Any]) -> Prepared:
        """Returns the features of some documents, and how many tokens each feature has."""
        columns = self.rows.columns(values)
        return Prepared(list(zip(*columns, strict=True)), lengths_of(columns))

    def make(self, values: Sequence[Any], pieces: Pieces, allocate: Allocate = np.empty) -> Sequence[Any]:
        """Returns rows of prepared documents.

        Raises:
            StackError: the documents of a row differ in dtype or shape.
        """
        return self.rows.lay_out(values, pieces, allocate)
