"""PyTorch's `DataLoader`, the way its tutorial writes it and the way its fast users do.

Mode "record by record": a `Dataset` with `__getitem__`, as in the tutorial. Mode "batched": reads and steps a batch at
a time in `__getitems__`, large arrays collated straight into shared memory. Workers are persistent, and forked, which
is PyTorch's default on Linux; "fork server" is what is safe beside JAX. The peer "torchdata" is the same `Dataset` in
torchdata's `StatefulDataLoader`.
"""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple, final

import numpy as np
import torch
import torch.utils.data
from array_record.python.array_record_data_source import ArrayRecordDataSource

from suite.peers import Stream
from suite.work import SEED, Columns, Contender, Files, Mixture, Records, UnsupportedError, Work, apply_to_many

_LARGE_BYTES = 4096
"""Arrays of this many bytes are stacked by PyTorch itself in workers, where it does so in shared memory."""


def open_stream(work: Work, contender: Contender) -> Stream:
    """Returns the batches of a `DataLoader`, one epoch or endless."""
    torch.manual_seed(SEED)
    kind: Any = torch.utils.data.DataLoader
    if contender.peer == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: PLC0415  (optional)

        kind = StatefulDataLoader
    loader = _loader(kind, work, contender)
    batches = iter(loader) if work.one_epoch else _epochs(loader)
    if contender.peer != "torchdata":
        return Stream(batches)
    return Stream(batches, get_state=loader.state_dict, set_state=loader.load_state_dict)


def _epochs(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _loader(kind: Any, work: Work, contender: Contender) -> Any:
    context = "forkserver" if "fork server" in contender.mode else "fork"
    options: dict[str, Any] = {
        "num_workers": contender.workers,
        "persistent_workers": contender.workers > 0,
        "multiprocessing_context": context if contender.workers else None,
        "batch_size": work.batch_size,
    }
    if work.filters:
        return kind(_Survivors(work), collate_fn=_collate, **options)
    if contender.mode.startswith("record by record"):
        return kind(_OneByOne(work), shuffle=True, **options)
    dataset = _Batched(work)
    if isinstance(work.source, Columns):
        # Whole batches by index array: the dataset makes them, nothing is left to collate.
        return kind(dataset, sampler=_Chunks(len(dataset), work.batch_size), **{**options, "batch_size": None})
    return kind(dataset, shuffle=True, collate_fn=_collate, **options)


@final
class _Chunks:
    """A new permutation each epoch, in chunks as arrays."""

    def __init__(self, num_records: int, size: int) -> None:
        self._num_records = num_records
        self._size = size

    def __len__(self) -> int:
        return (self._num_records + self._size - 1) // self._size

    def __iter__(self) -> Iterator[Any]:
        for chunk in torch.randperm(self._num_records).split(self._size):
            yield chunk.numpy()


class _Part(NamedTuple):
    """A range of records of a file, as ArrayRecord's own source takes it."""

    filename: str
    skip: int
    take: int
    examples_in_shard: int


@final
class _Batched:
    """A map-style dataset that reads and transforms many records in one call."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._rng: np.random.Generator | None = None
        self._source = _source(work)

    def __len__(self) -> int:
        if isinstance(self._work.source, Columns):
            return len(next(iter(self._source.values())))
        return len(self._source)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(self._work.source, Columns):
            return {name: torch.from_numpy(column[key]) for name, column in self._source.items()}
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[int]) -> list[Any]:
        if self._rng is None:
            self._rng = np.random.default_rng((SEED, os.getpid()))
        source = self._source
        match self._work.source:
            case Files(format="array_record"):
                records = list(source.__getitems__(keys))
            case Files():
                # A table of HF datasets: columns of the rows.
                columns = source[keys]
                records = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
            case _:
                records = [source[key] for key in keys]
        return apply_to_many(self._work.steps, records, self._rng)


def _source(work: Work) -> Any:
    if work.row_length is not None:
        raise UnsupportedError("it packs nothing")
    match work.source:
        case Records(values):
            return values
        case Columns(arrays):
            return arrays
        case Files(format="array_record") as files:
            # With the numbers of records given, nothing is opened here: the reader's threads do not survive a fork.
            count = files.records_per_file
            return ArrayRecordDataSource([_Part(path, 0, count, count) for path in files.paths])
        case Files() as files:
            from suite.peers.huggingface_adapter import table_of  # noqa: PLC0415  (optional)

            return table_of(files)
        case Mixture():
            raise UnsupportedError("it mixes nothing")


@final
class _OneByOne:
    """A map-style dataset as in the tutorial: one record per call, collated by default."""

    def __init__(self, work: Work) -> None:
        self._batched = _Batched(work)

    def __len__(self) -> int:
        return len(self._batched)

    def __getitem__(self, key: int) -> Any:
        return _contiguous(self._batched.__getitems__([key])[0])


def _contiguous(value: Any) -> Any:
    """Returns the value without flipped arrays, of which PyTorch makes no tensors."""
    if isinstance(value, dict):
        return {name: _contiguous(member) for name, member in value.items()}
    return np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value


class _Survivors(torch.utils.data.IterableDataset):
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
        rng = np.random.default_rng((SEED, os.getpid()))
        self._epoch += 1
        order = torch.randperm(len(values), generator=torch.Generator().manual_seed(SEED + self._epoch))
        for keys in order.split(1024)[number::count]:
            yield from apply_to_many(work.steps, [values[key] for key in keys.tolist()], rng)


def _collate(elements: list[Any]) -> Any:
    """Returns the batch: stacked by NumPy, which has less to do per record, and needs no second core to be fast."""
    first = elements[0]
    if isinstance(first, dict):
        return {name: _collate([element[name] for element in elements]) for name in first}
    if isinstance(first, np.ndarray):
        if first.nbytes >= _LARGE_BYTES and torch.utils.data.get_worker_info() is not None:
            return torch.utils.data.default_collate([np.ascontiguousarray(element) for element in elements])
        return torch.from_numpy(np.stack(elements))
    return torch.tensor(elements, dtype=torch.float64 if isinstance(first, float) else None)
