"""Every row of the tables in docs/coming-from-grain.md is true: code written for Grain shows what it says."""

import dataclasses
import functools
import importlib
import inspect
import itertools
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

import millstream as grain
from support.documents.document_tables import RowTests, first_cells

pytestmark = pytest.mark.third_party

DOCUMENT = Path(__file__).parents[1] / "docs" / "coming-from-grain.md"
ROWS = RowTests()

# The names of `grain.python` 0.2.18 that the façade has not; the document says what to write, or why there is nothing.
LEFT_OUT = {
    *("BatchOperation", "FilterOperation", "MapOperation", "Operation", "RandomMapOperation"),
    *("PyGrainCheckpointHandler", "PyGrainCheckpointRestore", "PyGrainCheckpointSave", "PyGrainDatasetIterator"),
    *(
        "META_FEATURES",
        "Record",
        "Sampler",
        "SharedMemoryArray",
        "Transformation",
        "Transformations",
        "config",
    ),
}


GRAIN_NAMES = [
    (line.split()[0], line.split()[1])
    for line in (Path(__file__).parent / "support" / "documents" / "grain_names.txt").read_text().splitlines()
    if not line.startswith("#")
]
"""The public names of Grain 0.2.18, each with its module."""

ABSENT = {
    *("grain.Record", "grain.__version_info__", "grain.config", "grain.monitoring"),
    "grain.experimental.ThreadPrefetchDatasetIterator",
    *("grain.multiprocessing.SharedMemoryArray", "grain.multiprocessing.SharedMemoryArrayMetadata"),
    *("grain.python.Operation", "grain.python.Record", "grain.python.SharedMemoryArray", "grain.python.config"),
    "grain.sources.SharedMemoryDataSource",
    "grain.transforms.TfRandomMap",
}
"""Those that are not where Grain has them; the document says what to write instead."""


class AddNoise(grain.RandomMapTransform):
    """A random operation, as one writes it for Grain."""

    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        """Returns the element and a draw."""
        return (*element, rng.random()) if isinstance(element, tuple) else (element, rng.random())


def batches(source: Any, operations: Sequence[Any] = (), *, sampler: Any = None, **options: Any) -> list[Any]:
    """Returns all that a loader of one epoch yields, in Grain's long form."""
    sampler = sampler or grain.IndexSampler(len(source), shard_options=grain.NoSharding(), num_epochs=1, seed=0)
    loader = grain.DataLoader(data_source=source, sampler=sampler, operations=operations, **options)
    return [element.tolist() if isinstance(element, np.ndarray) else element for element in loader]


def shuffled(num_records: int, seed: int = 0, **options: Any) -> grain.IndexSampler:
    """Returns a sampler that shuffles one epoch, unless told otherwise."""
    return grain.IndexSampler(num_records, shuffle=True, seed=seed, **{"num_epochs": 1, **options})


def parameters(function: Any) -> set[str]:
    """Returns the names of a function's parameters."""
    return set(inspect.signature(function).parameters)


# ---- The tests of the tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", first_cells(DOCUMENT))
def test_a_row_is_true(row: str) -> None:
    """Each row of each table has a test, and what it says holds."""
    ROWS[row]()


def test_no_row_has_gone() -> None:
    """Each test here belongs to a row that exists."""
    assert ROWS.keys() == set(first_cells(DOCUMENT))


def test_every_name_of_grain_is_here_or_in_the_document() -> None:
    """Each public name of each module of Grain is in the module of that name, or the document says what to write."""
    text = DOCUMENT.read_text()
    missing = {
        f"{module}.{name}"
        for module, name in GRAIN_NAMES
        if not hasattr(importlib.import_module(module.replace("grain", "millstream", 1)), name)
    }

    assert {name for _, name in GRAIN_NAMES} >= LEFT_OUT
    assert {name for name in LEFT_OUT if hasattr(grain, name)} == set()
    assert {name for name in LEFT_OUT if f"`{name}`" not in text and f".{name}`" not in text} == set()
    assert missing == ABSENT
    assert {name for name in missing if re.search(rf"[`.]{name.rpartition('.')[2]}`", text) is None} == set()


# ---- Names ---------------------------------------------------------------------------------------------------------


