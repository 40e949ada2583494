"""The datasets with Grain's names: what they yield, where they run, how they resume, what they refuse."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

import millstream as grain
from millstream.transforms import BestFitPack, ConcatThenSplit, FirstFitPack, FlatMap, WindowShuffle
from support.files.record_files import write_tfrecord

LENGTH = 8


def documents(count: int = 23) -> grain.MapDataset[Any]:
    """Returns documents of 1 to 8 tokens, each of the document's number."""
    return grain.MapDataset.range(1, count + 1).map(document)


def document(number: int) -> dict[str, Any]:
    return {"tokens": np.full(number * 5 % LENGTH + 1, number, np.int32)}


def write_parquet(folder: Path, sizes: Sequence[int]) -> list[str]:
    """Writes files whose rows say their file and number, two rows a row group; returns their paths."""
    paths = []
    for file, size in enumerate(sizes):
        table = pa.table({"file": np.full(size, file), "row": np.arange(size)})
        pq.write_table(table, folder / f"{file}.parquet", row_group_size=2)
        paths.append(str(folder / f"{file}.parquet"))
    return paths


def write_numbers(folder: Path, count: int) -> Path:
    return write_tfrecord(folder / "a.tfrecord", [b"%d" % number for number in range(count)])


def split(number: int) -> list[int]:
    return [number] * (number % 3)


STREAMS: dict[str, Callable[[Path], Any]] = {
    "first_fit": lambda _: grain.experimental.FirstFitPackIterDataset(
        documents(), length_struct={"tokens": LENGTH}, num_packing_bins=3, meta_features=(), max_sequences_per_bin=2
    ),
    "best_fit": lambda _: grain.experimental.BestFitPackIterDataset(
        documents().to_iter_dataset(),
        length_struct={"tokens": LENGTH},
        num_packing_bins=3,
        padding_struct={"tokens": -1},
    ),
    "concat_then_split": lambda _: grain.experimental.ConcatThenSplitIterDataset(
        documents().to_iter_dataset(), length_struct={"tokens": LENGTH}
    ),
    "window_shuffle": lambda _: grain.experimental.WindowShuffleIterDataset(
        grain.MapDataset.range(11), window_size=4, seed=1
    ),
    "rebatch": lambda _: grain.experimental.RebatchIterDataset(
        grain.MapDataset.range(11).batch(3).to_iter_dataset(), batch_size=4
    ),
    "flat_map": lambda _: grain.experimental.FlatMapIterDataset(
        grain.MapDataset.range(11).to_iter_dataset(), grain.transforms.FlatMap(split, 2)
    ),
    "flat_map_at_random": lambda _: grain.experimental.FlatMapMapDataset(
        grain.MapDataset.range(11), grain.transforms.FlatMap(split, 2)
    ).to_iter_dataset(),
    "tfrecord": lambda folder: grain.experimental.TFRecordIterDataset(write_numbers(folder, 7)),
    "parquet": lambda folder: grain.experimental.ParquetIterDataset(write_parquet(folder, [3, 5, 2])),
    "options": lambda _: grain.experimental.WithOptionsIterDataset(
        grain.MapDataset.range(5).to_iter_dataset(), grain.experimental.DatasetOptions(on_error="skip")
    ),
    "thread": lambda _: grain.experimental.ThreadPrefetchIterDataset(
        grain.IterDataset.mix([documents(4).to_iter_dataset(), documents(5).to_iter_dataset()]).map(dict),
        prefetch_buffer_size=3,
    ),
}


def plain(element: Any) -> Any:
    """Returns an element without arrays, for `==`."""
    if isinstance(element, dict):
        return {name: plain(value) for name, value in element.items()}
    return element.tolist() if isinstance(element, np.ndarray | np.generic) else element


@pytest.mark.parametrize("name", STREAMS)
def test_each_dataset_resumes_after_each_element(name: str, tmp_path: Path) -> None:
    """Its states restore on fresh iterators, through JSON, at every step; all have the same keys and types."""
    grain.experimental.assert_equal_output_after_checkpoint(STREAMS[name](tmp_path))


PACKED: dict[str, Any] = {
    "length_struct": {"tokens": LENGTH, "number": 4},
    "num_packing_bins": 3,
    "seed": 7,
    "meta_features": ("number",),
    "pack_alignment_struct": {"tokens": 2},
    "padding_struct": {"tokens": -1},
    "max_sequences_per_bin": 2,
    "overflow": "drop",
}
GROUPED = {"length_struct": {"tokens": 4}, "num_packing_bins": 2, "shuffle_bins_group_by_feature": "tokens"}
SPLIT: dict[str, Any] = {
    "length_struct": {"tokens": 4, "number": 4},
    "meta_features": ("number",),
    "bos_handling": grain.experimental.BOSHandling.REPLACE_FIRST_TOKEN_WITH_BOS,
    "bos_features": ("tokens",),
    "bos_token_id": 99,
}


