"""PyTorch, the way its fast users write it, and the way its tutorial does.

Fast: reads and steps a batch at a time in `__getitems__`, large arrays collated straight into shared memory, persistent
workers, one NumPy generator per process.
"""

import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple, final

import numpy as np
import torch
import torch.utils.data
from array_record.python.array_record_data_source import ArrayRecordDataSource

from suite.array_files import ARRAY_FORMATS, Rows
from suite.case import Contender, UnsupportedError
from suite.peers.base import Stream, bagz_reader, huggingface_dataset
from suite.peers.base import our_source as millstream_source
from suite.work import SEED, Columns, Files, Mixture, Records, Work, apply_to_many

LARGE_BYTES = 4096
"""Arrays of this many bytes are stacked by PyTorch itself in workers, where it does so in shared memory."""


@final
class PytorchAdapter:
    """Opens a `DataLoader`."""

    def open(self, work: Work, contender: Contender) -> Stream:
        one_by_one = contender.mode == "record by record"
        if one_by_one and isinstance(work.source, Records) and not isinstance(work.source.values, list):
            raise UnsupportedError("the same as the other mode: this source reads singly")
        return stream_of(_loader(work, contender, one_by_one=one_by_one), work)

    def sample_keys(self, num_records: int, starts: list[int], count: int) -> list[Any]:
        """Returns the record keys from the beginning, since only that can be asked for."""
        keys = iter(torch.utils.data.RandomSampler(range(num_records)))
        return [[next(keys) for _ in range(count)] for _ in starts]


ADAPTER = PytorchAdapter()


def _epochs(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def stream_of(loader: Any, work: Work) -> Stream:
    """Returns the batches of a `DataLoader`, one epoch or endless."""
    return Stream(iter(loader) if work.one_epoch else _epochs(loader), loader=loader)


def processes_of(contender: Contender) -> dict[str, Any]:
    return {
        "num_workers": contender.workers,
        "persistent_workers": contender.workers > 0,
        "multiprocessing_context": contender.mode if contender.workers else None,
    }


def _loader(work: Work, contender: Contender, *, one_by_one: bool) -> Any:
    torch.manual_seed(SEED)
    processes = processes_of(contender)
    if work.filters:
        return torch.utils.data.DataLoader(Survivors(work), batch_size=work.batch_size, collate_fn=collate, **processes)
    if one_by_one:
        return torch.utils.data.DataLoader(OneByOne(work), batch_size=work.batch_size, shuffle=True, **processes)
    dataset = Batched(work, our_source=contender.peer == "pytorch_our_source")
    chunk = work.batch_size or 1
    chunks = Chunks(len(dataset), chunk, work.shard, as_arrays=isinstance(work.source, Columns))
    if work.batch_size is None:
        return torch.utils.data.DataLoader(dataset, batch_size=None, shuffle=True, **processes)
    if isinstance(work.source, Columns) and not work.steps:
        # Whole batches by index array: the dataset makes them, nothing is left to collate.
        return torch.utils.data.DataLoader(dataset, batch_size=None, sampler=chunks, **processes)
    return torch.utils.data.DataLoader(dataset, batch_sampler=chunks, collate_fn=collate, **processes)


@final
class Chunks:
    """A new permutation each epoch, in chunks: cheaper than PyTorch's own samplers, which go record by record."""

    def __init__(self, num_records: int, size: int, shard: tuple[int, int], *, as_arrays: bool) -> None:
        self._num_records = num_records
        self._size = size
        self._shard = shard
        self._as_arrays = as_arrays

    def __len__(self) -> int:
        return math.ceil(self._num_records // self._shard[1] / self._size)

    def __iter__(self) -> Iterator[Any]:
        index, count = self._shard
        for chunk in torch.randperm(self._num_records)[index::count].split(self._size):
            yield chunk.numpy() if self._as_arrays else chunk.tolist()


class _Part(NamedTuple):
    """A range of records of a file, as ArrayRecord's own source takes it."""

    filename: str
    skip: int
    take: int
    examples_in_shard: int


@final
class Batched:
    """A map-style dataset that reads and transforms many records in one call."""

    def __init__(self, work: Work, *, our_source: bool = False) -> None:
        self._work = work
        self._rng: np.random.Generator | None = None
        self._source: Any = None
        if isinstance(work.source, Files):
            self._source = millstream_source(work.source) if our_source else _source(work.source)
        self._length = _count(work, self._source)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: Any) -> Any:
        if isinstance(self._work.source, Columns):
            return {name: torch.from_numpy(column[key]) for name, column in self._work.source.arrays.items()}
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[int]) -> list[Any]:
        if self._rng is None:
            self._rng = _generator()
        return apply_to_many(self._work.steps, self._read(keys), self._rng)

    def _read(self, keys: list[int]) -> list[Any]:
        match self._work.source:
            case Records(values):
                return [values[key] for key in keys]
            case Files(format="arrow"):
                columns = self._source[keys]
                return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
            case Files(format="bagz") if not hasattr(self._source, "__getitems__"):
                return list(self._source.read_indices(keys))
            case Files():
                return list(self._source.__getitems__(keys))
            case Columns(arrays):
                columns = {name: column[keys] for name, column in arrays.items()}
                return [{name: column[row] for name, column in columns.items()} for row in range(len(keys))]
            case Mixture():
                raise UnsupportedError("it mixes nothing")