@ROWS.of("`DataLoader`, `DataLoaderIterator`, `load`, `ReadOptions`, `MultiprocessingOptions`, `RecordMetadata`")
def _() -> None:
    long = {"data_source", "sampler", "operations", "worker_count", "worker_buffer_size", "shard_options"}
    short = {"source", "num_epochs", "shuffle", "seed", "transformations", "batch_size", "drop_remainder"}
    assert long | {"read_options"} <= parameters(grain.DataLoader)
    assert short | {"shard_options", "worker_count", "read_options"} <= parameters(grain.load)
    assert grain.ReadOptions(num_threads=4, prefetch_buffer_size=8) == grain.ReadOptions(4, 8)
    options = grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=2, enable_profiling=True)
    assert (options.num_workers, options.per_worker_buffer_size) == (1, 2)
    assert {"index", "record_key", "rng"} <= parameters(grain.RecordMetadata)


@ROWS.of("`samplers.`: `IndexSampler`, `SequentialSampler`, `Sampler`")
def _() -> None:
    assert batches(list("abc"), sampler=grain.samplers.SequentialSampler(3, shard_options=grain.NoSharding())) == [
        "a",
        "b",
        "c",
    ]
    sampler = grain.samplers.IndexSampler(3, shard_options=grain.NoSharding(), shuffle=True, num_epochs=2, seed=1)
    assert sorted(batches(list("abc"), sampler=sampler)) == ["a", "a", "b", "b", "c", "c"]
    assert isinstance(sampler, grain.samplers.Sampler)


@ROWS.of("`sharding.`: `ShardOptions`, `NoSharding`, `ShardByJaxProcess`")
def _() -> None:
    none, whole = grain.sharding.NoSharding(), grain.sharding.ShardOptions(shard_index=0, shard_count=1)
    assert dataclasses.astuple(none) == dataclasses.astuple(whole) == (0, 1, False, None)
    by_process = grain.sharding.ShardByJaxProcess(drop_remainder=True)
    assert (by_process.shard_index, by_process.shard_count, by_process.drop_remainder) == (0, 1, True)
    assert grain.shard_by_jax_process(drop_remainder=True) == by_process


@ROWS.of("`transforms.`: `Map`, `MapWithIndex`, `RandomMap`, `Filter`, `Batch`, `Transformation`")
def _() -> None:
    class Double(grain.transforms.Map):
        def map(self, element: Any) -> Any:
            return 2 * element

    class Number(grain.transforms.MapWithIndex):
        def map_with_index(self, index: int, element: Any) -> Any:
            return (index, element)

    class NotFour(grain.transforms.Filter):
        def filter(self, element: Any) -> bool:
            return bool(element[1] != 4)

    class Draw(grain.transforms.RandomMap):
        def random_map(self, element: Any, rng: np.random.Generator) -> Any:
            return (*element, 0 <= rng.random() < 1)

    operations: list[grain.transforms.Transformation] = [Double(), Number(), NotFour(), Draw()]
    assert batches(range(4), operations) == [(0, 0, True), (1, 2, True), (3, 6, True)]
    assert batches(range(3), [grain.transforms.Batch(batch_size=2, drop_remainder=True)]) == [[0, 1]]


@ROWS.of("`experimental.FlatMapTransform`")
def _() -> None:
    class Letters(grain.FlatMapTransform):
        max_fan_out = 3

        def flat_map(self, element: str) -> list[str]:
            return list(element)

    assert batches(["ab", "", "c"], [Letters()]) == ["a", "b", "c"]
    assert batches(["ab", "", "c"], [grain.transforms.FlatMap(list, max_fan_out=3)]) == ["a", "b", "c"]


@ROWS.of("`sources.`: `ArrayRecordDataSource`, `RangeDataSource`")
def _() -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer = ArrayRecordWriter(f"{folder}/two.array_record", "group_size:1")
        writer.write(b"one")
        writer.write(b"two")
        writer.close()
        with grain.sources.ArrayRecordDataSource(paths=[f"{folder}/two.array_record"]) as source:
            assert batches(source) == [b"one", b"two"]
    assert batches(grain.sources.RangeDataSource(start=4, stop=0, step=-2)) == [4, 2]


@ROWS.of("`sources.SharedMemoryDataSource` (`grain.python.InMemoryDataSource`)")
def _() -> None:
    assert batches(grain.InMemoryDataSource(["a", "b"])) == ["a", "b"]
    assert batches(grain.InMemoryDataSource({"x": np.arange(2)})) == [{"x": 0}, {"x": 1}]


