"""Documents laid end to end and cut into rows."""

import enum
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.checks import as_flag, as_integer, named_arguments
from millstream.columnar import Allocate
from millstream.transforms.grouping import GroupingOperation, Identity, Pieces, Prepared, lengths_of
from millstream.transforms.rows import TOKENS_TOGETHER, RowFormat
from millstream.transforms.split_group import ContinuedGroup
from millstream.transforms.whole_row_group import PassingGroup, passing_pieces
from millstream.warn import warn


class BOSHandling(enum.Enum):
    """What `ConcatThenSplit` does about the tokens that begin a sequence; named as in Grain.

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
    """Documents are laid out as they are."""
    REPLACE_FIRST_TOKEN_WITH_BOS = enum.auto()
    """The first token of each document in a row, and of what is left of one from the row before, is replaced."""


@final
class ConcatThenSplit(GroupingOperation):
    """Lays documents end to end, as they come, and cuts that into rows: none has padding but the last one.

    A document that is cut at the end of a row continues in the next row, as a segment of its own, whose positions begin
    at 0. So documents may have any length. The same rows come for any number of workers, and a state says how much of
    which document is used up: it is as small as any other.

    A document is a dict with the features named here (others are left out), or, where there is one only, that feature's
    array itself; documents without any token are left out. A row is a dict, as `Pack` makes it, with segment ids and
    positions.

    Args:
        length_struct: how many tokens a row takes, for each feature. Features are cut at the same token: so all lengths
            are the same, and in each document all features have equally many tokens.
        meta_features: features that need no segment ids and positions of their own.
        split_full_length_features: whether a document that is as long as a row is cut where a row ends, as any other;
            False makes it a row, which comes after the one that is being filled, or at once where none is.
        padding_struct: what fills up each feature in the last row; 0 for those that are not named.
        bos_handling: whether first tokens are replaced.
        bos_features: the features in which they are.
        bos_token_id: what they are replaced by; None where none are.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, or two do not fit together. While reading, a ValueError
            where a document lacks a feature, has features of several lengths, or has another dtype or shape than the
            others of its row.

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
        split_full_length_features: bool = True,
        padding_struct: Mapping[str, Any] | None = None,
        bos_handling: BOSHandling = BOSHandling.DO_NOTHING,
        bos_features: Collection[str] = (),
        bos_token_id: SupportsIndex | None = None,
    ) -> None:
        self.rows = RowFormat.of_rows(length_struct, meta_features, padding_struct)
        if len(set(self.rows.lengths)) > 1:
            raise ValueError(
                f"length_struct must give all features the same length, since they are cut at the same token, "
                f"got {self.rows.length_struct}."
            )
        if not isinstance(bos_handling, BOSHandling):
            raise TypeError(f"bos_handling must be one of {', '.join(map(str, BOSHandling))}, got {bos_handling!r}.")
        if not as_flag(split_full_length_features, "split_full_length_features"):
            self.splits_full_length = False
        self.bos_handling = bos_handling
        self.bos_features = self.rows.named("bos_features", bos_features)
        self.bos_token_id = None if bos_token_id is None else as_integer(bos_token_id, "bos_token_id")
        self._check_bos()

    splits_full_length = True

    @property
    def length_struct(self) -> dict[str, int]:
        """How long a row is, for each feature."""
        return self.rows.length_struct

    @property
    def unit(self) -> int:
        """A row uses up as many tokens as it is long."""
        return self.rows.lengths[0]

    def __repr__(self) -> str:
        option = "" if self.splits_full_length else ", split_full_length_features=False"
        return f"ConcatThenSplit({self.rows}{option})"

    @property
    def may_drop(self) -> bool:
        """True: documents without tokens are dropped."""
        return True

    def prepare(self, values: Sequence[Any]) -> Prepared:
        """Returns the features of the documents that have any token, and how many these are.

        Raises:
            ValueError: a document lacks a feature, or its features differ in length.
        """
        columns = self.rows.columns(values, takes_numbers=True)
        sizes = lengths_of(columns)
        if (is_other := sizes != sizes[0]).any():
            row = np.argmax(is_other.any(axis=0))
            lengths = dict(zip(self.length_struct, sizes[:, row].tolist(), strict=True))
            raise ValueError(
                f"The features of a document must be equally long, to be cut at the same token: {lengths}."
            )
        documents = list(zip(*columns, strict=True))
        if sizes.all():
            return Prepared(documents, sizes[:1])
        kept = sizes[0] > 0
        return Prepared(list(itertools.compress(documents, kept)), sizes[:1, kept], kept.astype(int).tolist())

    def begin(self, skip: int = 0) -> ContinuedGroup | PassingGroup:
        """Returns a group for some rows."""
        kind = ContinuedGroup if self.splits_full_length else PassingGroup
        return kind(self.unit, max(1, TOKENS_TOGETHER // self.unit), skip)

    def arrange(self, numbers: NDArray[np.int64], identity: Identity) -> Pieces:
        """Returns which parts of which documents are in which row."""
        del identity
        if not self.splits_full_length:
            return passing_pieces(numbers[0], numbers[-2], numbers[-1], self.unit)
        return Pieces.cut(numbers[-2], numbers[-1], self.unit)

    def make(self, values: Sequence[Any], pieces: Pieces, allocate: Allocate = np.empty) -> Sequence[Any]:
        """Returns the rows."""
        return self.rows.lay_out(values, pieces, allocate, dict.fromkeys(self.bos_features, self.bos_token_id))

    def _check_bos(self) -> None:
        if self.bos_handling is BOSHandling.DO_NOTHING:
            if self.bos_token_id is not None or self.bos_features:
                raise ValueError(
                    f"bos_token_id={self.bos_token_id} and bos_features={self.bos_features} are for a bos_handling "
                    "that replaces tokens, got DO_NOTHING: choose REPLACE_FIRST_TOKEN_WITH_BOS, or leave them out."
                )
        elif self.bos_token_id is None:
            raise ValueError(f"bos_handling={self.bos_handling.name} needs a bos_token_id, got None.")
        elif both := set(self.bos_features) & set(self.rows.meta_features):
            raise ValueError(f"{min(both)!r} is one of bos_features and of meta_features: choose one.")
        elif not self.bos_features:
            warn(
                f"bos_handling={self.bos_handling.name} replaces nothing, as in Grain, since bos_features is empty: "
                f"name the features, bos_features={list(self.length_struct)[:1]}."
            )
