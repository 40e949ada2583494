"""millstream: `load` as its documentation has it, and a `DataLoader` or chain tuned for the case."""

import functools
from typing import Any

import numpy as np

import millstream
from millstream.loader import DataLoader  # now, not in the time to the first batch
from suite.peers import Stream
from suite.work import SEED, Columns, Contender, Files, Filter, Map, Mixture, RandomMap, Records, Source, Step, Work

_OPEN_ROWS = 64
"""Rows that are open at once, where documents are packed as they come: as many as Grain has."""


def open_stream(work: Work, contender: Contender) -> Stream:
    """Returns the batches of `load`; in the mode "chain" of a `MapDataset`, in "threads off" of a loader without."""
    loader: Any
    if contender.mode == "chain":
        loader = _chain(work, contender)
    elif isinstance(work.source, Mixture):
        loader = _mixed(work, contender)
    else:
        threads_off = {"read_options": millstream.ReadOptions(num_threads=0)}
        options: dict[str, Any] = threads_off if contender.mode == "threads off" else {}
        loader = millstream.load(
            _source(work.source),
            shuffle=True,
            seed=SEED,
            num_epochs=1 if work.one_epoch else None,
            transformations=[*_packing(work), *map(_operation, work.steps)],
            batch_size=work.batch_size,
            worker_count=contender.workers,
            **options,
        )
    iterator = iter(loader)
    return Stream(iterator, iterator.close, iterator.get_state, iterator.set_state)


def _mixed(work: Work, contender: Contender) -> DataLoader:
    source = millstream.ConcatenatedDataSource([_source(part) for part in work.source.parts])  # type: ignore[union-attr]
    samplers = [
        millstream.IndexSampler(length, shuffle=True, seed=SEED + part, num_epochs=1 if work.one_epoch else None)
        for part, length in enumerate(source.lengths.tolist())
    ]
    return DataLoader(
        data_source=source,
        sampler=millstream.MixtureSampler(samplers, [1] * len(samplers)),
        operations=[*map(_operation, work.steps), millstream.Batch(work.batch_size)],
        worker_count=contender.workers,
    )


def _chain(work: Work, contender: Contender) -> Any:
    records = millstream.MapDataset.source(_source(work.source)).seed(SEED).shuffle()
    if not work.one_epoch:
        records = records.repeat()
    dataset = records.to_iter_dataset().apply([*_packing(work), *map(_operation, work.steps)]).batch(work.batch_size)
    return dataset.mp_prefetch(contender.workers) if contender.workers else dataset


def _source(source: Source) -> Any:
    match source:
        case Records(values):
            return values
        case Columns(arrays):
            return millstream.InMemoryDataSource(arrays)
        case Files(paths, format="json_lines"):
            return millstream.JsonLinesDataSource(list(paths))
        case Files(paths, format="parquet"):
            # As if the files were larger than memory: a quarter of their texts may stay decoded.
            decoded = len(paths) * source.records_per_file * 650
            return millstream.ParquetDataSource(list(paths), cache_bytes=decoded // 4)
        case Files(paths):
            return millstream.ArrayRecordDataSource(list(paths))
        case Mixture():
            raise TypeError("a mixture is no single source")


def _packing(work: Work) -> list[Any]:
    if work.row_length is None:
        return []
    packer = functools.partial(millstream.FirstFitPack, num_packing_bins=_OPEN_ROWS, seed=SEED)
    return [_as_feature, packer({"tokens": work.row_length})]


def _as_feature(document: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {"tokens": document}


def _operation(step: Step) -> Any:
    match step:
        case Map(of_list=of_list) if of_list is not None:
            return millstream.Map(of_list, batched=True)
        case Map(function):
            return function
        case RandomMap(function):
            return millstream.RandomMap(function)
        case Filter(function):
            return millstream.Filter(function)