@ROWS.of("`sources.RandomAccessDataSource`")
def _() -> None:
    class Letters(grain.RandomAccessDataSource[str]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, record_key: int, /) -> str:
            return "ab"[record_key]

    source: grain.sources.DataSource[str] = ["a", "b"]
    assert batches(source) == batches(Letters()) == ["a", "b"]
    assert isinstance(source, grain.sources.RandomAccessDataSource)


@ROWS.of("`checkpoint.`: `CheckpointSave`, `CheckpointRestore`, `CheckpointHandler`")
def _() -> None:
    assert grain.checkpoint.__all__ == ["CheckpointHandler", "CheckpointRestore", "CheckpointSave"]


@ROWS.of("`PyGrainCheckpointSave`, `PyGrainCheckpointRestore`, `PyGrainCheckpointHandler`")
def _() -> None:
    for name in ("CheckpointSave", "CheckpointRestore"):
        assert "item" in parameters(getattr(grain.checkpoint, name))


@ROWS.of("`PyGrainDatasetIterator`")
def _() -> None:
    assert isinstance(iter(grain.load(list("abc"))), grain.DataLoaderIterator)


@ROWS.of("`MapOperation`, `RandomMapOperation`, `FilterOperation`, `BatchOperation`")
def _() -> None:
    t = grain.transforms
    assert batches(range(4), [t.Map(lambda x: x + 1), t.Filter(lambda x: x % 2 == 0), t.Batch(2)]) == [[2, 4]]
    assert batches(range(2), [t.RandomMap(lambda x, rng: x + int(rng.integers(1)))]) == [0, 1]


@ROWS.of("`DataLoader(enable_profiling=...)`")
def _() -> None:
    loaders = [
        grain.DataLoader(data_source=list("abc"), sampler=grain.SequentialSampler(3), enable_profiling=profiled)
        for profiled in (False, True)
    ]
    assert list(loaders[0]) == list(loaders[1]) == ["a", "b", "c"]
    assert loaders[0].profile().keys() == loaders[1].profile().keys()


@ROWS.of("`config`, `monitoring`, absl flags `--grain_*`")
def _() -> None:
    assert not hasattr(grain, "config")
    assert not hasattr(grain, "monitoring")
    assert "debug" in parameters(grain.DataLoader)


@ROWS.of("`Operation`, `Record`")
def _() -> None:
    assert not hasattr(grain.python, "Operation")
    assert not hasattr(grain, "Record")
    with pytest.raises(TypeError, match="iterator"):
        grain.MapTransform(iter([]))  # type: ignore[call-overload]


@ROWS.of("`SharedMemoryArray`, `SharedMemoryArrayMetadata`")
def _() -> None:
    assert not hasattr(grain.multiprocessing, "SharedMemoryArray")
    with iter(grain.load([np.ones(1 << 16)] * 2, num_epochs=1, worker_count=1)) as iterator:
        assert type(next(iterator)) is np.ndarray


@ROWS.of("`__version_info__`")
def _() -> None:
    assert len([int(number) for number in grain.__version__.split(".")]) == 3


@ROWS.of("`MapDataset`, `IterDataset`, `DatasetIterator`")
def _() -> None:
    chain = grain.MapDataset.source(list("abcd")).shuffle(seed=0)[1::2].map(str.upper).repeat(2)
    assert batches(chain) == [chain[position] for position in range(4)]
    stream = grain.MapDataset.range(5).to_iter_dataset().batch(2)
    assert isinstance(stream, grain.IterDataset)
    assert isinstance(iter(stream), grain.DatasetIterator)