def _source(files: Files) -> Any:
    if files.format == "bagz":
        return bagz_reader(files)
    if files.format == "arrow":
        return huggingface_dataset(files).with_format("numpy")
    if files.format in ARRAY_FORMATS:
        return Rows(files.paths[0], files.format, files.records_per_file)
    if files.format != "array_record":
        raise UnsupportedError(f"there is no map-style dataset for {files.format} files")
    # With the numbers of records given, nothing is opened here: the reader's threads do not survive a fork.
    count = files.records_per_file
    return ArrayRecordDataSource([_Part(path, 0, count, count) for path in files.paths])


@final
class OneByOne:
    """A map-style dataset as in the tutorial: one record per call, collated by default."""

    def __init__(self, work: Work) -> None:
        self._batched = Batched(work)

    def __len__(self) -> int:
        return len(self._batched)

    def __getitem__(self, key: int) -> Any:
        return _contiguous(self._batched.__getitems__([key])[0])


def _contiguous(value: Any) -> Any:
    """Returns the value without flipped arrays, of which PyTorch makes no tensors."""
    if isinstance(value, dict):
        return {name: _contiguous(member) for name, member in value.items()}
    return np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value


class Survivors(torch.utils.data.IterableDataset):
    """An iterable-style dataset: how PyTorch filters before it batches. Each worker takes its part of the chunks."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        work = self._work
        if not isinstance(work.source, Records):
            raise UnsupportedError("filters are compared on records in memory only")
        values = work.source.values
        worker = torch.utils.data.get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        rng = _generator()
        self._epoch += 1
        order = torch.randperm(len(values), generator=torch.Generator().manual_seed(SEED + self._epoch))
        for keys in order.split(1024)[number::count]:
            yield from apply_to_many(work.steps, [values[key] for key in keys.tolist()], rng)


def collate(elements: list[Any]) -> Any:
    """Returns the batch: stacked by NumPy, which has less to do per record, and needs no second core to be fast."""
    first = elements[0]
    if isinstance(first, dict):
        return {name: collate([element[name] for element in elements]) for name in first}
    if isinstance(first, np.ndarray):
        if first.nbytes >= LARGE_BYTES and torch.utils.data.get_worker_info() is not None:
            return torch.utils.data.default_collate([np.ascontiguousarray(element) for element in elements])
        return torch.from_numpy(np.stack(elements))
    if isinstance(first, str):
        return elements
    return torch.tensor(elements, dtype=torch.float64 if isinstance(first, float) else None)


def _generator() -> np.random.Generator:
    return np.random.default_rng((SEED, os.getpid()))


def _count(work: Work, files: Any) -> int:
    match work.source:
        case Records(values):
            return len(values)
        case Columns(arrays):
            return len(next(iter(arrays.values())))
        case Files():
            return len(files)
        case Mixture():
            raise UnsupportedError("it mixes nothing")
