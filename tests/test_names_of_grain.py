"""The rows of docs/coming-from-grain.md about names: each name resolves or is reported missing, and each row holds.

Names are looked up where unmodified programs look: in `grain`, served by millstream. Parameters are compared with those
of Grain 0.2.18.
"""

import importlib
import inspect
import itertools
import json
import operator
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import millstream as grain
from support.documents.document_tables import RowTests, first_cells, rows
from support.files.record_files import write_tfrecord

pytestmark = pytest.mark.third_party

DOCUMENT = Path(__file__).parents[1] / "docs" / "coming-from-grain.md"
SECTIONS = ("Names", "From MapDataset to a DataLoader")
ROWS = RowTests()

FILES = Path(__file__).parent / "support" / "documents"


def lines_of(file: str) -> list[list[str]]:
    """Returns the words of each line of a list that was made from Grain 0.2.18."""
    return [line.split() for line in (FILES / file).read_text().splitlines() if not line.startswith("#")]


SIGNATURES = {name: parameters for name, *parameters in lines_of("grain_signatures.txt")}
"""The parameters of Grain's functions, classes and methods; those after `*` are passed by name alone."""

NOT_ACCEPTED = {
    "grain.DataLoaderIterator": {"validate_state"},
    "grain.experimental.PackAndBatchOperation": {"_cur_batch"},
}
"""Parameters that the document reports missing, or that are private."""

LOOK_UP = """
import json, operator, sys
import millstream
millstream.install_as_grain()
import grain, grain.python

def has(home, name):
    try:
        operator.attrgetter(name)(home)
    except AttributeError:
        return False
    return True

print(json.dumps([has(grain, name) or has(grain.python, name) for name in json.load(sys.stdin)]))
"""


def names_in(cell: str) -> list[str]:
    """Returns the names of Grain in a cell, each with its module if the cell has it."""
    names = []
    module = ""
    for text in re.findall(r"`([^`]+)`", cell):
        if text.endswith("."):
            module = text
        elif not text.startswith("--"):
            name = text.partition("(")[0].removeprefix("grain.")
            names.append(name if "." in name else module + name)
    return names


def parameters_of(name: str) -> list[inspect.Parameter] | None:
    """Returns the parameters of millstream's counterpart of a function, class or method; None if there is none."""
    *module, last = name.replace("grain", "millstream", 1).split(".")
    methods = []
    while True:
        try:
            home = importlib.import_module(".".join(module))
            break
        except ModuleNotFoundError:
            methods.append(module.pop())
    try:
        found = operator.attrgetter(".".join([*reversed(methods), last]))(home)
    except AttributeError:
        return None
    return list(inspect.signature(found).parameters.values())


def values(elements: Any) -> list[Any]:
    unpacked: list[Any] = jax.tree.map(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, list(elements))
    return unpacked


def loaded(source: Any, *operations: Any, **options: Any) -> list[Any]:
    """Returns what a `DataLoader` of one epoch yields, in Grain's long form."""
    sampler = options.pop("sampler", None) or grain.IndexSampler(len(source), grain.NoSharding(), num_epochs=1, seed=0)
    return values(grain.DataLoader(data_source=source, sampler=sampler, operations=operations, **options))


