"""The claims of docs/coming-from-grain.md are true: names, differences in behaviour, and what resumes.

The rows of names and spellings have their tests in test_names_of_grain.py.
"""

import importlib
import inspect
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream as grain
from support.documents.document_tables import RowTests, first_cells

pytestmark = pytest.mark.third_party

DOCUMENT = Path(__file__).parents[1] / "docs" / "coming-from-grain.md"
ROWS = RowTests()
CLAIMS = ("What differs, and why", "Checkpoints")
"""The sections whose rows have a test each."""

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
    ),
}


GRAIN_NAMES = [
    (line.split()[0], line.split()[1])
    for line in (Path(__file__).parent / "support" / "documents" / "grain_names.txt").read_text().splitlines()
    if not line.startswith("#")
]
"""The public names of Grain 0.2.18, each with its module."""

ABSENT = {
    *("grain.Record", "grain.__version_info__", "grain.monitoring"),
    "grain.experimental.ThreadPrefetchDatasetIterator",
    *("grain.multiprocessing.SharedMemoryArray", "grain.multiprocessing.SharedMemoryArrayMetadata"),
    *("grain.python.Operation", "grain.python.SharedMemoryArray"),
    "grain.transforms.TfRandomMap",
}
"""Those that are not where Grain has them; the document says what to write instead."""


class AddNoise(grain.RandomMapTransform):
    """A random operation, as one writes it for Grain."""

    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
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
    return set(inspect.signature(function).parameters)


# ---- The tests of the tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", first_cells(DOCUMENT, CLAIMS))
def test_a_row_is_true(row: str) -> None:
    """Each row of each table has a test, and what it says holds."""
    ROWS[row]()


def test_no_row_has_gone() -> None:
    """Each test here belongs to a row that exists."""
    assert ROWS.keys() == set(first_cells(DOCUMENT, CLAIMS))


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


@ROWS.of("a sampler of more records than the source has")
def _() -> None:
    with pytest.raises(ValueError, match="record keys up to 3, but data_source has 3 records"):
        grain.DataLoader(data_source=range(3), sampler=shuffled(4))


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


@ROWS.of("order of a mixture that is not shuffled, weights 1 and 2")
def _() -> None:
    parts = [grain.MapDataset.source([part]).repeat() for part in (0, 1)]
    first = [*grain.MapDataset.mix(parts, weights=[1, 2]).__getitems__(range(300))]
    assert first[:6] == [1, 0, 1, 1, 0, 1]
    assert all(abs(sum(first[:count]) - count * 2 / 3) < 0.5 for count in range(300))


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
    with pytest.raises(ValueError, match="missing element at position 1"):
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
