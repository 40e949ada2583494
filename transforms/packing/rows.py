"""Rows built from several documents: their arrays, the common code of all packers, and rows that a sampler plans."""

import contextlib
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer, named_arguments
from millstream.core.columnar import Allocate, ColumnarRecords, find_loss
from millstream.core.segments import Segments
from millstream.errors import StackError
from millstream.transforms.base import Transformation
from millstream.transforms.grouping import Prepared, lengths_of

Array = NDArray[Any]

_CELLS_PER_STEP = 1 << 17
"""Approximate number of tokens whose segment ids and positions are computed in one step."""


@functools.lru_cache(maxsize=4)
def _counting(length: int) -> NDArray[np.int32]:
    counting = np.arange(length, dtype=np.int32)
    counting.flags.writeable = False
    return counting


@final
class SegmentLayout:
    """The positions of one feature's segments in rows, and the padding after each segment.

    Args:
        sizes: the length of each segment, shape (segments,).
        starts: the offsets of each row's segments, shape (rows + 1,).
        length: the length of a row.
        alignment: the multiple at which the segments of a row begin.
        allocate: allocates the memory of the tokens.
    """

    def __init__(
        self, sizes: NDArray[np.int64], starts: NDArray[np.int64], length: int, alignment: int, allocate: Allocate
    ) -> None:
        self._starts = starts
        self._length = length
        self._allocate = allocate
        # The number of tokens of each segment, and of the padding after it.
        self._runs = np.empty((len(sizes), 2), dtype=np.int64)
        self._runs[:, 0] = sizes
        self._sizes, self._gaps = self._runs.T
        self._gaps[:] = -self._sizes % alignment
        row_of = np.repeat(np.arange(len(starts) - 1), starts[1:] - starts[:-1])
        ends = np.zeros(len(sizes) + 1, dtype=np.int64)
        np.cumsum(self._sizes + self._gaps, out=ends[1:])
        # The number of each segment in its row, and its start there.
        self._numbers = np.arange(1, len(sizes) + 1) - starts[row_of]
        self._begins = ends[:-1] - ends[starts[row_of]]
        # The last segment of a row is followed by all of the remaining space.
        lasts = starts[1:] - 1
        self._gaps[lasts] = length - self._begins[lasts] - self._sizes[lasts]
        self._begins_in_all = row_of * length + self._begins
        # The segments that padding follows, and its length.
        padded = self._gaps.nonzero()[0]
        self._padded = list(zip(padded.tolist(), self._gaps[padded].tolist(), strict=True))

    @property
    def firsts(self) -> NDArray[np.int64]:
        """The starts of the non-empty segments, as offsets into the concatenated rows."""
        firsts: NDArray[np.int64] = self._begins_in_all[self._sizes > 0]
        return firsts

    def tokens(self, segments: Sequence[Array], padding: Any) -> Array:
        """Returns the rows, padded, of shape (rows, length, …)."""
        first = segments[0]
        gap = np.full((int(self._gaps.max(initial=0)), *first.shape[1:]), padding, dtype=first.dtype)
        shape = (len(self._starts) - 1, self._length, *first.shape[1:])
        rows = np.empty(shape, first.dtype) if first.dtype.hasobject else self._allocate(shape, first.dtype)
        arrays: list[Array] = []
        done = 0
        for segment, missing in self._padded:
            arrays += segments[done : segment + 1]
            arrays.append(gap[:missing])
            done = segment + 1
        arrays += segments[done:]
        np.concatenate(arrays, axis=0, out=rows.reshape(-1, *first.shape[1:]), casting="no")
        return rows

    def segment_ids(self) -> NDArray[np.int32]:
        """Returns the number of each token's segment in its row, from 1; 0 for padding. Shape (rows, length)."""
        numbers = self._companion()
        for rows, spread in self._spread(self._numbers):
            numbers[rows] = spread
        return numbers

    def positions(self) -> NDArray[np.int32]:
        """Returns the offset of each token in its segment; 0 for padding. Shape (rows, length)."""
        positions, counting = self._companion(), _counting(self._length)
        for rows, spread in self._spread(self._begins):
            np.subtract(counting, spread, out=positions[rows])
        flat, ends = positions.reshape(-1), self._begins_in_all + self._sizes
        for segment, missing in self._padded:
            flat[ends[segment] : ends[segment] + missing] = 0
        return positions

    def _companion(self) -> NDArray[np.int32]:
        return self._allocate((len(self._starts) - 1, self._length), np.dtype(np.int32))

    def _spread(self, per_segment: NDArray[np.int64]) -> Iterator[tuple[slice, NDArray[np.int32]]]:
        """Repeats the number of each segment for each of its tokens, and 0 for padding; yields consecutive rows."""
        numbers = np.zeros((len(per_segment), 2), dtype=np.int32)
        numbers[:, 0] = per_segment
        # In steps, so that temporary arrays stay small.
        step = max(1, _CELLS_PER_STEP // self._length)
        for first in range(0, len(self._starts) - 1, step):
            starts = self._starts[first : first + step + 1]
            own = slice(int(starts[0]), int(starts[-1]))
            spread = np.repeat(numbers[own].reshape(-1), self._runs[own].reshape(-1)).reshape(-1, self._length)
            yield slice(first, first + len(spread)), spread


Document = tuple[Array, ...]
"""The features of a document, in the order of the length_struct."""

TOKENS_TOGETHER = 1 << 17
"""Approximate number of tokens of the rows that are built in one call, so that a row costs little more than its
copy."""

_MAX_SHARERS = 16
"""Maximum number of batches that share the memory of one call. A batch that is kept keeps all of that memory."""

_COMPANIONS = ("_segment_ids", "_positions")
"""Suffixes of the arrays that assign tokens to documents, as in Grain."""


@final
class RowFormat:
    """The layout of rows: the length of each feature, its padding, and whether it has segment ids and positions.

    `has_companions=False` is for elements that are padded, not packed: no feature has segment ids and positions.

    Attributes:
        length_struct: the length of a row, per feature.
        meta_features: the features without segment ids and positions.
        padding_struct: the padding value, per feature; 0 for the other features.
        alignments: the multiples of tokens at which documents begin, for the features whose multiple is not 1.
        carried: the names of values, one per document, of which a row has a list.

    Raises:
        TypeError, ValueError: an argument has the wrong type, or names an unknown feature.
    """

    def __init__(
        self,
        length_struct: Mapping[str, int],
        meta_features: Collection[str],
        padding_struct: Mapping[str, Any] | None,
        alignments: Mapping[str, int] | None = None,
        carried: Collection[str] = (),
        *,
        has_companions: bool = True,
    ) -> None:
        if not isinstance(length_struct, Mapping):
            raise TypeError(
                f"length_struct must map features to row lengths, such as {{'tokens': 2048}}, got {length_struct!r}."
            )
        if not length_struct:
            raise ValueError("length_struct must name at least one feature, got none.")
        self.length_struct = {
            # Positions in a row are int32.
            name: as_integer(length, f"length_struct[{name!r}]", minimum=1, maximum=1 << 31)
            for name, length in length_struct.items()
        }
        self.meta_features = self.named("meta_features", meta_features)
        for what, struct in (("padding_struct", padding_struct), ("pack_alignment_struct", alignments)):
            if not isinstance(struct or {}, Mapping):
                raise TypeError(f"{what} must map features to values, got {struct!r}.")
            self.named(what, struct or {})
        self.padding_struct = dict(padding_struct or {})
        self.alignments = {name: multiple for name, multiple in (alignments or {}).items() if multiple != 1}
        self.carried = tuple(sorted(carried))
        for name, multiple in self.alignments.items():
            if self.length_struct[name] % as_integer(multiple, f"pack_alignment_struct[{name!r}]", minimum=1):
                raise ValueError(
                    f"length_struct[{name!r}] must be a multiple of pack_alignment_struct[{name!r}], got "
                    f"{self.length_struct[name]} and {multiple}: documents begin at multiples of it."
                )
        names = {*self.length_struct, *carried}
        for name in self.length_struct if has_companions else ():
            if taken := [name + ending for ending in _COMPANIONS if name + ending in names]:
                raise ValueError(
                    f"A feature is called {taken[0]!r}, which is the name of an array that packing adds for {name!r}. "
                    "Leave it out."
                )

    def __repr__(self) -> str:
        options = {
            "meta_features": (*self.meta_features, *self.carried),
            "padding_struct": self.padding_struct,
            "pack_alignment_struct": self.alignments,
        }
        return f"{self.length_struct!r}{''.join(f', {name}={value!r}' for name, value in options.items() if value)}"

    @property
    def lengths(self) -> list[int]:
        return list(self.length_struct.values())

    def named(self, what: str, names: Collection[str]) -> tuple[str, ...]:
        if isinstance(names, str) or not isinstance(names, Collection):
            raise TypeError(f"{what} must be a list of names, got {names!r}: write [{names!r}].")
        if unknown := [name for name in names if name not in self.length_struct]:
            raise ValueError(f"{what} names {unknown[0]!r}, but length_struct has only {list(self.length_struct)}.")
        return tuple(sorted(names))

    def padding(self, name: str, dtype: np.dtype[Any]) -> Any:
        if name not in self.padding_struct:
            return 0
        value, padding = self.padding_struct[name], None
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            padding = np.array(value, dtype)
        if padding is None or (dtype.kind in "biu" and np.any(padding != np.asarray(value))):
            raise ValueError(
                f"padding_struct[{name!r}] must be a value of {dtype}, the dtype of the feature, got {value!r}."
            )
        return padding

    def columns(self, values: Sequence[Any], *, takes_numbers: bool = False) -> list[list[Array]]:
        """Returns the features of documents: one list of arrays per feature.

        If `takes_numbers`, a number counts as a feature of one token.
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
        for name, column in zip(self.length_struct, found, strict=True):
            if found_loss := find_loss(column):
                row, loss = found_loss
                raise ValueError(f"Cannot take the {type(column[row]).__qualname__} of feature {name!r}: {loss}.")
        columns = [list(map(np.asarray, column)) for column in found]
        for number, (name, column) in enumerate(zip(self.length_struct, columns, strict=True)):
            if 0 in {array.ndim for array in column}:
                self._check_single(name, column, takes_numbers=takes_numbers)
                columns[number] = list(map(np.atleast_1d, column))
        return columns

    def spaces(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the space of documents in a row, given the lengths of features; shape (features, documents)."""
        if not self.alignments:
            return sizes
        multiples = np.array([self.alignments.get(name, 1) for name in self.length_struct])[:, np.newaxis]
        spaces: NDArray[np.int64] = -(-sizes // multiples) * multiples
        return spaces

    def carried_values(self, values: Sequence[Any]) -> list[list[Any]]:
        return [[self._feature(value, name) for value in values] for name in self.carried]

    def lay_out(
        self,
        documents: Sequence[Document],
        segments: Segments,
        allocate: Allocate,
        first_tokens: Mapping[str, Any] | None = None,
    ) -> "Rows":
        """Builds rows of documents, or of segments of them.

        Args:
            documents: the features of each document, followed by its carried values.
            segments: the composition of the rows; at most as much as fits into each.
            allocate: allocates the memory of the rows.
            first_tokens: replacements for the first token of each segment, by feature.
        """
        chosen = [documents[number] for number in segments.elements.tolist()]
        columns: dict[str, Array] = {}
        features = list(zip(*chosen, strict=True))
        for (name, length), arrays in zip(self.length_struct.items(), features, strict=False):
            slices, sizes = list(arrays), np.array(list(map(len, arrays)))
            if segments.starts is not None and segments.stops is not None:
                lengths, sizes = sizes, segments.stops - segments.starts
                if name in self.meta_features:
                    # A single value belongs to the document, and each of its segments gets it.
                    sizes[lengths == 1] = 1
                    _check_limit(name, length, sizes, segments)
                for cut in np.flatnonzero(sizes != lengths).tolist():
                    slices[cut] = slices[cut][segments.starts[cut] : segments.stops[cut]]
            layout = SegmentLayout(sizes, segments.offsets, length, self.alignments.get(name, 1), allocate)
            try:
                tokens = layout.tokens(slices, self.padding(name, slices[0].dtype))
            except (TypeError, ValueError):
                # NumPy detects every difference, but does not say which document differs.
                _refuse_unlike(name, slices, segments)
                raise
            columns[name] = tokens
            if first_tokens is not None and name in first_tokens:
                tokens.reshape(-1, *tokens.shape[2:])[layout.firsts] = first_tokens[name]
            if name not in self.meta_features:
                companions = (layout.segment_ids(), layout.positions())
                columns |= {name + ending: made for ending, made in zip(_COMPANIONS, companions, strict=True)}
        lists: dict[str, list[list[Any]]] = {}
        for name, values in zip(self.carried, features[len(self.lengths) :], strict=False):
            bounds_of_rows = itertools.pairwise(segments.offsets.tolist())
            lists[name] = [list(values[start:stop]) for start, stop in bounds_of_rows]
        return Rows(columns, lists)

    def _check_single(self, name: str, column: Sequence[Array], *, takes_numbers: bool) -> None:
        """Refuses arrays without a token axis, except numbers that count as one token."""
        for array in column:
            is_text = array.dtype.kind in "SU" and name not in self.meta_features
            if array.ndim == 0 and (is_text or not takes_numbers):
                raise ValueError(
                    f"The feature {name!r} must be an array with a token axis, got "
                    + (
                        f"{array.item()!r:.40}: convert it to tokens in an operation before."
                        if is_text
                        else "an array of shape ()."
                    )
                )

    def _feature(self, document: Any, name: str) -> Any:
        # Arrays first, because checking that one is not a mapping takes longer than everything else.
        if not isinstance(document, np.ndarray) and isinstance(document, Mapping):
            return _feature(document, name)
        if len(self.length_struct) + len(self.carried) > 1:
            raise ValueError(f"Elements must be dicts if there are several features, got {type(document).__name__}.")
        return document


@final
class Rows(ColumnarRecords):
    """Packed rows: dicts whose arrays are rows of columns.

    The columns are the batch of all rows, and slices of them are the batch of consecutive rows. Batches share the
    memory of the rows, of which `laid_out` share it, so code that takes the batch must not use the rows.
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
        """Returns the columns, copied if they are a small share of their memory; None if rows have lists."""
        if self._lists:
            return None
        if self._num_rows * _MAX_SHARERS >= self._laid_out:
            return self._columns
        copies = {}
        for name, column in self._columns.items():
            copies[name] = np.empty_like(column) if column.dtype.hasobject else allocate(column.shape, column.dtype)
            copies[name][...] = column
        return copies


def _feature(document: Mapping[str, Any], name: str) -> Any:
    if name not in document:
        raise ValueError(f"The feature {name!r} is missing: got {', '.join(map(repr, document)) or 'none'}.")
    return document[name]


def _check_limit(name: str, length: int, sizes: NDArray[np.int64], segments: Segments) -> None:
    """Raises for the first row without room for all values of a meta feature."""
    totals = np.add.reduceat(sizes, segments.offsets[:-1])
    if (totals > length).any():
        row = int(np.argmax(totals > length))
        count = int(segments.offsets[row + 1] - segments.offsets[row])
        raise ValueError(
            f"length_struct[{name!r}] must be at least {totals[row]} for a row of {count} segments, got {length}. Use "
            "the length of the tokens, which always suffices."
        )


def _refuse_unlike(name: str, slices: Sequence[Array], segments: Segments) -> None:
    first = slices[0]
    for row, other in enumerate(slices):
        if other.dtype != first.dtype or other.shape[1:] != first.shape[1:]:
            raise StackError(
                f"The documents of a row must agree in dtype and shape, but {name!r} has dtype {first.dtype} and shape "
                f"{first.shape} in one, and {other.dtype} and {other.shape} in another.",
                f"[{name!r}]",
                (int(segments.elements[0]), int(segments.elements[row])),
            )


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
