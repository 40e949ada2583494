"""Grain, by its two interfaces: `DataLoader`, whose names millstream follows, and the newer `Dataset`.

It reads ArrayRecord and Bagz files at random, and TFRecord and Parquet files in order, the latter with all of their
columns. Of other files it is given millstream's source, as a peer of its own: that compares the loaders, and not the
formats.
"""

import json
from typing import Any, final

import grain
import numpy as np
from absl import flags

from suite.case import Contender, UnsupportedError
from suite.peers.base import Stream, bagz_reader, our_source
from suite.work import SEED, Columns, Files, Filter, Map, Mixture, RandomMap, Records, Source, Step, Work

WINDOW = 10_000
"""Records that come from files in order are shuffled within this many of them, as tf.data's are."""

IN_ORDER = {"tfrecord", "parquet"}
"""The formats that it reads in order only."""

PACKING_BINS = 64
"""Rows that are open at once, where documents are packed."""


@final
class GrainAdapter:
    """Opens a `DataLoader` or an `IterDataset`."""

    def open(self, work: Work, contender: Contender) -> Stream:
        # Its worker processes look at flags, which a program that uses absl would have parsed.
        flags.FLAGS.mark_as_parsed()
        threads = contender.threads
        reading = grain.ReadOptions() if threads is None else grain.ReadOptions(num_threads=threads)
        if contender.mode != "DataLoader":
            iterator = iter(_dataset(work, contender, reading))
            return Stream(iterator, getattr(iterator, "close", lambda: None), _DatasetPosition(iterator))
        loader = _data_loader(work, contender, reading)
        iterator = iter(loader)
        position = _LoaderPosition(iterator, work.batch_size or 1, contender.workers)
        return Stream(iterator, getattr(iterator, "close", lambda: None), position, loader)

    def sample_keys(self, num_records: int, starts: list[int], count: int) -> list[Any]:
        sampler = grain.samplers.IndexSampler(num_records, shuffle=True, seed=SEED)
        return [[sampler[start + i].record_key for i in range(count)] for start in starts]


ADAPTER = GrainAdapter()


def _data_loader(work: Work, contender: Contender, reading: Any) -> Any:
    source, (shard, shards) = _source(work.source, contender), work.shard
    return grain.DataLoader(
        data_source=source,
        sampler=grain.samplers.IndexSampler(
            len(source),
            shard_options=grain.sharding.ShardOptions(shard, shards),
            shuffle=True,
            num_epochs=1 if work.one_epoch else None,
            seed=SEED,
        ),
        operations=[
            *map(_transform, work.steps),
            *([grain.transforms.Batch(work.batch_size)] if work.batch_size else []),
        ],
        worker_count=contender.workers,
        read_options=reading,
    )


def _dataset(work: Work, contender: Contender, reading: Any) -> Any:
    if isinstance(work.source, Files) and work.source.format in IN_ORDER and contender.peer == "grain":
        dataset = _in_order(work, work.source)
    elif work.row_length is not None:
        dataset = _packed(work, contender, reading)
    else:
        dataset = _at_random(work, contender, reading)
    if contender.workers:
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=contender.workers))
    return dataset


def _at_random(work: Work, contender: Contender, reading: Any) -> Any:
    dataset = _shuffled(work, contender)
    for step in work.steps:
        dataset = _chained(dataset, step)
    if work.batch_size and not work.filters:
        # Batches as early as possible: whole ones then cross between threads.
        dataset = dataset.batch(work.batch_size)
    dataset = dataset.to_iter_dataset(reading)
    if work.batch_size and work.filters:
        dataset = dataset.batch(work.batch_size)
    return dataset


def _shuffled(work: Work, contender: Contender) -> Any:
    parts = work.source.parts if isinstance(work.source, Mixture) else (work.source,)
    datasets: list[Any] = [
        grain.MapDataset.source(_source(part, contender)).seed(SEED + number).shuffle()
        for number, part in enumerate(parts)
    ]
    shard, shards = work.shard
    datasets = [dataset[shard::shards] for dataset in datasets]
    if not work.one_epoch:
        datasets = [dataset.repeat() for dataset in datasets]
    return grain.MapDataset.mix(datasets, [1.0] * len(datasets)) if len(datasets) > 1 else datasets[0]


def _in_order(work: Work, files: Files) -> Any:
    kind = grain.experimental.TFRecordIterDataset
    if files.format == "parquet":
        kind = grain.experimental.ParquetIterDataset
    parts = [kind(path) for path in files.paths]
    dataset: Any = grain.experimental.InterleaveIterDataset(parts, cycle_length=len(parts))
    if files.columns:
        dataset = dataset.map(ChosenColumns(files.columns))
    dataset = grain.experimental.WindowShuffleIterDataset(dataset, window_size=WINDOW, seed=SEED)
    if not work.one_epoch:
        dataset = grain.experimental.RepeatIterDataset(dataset)
    for step in work.steps:
        dataset = _chained(dataset, step)
    return dataset.batch(work.batch_size)