@ROWS.of(
    "`experimental.`: `FirstFitPackIterDataset`, `BestFitPackIterDataset`, "
    "`ConcatThenSplitIterDataset`, `WindowShuffleIterDataset`, `RebatchIterDataset`, `batch_and_pad`"
)
def _() -> None:
    e = grain.experimental
    tokens = grain.MapDataset.range(1, 5).map(lambda n: {"tokens": np.full(n, n)}).to_iter_dataset()
    for packed in (
        e.FirstFitPackIterDataset(tokens, length_struct={"tokens": 5}, num_packing_bins=2, shuffle_bins=False),
        e.BestFitPackIterDataset(tokens, length_struct={"tokens": 5}, num_packing_bins=2, shuffle_bins=False),
        e.ConcatThenSplitIterDataset(tokens, length_struct={"tokens": 5}),
    ):
        rows = list(packed)
        assert all(set(row) == {"tokens", "tokens_segment_ids", "tokens_positions"} for row in rows)
        assert sum((row["tokens"] > 0).sum() for row in rows) == 10
    numbers = grain.MapDataset.range(5).to_iter_dataset()
    assert sorted(e.WindowShuffleIterDataset(numbers, window_size=5, seed=0)) == [0, 1, 2, 3, 4]
    assert [len(batch) for batch in e.RebatchIterDataset(numbers.batch(3), batch_size=4)] == [4, 1]
    pad = functools.partial(e.batch_and_pad, batch_size=3, pad_value=-1)
    assert [batch.tolist() for batch in numbers.batch(3, batch_fn=pad)] == [[0, 1, 2], [3, 4, -1]]
    with pytest.raises(ValueError, match="pack_alignment_struct"):
        e.FirstFitPackIterDataset(
            tokens, length_struct={"tokens": 5}, num_packing_bins=2, pack_alignment_struct={"tokens": 2}
        )


@ROWS.of("`experimental.`: `TFRecordIterDataset`, `ParquetIterDataset`, `InterleaveIterDataset`")
def _() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in "ab":
            pq.write_table(pa.table({"name": [name] * 2}), f"{folder}/{name}.parquet")
        dataset = grain.experimental.ParquetIterDataset([f"{folder}/a.parquet", f"{folder}/b.parquet"])
        assert [row["name"] for row in dataset] == ["a", "b", "a", "b"]
    assert "path" in parameters(grain.experimental.TFRecordIterDataset)
    assert {"datasets", "cycle_length"} <= parameters(grain.experimental.InterleaveIterDataset)


@ROWS.of("`experimental.`: `get_element_spec`, `ShapeDtypeStruct`, `ShapeDtypeStructProtocol`")
def _() -> None:
    e = grain.experimental
    spec = e.get_element_spec(grain.MapDataset.range(10).batch(5))
    assert spec == e.ShapeDtypeStruct((5,), np.dtype(np.int64))
    assert isinstance(spec, e.ShapeDtypeStructProtocol)


@ROWS.of("`experimental.ElasticIterator`")
def _() -> None:
    dataset = grain.MapDataset.range(12)
    iterator = grain.experimental.ElasticIterator(dataset, 6, grain.ShardOptions(0, 3))
    next(iterator)
    with grain.experimental.ElasticIterator(dataset, 6, grain.ShardOptions(0, 1)) as other, iterator:
        other.set_state(iterator.get_state())
        assert next(other).tolist() == [6, 7, 8, 9, 10, 11]


@ROWS.of(
    "`experimental.`: `pick_performance_config`, `DatasetOptions`, `WithOptionsIterDataset`, "
    "`ThreadPrefetchIterDataset`, `multithread_prefetch`"
)
def _() -> None:
    e, numbers = grain.experimental, grain.MapDataset.range(5).to_iter_dataset()
    options = e.pick_performance_config(ds=numbers, ram_budget_mb=64, max_workers=None, max_buffer_size=None)
    assert options.multiprocessing_options is not None
    assert options.multiprocessing_options.num_workers >= 1
    merged = e.DatasetOptions(min_shm_size=3).merge(e.DatasetOptions(filter_warn_threshold_ratio=0.5))
    assert (merged.min_shm_size, merged.filter_warn_threshold_ratio) == (3, 0.5)
    ahead = e.ThreadPrefetchIterDataset(e.WithOptionsIterDataset(numbers, merged), prefetch_buffer_size=3)
    assert list(e.multithread_prefetch(ahead, num_threads=2, buffer_size=1)) == [0, 1, 2, 3, 4]


@ROWS.of("`python.`, `constants.`, `multiprocessing.MultiprocessingOptions`")
def _() -> None:
    assert grain.python.MapTransform is grain.MapTransform
    assert grain.python.experimental is grain.experimental
    assert grain.python.RECORD_KEY == grain.constants.RECORD_KEY == "_record_key"
    assert grain.multiprocessing.MultiprocessingOptions is grain.MultiprocessingOptions


@ROWS.of("`experimental.ThreadPrefetchDatasetIterator`")
def _() -> None:
    assert not hasattr(grain.experimental, "ThreadPrefetchDatasetIterator")
    ahead = grain.experimental.ThreadPrefetchIterDataset(grain.MapDataset.range(3), prefetch_buffer_size=2)
    assert list(ahead) == [0, 1, 2]


