"""Concatenation of documents, cut into rows."""

import enum
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer, named_arguments
from millstream.core.columnar import Allocate
from millstream.core.segments import Segments
from millstream.core.warn import warn
from millstream.transforms.grouping import GroupId, GroupingOperation, Prepared, SplitGroup, lengths_of
from millstream.transforms.packing.rows import TOKENS_TOGETHER, RowFormat


class BOSHandling(enum.Enum):
    """The treatment of the first token of each document by `ConcatThenSplit`, named as in Grain.

    Examples:
        >>> cut = millstream.ConcatThenSplit(
        ...     {"tokens": 4},
        ...     bos_handling=millstream.BOSHandling.REPLACE_FIRST_TOKEN_WITH_BOS,
        ...     bos_features=["tokens"],
        ...     bos_token_id=1,
        ... )
        >>> documents = [{"tokens": np.arange(10, 16)}]
        >>> [row["tokens"].tolist() for row in millstream.load(documents, num_epochs=1, transformations=[cut])]
        [[1, 11, 12, 13], [1, 15, 0, 0]]
    """

    DO_NOTHING = enum.auto()
    """Documents stay unchanged."""
    REPLACE_FIRST_TOKEN_WITH_BOS = enum.auto()
    """The first token of each document, and of the remainder of one from the row before, is replaced."""


@final
class ConcatThenSplit(GroupingOperation):
    """Concatenates documents as they arrive, and cuts the result into rows. Only the last row has padding.

    A document that is cut at the end of a row continues in the next row, as a segment of its own, whose positions begin
    at 0. Documents may therefore have any length. The rows are the same for any number of workers, and states stay
    small: they contain the consumed amount of one document.

    A document is a dict with the features named here (others are dropped) or, if there is only one, that feature's
    array itself. Documents without tokens are dropped. A row is a dict as `Pack` returns it, with segment ids and
    positions.

    Args:
        length_struct: the number of tokens per row, for each feature. Features are cut at the same token, so these
            lengths must be equal, and so must the lengths of the features of each document, except meta features.
        meta_features: features without segment ids and positions of their own. In a document, a meta feature has one
            value per token and is cut with the tokens, or a single value, which each segment of the document gets. Its
            length in length_struct may differ, and must suffice for all values of a row.
        padding_struct: the padding value of the last row, per feature; 0 for the other features.
        bos_handling: selects whether first tokens are replaced.
        bos_features: the features whose first tokens are replaced.
        bos_token_id: the replacement; None if nothing is replaced.

    Raises:
        TypeError, ValueError: an argument has the wrong type, or two arguments conflict. While reading, a ValueError if
            a document lacks a feature, has features of different lengths, or differs in dtype or shape from the others
            of its row, or if the values of a meta feature do not fit into a row.

    Examples:
        >>> documents = [{"tokens": np.full(length, length)} for length in (3, 5, 2)]
        >>> operations = [millstream.ConcatThenSplit({"tokens": 4})]
        >>> for row in millstream.load(documents, num_epochs=1, transformations=operations):
        ...     print(row["tokens"], row["tokens_segment_ids"])
        [3 3 3 5] [1 1 1 2]
        [5 5 5 5] [1 1 1 1]
        [2 2 0 0] [1 1 0 0]
    """

    @named_arguments()
    def __init__(
        self,
        length_struct: Mapping[str, int],
        *,
        meta_features: Collection[str] = (),
        padding_struct: Mapping[str, Any] | None = None,
        bos_handling: BOSHandling = BOSHandling.DO_NOTHING,
        bos_features: Collection[str] = (),
        bos_token_id: SupportsIndex | None = None,
    ) -> None:
        self.rows = RowFormat(length_struct, meta_features, padding_struct)
        if len({self.length_struct[name] for name in self._cut_features}) > 1:
            raise ValueError(
                "length_struct must give all features but meta_features the same length, because they are cut at the "
                f"same token, got {self.length_struct}."
            )
        if not isinstance(bos_handling, BOSHandling):
            raise TypeError(f"bos_handling must be one of {', '.join(map(str, BOSHandling))}, got {bos_handling!r}.")
        self.bos_handling = bos_handling
        self.bos_features = self.rows.named("bos_features", bos_features)
        self.bos_token_id = None if bos_token_id is None else as_integer(bos_token_id, "bos_token_id")
        self._check_bos()

    @property
    def length_struct(self) -> dict[str, int]:
        """The length of a row, per feature."""
        return self.rows.length_struct

    @property
    def _cut_features(self) -> list[str]:
        names = list(self.length_struct)
        return [name for name in names if name not in self.rows.meta_features] or names

    @property
    def output_size(self) -> int:
        """The number of tokens that a row consumes: its length."""
        return self.length_struct[self._cut_features[0]]

    def __repr__(self) -> str:
        return f"ConcatThenSplit({self.rows})"

    @property
    def may_drop(self) -> bool:
        """True, because documents without tokens are dropped."""
        return True

    def prepare(self, values: Sequence[Any]) -> Prepared:
        """Returns the features of the documents with at least one token, and their lengths."""
        columns = self.rows.columns(values, takes_numbers=True)
        sizes = lengths_of(columns)
        names = list(self.length_struct)
        tokens = sizes[[names.index(self._cut_features[0])]]
        if (is_other := sizes != tokens).any():
            is_other &= np.array([[name in self._cut_features] for name in names]) | (sizes != 1)
            if is_other.any():
                row = np.argmax(is_other.any(axis=0))
                lengths = dict(zip(names, sizes[:, row].tolist(), strict=True))
                raise ValueError(
                    f"The features of a document must have the same length, because they are cut at the same "
                    f"token, got {lengths}. A meta feature may have a single value instead."
                )
        documents = list(zip(*columns, strict=True))
        if tokens.all():
            return Prepared(documents, tokens)
        kept = tokens[0] > 0
        return Prepared(list(itertools.compress(documents, kept)), tokens[:, kept], kept.astype(int).tolist())

    def begin(self, skip: int = 0) -> SplitGroup:
        return SplitGroup(self.output_size, max(1, TOKENS_TOGETHER // self.output_size), skip)

    def arrange(self, measures: NDArray[np.int64], group: GroupId) -> Segments:
        del group
        return Segments.chunked(measures[-2], measures[-1], self.output_size)

    def make(self, values: Sequence[Any], segments: Segments, allocate: Allocate = np.empty) -> Sequence[Any]:
        return self.rows.lay_out(values, segments, allocate, dict.fromkeys(self.bos_features, self.bos_token_id))

    def _check_bos(self) -> None:
        if self.bos_handling is BOSHandling.DO_NOTHING:
            if self.bos_token_id is not None or self.bos_features:
                raise ValueError(
                    f"bos_token_id={self.bos_token_id} and bos_features={self.bos_features} need a bos_handling that "
                    "replaces tokens, got DO_NOTHING. Use REPLACE_FIRST_TOKEN_WITH_BOS, or omit them."
                )
        elif self.bos_token_id is None:
            raise ValueError(f"bos_handling={self.bos_handling.name} needs a bos_token_id, got None.")
        elif both := set(self.bos_features) & set(self.rows.meta_features):
            raise ValueError(f"{min(both)!r} must not be in both bos_features and meta_features.")
        elif not self.bos_features:
            warn(
                f"bos_handling={self.bos_handling.name} replaces nothing, as in Grain, because bos_features is empty. "
                f"Name the features: bos_features={list(self.length_struct)[:1]}."
            )
