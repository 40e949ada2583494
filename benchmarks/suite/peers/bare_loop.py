"""The bounds: the speed that a program without a loader gets from the machine.

* loop: index, call, stack: the same work in the shortest Python.
* loop, streams: the same, with draws that can be made again: NumPy's generator is set to each record's own stream.
* keys: only the index: `[values[key] for key in keys]`.
* index: one NumPy fancy index per column; of tables, all of whose columns are in memory.
* row groups: those of Parquet files one after the other, decoded to columns: nothing is shuffled, nor made a batch.
* copy: only the memory traffic: rows laid end to end into one buffer that stays.
* copy in turns: the same into two buffers: what is handed to another process cannot be written over at once.
* read: only the read, by ArrayRecord's C++ reader: about a thousand records of each file in one call.
* read singly: the same, one call per record.
* pread: only the read, from a file of another format: one `os.pread` for each record, whose place is known; rows of
  arrays are read into the batch.
* open and pread: the same, and each record's file is opened and closed.
* documents: only the lookup of documents that others pack.

Where documents are packed, the loop lays them one after the other into rows of zeros, and begins a row where the next
one does not fit.
"""

import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from suite import tables
from suite.array_files import ARRAY_FORMATS, Rows
from suite.case import Contender, UnsupportedError
from suite.formats import FORMATS, pieces_of
from suite.peers.base import Stream
from suite.work import SEED, Columns, Files, Mixture, RandomMap, Records, Source, Step, Work, apply_to_many

LARGE_CALL = 4096
"""Records read at once by the bounds that only read."""


@final
class BareLoop:
    """Opens a loop."""

    def open(self, work: Work, contender: Contender) -> Stream:
        reader = _opening_reader if contender.mode == "open and pread" else _reader
        read, count = reader(work.source)
        index, shards = work.shard
        order = np.random.default_rng(SEED).permutation(count)[index::shards]
        size = 256 if work.row_length is not None else work.batch_size or 256
        chunks = [order[start : start + size] for start in range(0, len(order), size)]
        if not work.one_epoch:
            # A short last chunk would count as a whole one.
            chunks = [chunk for chunk in chunks if len(chunk) == size]
        repeated = iter(chunks) if work.one_epoch else itertools.cycle(chunks)
        batches: Iterator[Any]
        match contender.mode:
            case "loop" if work.row_length is not None:
                batches = _packed(work, read, repeated)
            case "loop" | "loop, streams" as mode:
                batches = _loop(work, read, repeated, own_streams=mode != "loop")
            case "keys" | "documents" | "open and pread":
                batches = map(read, repeated)
            case "pread":
                batches = _read_pieces(work.source, repeated)
            case "read" | "read singly" as mode:
                batches = _read_files(work, repeated, singly=mode != "read")
            case "index":
                batches = _index(work, repeated)
            case "row groups":
                batches = _row_groups(work.source, one_epoch=work.one_epoch)
            case "copy" | "copy in turns" as mode:
                batches = _copy(read, repeated, num_buffers=1 if mode == "copy" else 2)
            case mode:
                raise UnsupportedError(f"there is no bound called {mode!r}")
        return Stream(batches)


ADAPTER = BareLoop()


def _loop(
    work: Work, read: Callable[[NDArray[np.int64]], list[Any]], chunks: Iterator[Any], *, own_streams: bool
) -> Iterator[Any]:
    rng = np.random.default_rng(SEED)
    made: Iterator[list[Any]]
    if own_streams:
        made = (_with_own_streams(work.steps, keys, read(keys)) for keys in chunks)
    else:
        made = (apply_to_many(work.steps, read(keys), rng) for keys in chunks)
    if work.batch_size is None:
        return itertools.chain.from_iterable(made)
    if not work.filters:
        return map(stacked, made)
    survivors = itertools.chain.from_iterable(made)
    size = work.batch_size
    return map(stacked, iter(lambda: list(itertools.islice(survivors, size)), []))


def _with_own_streams(steps: tuple[Step, ...], keys: NDArray[np.int64], values: list[Any]) -> list[Any]:
    bits = np.random.Philox(SEED)
    rng, state = np.random.Generator(bits), bits.state
    counter = state["state"]["counter"]

    def stream_of(key: int) -> np.random.Generator:
        counter[2] = key
        bits.state = state
        return rng

    for step in steps:
        if isinstance(step, RandomMap):
            values = [step.function(value, stream_of(key)) for key, value in zip(keys.tolist(), values, strict=True)]
        else:
            values = apply_to_many([step], values, rng)
    return values