@ROWS.of("`experimental.`: the other names")
def _() -> None:
    missing = {name for module, name in GRAIN_NAMES if module == "grain.experimental"} - set(dir(grain.experimental))
    assert missing == {"ThreadPrefetchDatasetIterator"}


@ROWS.of("`transforms.`: `DatasetSelectionMap`, `Transformations`")
def _() -> None:
    operations: grain.transforms.Transformations = [grain.transforms.Map(abs)]
    assert batches([-1], operations) == [1]

    class Backwards(grain.transforms.DatasetSelectionMap):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[int, int]:
            return 0, 2 - index % 3

    assert list(grain.MapDataset.select_from_datasets([grain.MapDataset.range(3)], Backwards())) == [2, 1, 0]


@ROWS.of("`experimental.PackAndBatchOperation`")
def _() -> None:
    documents = [{"a": np.full(size, size)} for size in (2, 1, 3)]
    operation = grain.experimental.PackAndBatchOperation(length_struct={"a": 3}, batch_size=2)
    ((tokens, segments, positions),) = grain.load(documents, num_epochs=1, transformations=[operation])
    assert tokens["a"].tolist() == [[2, 2, 1], [3, 3, 3]]
    assert segments["a"].tolist() == [[1, 1, 2], [1, 1, 1]]
    assert positions["a"].tolist() == [[0, 1, 0], [0, 1, 2]]


@ROWS.of("`transforms.TfRandomMap`")
def _() -> None:
    assert not hasattr(grain.transforms, "TfRandomMap")


# ---- What differs, and why -----------------------------------------------------------------------------------------


@ROWS.of("shuffle over several hosts")
def _() -> None:
    parts = [
        batches(range(16), [grain.Batch(2)], sampler=shuffled(16, shard_options=grain.ShardOptions(index, 2)))
        for index in range(2)
    ]
    dealt = [first + second for first, second in zip(*parts, strict=True)]
    assert dealt == batches(range(16), [grain.Batch(4)], sampler=shuffled(16))
    assert {key < 8 for batch in parts[0] for key in batch} == {True, False}


@ROWS.of("seeds")
def _() -> None:
    orders = {seed: batches(range(20), sampler=shuffled(20, seed, num_epochs=2)) for seed in (3, 4, 2**64 - 1)}
    epochs = {tuple(order[start : start + 20]) for order in orders.values() for start in (0, 20)}
    assert len(epochs) == 6


@ROWS.of("random numbers of a record")
def _() -> None:
    draws = [draw for seed in (0, 1) for _, draw in batches(range(4), [AddNoise()], sampler=shuffled(4, seed))]
    assert len(set(draws)) == 8


@ROWS.of("several `RandomMap`s")
def _() -> None:
    one, two = (batches(range(4), [AddNoise()] * count) for count in (1, 2))
    assert [element[:2] for element in two] == one
    assert all(first != second for _, first, second in two)


@ROWS.of("end of the data on *S* hosts")
def _() -> None:
    def parts(batch: grain.Batch, **options: Any) -> list[list[Any]]:
        shards = [grain.ShardOptions(index, 3, **options) for index in range(3)]
        return [batches(range(11), [batch], shard_options=shard) for shard in shards]

    assert sorted(key for part in parts(grain.Batch(2)) for batch in part for key in batch) == list(range(11))
    assert len({len(part) for part in parts(grain.Batch(2), drop_remainder=True)}) == 1
    padded = parts(grain.Batch(2, pad_remainder=True))
    assert {len(part) for part in padded} == {2}
    assert sorted(key for part in padded for keys, mask in part for key in keys[mask]) == list(range(11))


@ROWS.of("a bare function in `operations`")
def _() -> None:
    assert batches(list("ab"), [str.upper]) == ["A", "B"]


@ROWS.of("`MapWithIndex` in a `DataLoader`")
def _() -> None:
    assert batches(list("ab"), [grain.transforms.MapWithIndex(lambda index, letter: (index, letter))]) == [
        (0, "a"),
        (1, "b"),
    ]


@ROWS.of("`bytes` in a batch")
def _() -> None:
    assert batches([b"a\0", b"b"], [grain.Batch(2)]) == [[b"a\0", b"b"]]


