"""Grain, by its two interfaces: `DataLoader`, and the newer `Dataset`, which its documentation recommends.

It reads ArrayRecord files at random and Parquet files in order, through a window in which it shuffles; JSON lines are
not among its formats.
"""

from typing import Any, final

import grain
import numpy as np
from absl import flags

from suite.peers import Stream
from suite.work import (
    SEED,
    Columns,
    Contender,
    Files,
    Filter,
    Map,
    Mixture,
    RandomMap,
    Records,
    Source,
    Step,
    UnsupportedError,
    Work,
    stacked,
)

_WINDOW = 10_000
"""Records that come from files in order are shuffled within this many of them."""

_OPEN_ROWS = 64
"""Rows that are open at once, where documents are packed."""


def open_stream(work: Work, contender: Contender) -> Stream:
    """Returns the batches of a `DataLoader`, or of a `Dataset`: "Dataset, threads off" for data in memory."""
    # Its worker processes look at flags, which a program that uses absl would have parsed.
    flags.FLAGS.mark_as_parsed()
    threads_off = contender.mode.endswith("threads off")
    reading = grain.ReadOptions(num_threads=0) if threads_off else grain.ReadOptions()
    is_loader = contender.mode.startswith("DataLoader")
    iterator: Any = iter((_data_loader if is_loader else _dataset)(work, contender, reading))
    return Stream(iterator, getattr(iterator, "close", lambda: None), iterator.get_state, iterator.set_state)


def _data_loader(work: Work, contender: Contender, reading: Any) -> Any:
    if work.row_length is not None:
        raise UnsupportedError("its DataLoader packs nothing")
    source = _source(work.source)
    return grain.DataLoader(
        data_source=source,
        sampler=grain.samplers.IndexSampler(
            len(source),
            shard_options=grain.sharding.NoSharding(),
            shuffle=True,
            num_epochs=1 if work.one_epoch else None,
            seed=SEED,
        ),
        operations=[*map(_transform, work.steps), grain.transforms.Batch(work.batch_size)],
        worker_count=contender.workers,
        read_options=reading,
    )


def _dataset(work: Work, contender: Contender, reading: Any) -> Any:
    if isinstance(work.source, Files) and work.source.format == "parquet":
        dataset = _in_order(work, work.source)
    else:
        dataset = _at_random(work, reading)
    if contender.workers:
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=contender.workers))
    return dataset


def _at_random(work: Work, reading: Any) -> Any:
    parts = work.source.parts if isinstance(work.source, Mixture) else (work.source,)
    datasets: list[Any] = [
        grain.MapDataset.source(_source(part)).seed(SEED + number).shuffle() for number, part in enumerate(parts)
    ]
    if not work.one_epoch:
        datasets = [dataset.repeat() for dataset in datasets]
    dataset = grain.MapDataset.mix(datasets, [1.0] * len(datasets)) if len(datasets) > 1 else datasets[0]
    for step in work.steps:
        dataset = _chained(dataset, step)
    if work.row_length is not None:
        rows = dataset.map(_as_feature).to_iter_dataset(reading)
        kind = grain.experimental.FirstFitPackIterDataset
        packed = kind(rows, length_struct={"tokens": work.row_length}, num_packing_bins=_OPEN_ROWS, seed=SEED)
        return packed.batch(work.batch_size)
    if not work.filters:
        # Batches as early as possible: whole ones then cross between threads.
        return dataset.batch(work.batch_size).to_iter_dataset(reading)
    return dataset.to_iter_dataset(reading).batch(work.batch_size)


def _in_order(work: Work, files: Files) -> Any:
    parts = [grain.experimental.ParquetIterDataset(path) for path in files.paths]
    dataset: Any = grain.experimental.InterleaveIterDataset(parts, cycle_length=len(parts))
    dataset = grain.experimental.WindowShuffleIterDataset(dataset, window_size=_WINDOW, seed=SEED)
    if not work.one_epoch:
        dataset = grain.experimental.RepeatIterDataset(dataset)
    # Many at once: a batch of records is a list, which the function takes whole.
    dataset = dataset.batch(work.batch_size, batch_fn=list)
    for step in work.steps:
        if not isinstance(step, Map) or step.of_list is None:
            raise UnsupportedError("only steps of lists are compared on Parquet files")
        dataset = dataset.map(step.of_list)
    return dataset.map(stacked)


def _as_feature(document: Any) -> dict[str, Any]:
    return {"tokens": document}


def _chained(dataset: Any, step: Step) -> Any:
    match step:
        case Map():
            return dataset.map(step.function)
        case RandomMap():
            return dataset.random_map(step.function)
        case Filter():
            return dataset.filter(step.function)


def _source(source: Source) -> Any:
    match source:
        case Records(values):
            return values
        case Columns(arrays):
            return _Rows(arrays)
        case Files(paths=paths, format="array_record"):
            return grain.sources.ArrayRecordDataSource(list(paths))
        case Files():
            raise UnsupportedError(f"it has no random access to {source.format} files")
        case Mixture():
            raise UnsupportedError("its DataLoader mixes nothing")


@final
class _Rows:
    """Columns, read one row at a time: Grain has no other way."""

    def __init__(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, key: int) -> dict[str, Any]:
        return {name: column[key] for name, column in self._arrays.items()}

    def __repr__(self) -> str:
        return f"Rows({len(self)})"


def _transform(step: Step) -> Any:
    match step:
        case Map():
            return _MapStep(step)
        case RandomMap():
            return _RandomStep(step)
        case Filter():
            return _FilterStep(step)


class _MapStep(grain.transforms.Map):
    def __init__(self, step: Map) -> None:
        self._function = step.function

    def map(self, element: Any) -> Any:
        return self._function(element)


class _RandomStep(grain.transforms.RandomMap):
    def __init__(self, step: RandomMap) -> None:
        self._function = step.function

    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        return self._function(element, rng)


class _FilterStep(grain.transforms.Filter):
    def __init__(self, step: Filter) -> None:
        self._function = step.function

    def filter(self, element: Any) -> bool:
        return self._function(element)