def stacked(elements: list[Any]) -> Any:
    """Returns the batch of elements that are all alike, unchecked."""
    first = elements[0]
    if isinstance(first, dict):
        return {name: stacked([element[name] for element in elements]) for name in first}
    return np.stack(elements) if isinstance(first, np.ndarray) else np.array(elements)


def _index(work: Work, chunks: Iterator[Any]) -> Iterator[Any]:
    if isinstance(work.source, Files) and work.source.columns:
        arrays = tables.whole(work.source.paths, work.source.columns)
    elif isinstance(work.source, Columns):
        arrays = work.source.arrays
    else:
        raise UnsupportedError("only columns have a fancy index")
    return ({name: column[keys] for name, column in arrays.items()} for keys in chunks)


def _row_groups(source: Source, *, one_epoch: bool) -> Iterator[Any]:
    if not isinstance(source, Files) or source.format != "parquet":
        raise UnsupportedError("only Parquet files have row groups")
    while True:
        yield from tables.row_groups(source.paths, source.columns)
        if one_epoch:
            return


def _copy(read: Callable[[NDArray[np.int64]], list[Any]], chunks: Iterator[Any], *, num_buffers: int) -> Iterator[Any]:
    buffers: list[NDArray[Any]] = []
    for number, keys in enumerate(chunks):
        rows = read(keys)
        if len(buffers) < num_buffers:
            buffers.append(np.empty((len(rows), *rows[0].shape), rows[0].dtype))
        buffer = buffers[number % num_buffers]
        np.concatenate(rows, out=buffer.reshape(-1, *rows[0].shape[1:]))
        yield buffer


def _packed(
    work: Work, read: Callable[[NDArray[np.int64]], list[Any]], chunks: Iterator[NDArray[np.int64]]
) -> Iterator[dict[str, NDArray[Any]]]:
    rows = _rows_of(itertools.chain.from_iterable(map(read, chunks)), work.row_length or 0)
    return map(stacked, iter(lambda: list(itertools.islice(rows, work.batch_size)), []))


def _rows_of(documents: Iterator[NDArray[Any]], row_length: int) -> Iterator[dict[str, NDArray[Any]]]:
    counting = np.arange(row_length, dtype=np.int32)
    row: dict[str, NDArray[Any]] = {}
    used = row_length
    number = 0
    for document in documents:
        if used + len(document) > row_length:
            if row:
                yield row
            used = number = 0
            row = {"tokens": np.zeros(row_length, document.dtype)}
            row |= {f"tokens_{name}": np.zeros(row_length, np.int32) for name in ("segment_ids", "positions")}
        stop = used + len(document)
        number += 1
        row["tokens"][used:stop] = document
        row["tokens_segment_ids"][used:stop] = number
        row["tokens_positions"][used:stop] = counting[: len(document)]
        used = stop
    yield row


def _reader(source: Source) -> tuple[Callable[[NDArray[np.int64]], list[Any]], int]:
    """Returns what reads the records of some keys, and how many records there are."""
    match source:
        case Mixture():
            return _reader(source.whole())
        case Records(values):
            return lambda keys: [values[key] for key in keys.tolist()], len(values)
        case Columns(arrays):
            return lambda keys: _rows(arrays, keys), len(next(iter(arrays.values())))
        case Files(paths=paths, format="array_record"):
            return _file_reader(paths)
        case Files(columns=columns) if columns:
            arrays = tables.whole(source.paths, columns)
            return lambda keys: _rows(arrays, keys), len(next(iter(arrays.values())))
        case Files():
            return _parsing_reader(source)


def _parsing_reader(files: Files) -> tuple[Callable[[NDArray[np.int64]], list[Any]], int]:
    if files.format in ARRAY_FORMATS:
        rows = Rows(files.paths[0], files.format, files.records_per_file)
        return lambda keys: rows.__getitems__(keys.tolist()), len(rows)
    read, count = _piece_reader(files)
    decode = FORMATS[files.format].decode
    return lambda keys: list(map(decode, read(keys))), count


def _rows(arrays: dict[str, NDArray[Any]], keys: NDArray[np.int64]) -> list[Any]:
    columns = {name: column[keys] for name, column in arrays.items()}
    return [{name: column[row] for name, column in columns.items()} for row in range(len(keys))]


