"""Objects of the real Grain are accepted by their shape, and legacy names and keywords work.

The classes here stand for those of Grain: they have the methods and fields, and no base class of this library.
"""

import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest

import millstream
from support.streams import equal_streams


@dataclasses.dataclass(frozen=True)
class Add:
    """A map of a library."""

    amount: int = 1

    def map(self, element: int) -> int:
        return element + self.amount


class Noise:
    def random_map(self, element: int, rng: np.random.Generator) -> int:
        return element + int(rng.integers(100))


class Numbered:
    def map_with_index(self, index: int, element: int) -> tuple[int, int]:
        return index, element


class Even:
    def filter(self, element: int) -> bool:
        return element % 2 == 0


class Twice:
    """A flat map of a library."""

    max_fan_out = 2

    def flat_map(self, element: int) -> list[int]:
        return [element, element]


def options(name: str, *fields: Any, **kind: Any) -> Any:
    """Returns a class of options, whose fields are names, types and defaults."""
    return dataclasses.make_dataclass(name, fields, **kind)


Batch = options("Batch", ("batch_size", int), ("drop_remainder", bool, False), ("batch_fn", Any, None), frozen=True)
ReadOptions = options("ReadOptions", ("num_threads", int, 16), ("prefetch_buffer_size", int, 500), slots=True)
MultiprocessingOptions = options(
    "MultiprocessingOptions",
    ("num_workers", int, 0),
    ("per_worker_buffer_size", int, 1),
    ("enable_profiling", bool, False),
    slots=True,
)
ShardOptions = options(
    "ShardOptions", ("shard_index", int, 0), ("shard_count", int, 1), ("drop_remainder", bool, False), frozen=True
)


NoSharding = type("NoSharding", (ShardOptions,), {})

OURS: dict[type, Callable[[Any], Any]] = {
    Add: lambda given: millstream.transforms.Map(given.map),
    Noise: lambda given: millstream.transforms.RandomMap(given.random_map),
    Numbered: lambda given: millstream.transforms.MapWithIndex(given.map_with_index),
    Even: lambda given: millstream.transforms.Filter(given.filter),
    Twice: lambda given: millstream.transforms.FlatMap(given.flat_map, 2),
    Batch: lambda given: millstream.Batch(given.batch_size, given.drop_remainder, given.batch_fn),
}
"""For each foreign class, its counterpart."""

