"""Rows of a fixed length made of whole documents, planned in advance: the documents of a row follow by arithmetic."""

import functools
from collections.abc import Callable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_flag, as_integer, as_integer_or_none, as_overflow, named_arguments
from millstream.core.randomness import Purpose, derive_seed, derive_seeds
from millstream.core.segments import Segments
from millstream.samplers.base import check_range, checked_positions
from millstream.samplers.hierarchical import Windows, windows_by_epoch
from millstream.samplers.order import EpochSampler, by_number, counted_crc, positions_between, spread, whole_numbers
from millstream.samplers.permutation import permute
from millstream.samplers.rows.packing_plan import BEST_FIT, CONCAT_THEN_SPLIT, PlannedRows
from millstream.sharding import ShardOptions

_ROWS_PER_CHUNK = 1 << 16
"""The number of rows whose tokens are counted together."""

_PLANS_KEPT = 4
"""The number of windows whose rows are kept planned: a batch has rows of two, and threads read ahead."""


@final
class PackingSampler(EpochSampler):
    """Rows of `row_length` tokens, each made of documents: every document once per epoch, and hardly any padding.

    A position is a row. All rows are planned when the sampler is built, from the lengths alone, in a fraction of the
    time that sorting them takes; the documents of the row at any position are then computed directly. So packed rows
    can be shuffled, sought, resumed and dealt to any number of hosts as records can. It goes with `transforms.Pack`,
    which builds the rows.

    Several of them, of one row_length, are components of a `MixtureSampler`: each row then has documents of one source,
    and the weights count rows.

    Args:
        lengths: the number of tokens of each document of the source: integers from 0 on, by record key, as
            `millstream.lengths_of` finds them. Documents without tokens are in no row.
        row_length: the number of tokens per row, 1 … 2**24. The plan has an entry for each length.
        shuffle: True for other rows in another order in each epoch: documents trade places with others of their length,
            and the rows, and the documents in each, are permuted. It needs a seed. With "concat_then_split", rows begin
            at other documents, and are permuted; documents that are neighbours in the source are so in the rows, too.
        seed: 0 … 2**64 - 1, selects the shuffles and all randomness of the pipeline; None for a pipeline without any.
        num_epochs: the number of epochs, at least 1; None for an endless order.
        overflow: the treatment of documents that are longer than a row: "error" refuses them when the sampler is built;
            "truncate" takes their beginnings; "split" cuts them into pieces of row_length and a last, shorter one;
            "drop" leaves them out.
        strategy: "best_fit" puts whole documents into rows, each into the row that it leaves the least space in.
            "concat_then_split" concatenates all documents and cuts that into rows: none has padding but the last, and
            most documents at a row's end are cut. It takes documents of any length, and no overflow.
        unit_sizes: the number of documents of each unit that the source reads as a whole, in its order, for instance
            `source.unit_sizes`; None if it reads documents alone.
        window_units: the number of units whose documents share rows, at least 1, for instance `source.window_units`;
            None to combine documents of any units. Rows come window by window: a source that keeps as many units in
            memory reads each about once per epoch and process. With n windows, window k has the units k, k + n, k + 2n,
            …, so it is drawn from all over the source. Each epoch permutes the windows, and the rows of each. A window
            needs many documents of each length for rows that differ between epochs.
        shard_options: the shard of every global batch that this process reads; None for all of it.

    Attributes:
        num_records: the number of rows per epoch.
        lengths: as given, an array of shape (documents,).
        row_length, shuffle, seed, num_epochs, overflow, strategy, window_units, shard_options: as given.
        unit_sizes: an array of shape (units,); None if None was given.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; a document is too long, or none has any
            token; a shuffle has no seed.

    Examples:
        >>> documents = [np.full(length, length) for length in (3, 5, 2, 6, 4)]
        >>> sampler = millstream.PackingSampler(millstream.lengths_of(documents), row_length=10)
        >>> operations = [millstream.Pack({"tokens": 10}), millstream.Batch(2)]
        >>> loader = millstream.DataLoader(data_source=documents, sampler=sampler, operations=operations)
        >>> next(iter(loader))["tokens"]
        array([[6, 6, 6, 6, 6, 6, 4, 4, 4, 4],
               [5, 5, 5, 5, 5, 3, 3, 3, 2, 2]])
    """

    @named_arguments()
    def __init__(
        self,
        lengths: Any,
        row_length: int,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        num_epochs: int | None = None,
        overflow: str = "error",
        strategy: str = BEST_FIT,
        unit_sizes: Any = None,
        window_units: int | None = None,
        shard_options: ShardOptions | None = None,
    ) -> None:
        self.shuffle = as_flag(shuffle, "shuffle")
        super().__init__(num_epochs, seed, shard_options, shuffle=self.shuffle)
        self.lengths = whole_numbers(lengths, "lengths")
        self.row_length = as_integer(row_length, "row_length", minimum=1, maximum=1 << 24)
        self.overflow = as_overflow(overflow)
        if strategy not in {BEST_FIT, CONCAT_THEN_SPLIT}:
            raise ValueError(f"strategy must be {BEST_FIT!r} or {CONCAT_THEN_SPLIT!r}, got {strategy!r}.")
        if strategy == CONCAT_THEN_SPLIT and overflow != "error":
            raise ValueError(f"strategy={strategy!r} cuts documents wherever a row ends, and takes no overflow.")
        self.strategy = strategy
        if not self.lengths.max():
            raise ValueError("lengths must have at least one token, got nothing but zeros.")
        self.window_units = as_integer_or_none(window_units, "window_units")
        self.unit_sizes = None if unit_sizes is None else whole_numbers(unit_sizes, "unit_sizes")
        if self.unit_sizes is None and window_units is not None:
            raise ValueError("unit_sizes must be given with window_units, got None. Pass source.unit_sizes.")
        sizes = np.array([len(self.lengths)]) if self.unit_sizes is None else self.unit_sizes
        if sizes.sum() != len(self.lengths):
            raise ValueError(
                f"unit_sizes must have the sum {len(self.lengths)}, the number of lengths, got {sizes.sum()}."
            )
        self._unit_ends = np.cumsum(sizes)
        self._num_windows = -(-len(sizes) // (self.window_units or len(sizes)))
        self._refuse_long_documents()
        # Several plans are made again when their rows are read: together, they would be larger than the lengths.
        self._whole: PlannedRows | None = None
        if self._num_windows == 1:
            self._whole = self._planned(0)
        sizes_of_windows = [self._size_of(window) for window in range(self._num_windows)]
        self._window_rows, self._window_tokens = np.array(sizes_of_windows).T
        self._row_ends = np.cumsum(self._window_rows)
        self.num_records = int(self._row_ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in {"_plan_of", "_windows_of"}}

    def __repr__(self) -> str:
        return (
            f"PackingSampler({len(self.lengths):,} documents in {self.num_records:,} rows of {self.row_length}, "
            f"shuffle={self.shuffle}, seed={self.seed}, num_epochs={self.num_epochs})"
        )

    @property
    def largest_key(self) -> int:
        """No record key is larger."""
        return len(self.lengths) - 1

    @property
    def num_source_records(self) -> int:
        """The number of documents of the source."""
        return len(self.lengths)

    def fingerprint(self) -> str:
        """Returns the class and everything that determines the rows, in words; of the lengths, a CRC."""
        names = ("row_length", "shuffle", "seed", "overflow", "strategy")
        named = " ".join(f"{name}={getattr(self, name)}" for name in names)
        if self.unit_sizes is not None and self._num_windows > 1:
            named += f" units={counted_crc(self.unit_sizes)} window_units={self.window_units}"
        return f"PackingSampler documents={counted_crc(self.lengths)} {named}"

    def segments(self, start: int, stop: int) -> Segments:
        """Returns the documents of the rows at the positions [start, stop).

        Args:
            start: the first position, from 0 on.
            stop: the position after the last one.

        Raises:
            IndexError: start is negative or above stop, or stop is beyond the end.
        """
        return self._segments(positions_between(start, stop, self.length))

    def segments_at(self, positions: NDArray[np.int64]) -> Segments:
        """Returns the documents of the rows at any positions, in their order.

        Args:
            positions: any positions, from 0 on, shape (m,), in any order; they may repeat.

        Raises:
            IndexError: a position is negative or beyond the end.
        """
        return self._segments(checked_positions(positions, self.length))

    def lengths_at(self, record_keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers of tokens of documents, shape (m,).

        Args:
            record_keys: the documents, shape (m,).
        """
        lengths: NDArray[np.int64] = self.lengths[record_keys]
        return lengths

    def tokens_between(self, start: int, stop: int) -> int:
        """Returns the number of tokens in the rows of the positions [start, stop), without padding.

        Whole epochs take no time. Each other row takes some 50 ns, and each window of units of which only a part is
        counted takes some milliseconds.

        Args:
            start: the first position, from 0 on.
            stop: the position after the last one. Beyond the last epoch, rows are those of further epochs, as for a
                component of a mixture that goes on when it has ended.

        Raises:
            IndexError: start is negative or above stop.
        """
        check_range(start, stop, None)
        first, last = -(-start // self.num_records), stop // self.num_records
        ranges = [(start, stop)]
        if first <= last:
            ranges = [(start, first * self.num_records), (last * self.num_records, stop)]
        tokens = max(0, last - first) * int(self._window_tokens.sum())
        for begin, end in ranges:
            epoch = begin // self.num_records
            for chunk in range(begin, end, _ROWS_PER_CHUNK):
                offsets = np.arange(chunk, min(chunk + _ROWS_PER_CHUNK, end)) - epoch * self.num_records
                for window, _, rows in self._rows_by_window(offsets, epoch):
                    is_whole = len(rows) == self._window_rows[window]
                    own = self._window_tokens[window] if is_whole else self._plan_of(window).tokens_of(rows).sum()
                    tokens += int(own)
        return tokens

    def _keys_of_epoch(self, offsets: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        rows = self._segments_of_epoch(offsets, epoch)
        return rows.elements[rows.offsets[:-1]]

    def _segments(self, positions: NDArray[np.int64]) -> Segments:
        found = [(rows, self._segments_of_epoch(offsets, epoch)) for epoch, rows, offsets in self._by_epoch(positions)]
        return Segments.scattered(found)

    def _segments_of_epoch(self, offsets: NDArray[np.int64], epoch: int) -> Segments:
        found = [
            (own, self._plan_of(window).segments(rows, self._key(epoch, window)))
            for window, own, rows in self._rows_by_window(offsets, epoch)
        ]
        return Segments.scattered(found)

    def _rows_by_window(
        self, offsets: NDArray[np.int64], epoch: int
    ) -> list[tuple[int, NDArray[np.intp] | slice, NDArray[np.int64]]]:
        """Returns each window that offsets into an epoch lie in, their indices, and their rows in its plan."""
        rows = self._permuted(offsets, epoch)
        windows = np.searchsorted(self._row_ends, rows, side="right")
        rows = rows - (self._row_ends - self._window_rows)[windows]
        return [(window, own, rows[own]) for window, own in by_number(windows)]

    def _elements_of(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rows = np.flatnonzero((keys >= 0) & (keys < len(self.lengths)))
        lengths = self.lengths[keys[rows]]
        rows = rows[(lengths > 0) & ((lengths <= self.row_length) | (self.overflow != "drop"))]
        return rows, keys[rows]

    def _offsets_of(self, elements: NDArray[np.int64], epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        found = []
        windows = np.searchsorted(self._unit_ends, elements, side="right") % self._num_windows
        for window, own in by_number(windows):
            owners, rows = self._plan_of(window).rows_of(elements[own], self._key(epoch, window))
            begin = self._row_ends[window] - self._window_rows[window]
            found.append((np.arange(len(elements))[own][owners], rows + begin))
        owners, rows = (np.concatenate(columns) for columns in zip(*found, strict=True))
        return owners, self._permuted(rows, epoch, inverse=True)

    def _permuted(self, rows: NDArray[np.int64], epoch: int, *, inverse: bool = False) -> NDArray[np.int64]:
        """Returns the rows at offsets into an epoch, or the offsets of rows."""
        if not self.shuffle or self.seed is None:
            return rows
        if self._num_windows == 1:
            return permute(rows, self.num_records, derive_seed(self.seed, Purpose.PACKED_ROWS), epoch, inverse=inverse)
        windows = self._windows_of(epoch)
        return windows.offsets(rows) if inverse else windows.keys(rows)

    @functools.cached_property
    def _windows_of(self) -> Callable[[int], Windows]:
        return windows_by_epoch(self._window_rows, 1, derive_seed(self.seed or 0, Purpose.PACKED_ROWS))

    def _key(self, epoch: int, window: int) -> NDArray[np.uint64] | None:
        """Returns a random word for an epoch and a window, as an array of shape (1,); None if nothing is shuffled."""
        if not self.shuffle or self.seed is None:
            return None
        key = derive_seeds(np.array([self.seed], np.uint64), Purpose.PACKED_EPOCH, np.array([epoch], np.uint64))
        if self._num_windows == 1:
            return key
        return derive_seeds(key, Purpose.PACKED_WINDOW, np.array([window], np.uint64))

    @functools.cached_property
    def _plan_of(self) -> Callable[[int], PlannedRows]:
        return functools.lru_cache(maxsize=_PLANS_KEPT)(self._planned)

    def _planned(self, window: int) -> PlannedRows:
        if self._whole is not None:
            return self._whole
        return PlannedRows(self._lengths_in(window), self.row_length, self.strategy, self._documents_in(window))

    def _size_of(self, window: int) -> tuple[int, int]:
        tokens = int(self._lengths_in(window).sum())
        return self._planned(window).num_rows if tokens else 0, tokens

    def _documents_in(self, window: int) -> NDArray[np.int64] | None:
        """Returns the record keys of a window, ascending; None for those of the whole source."""
        if self._num_windows == 1:
            return None
        ends = self._unit_ends[window :: self._num_windows]
        starts = np.append(0, self._unit_ends)[window :: self._num_windows][: len(ends)]
        return spread(starts, ends)[1]

    def _lengths_in(self, window: int) -> NDArray[np.int64]:
        """Returns the lengths of the documents of a window; 0 for those that are dropped."""
        documents = self._documents_in(window)
        lengths: NDArray[np.int64] = self.lengths if documents is None else self.lengths[documents]
        if self.overflow == "truncate":
            return np.minimum(lengths, self.row_length)
        return np.where(lengths > self.row_length, 0, lengths) if self.overflow == "drop" else lengths

    def _refuse_long_documents(self) -> None:
        is_long = self.lengths > self.row_length
        if self.strategy == BEST_FIT and self.overflow == "error" and is_long.any():
            key = int(np.argmax(is_long))
            raise ValueError(
                f"lengths must be at most row_length={self.row_length}, got {self.lengths[key]} for record {key} "
                f"(longer documents: {int(is_long.sum())}). Choose overflow='truncate', 'split' or 'drop', or a "
                "longer row."
            )
        if self.overflow == "drop" and not self.lengths[~is_long].any():
            raise ValueError(
                f"No document is left: overflow='drop', and all are longer than row_length={self.row_length}."
            )