@pytest.mark.parametrize(
    ("name", "operation", "options"),
    [
        ("FirstFitPackIterDataset", FirstFitPack, PACKED),
        ("FirstFitPackIterDataset", FirstFitPack, {"length_struct": {"tokens": 4}, "num_packing_bins": 2, "seed": 0}),
        ("BestFitPackIterDataset", BestFitPack, PACKED),
        ("ConcatThenSplitIterDataset", ConcatThenSplit, SPLIT),
        ("ConcatThenSplitIterDataset", ConcatThenSplit, {"length_struct": {"tokens": LENGTH}}),
        ("WindowShuffleIterDataset", WindowShuffle, {"window_size": 4, "seed": 3}),
        ("FlatMapIterDataset", lambda transform: transform, {"transform": FlatMap(lambda one: [one] * 3, 3)}),
    ],
)
def test_an_adapter_is_its_operation(name: str, operation: Any, options: dict[str, Any]) -> None:
    """Grain's arguments are those of the operation: the elements are the same, whatever they are, and so are errors."""
    numbered = documents().map(lambda one: one | {"number": int(one["tokens"][0])})
    stream = numbered.to_iter_dataset()
    if options.get("overflow") is None and "Pack" in name:
        options = {**options, "overflow": "truncate"}

    adapted = [plain(element) for element in getattr(grain.experimental, name)(numbered, **options)]

    assert adapted == [plain(element) for element in stream.apply(operation(**options))]
    assert len(adapted) > 5