FOREIGN: list[Any] = [Add(3), Noise(), Even(), Twice(), Numbered(), Batch(4, drop_remainder=True)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_takes_foreign_operations_and_options(workers: int) -> None:
    """The batches are those of the same loader with this library's own operations and options, workers included."""

    def loader(operations: list[Any], module: Any, shard: Any) -> millstream.DataLoader:
        return millstream.DataLoader(
            data_source=range(40),
            sampler=millstream.IndexSampler(40, shuffle=True, seed=1, num_epochs=1, shard_options=shard),
            operations=operations,
            shard_options=shard,
            read_options=module.ReadOptions(num_threads=2, prefetch_buffer_size=20),
            worker_count=workers,
        )

    for given, ours, theirs in (
        ([Add(3), Noise(), Batch(4)], millstream.ShardOptions(1, 2), ShardOptions(1, 2)),
        (FOREIGN, millstream.NoSharding(), NoSharding()),
    ):
        own = loader([OURS[type(operation)](operation) for operation in given], millstream, ours)
        foreign = loader(given, types.SimpleNamespace(ReadOptions=ReadOptions), theirs)
        expected = list(own)

        assert equal_streams(list(foreign), expected)
        assert len(expected) > 2
        assert foreign.read_options == own.read_options
        assert foreign.shard_options.shard_index == own.shard_options.shard_index


def test_chains_take_foreign_operations_and_options() -> None:
    """Each method of a chain takes the operation of its kind, and `apply` all of them."""
    numbers: Any = millstream.MapDataset.range(12).seed(2)

    def chain(of: Callable[[Any], Any], reading: Any, workers: Any) -> Any:
        dataset = numbers.map(of(Add(2))).random_map(of(Noise())).filter(of(Even())).flat_map(of(Twice()))
        stream = (
            dataset.to_iter_dataset(reading).map(of(Add(1))).flat_map(of(Twice())).apply([of(Numbered()), of(Batch(3))])
        )
        return stream.prefetch(reading).mp_prefetch(workers)

    ours = chain(
        lambda given: OURS[type(given)](given), millstream.ReadOptions(0, 0), millstream.MultiprocessingOptions(0)
    )
    foreign = chain(lambda given: given, ReadOptions(0, 0), MultiprocessingOptions(0))

    expected = list(ours)
    assert equal_streams(list(foreign), expected)
    assert len(expected) > 3
    for dataset in (numbers, numbers.to_iter_dataset()):
        with pytest.raises(TypeError, match=r"Use \.apply"):
            dataset.filter(Add())


def test_attributes_of_foreign_operations_belong_to_the_stream() -> None:
    """A state is refused if an attribute of a foreign operation differs, and accepted if none does."""

    def iterator(amount: int) -> Any:
        return iter(millstream.load(range(12), transformations=[cast("Any", Add(amount))], batch_size=2))

    with iterator(1) as saved, iterator(1) as same, iterator(2) as other:
        next(saved)
        state = saved.get_state()
        same.set_state(state)
        assert next(same).tolist() == next(saved).tolist()
        with pytest.raises(millstream.CheckpointError, match=r"saved \{'amount': 1\}, here \{'amount': 2\}"):
            other.set_state(state)


def test_foreign_operations_are_described_by_their_class() -> None:
    """A loader's text has the class and its fields."""
    assert "Map(Add(amount=7))" in repr(millstream.load(range(4), transformations=[cast("Any", Add(7))]))


def test_ambiguous_and_old_operations_are_errors_that_say_what_to_write() -> None:
    """Objects of two kinds, operations of iterators, and options without the fields are refused at construction."""

    class Both:
        def map(self, element: int) -> int:
            return element

        def filter(self, element: int) -> bool:
            return bool(element)

    class OfIterator:
        def __call__(self, records: Iterator[Any]) -> Iterator[Any]:
            yield from records

    with pytest.raises(TypeError, match=r"Both has map and filter: pass the function itself, such as operation\.map"):
        millstream.load(range(4), transformations=[cast("Any", Both())])
    with pytest.raises(TypeError, match=r"which yields\. Use FlatMap"):
        millstream.load(range(4), transformations=[OfIterator()])
    with pytest.raises(TypeError, match="read_options must be of type ReadOptions"):
        millstream.load(range(4), read_options=MultiprocessingOptions())
    with pytest.raises(ValueError, match="num_threads must be at least 0"):
        millstream.load(range(4), read_options=ReadOptions(num_threads=-1))


def test_legacy_names_and_keywords() -> None:
    """The older operations, `elements`, `Record` and a `RecordMetadata` without a key have Grain's keywords."""
    old = millstream.python
    older: list[Any] = [
        old.MapOperation(map_function=lambda element: element + 1),
        old.RandomMapOperation(random_map_function=lambda element, rng: element + 0 * rng.integers(5)),
        old.FilterOperation(condition_function=lambda element: element > 1),
        old.BatchOperation(batch_size=2, drop_remainder=True),
    ]
    source = old.InMemoryDataSource(elements=[0, 1, 2])
    loader = millstream.DataLoader(
        data_source=source, sampler=millstream.IndexSampler(3, seed=0, num_epochs=1), operations=older
    )
    assert [batch.tolist() for batch in loader] == [[2, 3]]
    source.close()
    source.unlink()
    assert source[2] == 2
    with pytest.raises(ValueError, match="records, or a name"):
        old.InMemoryDataSource()
    record = old.Record(millstream.RecordMetadata(index=3), "text")
    assert repr(record.metadata) == "RecordMetadata(index=3, record_key=None, rng=None)"
    assert record.data == "text"


def test_stats_of_own_datasets_are_accepted() -> None:
    """`self._stats` has Grain's methods in datasets and iterators of users, which change no element."""

    class OwnMap(millstream.MapDataset[int]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, position: Any) -> Any:
            with self._stats.record_self_time(num_elements=1, offset_ns=3.0):
                return self._stats.record_output_spec(self._parent[position] * 10)

    class OwnIterator(millstream.DatasetIterator[int]):
        def __next__(self) -> int:
            element = next(self._parent)
            with self._stats.record_self_time():
                return int(self._stats.record_bytes_produced(self._stats.record_bytes_consumed(element)))

        def get_state(self) -> dict[str, Any]:
            return {"parent": self._parent.get_state()}

        def set_state(self, state: dict[str, Any]) -> None:
            self._parent.set_state(state["parent"])

    class OwnStream(millstream.IterDataset[int]):
        def __iter__(self) -> OwnIterator:
            self._stats.report()
            return OwnIterator(iter(self._parent))

    assert list(OwnStream(OwnMap(millstream.MapDataset.range(3)).to_iter_dataset())) == [0, 10, 20]


def test_images_of_pillow_stack_as_arrays() -> None:
    """A batch of Pillow's images is the batch of their arrays; images of several sizes are refused."""
    image = pytest.importorskip("PIL.Image")
    arrays = [np.full((4, 6, 3), shade, np.uint8) for shade in range(4)]
    pictures = [{"image": image.fromarray(array)} for array in arrays]

    (batch,) = millstream.load(pictures, num_epochs=1, batch_size=4)

    assert np.array_equal(batch["image"], np.stack(arrays))
    assert batch["image"].dtype == np.uint8
    pictures[1]["image"] = image.fromarray(np.zeros((2, 2, 3), np.uint8))
    with pytest.raises(millstream.StackError, match="shape"):
        list(millstream.load(pictures, num_epochs=1, batch_size=4))