@ROWS.of("`DataLoader` without `shard_options`, and a sampler that carries none")
def _() -> None:
    class Own:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, position: int) -> grain.RecordMetadata:
            return grain.RecordMetadata(index=position, record_key=1 - position)

    assert batches(list("ab"), sampler=Own()) == ["b", "a"]


@ROWS.of("`len(loader)`")
def _() -> None:
    assert len(grain.load(range(10), num_epochs=1, batch_size=4)) == 3


@ROWS.of("`len(sampler)` of an endless one")
def _() -> None:
    with pytest.raises(TypeError, match="endless"):
        len(grain.IndexSampler(4))


@ROWS.of("`sampler[i]` of a sharded one")
def _() -> None:
    sampler = grain.IndexSampler(4, shard_options=grain.ShardOptions(1, 2))
    assert [sampler[position].record_key for position in range(4)] == [0, 1, 2, 3]


@ROWS.of("a custom sampler without `len`")
def _() -> None:
    class Own:
        def __getitem__(self, position: int) -> grain.RecordMetadata:
            return grain.RecordMetadata(index=position, record_key=position % 2)

    loader = grain.DataLoader(data_source=list("ab"), sampler=Own(), operations=[grain.Batch(4)])
    with iter(loader) as iterator:
        iterator.seek(10**6)
        assert next(iterator).tolist() == ["a", "b", "a", "b"]


@ROWS.of("reading")
def _() -> None:
    calls = []

    class Source:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, key: int) -> int:
            raise AssertionError(key)

        def __getitems__(self, keys: Sequence[int]) -> list[int]:
            calls.append(list(keys))
            return list(keys)

    in_this_thread = grain.ReadOptions(num_threads=0)
    assert batches(Source(), [grain.Batch(4)], read_options=in_this_thread) == [[0, 1, 2, 3], [4, 5, 6, 7]] == calls


@ROWS.of("`worker_count=None`")
def _() -> None:
    loader = grain.load(list("abc"), worker_count=None)
    assert loader.multiprocessing_options.num_workers == len(os.sched_getaffinity(0))


@ROWS.of("workers")
def _() -> None:
    script = "import millstream as grain\nprint(*grain.load(list('abc'), num_epochs=1, worker_count=1))"
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("a b c\n", "")


@ROWS.of("batches from workers")
def _() -> None:
    with iter(grain.load(range(4), batch_size=4, worker_count=1)) as iterator:
        assert type(next(iterator)) is np.ndarray


@ROWS.of("iterators")
def _() -> None:
    with iter(grain.load(list("ab"))) as iterator:
        assert next(iterator) == "a"
    with pytest.raises(ValueError, match="closed"):
        next(iterator)


# ---- What differs in chains ----------------------------------------------------------------------------------------


@ROWS.of("default seed of a `shuffle` or `random_map`")
def _() -> None:
    def draw(element: int, rng: np.random.Generator) -> tuple[int, int]:
        return element, int(rng.integers(2**62))

    numbers = grain.MapDataset.range(30).seed(5)
    expected = list(numbers.shuffle().random_map(draw))
    assert list(numbers.map(abs).shuffle().map(abs).map(abs).random_map(draw)) == expected
    assert list(numbers.shuffle().shuffle().random_map(draw)) != expected


@ROWS.of("`mp_prefetch(n)` after filters, packing, draws or `batch`")
def _() -> None:
    def noisy(row: dict[str, Any], rng: np.random.Generator) -> Any:
        return row["a"] + rng.integers(1000)

    documents = grain.MapDataset.range(60).map(lambda x: {"a": np.full(x % 5 + 1, x)}).filter(lambda x: x["a"][0] % 7)
    rows = grain.experimental.FirstFitPackIterDataset(
        documents.to_iter_dataset(), length_struct={"a": 8}, num_packing_bins=3
    )
    batched = rows.random_map(noisy, seed=1).batch(2)
    expected = [batch.tolist() for batch in batched]
    with iter(batched) as alone, iter(batched.mp_prefetch(2)) as spread:
        assert [next(spread).tolist() for _ in range(3)] == expected[:3]
        state = spread.get_state()
        alone.set_state(state)
        assert [batch.tolist() for batch in alone] == expected[3:]
        assert state.keys() == alone.get_state().keys()


@ROWS.of("weights of a mixture")
def _() -> None:
    parts = [grain.MapDataset.source([part]).repeat() for part in (0, 1)]
    mixed = grain.MapDataset.mix(parts, weights=[0.3, 0.7])
    assert {sum(mixed.__getitems__(range(start, start + 10))) for start in (0, 10, 10**6, 10**9)} == {7}