def _packed(work: Work, contender: Contender, reading: Any) -> Any:
    documents = _shuffled(work, contender).map(as_feature).to_iter_dataset(reading)
    lengths = {"tokens": work.row_length}
    kind = work.packing or contender.mode.removeprefix("Dataset, ")
    if kind == "concatenated":
        rows = grain.experimental.ConcatThenSplitIterDataset(documents, length_struct=lengths)
    else:
        is_best = kind == "best fit"
        packing = grain.experimental.BestFitPackIterDataset if is_best else grain.experimental.FirstFitPackIterDataset
        rows = packing(documents, length_struct=lengths, num_packing_bins=PACKING_BINS, seed=SEED)
    return rows.batch(work.batch_size)


@final
class ChosenColumns:
    """Leaves the other columns out, of which there is no way to say that they need not be read."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self._columns = columns

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        return {name: record[name] for name in self._columns}


def as_feature(document: Any) -> dict[str, Any]:
    return {"tokens": document}


def _chained(dataset: Any, step: Step) -> Any:
    match step:
        case Map():
            return dataset.map(step.function)
        case RandomMap():
            return dataset.random_map(step.function)
        case Filter():
            return dataset.filter(step.function)


def _source(source: Source, contender: Contender) -> Any:
    match source:
        case Records(values):
            return values
        case Columns(arrays):
            return Rows(arrays)
        case Files() if contender.peer == "grain_our_source":
            return our_source(source)
        case Files(paths=paths, format="array_record"):
            return grain.sources.ArrayRecordDataSource(list(paths))
        case Files(format="bagz"):
            return bagz_reader(source)
        case Files():
            raise UnsupportedError(f"it has no random access to {source.format} files")
        case Mixture():
            raise UnsupportedError("its DataLoader mixes nothing")


def _transform(step: Step) -> Any:
    match step:
        case Map():
            return MapStep(step)
        case RandomMap():
            return RandomStep(step)
        case Filter():
            return FilterStep(step)


@final
class Rows:
    """Columns, read one row at a time: Grain has no other way."""

    def __init__(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, key: int) -> dict[str, Any]:
        return {name: column[key] for name, column in self._arrays.items()}

    def __repr__(self) -> str:
        return f"Rows({len(self)})"


class MapStep(grain.transforms.Map):
    """Calls a function."""

    def __init__(self, step: Map) -> None:
        self._function = step.function

    def map(self, element: Any) -> Any:
        return self._function(element)


class RandomStep(grain.transforms.RandomMap):
    """Calls a function with a generator."""

    def __init__(self, step: RandomMap) -> None:
        self._function = step.function

    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        return self._function(element, rng)


class FilterStep(grain.transforms.Filter):
    """Asks a function."""

    def __init__(self, step: Filter) -> None:
        self._function = step.function

    def filter(self, element: Any) -> bool:
        return self._function(element)


@final
class _LoaderPosition:
    """The `DataLoader`'s state is JSON that tells the last record seen by each worker."""

    def __init__(self, iterator: Any, batch_size: int, workers: int) -> None:
        self.get_state = iterator.get_state
        self.set_state = iterator.set_state
        self._batch_size = batch_size
        self._workers = workers

    def state_at(self, step: int) -> bytes:
        state = json.loads(self.get_state())
        count = max(1, self._workers)
        seen = step // count * count * self._batch_size
        state["last_seen_indices"] = {str(worker): seen - count + worker for worker in range(count)}
        state["last_worker_index"] = -1
        return json.dumps(state, indent=4).encode()


@final
class _DatasetPosition:
    """The `Dataset`'s state is a dict that tells the next batch."""

    def __init__(self, iterator: Any) -> None:
        self.get_state = iterator.get_state
        self.set_state = iterator.set_state

    def state_at(self, step: int) -> Any:
        return _moved(self.get_state(), step)


def _moved(state: Any, step: int) -> Any:
    """Returns a state with every position in it set to the step; where workers share the steps, to their part of it."""
    if "next_index" in state:
        return {**state, "next_index": step}
    if "workers_state" in state:
        workers = state["workers_state"]
        count = len(workers)
        moved = {name: _moved(inner, step // count) for name, inner in workers.items()}
        return {**state, "workers_state": moved, "last_worker_index": -1}
    if "iterators_in_use_states" in state:
        states = state["iterators_in_use_states"]
        moved_states = [_moved(inner, step // len(states)) for inner in states]
        return {**state, "iterators_in_use_states": moved_states, "next_index_in_cycle": 0}
    if "parent" in state:
        return {**state, "parent": _moved(state["parent"], step)}
    raise ValueError(f"Grain's state has an unknown form: {state!r}.")
