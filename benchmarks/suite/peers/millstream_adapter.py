"""millstream: records as they are or, where a contender says so, as columns, batched before any step; or as a chain.

Two more peers show what mixing and packing cost it: the same records in one source, and the same documents unpacked.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, final

import numpy as np

import millstream
from millstream.loader import DataLoader  # now, not in the time to the first batch
from suite.case import Contender, UnsupportedError
from suite.peers.base import Stream, columns_of, our_source
from suite.peers.clusters import RAY_ACTORS, ray_cluster
from suite.work import SEED, Columns, Files, Filter, Map, Mixture, RandomMap, Records, Source, Step, Work

WINDOW_UNITS = 16
"""The number of row groups of Parquet files that are shuffled together."""

PACKING_BINS = 64
"""Rows that are open at once, where documents are packed as they come: as many as Grain has."""

DOCUMENTS_AT_ONCE = 256
"""The number of documents per batch if they are not packed."""


@final
class MillstreamAdapter:
    """Opens a `DataLoader`, or an `IterDataset`."""

    def open(self, work: Work, contender: Contender) -> Stream:
        if contender.peer == "millstream_one_source" and isinstance(work.source, Mixture):
            work = dataclasses.replace(work, source=work.source.whole())
        if contender.peer == "millstream_unpacked":
            work = dataclasses.replace(work, row_length=None, batch_size=DOCUMENTS_AT_ONCE)
        if contender.mode == "chain":
            return _stream(_chain(work, contender))
        if contender.mode == "default":
            return _stream(_default(work, contender))
        as_columns = contender.mode == "columns"
        source = millstream.InMemoryDataSource(columns_of(work)) if as_columns else _source(work.source)
        batch_fn = list if contender.peer == "millstream_unpacked" else None
        threads = contender.threads
        loader = DataLoader(
            data_source=source,
            sampler=_sampler(work, source, contender.mode),
            operations=_operations(work, batch_fn, batches_first=as_columns),
            **_workers(contender),
            shard_options=millstream.ShardOptions(*work.shard),
            read_options=millstream.ReadOptions() if threads is None else millstream.ReadOptions(num_threads=threads),
        )
        return _stream(loader)

    def sample_keys(self, num_records: int, starts: list[int], count: int) -> list[Any]:
        sampler = millstream.IndexSampler(num_records, shuffle=True, seed=SEED)
        return [sampler.record_keys(start, start + count) for start in starts]


ADAPTER = MillstreamAdapter()


def _stream(loader: Any) -> Stream:
    iterator = iter(loader)
    return Stream(iterator, iterator.close, _Position(iterator), loader)


@final
class _Position:
    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.get_state = iterator.get_state
        self.set_state = iterator.set_state

    def state_at(self, step: int) -> Any:
        self._iterator.seek(step)
        return self._iterator.get_state()


def _workers(contender: Contender) -> dict[str, Any]:
    if contender.mode == RAY_ACTORS:
        ray_cluster(contender.workers)
        return {"workers": millstream.RayWorkers(contender.workers)}
    return {"worker_count": contender.workers}


def _default(work: Work, contender: Contender) -> Any:
    """Returns what `load(shuffle=True)` makes of files, Parquet files four times as large as the memory for them."""
    if not isinstance(work.source, Files):
        raise UnsupportedError("only of files")
    source = our_source(work.source)
    if work.source.format == "parquet":
        cache_bytes = len(source) * len(source[0]["tokens"].tobytes()) // 4
        paths = list(work.source.paths)
        source = millstream.ParquetDataSource(paths, columns=work.source.columns, cache_bytes=cache_bytes)
    return millstream.load(
        source,
        shuffle=True,
        seed=SEED,
        num_epochs=1 if work.one_epoch else None,
        batch_size=work.batch_size,
        worker_count=contender.workers,
    )


def _chain(work: Work, contender: Contender) -> Any:
    if isinstance(work.source, Mixture) or (work.row_length is not None and not work.packing):
        raise UnsupportedError("the order of a chain is that of its MapDataset")
    shard, shards = work.shard
    records = millstream.MapDataset.source(_source(work.source)).shuffle(seed=SEED)
    if shards > 1:
        records = records[shard::shards]
    if not work.one_epoch:
        records = records.repeat()
    threads = contender.threads
    reading = millstream.ReadOptions() if threads is None else millstream.ReadOptions(num_threads=threads)
    steps = list(map(_operation, work.steps))
    dataset = records.seed(SEED).to_iter_dataset(reading).apply(steps)
    dataset = dataset.apply(_operations(dataclasses.replace(work, steps=()), None, batches_first=False))
    return dataset.mp_prefetch(contender.workers) if contender.workers else dataset


def _source(source: Source) -> Any:
    match source:
        case Records(values):
            return values
        case Columns(arrays):
            return millstream.InMemoryDataSource(arrays)
        case Files():
            return our_source(source)
        case Mixture(parts):
            return millstream.ConcatenatedDataSource([_source(part) for part in parts])


def _sampler(work: Work, source: Any, strategy: str) -> Any:
    num_epochs = 1 if work.one_epoch else None
    if work.row_length is not None and not work.packing:
        lengths = np.fromiter(map(len, source), np.int64, len(source))
        return millstream.PackingSampler(
            lengths, work.row_length, seed=SEED, num_epochs=num_epochs, strategy=strategy or "best_fit", shuffle=True
        )
    if isinstance(source, millstream.ParquetDataSource):
        return millstream.HierarchicalSampler(
            source.unit_sizes, window_units=WINDOW_UNITS, seed=SEED, num_epochs=num_epochs
        )
    if not isinstance(source, millstream.ConcatenatedDataSource):
        return millstream.IndexSampler(len(source), shuffle=True, seed=SEED, num_epochs=num_epochs)
    samplers = [
        millstream.IndexSampler(length, shuffle=True, seed=SEED + part, num_epochs=num_epochs)
        for part, length in enumerate(source.lengths.tolist())
    ]
    return millstream.MixtureSampler(samplers, [1] * len(samplers))


_AS_THEY_COME: dict[str, Callable[[dict[str, int]], Any]] = {
    "first fit": functools.partial(millstream.FirstFitPack, num_packing_bins=PACKING_BINS, seed=SEED),
    "best fit": functools.partial(millstream.BestFitPack, num_packing_bins=PACKING_BINS, seed=SEED),
    "concatenated": millstream.ConcatThenSplit,
}
"""The packers of documents whose lengths are not known in advance."""


def _operations(work: Work, batch_fn: Callable[[list[Any]], Any] | None, *, batches_first: bool) -> list[Any]:
    batch = [millstream.Batch(work.batch_size, batch_fn=batch_fn)] if work.batch_size else []
    if work.row_length is not None:
        packing = _AS_THEY_COME[work.packing] if work.packing else millstream.Pack
        return [packing({"tokens": work.row_length}), *map(_operation, work.steps), *batch]
    if not batches_first:
        return [*map(_operation, work.steps), *batch]
    if any(not isinstance(step, Map) or step.graph_of_many is not step.function for step in work.steps):
        raise UnsupportedError("a step does not take whole batches as they are")
    return [*batch, *map(_operation, work.steps)]


def _operation(step: Step) -> Any:
    match step:
        case Map():
            return step.function
        case RandomMap():
            return millstream.RandomMap(step.function)
        case Filter():
            return millstream.Filter(step.function)