def _file_reader(paths: tuple[str, ...]) -> tuple[Callable[[NDArray[np.int64]], list[bytes]], int]:
    """Returns what reads records by their keys, in the order of the files, and how many records there are."""
    readers, ends = _open_readers(paths)

    def read(keys: NDArray[np.int64]) -> list[bytes]:
        parts = np.searchsorted(ends, keys, side="right")
        local = keys - np.append(0, ends)[parts]
        return [record for part, reader in enumerate(readers) for record in reader.read(local[parts == part].tolist())]

    return read, int(ends[-1])


def _read_pieces(source: Source, chunks: Iterator[NDArray[np.int64]]) -> Iterator[Any]:
    if isinstance(source, Files) and source.format in ARRAY_FORMATS:
        return _read_rows(source, chunks)
    if not isinstance(source, Files) or source.format not in FORMATS:
        raise UnsupportedError("only files whose records are pieces are read by pread")
    return map(_piece_reader(source)[0], chunks)


def _read_rows(source: Files, chunks: Iterator[NDArray[np.int64]]) -> Iterator[NDArray[np.uint8]]:
    first_byte = ARRAY_FORMATS[source.format].first_byte
    if first_byte is None:
        raise UnsupportedError("only rows that follow each other as they are")
    first = first_byte(source.paths[0])
    with open(source.paths[0], "rb", buffering=0) as file:  # noqa: PTH123  (the path is a string)
        size = (os.fstat(file.fileno()).st_size - first) // source.records_per_file
        for keys in chunks:
            batch = np.empty((len(keys), size), np.uint8)
            for row, key in zip(batch, keys.tolist(), strict=True):
                os.preadv(file.fileno(), [row.data], first + key * size)
            yield batch


def _opening_reader(source: Source) -> tuple[Callable[[NDArray[np.int64]], list[bytes]], int]:
    """Returns what opens the file of each of some records and reads its piece, and how many records there are."""
    if not isinstance(source, Files) or source.format not in FORMATS:
        raise UnsupportedError("only files whose records are pieces are read by pread")
    paths, pieces = source.paths, [pieces_of(path).tolist() for path in source.paths]

    def read_one(key: int) -> bytes:
        file, record = divmod(key, source.records_per_file)
        start, length = pieces[file][record]
        descriptor = os.open(paths[file], os.O_RDONLY)
        try:
            return os.pread(descriptor, length, start)
        finally:
            os.close(descriptor)

    return lambda keys: list(map(read_one, keys.tolist())), len(paths) * source.records_per_file


def _piece_reader(files: Files) -> tuple[Callable[[NDArray[np.int64]], list[bytes]], int]:
    """Returns what reads the pieces of some records, and how many records there are."""
    opened = [os.open(path, os.O_RDONLY) for path in files.paths]
    pieces = [pieces_of(path) for path in files.paths]
    descriptors = np.repeat(opened, [len(places) for places in pieces])
    starts, lengths = np.concatenate(pieces).T

    def read(keys: NDArray[np.int64]) -> list[bytes]:
        return list(map(os.pread, descriptors[keys].tolist(), lengths[keys].tolist(), starts[keys].tolist()))

    weakref.finalize(read, _close, opened)
    return read, len(starts)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _read_files(work: Work, chunks: Iterator[NDArray[np.int64]], *, singly: bool) -> Iterator[list[bytes]]:
    if not isinstance(work.source, Files) or work.source.format != "array_record":
        raise UnsupportedError("only ArrayRecord files are read by its reader")
    readers, ends = _open_readers(work.source.paths)
    while True:
        keys = np.concatenate(list(itertools.islice(chunks, LARGE_CALL // (work.batch_size or 1))))
        parts = np.searchsorted(ends, keys, side="right")
        local = keys - np.append(0, ends)[parts]
        if singly:
            yield [
                readers[part].read(key, key + 1)[0] for part, key in zip(parts.tolist(), local.tolist(), strict=True)
            ]
        else:
            found = [reader.read(local[parts == part].tolist()) for part, reader in enumerate(readers)]
            yield [record for records in found for record in records]


def _open_readers(paths: tuple[str, ...]) -> tuple[list[Any], NDArray[np.int64]]:
    from array_record.python.array_record_module import ArrayRecordReader  # noqa: PLC0415  (starts threads)

    readers = [ArrayRecordReader(path, options="readahead_buffer_size:0,max_parallelism:0") for path in paths]
    return readers, np.cumsum([reader.num_records() for reader in readers])
