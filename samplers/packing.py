"""Rows of a fixed length made of whole documents, planned in advance: the documents of a row follow by arithmetic."""

import zlib
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.checks import as_flag, as_integer, named_arguments
from millstream.overflow import as_overflow
from millstream.samplers.epochs import EpochSampler, positions_between, whole_numbers
from millstream.samplers.occurrences import equal_to
from millstream.samplers.packing_plan import BestFit, Stream
from millstream.samplers.permutation import permute
from millstream.seed_hashing import mix_words
from millstream.segments import Segments
from millstream.sharding import ShardOptions

BEST_FIT, CONCAT_THEN_SPLIT = "best_fit", "concat_then_split"

_ROWS_PER_CHUNK = 1 << 16
"""The number of rows whose tokens are counted together."""

_LENGTH_STEP = np.uint64(0x9E3779B97F4A7C15)
"""An odd number without a pattern, which sets lengths apart."""


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
        row_length: the number of tokens per row, at least 1.
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
        shard_options: the shard of every global batch that this process reads; None for all of it.

    Attributes:
        num_records: the number of rows per epoch.
        lengths: as given, an array of shape (documents,).
        row_length, shuffle, seed, num_epochs, overflow, strategy, shard_options: as given.

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
        shard_options: ShardOptions | None = None,
    ) -> None:
        self.shuffle = as_flag(shuffle, "shuffle")
        super().__init__(num_epochs, seed, shard_options, shuffle=self.shuffle)
        self.lengths = whole_numbers(lengths, "lengths", minimum=0)
        self.row_length = as_integer(row_length, "row_length", minimum=1)
        self.overflow = as_overflow(overflow)
        if strategy not in {BEST_FIT, CONCAT_THEN_SPLIT}:
            raise ValueError(f"strategy must be {BEST_FIT!r} or {CONCAT_THEN_SPLIT!r}, got {strategy!r}.")
        if strategy == CONCAT_THEN_SPLIT and overflow != "error":
            raise ValueError(f"strategy={strategy!r} cuts documents wherever a row ends, and takes no overflow.")
        self.strategy = strategy
        if not self.lengths.max():
            raise ValueError("lengths must have at least one token, got nothing but zeros.")
        self._documents: NDArray[np.int64] | None = None
        self._begins: NDArray[np.int64] | None = None
        if strategy == CONCAT_THEN_SPLIT:
            self._plan: BestFit | Stream = Stream.of(self.lengths, self.row_length)
        else:
            self._plan = BestFit.of(self._cut(), self.row_length)
        self.num_records = self._plan.num_rows

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
        crc = zlib.crc32(self.lengths.astype("<i8", copy=False).data)
        words = ("row_length", "shuffle", "seed", "overflow", "strategy")
        named = " ".join(f"{name}={getattr(self, name)}" for name in words)
        return f"PackingSampler documents={len(self.lengths)}#{crc:08x} {named}"

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
        return self._segments(self._checked(positions))

    def lengths_at(self, record_keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers of tokens of documents, shape (m,).

        Args:
            record_keys: the documents, shape (m,).
        """
        lengths: NDArray[np.int64] = self.lengths[record_keys]
        return lengths

    def tokens_between(self, start: int, stop: int) -> int:
        """Returns the number of tokens in the rows of the positions [start, stop), without padding.

        Whole epochs take no time. Each other row takes some 50 ns.

        Args:
            start: the first position, from 0 on.
            stop: the position after the last one.
        """
        first, last = -(-start // self.num_records), stop // self.num_records
        ranges = [(start, stop)]
        if first <= last:
            ranges = [(start, first * self.num_records), (last * self.num_records, stop)]
        tokens = max(0, last - first) * self._plan.num_tokens
        for begin, end in ranges:
            epoch = begin // self.num_records
            for chunk in range(begin, end, _ROWS_PER_CHUNK):
                offsets = np.arange(chunk, min(chunk + _ROWS_PER_CHUNK, end)) - epoch * self.num_records
                tokens += int(self._plan.tokens_of(self._rows_at(offsets, epoch)).sum())
        return tokens

    def _keys_of_epoch(self, offsets: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Returns the key of the first document of each row."""
        rows = self._segments_of_epoch(offsets, epoch)
        return rows.elements[rows.offsets[:-1]]

    def _elements_of(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rows = np.flatnonzero((keys >= 0) & (keys < len(self.lengths)))
        if isinstance(self._plan, Stream):
            rows = rows[self.lengths[keys[rows]] > 0]
            return rows, keys[rows]
        if self._documents is None:
            return rows, keys[rows]
        return equal_to(self._documents, keys)

    def _offsets_of(self, elements: NDArray[np.int64], epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        epoch %= 2**64
        which = np.arange(len(elements))
        if isinstance(self._plan, Stream):
            first = int(self._epoch_key(epoch)[0] % np.uint64(len(self.lengths))) if self.shuffle else 0
            which, rows = self._plan.rows_of(elements, self.lengths[elements], first)
        else:

            def back(ranks: NDArray[np.int64], sizes: NDArray[np.int64], lengths: NDArray[np.int64]) -> Any:
                if not self.shuffle:
                    return ranks
                seeds = mix_words(lengths.astype(np.uint64) * _LENGTH_STEP + self._epoch_key(epoch))
                return permute(ranks, sizes, seeds, 0, inverse=True)

            rows = self._plan.rows_of(elements, back)
        if self.shuffle and self.seed is not None:
            rows = permute(rows, self.num_records, self.seed, epoch, inverse=True)
        return which, rows

    def _segments(self, positions: NDArray[np.int64]) -> Segments:
        found = [(rows, self._segments_of_epoch(offsets, epoch)) for epoch, rows, offsets in self._by_epoch(positions)]
        return Segments.scattered(found)

    def _segments_of_epoch(self, offsets: NDArray[np.int64], epoch: int) -> Segments:
        rows, epoch = self._rows_at(offsets, epoch), epoch % 2**64
        if isinstance(self._plan, Stream):
            first = int(self._epoch_key(epoch)[0] % np.uint64(len(self.lengths))) if self.shuffle else 0
            return Segments(*self._plan.pieces(rows, first))

        def among_equals(sizes: NDArray[np.int64], ranks: NDArray[np.int64], lengths: NDArray[np.int64]) -> Any:
            if not self.shuffle:
                return ranks
            seeds = mix_words(lengths.astype(np.uint64) * _LENGTH_STEP + self._epoch_key(epoch))
            return permute(ranks, sizes, seeds, 0)

        starts, pieces, lengths = self._plan.pieces(rows, among_equals)
        if self.shuffle:
            # Else the longest document of each row would come first.
            words = mix_words(rows.astype(np.uint64) * _LENGTH_STEP + ~self._epoch_key(epoch))
            widths = np.diff(starts)
            owners = np.repeat(np.arange(len(rows)), widths)
            slots = (np.arange(len(pieces)) - starts[owners]).astype(np.uint64)
            order = np.lexsort((mix_words(words[owners] + slots * _LENGTH_STEP), owners))
            pieces, lengths = pieces[order], lengths[order]
        documents = pieces if self._documents is None else self._documents[pieces]
        begins = np.zeros(len(pieces), dtype=np.int64) if self._begins is None else self._begins[pieces]
        return Segments(starts, documents, begins, begins + lengths)

    def _rows_at(self, offsets: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Returns the number in the plan of the row at each offset into an epoch, shape (m,)."""
        if not self.shuffle or self.seed is None:  # The constructor refuses a shuffle without a seed.
            return offsets
        return permute(offsets, self.num_records, self.seed, epoch % 2**64)

    def _epoch_key(self, epoch: int) -> NDArray[np.uint64]:
        """Returns one random word for the epoch, as an array of shape (1,)."""
        seeded = mix_words(np.array([self.seed or 0], dtype=np.uint64))
        return mix_words(seeded + np.uint64(epoch))

    def _cut(self) -> NDArray[np.int64]:
        """Returns the lengths of all segments; sets the document of each and the offset in it, unless all are whole."""
        lengths, limit = self.lengths, self.row_length
        if lengths.min() and lengths.max() <= limit:
            return lengths
        is_long = lengths > limit
        if self.overflow == "error" and is_long.any():
            key = int(np.argmax(is_long))
            raise ValueError(
                f"lengths must be at most row_length={limit}, got {lengths[key]} for record {key} (longer documents: "
                f"{int(is_long.sum())}). Choose overflow='truncate', 'split' or 'drop', or a longer row."
            )
        if self.overflow == "split":
            counts = -(-lengths // limit)
            self._documents = np.repeat(np.arange(len(lengths)), counts)
            firsts = np.cumsum(counts) - counts
            self._begins = (np.arange(len(self._documents)) - firsts[self._documents]) * limit
            pieces: NDArray[np.int64] = np.minimum(lengths[self._documents] - self._begins, limit)
            return pieces
        self._documents = np.flatnonzero((lengths > 0) & ~is_long if self.overflow == "drop" else lengths)
        if not len(self._documents):
            raise ValueError(f"No document is left: overflow='drop', and all are longer than row_length={limit}.")
        kept: NDArray[np.int64] = np.minimum(lengths[self._documents], limit)
        return kept