def test_other_adapters_yield_what_they_say(tmp_path: Path) -> None:
    """Batches keep rows in order; children follow each other; files are read; threads of a MapDataset stay."""
    children = [number for number in range(11) for _ in range(number % 3)]
    batches = grain.MapDataset.range(11).batch(3)

    assert [batch.tolist() for batch in STREAMS["rebatch"](tmp_path)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    dropped = grain.experimental.RebatchIterDataset(batches, 4, drop_remainder=True)
    assert [batch.tolist() for batch in dropped] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(STREAMS["flat_map"](tmp_path)) == list(STREAMS["flat_map_at_random"](tmp_path)) == children
    assert list(STREAMS["tfrecord"](tmp_path)) == [b"%d" % number for number in range(7)]
    assert list(STREAMS["options"](tmp_path)) == list(range(5))
    with iter(grain.experimental.ThreadPrefetchIterDataset(documents(), prefetch_buffer_size=2)) as iterator:
        assert "up to 16 threads" in repr(iterator)


@pytest.mark.parametrize(
    "sizes", [[4], [3, 5, 2], [1, 1, 1, 7], [2] * 20 + [5], [9] + [1] * 17, [2, 0] + [1] * 17 + [0, 3]]
)
def test_parquet_files_are_read_in_turn(sizes: list[int], tmp_path: Path) -> None:
    """The order is that of interleaving the files, 16 at a time; files without rows take no turns."""
    paths = write_parquet(tmp_path, sizes)
    apart = [grain.experimental.ParquetIterDataset(path) for path, size in zip(paths, sizes, strict=True) if size]
    in_turn = list(grain.experimental.ParquetIterDataset(paths))

    assert in_turn == list(grain.experimental.InterleaveIterDataset(apart, cycle_length=16))
    assert next(iter(grain.experimental.ParquetIterDataset(paths, columns=["row"], filesystem=None))) == {"row": 0}


@pytest.mark.parametrize("kind", ["fsspec", "pyarrow"])
def test_parquet_files_of_another_file_system(kind: str, tmp_path: Path) -> None:
    """Read by paths that it alone knows, they give the same rows, in workers and after a resume; mistakes are named."""
    paths = write_parquet(tmp_path, [3, 5])
    inner: Any = LocalFileSystem()
    named = [f"file://{path}" for path in paths]
    if kind == "pyarrow":
        inner = pa.fs.SubTreeFileSystem(str(tmp_path), pa.fs.LocalFileSystem())
        named = ["0.parquet", "1.parquet"]
    dataset = grain.experimental.ParquetIterDataset(named, filesystem=inner, columns=["row"])
    expected = [{"row": row["row"]} for row in grain.experimental.ParquetIterDataset(paths)]

    assert list(dataset.mp_prefetch(1)) == expected
    grain.experimental.assert_equal_output_after_checkpoint(dataset)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.parquet"):
        grain.experimental.ParquetIterDataset("nowhere.parquet", filesystem=inner)
    with pytest.raises(TypeError, match="cache"):
        grain.experimental.ParquetIterDataset("0.parquet", filesystem=inner, cache=None, cache_size=3)


def test_a_dataset_of_one_s_own_may_be_derived_from_these(tmp_path: Path) -> None:
    """Its `__iter__` counts, at the end of a chain, within one and below another; and may call its parent's."""

    class Twice(grain.experimental.TFRecordIterDataset):
        def __iter__(self) -> Any:
            return itertools.chain.from_iterable((record, record) for record in super().__iter__())

    twice = Twice(write_numbers(tmp_path, 2))

    assert list(twice) == [b"0", b"0", b"1", b"1"]
    assert list(twice.map(int).mp_prefetch(0)) == [0, 0, 1, 1]
    assert list(grain.experimental.LimitIterDataset(twice, 3)) == [b"0", b"0", b"1"]


@pytest.mark.parametrize(("count", "pad_value"), [(1, 0), (3, -7), (4, 5)])
def test_a_batch_is_filled_up(count: int, pad_value: int) -> None:
    """Every leaf has batch_size rows: the elements, then the value, in the dtype of the leaf."""
    values = [{"a": np.int16(number), "b": np.full(2, number, np.float32)} for number in range(count)]
    batch = grain.experimental.batch_and_pad(values, batch_size=4, pad_value=pad_value)

    assert batch["a"].tolist() == [*range(count)] + [pad_value] * (4 - count)
    assert batch["b"].tolist() == [[row, row] for row in batch["a"].tolist()]
    assert (batch["a"].dtype, batch["b"].dtype) == (np.int16, np.float32)


class Unlimited(grain.FlatMapTransform):
    """Splits a number into as many as it says, without a limit."""

    def flat_map(self, element: int) -> list[int]:
        return [element] * element


@pytest.mark.parametrize("worker_count", [0, 1])
def test_a_flat_map_needs_no_limit_in_a_stream(worker_count: int) -> None:
    """Its children draw as those of one with a limit of 2**20; a MapDataset, whose positions need it, refuses it."""
    limited = Unlimited()
    limited.max_fan_out = 2**20
    numbers = grain.MapDataset.range(5)
    draw: Any = grain.transforms.RandomMap(lambda element, rng: (element, int(rng.integers(1000))))
    options: dict[str, Any] = {"num_epochs": 1, "seed": 1, "worker_count": worker_count}
    of_limited, of_unlimited = (
        [
            list(grain.experimental.FlatMapIterDataset(numbers, operation).seed(1).apply(draw)),
            list(grain.load(range(5), transformations=[operation, draw], **options)),
        ]
        for operation in (limited, Unlimited())
    )
    assert of_limited == of_unlimited
    assert [[element for element, _ in stream] for stream in of_limited] == [[1, 2, 2, 3, 3, 3, 4, 4, 4, 4]] * 2
    for make in (numbers.flat_map, numbers.apply):
        with pytest.raises(TypeError, match="Unlimited needs max_fan_out, an integer"):
            make(Unlimited())


def test_an_element_has_at_most_a_million_children() -> None:
    """A flat_map without a limit that never ends is an error, at its turn."""
    endless = grain.transforms.FlatMap(itertools.count, 2**20)
    del endless.max_fan_out
    with pytest.raises(ValueError, match="at most max_fan_out = 1048576 elements, got more"):
        next(iter(grain.load(range(5), transformations=[endless], read_options=grain.ReadOptions(0, 0))))


@pytest.mark.parametrize("limit", [None, 4, 100])
def test_iterators_can_seek(limit: int | None) -> None:
    """Any position can be sought, up to the end or limit, and a state taken there resumes."""
    dataset = grain.MapDataset.range(20).to_iter_dataset().batch(3)
    with iter(dataset if limit is None else dataset.take(limit)) as iterator:
        expected = [batch.tolist() for batch in iterator]
        end = min(limit or 7, 7)
        assert iterator.step == len(expected) == end
        for index in (1, 3, 0, end):
            iterator.seek(index)
            state = iterator.get_state()
            assert iterator.step == index
            assert [batch.tolist() for batch in iterator] == expected[index:]
            iterator.set_state(state)
            assert [batch.tolist() for batch in iterator] == expected[index:]
        with pytest.raises(IndexError, match=f"step must be between 0 and {end}"):
            iterator.seek(end + 1)


def test_positions_of_a_shuffle() -> None:
    """The function `index_shuffle` is the order of shuffle."""
    order = [grain.experimental.index_shuffle(index, max_index=8, seed=4, rounds=4) for index in range(9)]

    assert order == list(grain.MapDataset.range(9).shuffle(seed=4))


def test_a_configuration_fits_into_the_budget() -> None:
    """The larger the elements, the fewer workers and the less read-ahead; never none."""
    dataset = grain.MapDataset.range(9).map(lambda _: np.zeros(1 << 18, np.uint8))

    def picked(budget: float) -> Any:
        return grain.experimental.pick_performance_config(ds=dataset, ram_budget_mb=budget, max_workers=3)

    assert picked(0.1).multiprocessing_options.num_workers == 1
    assert picked(0.1).read_options.prefetch_buffer_size == 1
    assert picked(10).read_options.prefetch_buffer_size == 40
    assert 1 <= picked(1000).multiprocessing_options.num_workers <= 3
    assert picked(float("inf")).read_options.prefetch_buffer_size == 1000


class Lies(grain.DatasetIterator[int]):
    """Counts to 3; its states forget every second number."""

    count = 0

    def __next__(self) -> int:
        self.count += 1
        if self.count > 3:
            raise StopIteration
        return self.count

    def get_state(self) -> dict[str, Any]:
        return {"count": self.count // 2}

    def set_state(self, state: dict[str, Any]) -> None:
        self.count = 2 * state["count"]


class Liar(grain.IterDataset[int]):
    def __iter__(self) -> Any:
        return Lies()


def test_a_dataset_that_does_not_resume_is_found_out() -> None:
    """The check of one's own datasets fails for one whose states lie, and for one without elements; loaders pass it."""
    for operations in ([grain.Batch(3)], [grain.FlatMap(lambda x: [x] * (x % 3), max_fan_out=2)]):
        loader = grain.load(range(8), num_epochs=1, shuffle=True, seed=0, transformations=operations)
        grain.experimental.assert_equal_output_after_checkpoint(loader)
    with pytest.raises(AssertionError, match="After 1 elements"):
        grain.experimental.assert_equal_output_after_checkpoint(Liar())
    with pytest.raises(ValueError, match="yields nothing"):
        grain.experimental.assert_equal_output_after_checkpoint(grain.MapDataset.range(0))


@pytest.mark.parametrize(
    ("name", "arguments", "error", "words"),
    [
        ("FlatMapIterDataset", {"parent": documents(), "transform": split}, TypeError, "max_fan_out"),
        ("ParquetIterDataset", {"path": "x", "filesystem": 3}, TypeError, "filesystem"),
        ("TFRecordIterDataset", {"path": "/nowhere"}, FileNotFoundError, "nowhere"),
        ("ThreadPrefetchIterDataset", {"parent": documents(), "prefetch_buffer_size": -1}, ValueError, "at least 0"),
        (
            "ConcatThenSplitIterDataset",
            {"parent": documents(), "length_struct": {"tokens": 4}, "split_full_length_features": False},
            ValueError,
            "FirstFitPackIterDataset",
        ),
        ("BestFitPackIterDataset", {"parent": documents(), **GROUPED}, ValueError, "shuffle_bins=False"),
        ("PackAndBatchOperation", {"length_struct": {"x": {"a": 4}}, "batch_size": 2}, TypeError, "must be an integer"),
        ("DatasetOptions", {"filter_raise_threshold_ratio": 1.5}, ValueError, "a share above 0 and up to 1"),
        ("WithOptionsIterDataset", {"parent": documents(), "options": None}, TypeError, "DatasetOptions"),
        ("device_put", {"ds": documents(), "device": None, "cpu_buffer_size": -1}, ValueError, "^cpu_buffer_size must"),
        ("WindowShuffleMapDataset", {"parent": 3, "window_size": 2, "seed": 0}, TypeError, "a MapDataset, got int"),
        ("index_shuffle", {"index": 1, "max_index": 3, "seed": 0, "rounds": 5}, ValueError, "even"),
        ("index_shuffle", {"index": 4, "max_index": 3, "seed": 0, "rounds": 4}, ValueError, "at most max_index"),
        ("batch_and_pad", {"values": [], "batch_size": 2}, ValueError, "got 0"),
        ("batch_and_pad", {"values": [1, 2, 3], "batch_size": 2}, ValueError, "got 3"),
        ("pick_performance_config", {"ds": documents(), "ram_budget_mb": 0}, ValueError, "above 0"),
        ("pick_performance_config", {"ds": documents(), "ram_budget_mb": "8"}, TypeError, "must be a number, got '8'"),
    ],
)
def test_mistakes_are_errors_where_they_are_made(
    name: str, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    """Invalid arguments are errors when the dataset is built, and name the remedy."""
    with pytest.raises(error, match=words):
        getattr(grain.experimental, name)(**arguments)
