"""Rows laid out from several documents: what all packers have in common."""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from millstream.checks import as_integer
from millstream.columnar import Allocate, ColumnarRecords
from millstream.errors import StackError
from millstream.transforms.grouping import Pieces
from millstream.transforms.row_arrays import Layout

Array = NDArray[Any]

Document = tuple[Array, ...]
"""The features of a document, in the order of the length_struct."""

TOKENS_TOGETHER = 1 << 17
"""Rows are laid out together, as many as have about this many tokens: each then costs little more than its copy."""

_MOST_SHARERS = 16
"""Batches of rows that were laid out together share memory, about this many at most: one that is kept keeps all."""

_COMPANIONS = ("_segment_ids", "_positions")
"""What the names of the arrays that say which token is of which document end in; they are those of Grain."""


@final
class RowFormat:
    """What a row looks like: for each feature its length, and whether segments and positions are told.

    Attributes:
        length_struct: how long a row is, for each feature.
        meta_features: the features without segment ids and positions.
        padding_struct: what fills up each feature; 0 for those that are not named.
        alignments: multiples of how many tokens documents begin at, for the features where that is not 1.
        carried: the names of values, one of each document, that a row has a list of.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, or names what is not a feature.
    """

    def __init__(
        self,
        length_struct: Mapping[str, int],
        meta_features: Collection[str],
        padding_struct: Mapping[str, Any] | None,
        alignments: Mapping[str, int] | None = None,
        carried: Collection[str] = (),
    ) -> None:
        if not isinstance(length_struct, Mapping):
            raise TypeError(
                f"length_struct must say how long each feature is, such as {{'tokens': 2048}}, got {length_struct!r}."
            )
        if not length_struct:
            raise ValueError("length_struct must name at least one feature, got none.")
        self.length_struct = {
            name: as_integer(length, f"length_struct[{name!r}]", minimum=1) for name, length in length_struct.items()
        }
        self.meta_features = self.named("meta_features", meta_features)
        self.padding_struct = dict(padding_struct or {})
        self.named("padding_struct", self.padding_struct)
        self.named("pack_alignment_struct", alignments or ())
        self.alignments = {name: multiple for name, multiple in (alignments or {}).items() if multiple != 1}
        self.carried = tuple(sorted(carried))
        for name, multiple in self.alignments.items():
            if self.length_struct[name] % as_integer(multiple, f"pack_alignment_struct[{name!r}]", minimum=1):
                raise ValueError(
                    f"length_struct[{name!r}] must be a multiple of pack_alignment_struct[{name!r}], got "
                    f"{self.length_struct[name]} and {multiple}: documents begin at multiples of it."
                )

    @classmethod
    def of_rows(
        cls,
        length_struct: Mapping[str, int],
        meta_features: Collection[str],
        padding_struct: Mapping[str, Any] | None,
        alignments: Mapping[str, int] | None = None,
        carried: Collection[str] = (),
    ) -> Self:
        """Returns the format of rows that are laid out; refuses a feature whose name is that of another's segments."""
        made = cls(length_struct, meta_features, padding_struct, alignments, carried)
        names = {*made.length_struct, *carried}
        for name in made.length_struct:
            if taken := [name + ending for ending in _COMPANIONS if name + ending in names]:
                raise ValueError(
                    f"A feature is called {taken[0]!r}, but packing gives rows one of that name, about {name!r}: "
                    "leave it out."
                )
        return made

    def __repr__(self) -> str:
        options = {
            "meta_features": (*self.meta_features, *self.carried),
            "padding_struct": self.padding_struct,
            "pack_alignment_struct": self.alignments,
        }
        return f"{self.length_struct!r}{''.join(f', {name}={value!r}' for name, value in options.items() if value)}"

    @property
    def lengths(self) -> list[int]:
        """How long a row is, in the order of the features."""
        return list(self.length_struct.values())

    def named(self, what: str, names: Collection[str]) -> tuple[str, ...]:
        """Returns names of features, sorted; refuses what is not a feature."""
        if isinstance(names, str):
            raise TypeError(f"{what} must be a list of names, got {names!r}: write [{names!r}].")
        if unknown := [name for name in names if name not in self.length_struct]:
            raise ValueError(f"{what} names {unknown[0]!r}, which length_struct does not: {list(self.length_struct)}.")
        return tuple(sorted(names))

    def columns(self, values: Sequence[Any], *, takes_numbers: bool = False) -> list[list[Array]]:
        """Returns the features of some documents: a list of arrays for each feature.

        Args:
            values: the documents.
            takes_numbers: whether a number is a feature of one token.

        Raises:
            ValueError: a document lacks a feature, or has one without an axis of tokens.
        """
        kinds = set(map(type, values))
        if kinds == {np.ndarray} and len(self.length_struct) == 1:
            found = [values]
        elif kinds == {dict}:
            try:
                found = [list(map(itemgetter(name), values)) for name in self.length_struct]
            except KeyError:
                found = [[_feature(value, name) for value in values] for name in self.length_struct]
        else:
            found = [[self._feature(value, name) for value in values] for name in self.length_struct]
        columns = [list(map(np.asarray, column)) for column in found]
        for number, (name, column) in enumerate(zip(self.length_struct, columns, strict=True)):
            if 0 in {array.ndim for array in column}:
                self._check_single(name, column, takes_numbers=takes_numbers)
                columns[number] = list(map(np.atleast_1d, column))
        return columns

    def spaces(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns how much of a row documents take, given how long each feature is; shape (features, documents)."""
        if not self.alignments:
            return sizes
        multiples = np.array([self.alignments.get(name, 1) for name in self.length_struct])[:, np.newaxis]
        spaces: NDArray[np.int64] = -(-sizes // multiples) * multiples
        return spaces

    def carried_values(self, values: Sequence[Any]) -> list[list[Any]]:
        """Returns what rows have lists of, of some documents: a list for each name.

        Raises:
            ValueError: a document lacks it.
        """
        return [[self._feature(value, name) for value in values] for name in self.carried]

    def lay_out(
        self,
        documents: Sequence[Document],
        pieces: Pieces,
        allocate: Allocate,
        first_tokens: Mapping[str, Any] | None = None,
    ) -> "Rows":
        """Returns rows made of documents, or of pieces of them.

        Args:
            documents: the features of each, and after them what rows have lists of.
            pieces: which of them, and what of each, is in which row; no more than a row takes.
            allocate: gives the memory of the rows.
            first_tokens: what the first token of each piece is replaced by, for some features.

        Raises:
            StackError: the documents of a row differ in dtype or shape.
        """
        chosen = [documents[number] for number in pieces.elements.tolist()]
        columns: dict[str, Array] = {}
        features = list(zip(*chosen, strict=True))
        for (name, length), arrays in zip(self.length_struct.items(), features, strict=False):
            parts, sizes = list(arrays), np.array(list(map(len, arrays)))
            if pieces.begins is not None and pieces.ends is not None:
                lengths, sizes = sizes, pieces.ends - pieces.begins
                for piece in np.flatnonzero(sizes != lengths).tolist():
                    parts[piece] = parts[piece][pieces.begins[piece] : pieces.ends[piece]]
            layout = Layout(sizes, pieces.starts, length, self.alignments.get(name, 1), allocate)
            try:
                tokens = layout.tokens(parts, self.padding_struct.get(name, 0))
            except (TypeError, ValueError):
                # NumPy finds every difference itself, but does not say where it is.
                _refuse_unlike(name, parts, pieces)
                raise
            columns[name] = tokens
            if first_tokens is not None and name in first_tokens:
                tokens.reshape(-1, *tokens.shape[2:])[layout.firsts] = first_tokens[name]
            if name not in self.meta_features:
                companions = (layout.segment_ids(), layout.positions())
                columns |= {name + ending: made for ending, made in zip(_COMPANIONS, companions, strict=True)}
        lists: dict[str, list[list[Any]]] = {}
        for name, values in zip(self.carried, features[len(self.lengths) :], strict=False):
            bounds_of_rows = itertools.pairwise(pieces.starts.tolist())
            lists[name] = [list(values[start:stop]) for start, stop in bounds_of_rows]
        return Rows(columns, lists)

    def _check_single(self, name: str, column: Sequence[Array], *, takes_numbers: bool) -> None:
        """Refuses what has no axis of tokens, and is no number that counts as one."""
        for array in column:
            is_text = array.dtype.kind in "SU" and name not in self.meta_features
            if array.ndim == 0 and (is_text or not takes_numbers):
                raise ValueError(
                    f"The feature {name!r} must be an array with an axis of tokens, got "
                    + (
                        f"{array.item()!r:.40}: make tokens of it in an operation before."
                        if is_text
                        else "one of shape ()."
                    )
                )

    def _feature(self, document: Any, name: str) -> Any:
        # Arrays first: to find out that one is no mapping takes longer than all else.
        if not isinstance(document, np.ndarray) and isinstance(document, Mapping):
            return _feature(document, name)
        if len(self.length_struct) + len(self.carried) > 1:
            raise ValueError(f"Several features need elements that are dicts, got {type(document).__name__}.")
        return document


@final
class Rows(ColumnarRecords):
    """Rows that are laid out: dicts, whose arrays are rows of columns.

    The columns are the batch of all rows, and parts of the columns the batch of some rows that follow one another. Both
    have the same memory: who takes the batch leaves the rows alone.

    Args:
        columns: arrays, a row of each for each row.
        lists: other values, likewise.
        laid_out: how many rows were laid out in that memory, if there are more than these.
    """

    def __init__(
        self, columns: dict[str, Array], lists: Mapping[str, Sequence[Any]], laid_out: int | None = None
    ) -> None:
        self._columns = columns
        self._lists = lists
        self._num_rows = len(next(iter(columns.values()), ()))
        self._laid_out = self._num_rows if laid_out is None else laid_out

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: Any) -> Any:
        columns = {name: column[index] for name, column in self._columns.items()}
        lists = {name: values[index] for name, values in self._lists.items()}
        return Rows(columns, lists, self._laid_out) if isinstance(index, slice) else columns | lists

    def __iter__(self) -> Iterator[dict[str, Any]]:
        names = [*self._columns, *self._lists]
        values = zip(*self._columns.values(), *self._lists.values(), strict=True)
        return (dict(zip(names, row, strict=True)) for row in values)

    def stack(self, allocate: Allocate) -> dict[str, Array] | None:
        """Returns the columns, as they are if they are not a small part; None where rows have lists, too."""
        if self._lists:
            return None
        if self._num_rows * _MOST_SHARERS >= self._laid_out:
            return self._columns
        copies = {}
        for name, column in self._columns.items():
            copies[name] = np.empty_like(column) if column.dtype.hasobject else allocate(column.shape, column.dtype)
            copies[name][...] = column
        return copies


def _feature(document: Mapping[str, Any], name: str) -> Any:
    if name not in document:
        raise ValueError(f"The feature {name!r} is missing: there are {', '.join(map(repr, document)) or 'none'}.")
    return document[name]


def _refuse_unlike(name: str, parts: Sequence[Array], pieces: Pieces) -> None:
    """Raises for the first document that differs from the first one of all."""
    first = parts[0]
    for row, part in enumerate(parts):
        if part.dtype != first.dtype or part.shape[1:] != first.shape[1:]:
            raise StackError(
                f"The documents of a row must be alike, but {name!r} of one has dtype {first.dtype} and shape "
                f"{first.shape}, of another one {part.dtype} and {part.shape}.",
                f"[{name!r}]",
                (int(pieces.elements[0]), int(pieces.elements[row])),
            )
