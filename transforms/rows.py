"""Rows laid out from several documents: what all packers have in common."""

import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from millstream.checks import as_integer
from millstream.columnar import Allocate
from millstream.errors import StackError
from millstream.transforms.grouping import Pieces

Array = NDArray[Any]

Document = tuple[Array, ...]
"""The features of a document, in the order of the length_struct."""

_COMPANIONS = ("_segment_ids", "_positions")
"""What the names of the arrays that say which token is of which document end in; they are those of Grain."""

_CELLS_AT_ONCE = 1 << 14
"""Segment ids and positions are made for about this many tokens at a time."""


@functools.lru_cache(maxsize=4)
def _counting(length: int) -> NDArray[np.int32]:
    """Returns 0, 1, 2, …; not to be written to."""
    counting = np.arange(length, dtype=np.int32)
    counting.flags.writeable = False
    return counting


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
        TypeError, ValueError: an argument is of the wrong kind, or names what is no feature.
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
        """Returns names of features, sorted; refuses what is no feature."""
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
            ValueError: a document has not got a feature, or one that has no axis of tokens.
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
                if not takes_numbers:
                    raise ValueError(
                        f"The feature {name!r} must be an array with an axis of tokens, got one of shape ()."
                    )
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
            ValueError: a document has not got it.
        """
        return [[self._feature(value, name) for value in values] for name in self.carried]

    def lay_out(
        self,
        documents: Sequence[Document],
        pieces: Pieces,
        allocate: Allocate,
        first_tokens: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Array]]:
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
            parts: Sequence[Array] = arrays
            if pieces.begins is not None and pieces.ends is not None:
                bounds = zip(arrays, pieces.begins.tolist(), pieces.ends.tolist(), strict=True)
                parts = [array[begin:end] for array, begin, end in bounds]
            layout = _Layout(list(map(len, parts)), pieces.starts, length, self.alignments.get(name, 1), allocate)
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
        bounds_of_rows = list(itertools.pairwise(pieces.starts.tolist()))
        lists = [
            [list(values[start:stop]) for start, stop in bounds_of_rows] for values in features[len(self.lengths) :]
        ]
        names = [*columns, *self.carried]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), *lists, strict=True)]

    def _feature(self, document: Any, name: str) -> Any:
        # Arrays first: to find out that one is no mapping takes longer than all else.
        if not isinstance(document, np.ndarray) and isinstance(document, Mapping):
            return _feature(document, name)
        if len(self.length_struct) + len(self.carried) > 1:
            raise ValueError(f"Several features need elements that are dicts, got {type(document).__name__}.")
        return document


def _feature(document: Mapping[str, Any], name: str) -> Any:
    if name not in document:
        raise ValueError(f"The feature {name!r} is missing: there are {', '.join(map(repr, document)) or 'none'}.")
    return document[name]


@final
class _Layout:
    """Where the pieces of one feature lie in some rows, and the padding after each of them.

    Args:
        sizes: how long each piece is.
        starts: where the pieces of each row begin, and one more.
        length: how long a row is.
        alignment: the pieces of a row begin at multiples of this.
        allocate: gives the memory of the tokens.
    """

    def __init__(
        self, sizes: list[int], starts: NDArray[np.int64], length: int, alignment: int, allocate: Allocate
    ) -> None:
        self._starts = starts
        self._length = length
        self._allocate = allocate
        self._sizes = np.array(sizes, dtype=np.int64)
        row_of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        self._gaps = -self._sizes % alignment
        ends = np.zeros(len(sizes) + 1, dtype=np.int64)
        np.cumsum(self._sizes + self._gaps, out=ends[1:])
        # Of each piece, its number in its row, and where it begins there.
        self._numbers = np.arange(1, len(sizes) + 1) - starts[row_of]
        self._begins = ends[:-1] - ends[starts[row_of]]
        # The last one of a row has all the rest after it.
        lasts = starts[1:] - 1
        self._gaps[lasts] = length - self._begins[lasts] - self._sizes[lasts]
        self._begins_in_all = row_of * length + self._begins

    @property
    def firsts(self) -> NDArray[np.int64]:
        """Where the pieces begin that are not empty, in all rows laid end to end."""
        firsts: NDArray[np.int64] = self._begins_in_all[self._sizes > 0]
        return firsts

    def tokens(self, parts: Sequence[Array], padding: Any) -> Array:
        """Returns the pieces laid out, of shape (rows, length, …), filled up with padding."""
        first = parts[0]
        gap = np.full((int(self._gaps.max(initial=0)), *first.shape[1:]), padding, dtype=first.dtype)
        whole = (len(self._starts) - 1, self._length, *first.shape[1:])
        rows = np.empty(whole, first.dtype) if first.dtype.hasobject else self._allocate(whole, first.dtype)
        laid: list[Array] = []
        done = 0
        for piece, missing in self._gaps_after():
            laid += parts[done : piece + 1]
            laid.append(gap[:missing])
            done = piece + 1
        laid += parts[done:]
        np.concatenate(laid, axis=0, out=rows.reshape(-1, *first.shape[1:]), casting="no")
        return rows

    def segment_ids(self) -> NDArray[np.int32]:
        """Returns the number of the piece in its row, from 1, for each token; 0 for padding. Shape (rows, length)."""
        numbers = self._companion()
        for rows, spread in self._spread(self._numbers):
            numbers[rows] = spread
        return numbers

    def positions(self) -> NDArray[np.int32]:
        """Returns for each token how many of its piece come before it; 0 for padding. Shape (rows, length)."""
        positions, counting = self._companion(), _counting(self._length)
        for rows, spread in self._spread(self._begins):
            np.subtract(counting, spread, out=positions[rows])
        flat, ends = positions.reshape(-1), self._begins_in_all + self._sizes
        for piece, missing in self._gaps_after():
            flat[ends[piece] : ends[piece] + missing] = 0
        return positions

    def _companion(self) -> NDArray[np.int32]:
        """Returns memory for a number of each token, of shape (rows, length)."""
        return self._allocate((len(self._starts) - 1, self._length), np.dtype(np.int32))

    def _gaps_after(self) -> Iterator[tuple[int, int]]:
        """Yields the pieces after which there is padding, and how much."""
        pieces = np.flatnonzero(self._gaps)
        return zip(pieces.tolist(), self._gaps[pieces].tolist(), strict=True)

    def _spread(self, of_pieces: NDArray[np.int64]) -> Iterator[tuple[slice, NDArray[np.int32]]]:
        """Yields a number of each piece for each of its tokens, and 0 for padding, some rows at a time."""
        numbers = np.stack([of_pieces, np.zeros_like(of_pieces)], axis=1).astype(np.int32)
        runs = np.stack([self._sizes, self._gaps], axis=1)
        # A few rows at a time: what is made for them stays in the cache, and needs no new pages.
        step = max(1, _CELLS_AT_ONCE // self._length)
        for first in range(0, len(self._starts) - 1, step):
            starts = self._starts[first : first + step + 1]
            own = slice(int(starts[0]), int(starts[-1]))
            spread = np.repeat(numbers[own].reshape(-1), runs[own].reshape(-1)).reshape(-1, self._length)
            yield slice(first, first + len(spread)), spread


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