@ROWS.of("weights of datasets with names")
def _() -> None:
    parts = {name: grain.MapDataset.source([name]).repeat() for name in "ba"}
    for mixed in (
        grain.MapDataset.mix(parts, weights={"a": 0.75, "b": 0.25})[:8].to_iter_dataset(),
        grain.IterDataset.mix({name: part.to_iter_dataset() for name, part in parts.items()}, {"a": 0.75, "b": 0.25}),
    ):
        assert "".join(itertools.islice(mixed, 8)).count("a") == 6


@ROWS.of("`batch` after a `map` that returned `None`")
def _() -> None:
    holey = grain.MapDataset.range(4).map(lambda x: None if x == 1 else x)
    with pytest.raises(ValueError, match="no element at position 1"):
        list(holey.batch(2))
    assert [batch.tolist() for batch in holey.to_iter_dataset().batch(2)] == [[0, 2], [3]]


@ROWS.of("last window of a `WindowShuffleMapDataset`")
def _() -> None:
    shuffle = grain.experimental.WindowShuffleMapDataset
    assert all(sorted(shuffle(grain.MapDataset.range(10), window_size=4, seed=s)) == [*range(10)] for s in range(20))


@ROWS.of("`dataset[-1]`")
def _() -> None:
    with pytest.raises(IndexError):
        _ = grain.MapDataset.range(4)[-1]


@ROWS.of("`iter(elastic)` of an `ElasticIterator`")
def _() -> None:
    with grain.experimental.ElasticIterator(grain.MapDataset.range(4), 2, grain.ShardOptions(0, 1)) as elastic:
        assert iter(elastic) is elastic


# ---- Checkpoints ---------------------------------------------------------------------------------------------------


def loader(
    seed: int = 0, num_epochs: int | None = 1, batch_size: int = 4, shards: int = 1, **options: Any
) -> grain.DataLoader:
    """Returns the loader whose states are taken elsewhere."""
    return grain.DataLoader(
        data_source=grain.RangeDataSource(0, 16, 1),
        sampler=shuffled(16, seed, num_epochs=num_epochs),
        shard_options=grain.ShardOptions(0, shards),
        **{"operations": [grain.Batch(batch_size)], **options},
    )


def state_of_step_1(of: grain.DataLoader) -> bytes:
    """Returns the state of a loader after its first batch."""
    with iter(of) as iterator:
        next(iterator)
        return iterator.get_state()


def next_from(state: bytes, of: grain.DataLoader, **options: Any) -> list[int]:
    """Returns the first batch of a loader that resumes from a state."""
    with iter(of) as iterator:
        iterator.set_state(state, **options)
        return list(next(iterator))


@ROWS.of("workers, threads, buffers, `num_epochs`")
def _() -> None:
    state, expected = state_of_step_1(loader()), next_from(state_of_step_1(loader()), loader())
    other = loader(num_epochs=3, worker_count=1, worker_buffer_size=2, read_options=grain.ReadOptions(0, 0))
    assert next_from(state, other) == expected
    with iter(loader(batch_size=5)) as finished:
        list(finished)
        state = finished.get_state()
    assert next_from(state_of_step_1(loader(batch_size=5)), loader(batch_size=5, num_epochs=2))
    with pytest.raises(grain.CheckpointError, match="short or padded"):
        next_from(state, loader(batch_size=5, num_epochs=2))


@ROWS.of("the code of an operation, its parameters being the same")
def _() -> None:
    saved, here = ([grain.transforms.Map(function), grain.Batch(4)] for function in (lambda key: key, lambda key: +key))
    state = state_of_step_1(loader(operations=saved))
    assert next_from(state, loader(operations=here)) == next_from(state, loader(operations=saved))
    with pytest.raises(grain.CheckpointError, match="the code has changed"):
        next_from(state, loader(operations=here), strict=True)


@ROWS.of("number of hosts, at the same global batch size")
def _() -> None:
    state, expected = state_of_step_1(loader()), next_from(state_of_step_1(loader()), loader())
    assert next_from(state, loader(batch_size=2, shards=2)) == expected[:2]
    positive = grain.transforms.Filter(lambda key: key > 0)
    state = state_of_step_1(loader(operations=[positive, grain.Batch(4)], num_epochs=None))
    with pytest.raises(grain.CheckpointError):
        next_from(state, loader(operations=[positive, grain.Batch(2)], num_epochs=None, shards=2))