# ---- The tests of the tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", first_cells(DOCUMENT, SECTIONS))
def test_a_row_is_true(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has a test, and holds."""
    monkeypatch.chdir(tmp_path)
    ROWS[row]()


def test_no_row_has_gone() -> None:
    """Each test here belongs to a row that exists."""
    assert ROWS.keys() == set(first_cells(DOCUMENT, SECTIONS))


def test_names_are_there_or_the_row_reports_them_missing() -> None:
    """A program that imports Grain finds each name of each row, unless the row begins with "not there"."""
    listed = [(name, right) for left, right in rows(DOCUMENT, SECTIONS[:1]) for name in names_in(left)]
    known = {
        f"{module}.{name}".removeprefix("grain.").removeprefix("python.")
        for module, name in lines_of("grain_names.txt")
    }
    ended = subprocess.run(
        [sys.executable, "-c", LOOK_UP],
        input=json.dumps([name for name, _ in listed]),
        capture_output=True,
        text=True,
        check=True,
    )

    assert len(listed) > 70
    assert {name for name, _ in listed if name.removeprefix("python.").partition(".py_")[0] not in known} == {
        "IterDataset.mp_prefetch"
    }
    assert {
        name
        for (name, right), is_there in zip(listed, json.loads(ended.stdout), strict=True)
        if is_there == right.startswith("not there")
    } == set()


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_of_grain_are_accepted(name: str) -> None:
    """Each parameter of Grain has its name here, and its position unless it is passed by name alone.

    The first parameter of a method or function is passed by position.
    """
    ours = parameters_of(name)
    if ours is None or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in ours):
        return
    names = [parameter.name for parameter in ours]
    by_position = list(itertools.takewhile("*".__ne__, SIGNATURES[name]))
    first = 2 if by_position[:1] == ["self"] else 1
    missing = NOT_ACCEPTED.get(name, set())

    assert {*SIGNATURES[name][first:]} - {"*"} - missing <= {*names}
    by_position = [name for name in by_position if name not in missing]
    assert names[first : len(by_position)] == by_position[first:]


# ---- Names ---------------------------------------------------------------------------------------------------------


@ROWS.of("`DataLoader`, `DataLoaderIterator`, `load`, `ReadOptions`, `MultiprocessingOptions`, `RecordMetadata`")
def _() -> None:
    loader = grain.load(range(10), num_epochs=1, shuffle=True, seed=1, batch_size=2)
    expected = values(loader)
    iterator = grain.DataLoaderIterator(loader, loader._create_initial_state())
    assert [next(iterator).tolist(), next(iterator).tolist()] == expected[:2]
    assert values(grain.DataLoaderIterator(loader, iterator.get_state())) == expected[2:]
    assert values(grain.DataLoaderIterator(loader, None)) == expected
    with pytest.raises(grain.CheckpointError):
        grain.DataLoaderIterator(loader, b"another")
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        grain.DataLoaderIterator(loader)


@ROWS.of("`samplers.`: `IndexSampler`, `SequentialSampler`, `Sampler`")
def _() -> None:
    shuffled = grain.samplers.IndexSampler(4, grain.NoSharding(), True, 2, 3)
    assert isinstance(shuffled, grain.samplers.Sampler)
    assert sorted(shuffled[position].record_key for position in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert loaded(list("abcd"), sampler=grain.samplers.SequentialSampler(4, grain.NoSharding(), 0)) == list("abcd")


@ROWS.of("`sharding.`: `ShardOptions`, `NoSharding`, `ShardByJaxProcess`")
def _() -> None:
    assert grain.sharding.ShardOptions(1, 2, True) == grain.ShardOptions(1, 2, drop_remainder=True)
    assert (grain.sharding.NoSharding().shard_index, grain.sharding.NoSharding().shard_count) == (0, 1)
    for shard in (grain.sharding.ShardByJaxProcess(), grain.shard_by_jax_process()):
        assert (shard.shard_index, shard.shard_count) == (jax.process_index(), jax.process_count())


@ROWS.of("`transforms.`: `Map`, `MapWithIndex`, `RandomMap`, `Filter`, `Batch`, `Transformation`")
def _() -> None:
    class Negative(grain.transforms.Map):
        def map(self, element: int) -> int:
            return -element

    class Numbered(grain.transforms.MapWithIndex):
        def map_with_index(self, index: int, element: int) -> list[int]:
            return [index, element]

    class Drawn(grain.transforms.RandomMap):
        def random_map(self, element: list[int], rng: np.random.Generator) -> list[int]:
            return [*element, int(rng.integers(5, 7))]

    class Odd(grain.transforms.Filter):
        def filter(self, element: list[int]) -> bool:
            return element[1] % 2 == 1

    operations = [Negative(), Numbered(), Drawn(), Odd(), grain.transforms.Batch(2)]
    assert all(isinstance(operation, grain.transforms.Transformation) for operation in operations)
    (batch,) = loaded(range(4), *operations)
    assert batch[:2] == [[1, 3], [-1, -3]]
    assert {*batch[2]} <= {5, 6}


@ROWS.of("`experimental.FlatMapTransform`")
def _() -> None:
    class Twice(grain.experimental.FlatMapTransform):
        max_fan_out = 2

        def flat_map(self, element: int) -> list[int]:
            return [element, element]

    assert grain.experimental.FlatMapTransform is grain.transforms.FlatMap is grain.FlatMapTransform
    assert loaded(range(2), Twice()) == [0, 0, 1, 1]


@ROWS.of("`sources.`: `ArrayRecordDataSource`, `RangeDataSource`")
def _() -> None:
    grain.convert(grain.MapDataset.source([b"a", b"b"]), "file.array_record")
    assert values(grain.sources.ArrayRecordDataSource("file.array_record")) == [b"a", b"b"]
    assert values(grain.sources.RangeDataSource(1, 7, 2)) == [1, 3, 5]


SHARED_LIST = """
import multiprocessing, os
import millstream

def read(name):
    return list(millstream.InMemoryDataSource(name=name))

if __name__ == "__main__":
    name = f"records-{os.getpid()}"
    source = millstream.sources.SharedMemoryDataSource(elements=[1, "b", None], name=name)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(read(name) + pool.apply(read, (name,)))
    print(list(millstream.load(source, num_epochs=2, worker_count=1)))
    source.close()
    source.unlink()
    print(list(source))
    try:
        read(name)
    except FileNotFoundError:
        print("gone")
"""


@ROWS.of("`sources.SharedMemoryDataSource` (`grain.python.InMemoryDataSource`)")
def _() -> None:
    assert grain.sources.SharedMemoryDataSource is grain.python.InMemoryDataSource is grain.InMemoryDataSource
    assert values(grain.InMemoryDataSource({"x": np.arange(2)})) == [{"x": 0}, {"x": 1}]
    Path("script.py").write_text(SHARED_LIST)
    ended = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["[1, 'b', None, 1, 'b', None]"] * 2 + ["[1, 'b', None]", "gone"]
    assert ended.stderr == ""


@ROWS.of("`sources.RandomAccessDataSource`")
def _() -> None:
    assert grain.sources.RandomAccessDataSource is grain.sources.DataSource
    assert isinstance([0], grain.sources.RandomAccessDataSource)


def saved_and_restored(module: Any, prefix: str) -> list[int]:
    """Returns the batch that follows after a save and a restore of Orbax, by the names of a module."""
    checkpointing = pytest.importorskip("orbax.checkpoint")
    loader = grain.load(range(8), batch_size=2, seed=0)
    handler, save, restore = (getattr(module, prefix + name) for name in ("Handler", "Save", "Restore"))
    with iter(loader) as saved, iter(loader) as restored:
        next(saved)
        checkpointer = checkpointing.Checkpointer(handler())
        checkpointer.save(Path.cwd() / prefix, args=save(saved))
        checkpointer.restore(Path.cwd() / prefix, args=restore(restored))
        return list(next(restored))


@ROWS.of("`checkpoint.`: `CheckpointSave`, `CheckpointRestore`, `CheckpointHandler`")
def _() -> None:
    assert saved_and_restored(grain.checkpoint, "Checkpoint") == [2, 3]


@ROWS.of("`PyGrainCheckpointSave`, `PyGrainCheckpointRestore`, `PyGrainCheckpointHandler`")
def _() -> None:
    assert saved_and_restored(grain.python, "PyGrainCheckpoint") == [2, 3]
    assert grain.python.PyGrainCheckpointSave is grain.checkpoint.CheckpointSave


@ROWS.of("`PyGrainDatasetIterator`")
def _() -> None:
    assert grain.python.PyGrainDatasetIterator is grain.DataLoaderIterator


@ROWS.of("`MapOperation`, `RandomMapOperation`, `FilterOperation`, `BatchOperation`")
def _() -> None:
    older = [
        grain.python.MapOperation(map_function=abs),
        grain.python.RandomMapOperation(random_map_function=lambda element, rng: element + rng.integers(1)),
        grain.python.FilterOperation(condition_function=lambda element: element != 1),
        grain.python.BatchOperation(batch_size=2, drop_remainder=True),
    ]
    kinds = [grain.transforms.Map, grain.transforms.RandomMap, grain.transforms.Filter, grain.Batch]
    assert [type(operation) for operation in older] == kinds
    assert loaded(range(-2, 3), *older) == [[2, 0]]


def note_worker(index: int, count: int) -> None:
    Path(f"worker {index} of {count}").touch()


@ROWS.of("`IterDataset.mp_prefetch(worker_init_fn=f)`")
def _() -> None:
    # Replacements of dead workers: tests/loader/processes/test_worker_init.py.
    numbers = grain.MapDataset.range(8).to_iter_dataset()
    spread = numbers.mp_prefetch(grain.MultiprocessingOptions(2), worker_init_fn=note_worker)
    assert list(spread) == [*range(8)]
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["worker 0 of 2", "worker 1 of 2"]


@ROWS.of("`DataLoader(enable_profiling=...)`")
def _() -> None:
    timelines = []
    for enabled in (False, True):
        loader = grain.load(range(8), num_epochs=1, batch_size=2, enable_profiling=enabled)
        list(loader)
        assert loader.profile()
        timelines.append("<svg" in loader.report("report.html").read_text())
    assert timelines == [False, True]


@ROWS.of("`config.py_dataset_visualization_output_dir`, `config.py_debug_mode`")
def _() -> None:
    # What they show: tests/test_config.py.
    for name, setting, default in (("py_dataset_visualization_output_dir", "", None), ("py_debug_mode", True, False)):
        grain.config.update(name, setting)
        assert getattr(grain.config, name) == setting
        grain.config.update(name, default)
    with pytest.raises(ValueError, match="py_debug_mode"):
        grain.config.update("py_other", 1)


@ROWS.of("`monitoring`, absl flags `--grain_*`")
def _() -> None:
    flags = pytest.importorskip("absl.flags")
    assert not [name for name in flags.FLAGS if name.startswith("grain")]
    assert grain.load(range(4), num_epochs=1).metrics()


@ROWS.of("`Record`")
def _() -> None:
    record = grain.python.Record(metadata=grain.RecordMetadata(index=0, record_key=3), data="text")
    assert (record.metadata.record_key, record.data) == (3, "text")
    assert loaded(["a"], str.upper) == ["A"]


@ROWS.of("`Operation`")
def _() -> None:
    def packed(records: Any) -> Any:
        yield from records

    with pytest.raises(TypeError, match="FlatMap"):
        loaded(range(4), packed)


@ROWS.of("`multiprocessing.`: `SharedMemoryArray`, `SharedMemoryArrayMetadata`")
def _() -> None:
    assert loaded(range(2), lambda key: np.full(3, key), worker_count=1) == [[0, 0, 0], [1, 1, 1]]


@ROWS.of("`__version_info__`")
def _() -> None:
    assert tuple(map(int, grain.__version__.split(".")[:2])) >= (0, 1)


@ROWS.of("`MapDataset`, `IterDataset`, `DatasetIterator`")
def _() -> None:
    stream = grain.MapDataset.range(10).seed(3).shuffle().map(abs).to_iter_dataset().batch(4)
    with iter(stream) as iterator:
        assert isinstance(stream, grain.IterDataset)
        assert isinstance(iterator, grain.DatasetIterator)
        assert sorted(key for batch in iterator for key in batch.tolist()) == [*range(10)]


DOCUMENTS = [{"a": np.full(length, length)} for length in (1, 2, 3, 2)]


@ROWS.of(
    "`experimental.`: `FirstFitPackIterDataset`, `BestFitPackIterDataset`, `ConcatThenSplitIterDataset`, "
    "`WindowShuffleIterDataset`, `RebatchIterDataset`, `batch_and_pad`"
)
def _() -> None:
    documents = grain.MapDataset.source(DOCUMENTS).to_iter_dataset()
    for pack in (grain.experimental.FirstFitPackIterDataset, grain.experimental.BestFitPackIterDataset):
        packed = list(pack(documents, length_struct={"a": 4}, num_packing_bins=2, shuffle_bins=False))
        assert packed[0].keys() == {"a", "a_segment_ids", "a_positions"}
        assert sorted(int(token) for row in packed for token in row["a"] if token) == [1, 2, 2, 2, 2, 3, 3, 3]
    cut = grain.experimental.ConcatThenSplitIterDataset(documents, length_struct={"a": 4})
    assert values(row["a"] for row in cut) == [[1, 2, 2, 3], [3, 3, 2, 2]]
    window = grain.experimental.WindowShuffleIterDataset(documents, window_size=4, seed=0)
    assert sorted(len(document["a"]) for document in window) == [1, 2, 2, 3]
    numbers = grain.MapDataset.range(7).to_iter_dataset().batch(2)
    rebatched = grain.experimental.RebatchIterDataset(numbers, batch_size=3, drop_remainder=True)
    assert values(rebatched) == [[0, 1, 2], [3, 4, 5]]
    assert grain.experimental.batch_and_pad([1, 2], batch_size=3, pad_value=9).tolist() == [1, 2, 9]
    with pytest.raises(ValueError, match="length"):
        grain.experimental.ConcatThenSplitIterDataset(documents, length_struct={"a": 4, "b": 5})


@ROWS.of("`experimental.`: `TFRecordIterDataset`, `ParquetIterDataset`, `InterleaveIterDataset`")
def _() -> None:
    filesystem = pytest.importorskip("fsspec").filesystem("file")
    write_tfrecord(Path("file.tfrecord"), [b"a", b"b"])
    for name, start in (("1.parquet", 0), ("2.parquet", 2)):
        pyarrow.parquet.write_table(pa.table({"x": [start, start + 1]}), name)
    here = Path.cwd()
    assert list(grain.experimental.TFRecordIterDataset("file.tfrecord")) == [b"a", b"b"]
    rows_of_both = grain.experimental.ParquetIterDataset(["1.parquet", "2.parquet"])
    assert [row["x"] for row in rows_of_both] == [0, 2, 1, 3]
    of_fsspec = grain.experimental.ParquetIterDataset(f"{here}/2.parquet", filesystem=filesystem)
    assert [row["x"] for row in of_fsspec] == [2, 3]
    parts = [grain.MapDataset.range(start, start + 2).to_iter_dataset() for start in (0, 10)]
    assert list(grain.experimental.InterleaveIterDataset(parts, cycle_length=2)) == [0, 10, 1, 11]


@ROWS.of("`experimental.ElasticIterator`")
def _() -> None:
    # Other numbers of shards and workers: tests/dataset/grain_compat/test_elastic.py.
    numbers = grain.MapDataset.range(8)
    with grain.experimental.ElasticIterator(numbers, 4, grain.ShardOptions(0, 1)) as whole:
        next(whole)
        state = whole.get_state()
    halves = []
    for index in range(2):
        with grain.experimental.ElasticIterator(numbers, 4, grain.ShardOptions(index, 2)) as half:
            half.set_state(state)
            halves += next(half).tolist()
    assert sorted(halves) == [4, 5, 6, 7]


@ROWS.of(
    "`experimental.`: `pick_performance_config`, `DatasetOptions`, `WithOptionsIterDataset`, "
    "`ThreadPrefetchIterDataset`, `multithread_prefetch`"
)
def _() -> None:
    own = grain.experimental
    numbers = grain.MapDataset.range(6).to_iter_dataset()
    picked = own.pick_performance_config(
        numbers, ram_budget_mb=16, max_workers=1, max_buffer_size=2, samples_to_check=2
    )
    options = own.DatasetOptions(filter_warn_threshold_ratio=0.5, filter_raise_threshold_ratio=1.0)
    for stream in (
        numbers.mp_prefetch(picked.multiprocessing_options),
        own.WithOptionsIterDataset(numbers, options),
        own.ThreadPrefetchIterDataset(numbers, prefetch_buffer_size=2),
        own.multithread_prefetch(numbers, 2, 2),
    ):
        assert list(stream) == [*range(6)]
    failing = numbers.map(lambda key: 6 // key)
    assert list(own.WithOptionsIterDataset(failing, own.DatasetOptions(on_error="skip"))) == [6, 3, 2, 1, 1]


@ROWS.of("`experimental.ThreadPrefetchDatasetIterator`")
def _() -> None:
    numbers = grain.MapDataset.range(3).to_iter_dataset()
    assert list(grain.experimental.ThreadPrefetchIterDataset(numbers, prefetch_buffer_size=1)) == [0, 1, 2]


@ROWS.of("`experimental.`: the other names")
def _() -> None:
    # What they do: tests/dataset/grain_compat.
    all_names = {name for module, name in lines_of("grain_names.txt") if module == "grain.experimental"}
    assert {name for name in all_names if not hasattr(grain.experimental, name)} == {"ThreadPrefetchDatasetIterator"}


@ROWS.of("`python.`, `constants.`, `multiprocessing.MultiprocessingOptions`")
def _() -> None:
    for module in ("python", "constants"):
        names = {name for home, name in lines_of("grain_names.txt") if home == f"grain.{module}"}
        ours = {name for name in names if hasattr(getattr(grain, module), name)}
        assert names - ours == ({"Operation", "SharedMemoryArray"} if module == "python" else set())
        assert "META_FEATURES" in ours
    assert not hasattr(grain, "META_FEATURES")
    assert importlib.import_module("millstream.multiprocessing").MultiprocessingOptions is grain.MultiprocessingOptions


@ROWS.of("`transforms.`: `DatasetSelectionMap`, `Transformations`")
def _() -> None:
    class Alternate(grain.transforms.DatasetSelectionMap):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[int, int]:
            return index % 2, index // 2

    parts = [grain.MapDataset.source(list(text)) for text in ("ab", "xy")]
    assert "".join(grain.MapDataset.select_from_datasets(parts, Alternate())) == "axby"
    assert grain.transforms.Transformations is not None


@ROWS.of("`experimental.PackAndBatchOperation`")
def _() -> None:
    operation = grain.experimental.PackAndBatchOperation(length_struct={"a": 4}, batch_size=2)
    packed = loaded(DOCUMENTS, operation)
    assert sorted(token for batch in packed for row in batch[0]["a"] for token in row if token) == [
        1,
        2,
        2,
        2,
        2,
        3,
        3,
        3,
    ]


@ROWS.of("`experimental.`: `get_element_spec`, `ShapeDtypeStruct`, `ShapeDtypeStructProtocol`")
def _() -> None:
    class Source(list[Any]):
        element_spec = grain.experimental.ShapeDtypeStruct((2,), np.dtype(np.int32))

    class Double(grain.transforms.Map):
        def map(self, element: Any) -> Any:
            return 2.0 * element

        def output_spec(self, input_spec: Any) -> Any:
            return grain.experimental.ShapeDtypeStruct(input_spec.shape, np.dtype(np.float64))

    stream = grain.MapDataset.source(Source([np.zeros(2, np.int32)] * 3)).map(Double()).to_iter_dataset()
    stream = stream.batch(3, drop_remainder=True)
    spec = grain.experimental.get_element_spec(stream)
    assert isinstance(spec, grain.experimental.ShapeDtypeStructProtocol)
    assert (spec.shape, spec.dtype) == ((3, 2), np.float64)
    with iter(stream) as iterator:
        assert "float64" in str(iterator.trace())


@ROWS.of("`transforms.TfRandomMap`")
def _() -> None:
    drawn = loaded(range(3), grain.transforms.RandomMap(lambda element, rng: element + rng.uniform(0, 0.5)))
    assert [int(element) for element in drawn] == [0, 1, 2]


# ---- From MapDataset to a DataLoader -------------------------------------------------------------------------------

NUMBERS = grain.MapDataset.range(10)


@ROWS.of("`MapDataset.source(source)`")
def _() -> None:
    assert list(grain.MapDataset.source(list("abc"))) == loaded(list("abc"))


@ROWS.of("`.seed(s)`, `.shuffle(seed=s)`")
def _() -> None:
    sampler = grain.IndexSampler(10, shuffle=True, seed=3, num_epochs=1)
    for order in (list(NUMBERS.seed(3).shuffle()), list(NUMBERS.shuffle(seed=3)), loaded(NUMBERS, sampler=sampler)):
        assert sorted(order) == [*range(10)] != order


@ROWS.of("`.repeat(n)`, `.repeat()`")
def _() -> None:
    assert list(NUMBERS.repeat(2)) == loaded(NUMBERS, sampler=grain.IndexSampler(10, num_epochs=2))
    endless = grain.DataLoader(data_source=NUMBERS, sampler=grain.IndexSampler(10, num_epochs=None))
    with iter(endless) as iterator:
        assert list(itertools.islice(iterator, 25)) == list(itertools.islice(NUMBERS.repeat(), 25))


@ROWS.of("`ds[shard_index::shard_count]`")
def _() -> None:
    assert list(NUMBERS[1::2]) == loaded(NUMBERS, shard_options=grain.ShardOptions(1, 2))


@ROWS.of("`.map(f)`, `.map_with_index(f)`, `.random_map(f)`, `.filter(f)`, `.batch(n)`")
def _() -> None:
    def draw(element: int, rng: np.random.Generator) -> int:
        return element + int(rng.integers(1))

    chain = NUMBERS.map(abs).map_with_index(max).random_map(draw, seed=0).filter(bool).to_iter_dataset().batch(4)
    operations = [
        abs,
        grain.transforms.MapWithIndex(max),
        grain.transforms.RandomMap(draw),
        grain.transforms.Filter(bool),
        grain.Batch(4),
    ]
    assert values(chain) == loaded(NUMBERS, *operations) == [[1, 2, 3, 4], [5, 6, 7, 8], [9]]


@ROWS.of("`.to_iter_dataset(read_options)`")
def _() -> None:
    reading = grain.ReadOptions(2, 4)
    assert list(NUMBERS.to_iter_dataset(reading)) == loaded(NUMBERS, read_options=reading)


@ROWS.of("`.mp_prefetch(options)`")
def _() -> None:
    spread = NUMBERS.to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(1, 2))
    assert list(spread) == loaded(NUMBERS, worker_count=1, worker_buffer_size=2)


@ROWS.of("`ThreadPrefetchIterDataset(ds, m)`")
def _() -> None:
    stream = NUMBERS.to_iter_dataset()
    ahead = grain.experimental.ThreadPrefetchIterDataset(stream, prefetch_buffer_size=2)
    assert list(ahead) == list(stream) == loaded(NUMBERS)


@ROWS.of("`experimental.device_put(ds, device, device_buffer_size=m)`")
def _() -> None:
    device = jax.devices()[0]
    stream = NUMBERS.to_iter_dataset().batch(5)
    placed = grain.experimental.device_put(stream, device, device_buffer_size=2)
    with grain.device_put(iter(grain.load(NUMBERS, num_epochs=1, batch_size=5)), device, buffer_size=2) as batches:
        assert values(placed) == values(batches) == values(stream)


@ROWS.of("`ds[i]`")
def _() -> None:
    with iter(grain.load(NUMBERS)) as iterator:
        iterator.seek(7)
        assert next(iterator) == NUMBERS[7]


@ROWS.of("`ds.slice(slice(a, b))`, for a split")
def _() -> None:
    grain.convert(grain.MapDataset.source([b"a", b"b", b"c"]), "file.array_record")
    letters = ["a", "b", "c"]
    assert list(grain.MapDataset.source(letters).slice(slice(1, 3))) == loaded(letters[1:3]) == ["b", "c"]
    assert loaded(grain.ArrayRecordDataSource("file.array_record[1:3]")) == [b"b", b"c"]