@ROWS.of("seed, shuffle, source, an operation or its parameters (private ones too), global batch")
def _() -> None:
    state = state_of_step_1(loader())
    negative = [grain.transforms.Map(lambda key: -key), grain.Batch(4)]
    for other, name in ((loader(seed=1), "sampler"), (loader(operations=negative), "operations")):
        with pytest.raises(grain.CheckpointError, match=name):
            next_from(state, other)
        assert len(next_from(state, other, allow={name})) == 4
    with pytest.raises(grain.CheckpointError, match="global_batch"):
        next_from(state, loader(batch_size=2))


@ROWS.of("anything in the bytes of the state")
def _() -> None:
    state = state_of_step_1(loader())
    for place in range(len(state)):
        with pytest.raises(grain.CheckpointError):
            iter(loader()).set_state(state[:place] + bytes([state[place] ^ 1]) + state[place + 1 :])


# ---- From MapDataset to a DataLoader -------------------------------------------------------------------------------


@ROWS.of("`MapDataset.source(source)`")
def _() -> None:
    assert batches(["a", "b"]) == ["a", "b"]


@ROWS.of("`.seed(s)`, `.shuffle(seed=s)`")
def _() -> None:
    order = batches(range(50), sampler=grain.IndexSampler(50, shuffle=True, seed=7, num_epochs=1))
    assert sorted(order) == list(range(50)) != order


@ROWS.of("`.repeat(n)`, `.repeat()`")
def _() -> None:
    assert batches(list("ab"), sampler=grain.IndexSampler(2, num_epochs=3)) == list("ababab")
    endless = grain.DataLoader(data_source=list("ab"), sampler=grain.IndexSampler(2, num_epochs=None))
    with iter(endless) as iterator:
        assert [next(iterator) for _ in range(5)] == list("ababa")


@ROWS.of("`ds[shard_index::shard_count]`")
def _() -> None:
    assert batches(range(7), shard_options=grain.ShardOptions(1, 3)) == [1, 4]


@ROWS.of("`.map(f)`, `.map_with_index(f)`, `.random_map(f)`, `.filter(f)`, `.batch(n)`")
def _() -> None:
    t = grain.transforms
    operations = [
        lambda key: 2 * key,
        t.MapWithIndex(lambda index, key: index + key),
        t.RandomMap(lambda key, rng: key + int(rng.integers(1))),
        t.Filter(lambda key: key != 3),
        t.Batch(2),
    ]
    assert batches(range(4), operations) == [[0, 6], [9]]


@ROWS.of("`.to_iter_dataset(read_options)`")
def _() -> None:
    assert batches(list("ab"), read_options=grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)) == ["a", "b"]


@ROWS.of("`.mp_prefetch(options)`")
def _() -> None:
    assert batches(list("ab"), worker_count=1, worker_buffer_size=2) == ["a", "b"]


@ROWS.of("`ThreadPrefetchIterDataset(ds, m)`")
def _() -> None:
    is_read = threading.Event()

    def read(key: int) -> int:
        is_read.set()
        return key

    with iter(grain.load(range(100), transformations=[read])) as iterator:
        iterator.start_prefetch()
        assert is_read.wait(60)


@ROWS.of("`experimental.device_put(ds, device, device_buffer_size=m)`")
def _() -> None:
    numbers = iter(grain.load(range(4), batch_size=4))
    with grain.device_put(numbers, jax.devices()[0], buffer_size=2) as iterator:
        batch = next(iterator)
    assert isinstance(batch, jax.Array)
    assert batch.tolist() == [0, 1, 2, 3]


@ROWS.of("`ds[i]`")
def _() -> None:
    with iter(grain.load(range(10))) as iterator:
        iterator.seek(7)
        assert next(iterator) == 7


@ROWS.of("`ds.slice(slice(a, b))`, for a split")
def _() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/five.array_record"
        writer = ArrayRecordWriter(path, "group_size:1")
        for key in range(5):
            writer.write(bytes([key]))
        writer.close()
        with grain.ArrayRecordDataSource(f"{path}[1:3]") as source:
            assert batches(source) == [b"\1", b"\2"]
    assert batches(list(range(5))[1:3]) == batches(grain.InMemoryDataSource(np.arange(5)[1:3])) == [1, 2]
