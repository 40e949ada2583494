"""The types of the public names: mypy and pyright agree with every line, and find every marked error."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, assert_type

import jax
import numpy as np
from numpy.typing import NDArray

import millstream
from millstream import experimental
from millstream.checkpoint import CheckpointRestore, CheckpointSave

if TYPE_CHECKING:
    from millstream.samplers import Sampler, VectorisedSampler
    from millstream.sources import DataSource


class Example(TypedDict):
    """A decoded record."""

    text: str
    length: int


class Decode(millstream.Map[bytes, Example]):
    """Has the types of what it gets and what it returns."""

    def map(self, element: bytes) -> Example:
        """Returns the text and its length."""
        return {"text": element.decode(), "length": len(element)}


class Jitter(millstream.RandomMap[int, float]):
    """Draws."""

    def random_map(self, element: int, rng: np.random.Generator) -> float:
        """Returns a number nearby."""
        return element + rng.random()


class Numbers(millstream.DatasetIterator[int]):
    """An iterator of one's own, whose `set_state` takes a state alone."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves."""


class Squares:
    """A source of one's own."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, record_key: int, /) -> int:
        return record_key**2


class Backwards:
    """A sampler of one's own."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, position: int, /) -> millstream.RecordMetadata:
        return millstream.RecordMetadata(position, 9 - position, None)


def lengths(examples: Sequence[Example]) -> NDArray[np.int64]:
    """Makes a batch."""
    return np.array([example["length"] for example in examples])


def sources() -> None:
    """Records have their types, in sources of the library and of one's own."""
    lines = millstream.TextLineDataSource("a.txt")
    records: DataSource[bytes] = millstream.ArrayRecordDataSource(["a", Path("b")])
    rows: DataSource[dict[str, str]] = millstream.CsvDataSource("a.csv", columns=["name"])
    assert_type(lines[0], str)
    assert_type(records[0], bytes)
    assert_type(rows[0], dict[str, str])
    assert_type(millstream.MegatronDataSource("a")[0], NDArray[Any])
    assert_type(millstream.RangeDataSource(0, 10)[0], int)
    assert_type(millstream.ParquetDataSource("a.parquet").unit_sizes, NDArray[np.int64])
    assert_type(millstream.WindowDataSource(["a", "b"], 2).unit_sizes, NDArray[np.int64] | None)
    with millstream.TFRecordDataSource("a.tfrecord") as opened:
        assert_type(opened[0], bytes)
    own: DataSource[int] = Squares()
    words: DataSource[str] = ["a", "b"]
    assert_type(own[0], int)
    assert_type(words[0], str)


def parts() -> None:
    """A part of a source is a dataset."""
    assert_type(millstream.split(["a", "b"], {"train": 0.5}, seed=0), dict[str, millstream.MapDataset[Any]])


def samplers() -> None:
    """Orders of the library and of one's own are samplers."""
    index: VectorisedSampler = millstream.IndexSampler(10, shuffle=True, seed=0)
    own: Sampler = Backwards()
    mixture = millstream.MixtureSampler({"a": millstream.IndexSampler(10)}, {"a": 1.0})
    units: VectorisedSampler = millstream.HierarchicalSampler([5, 5], window_units=1, seed=0, keys=[1, 7])
    buckets: VectorisedSampler = millstream.BucketSampler([3, 5], [8], global_batch_size=2)
    assert_type(buckets.length, int | None)
    drawn = millstream.WeightedSampler([0.5, 2], seed=0)
    assert_type(drawn.reweighted(10, np.ones(2)), millstream.WeightedSampler)
    balanced: VectorisedSampler = millstream.BalancedSampler(own, costs=[1] * 10, global_batch_size=4, parts=2)
    rows = millstream.PackingSampler([3, 5], row_length=8)
    assert_type(index.record_keys(0, 4), NDArray[np.int64])
    assert_type(units.length, int | None)
    assert_type(balanced[0].rng, np.random.Generator | None)
    assert_type(rows.segments(0, 1).elements, NDArray[np.int64])
    assert_type(len(millstream.SequentialSampler(10)), int)
    assert_type(own[0], millstream.RecordMetadata)
    assert_type(own[0].record_key, int)
    assert_type(mixture.reweighted(10, {"a": 2}), millstream.MixtureSampler)
    order = millstream.IndexSampler(3)
    assert_type(mixture.reweighted(10, {"a": 2, "b": 1}, samplers={"b": order}), millstream.MixtureSampler)
    with iter(millstream.load({"a": [1], "b": [2]}, weights=[1, 1], batch_size=2)) as run:
        run.skip(3)
        run.reweight({"a": 1, "b": 2})
        assert_type(run.record_keys(0), NDArray[np.int64])
        assert_type(run.composition(0, 1).as_dict(), dict[Any, dict[str, Any]])


def loaders() -> None:
    """A loader, its iterators and its states."""
    loader = millstream.load(
        millstream.TextLineDataSource("a.txt"),
        shuffle=True,
        seed=0,
        transformations=[str.split, millstream.Filter[list[str]](lambda words: len(words) > 1)],
        batch_size=8,
        worker_count=2,
        worker_init_fn=lambda index, count: index + count,
    )
    assert_type(loader, millstream.DataLoader)
    assert_type(len(loader), int)
    assert_type(loader.record_keys(3), NDArray[np.int64])
    with iter(loader) as batches:
        assert_type(batches, millstream.DataLoaderIterator)
        assert_type(batches.step, int)
        assert_type(batches.epoch, int | None)
        assert_type(batches.get_state(), bytes)
        batches.set_state(b"", allow={"sampler"}, strict=True)
        batch: dict[str, NDArray[np.int64]] = next(batches)
        assert_type(batch["a"], NDArray[np.int64])
    with millstream.device_put(iter(loader), jax.devices()[0]) as placed:
        assert_type(placed, millstream.DeviceIterator)
        assert_type(placed.step, int)
    assert_type(loader.metrics(), dict[str, float])
    assert_type(millstream.prometheus_text({"train": loader}), str)
    assert_type(millstream.lengths_of(["a b"], [str.split]), NDArray[np.int64])
    assert_type(CheckpointSave(iter(loader)), CheckpointSave)
    assert_type(CheckpointRestore(iter(loader), allow={"sampler"}), CheckpointRestore)


def operations() -> None:
    """Operations know what they get and what they return, made from functions too."""
    length: millstream.Map[str, int] = millstream.Map(len)
    words: millstream.FlatMap[str, str] = millstream.FlatMap(str.split, max_fan_out=8)
    assert_type(length.map("abc"), int)
    assert_type(list(words.flat_map("a b")), list[str])
    assert_type(Decode().map(b"abc"), Example)
    # What is made from a lambda may do anything with its element: nobody has said what that is.
    assert_type(millstream.Filter(lambda element: element["length"] > 1), millstream.Filter[Any])
    assert_type(millstream.Map(lambda element: element["text"]), millstream.Map[Any, Any])
    millstream.load(
        [b"a"],
        transformations=[
            Decode(),
            lambda element: element["text"],
            millstream.RandomMap(lambda element, rng: element[rng.integers(len(element)) :]),
            millstream.FlatMap(lambda element: element.split(), max_fan_out=8),
            millstream.OnlyFor("web", lambda element: element["text"]),
            millstream.Batch(8),
            lambda batch: {**batch, "mask": batch["tokens"] > 0},
        ],
    )


def random_access_chains() -> None:
    """Elements keep their types through a chain that is read at random."""
    files = millstream.MapDataset.source(millstream.ArrayRecordDataSource("a"))
    examples = files.shuffle(seed=0).map(Decode())
    numbers = examples.map(lambda example: example["length"])
    assert_type(files, millstream.MapDataset[bytes])
    assert_type(examples, millstream.MapDataset[Example])
    assert_type(numbers, millstream.MapDataset[int])
    assert_type(numbers.random_map(Jitter(), seed=0), millstream.MapDataset[float])
    assert_type(numbers.random_map(lambda value, rng: value + rng.random(), seed=0)[0], float)
    assert_type(numbers.filter(lambda value: value > 1).repeat(2)[:10], millstream.MapDataset[int])
    assert_type(numbers.map_with_index(lambda index, value: (index, value)), millstream.MapDataset[tuple[int, int]])
    assert_type(examples.flat_map(lambda example: example["text"].split(), 8), millstream.MapDataset[str])
    assert_type(examples.batch(8, batch_fn=lengths), millstream.MapDataset[NDArray[np.int64]])
    assert_type(examples[0], Example)
    assert_type(examples.pipe(len), int)
    assert_type(numbers.shard(0, 2).window_shuffle(8, seed=0), millstream.MapDataset[int])
    assert_type(numbers.zip(examples), millstream.MapDataset[tuple[Any, ...]])
    assert_type(millstream.MapDataset.range(10), millstream.MapDataset[int])
    assert_type(millstream.MapDataset.mix([numbers, numbers], [0.5, 0.5]), millstream.MapDataset[int])
    assert_type(experimental.ZipMapDataset([numbers, examples]), experimental.ZipMapDataset)
    batch: dict[str, NDArray[np.int64]] = examples.batch(8)[0]
    assert_type(batch["length"], NDArray[np.int64])


def streamed_chains() -> None:
    """Elements keep their types through a chain that is read in order."""
    stream = millstream.MapDataset.source(millstream.ArrayRecordDataSource("a")).map(Decode()).to_iter_dataset()
    assert_type(stream, millstream.IterDataset[Example])
    assert_type(stream.map(lambda example: example["length"]), millstream.IterDataset[int])
    assert_type(stream.filter(lambda example: example["length"] > 3), millstream.IterDataset[Example])
    assert_type(stream.flat_map(lambda example: example["text"].split(), 8), millstream.IterDataset[str])
    assert_type(stream.map(lambda example: example["length"]).random_map(Jitter()), millstream.IterDataset[float])
    assert_type(stream.map_with_index(lambda index, _example: index), millstream.IterDataset[int])
    assert_type(stream.batch(8, batch_fn=lengths).mp_prefetch(2), millstream.IterDataset[NDArray[np.int64]])
    assert_type(stream.take(8).skip(1).repeat(2).cache().window_shuffle(4), millstream.IterDataset[Example])
    assert_type(stream.concatenate(stream).options(on_error="skip", max_errors=3), millstream.IterDataset[Example])
    assert_type(stream.zip(stream, strict=False), millstream.IterDataset[tuple[Any, ...]])
    assert_type(stream.batch(8, batch_fn=lengths).rebatch(4), millstream.IterDataset[NDArray[np.int64]])
    assert_type(millstream.IterDataset.interleave([stream], cycle_length=2), millstream.IterDataset[Any])
    assert_type(millstream.IterDataset.source(["a", "b"]).map(len), millstream.IterDataset[int])
    assert_type(millstream.IterDataset.mix({"a": stream, "b": stream}), millstream.IterDataset[Example])
    assert_type(stream.pipe(lambda dataset: dataset.map(Decode.__name__.join)), millstream.IterDataset[str])
    with iter(stream.seed(0).prefetch(millstream.ReadOptions(num_threads=2))) as iterator:
        assert_type(iterator, millstream.DatasetIterator[Example])
        assert_type(next(iterator), Example)
        assert_type(iterator.get_state(), dict[str, Any])
        iterator.set_state({}, allow={"stream"}, strict=True)
    stream.batch(8, pad_remainder=True).mp_prefetch(2)


def tools() -> None:
    """Calls that compute something once, write, check, or share a batch over a mesh."""
    source = millstream.ArrayRecordDataSource("a")
    assert_type(millstream.surviving_keys(source, [millstream.Filter[bytes](bool)]), NDArray[np.int64])
    assert_type(millstream.convert(source, "b.array_record", num_shards=2), list[str])
    assert_type(millstream.split([1, 2], {"train": 1.0}, seed=0), dict[str, millstream.MapDataset[Any]])
    decode = millstream.decode_example({"label": millstream.FixedLengthFeature((), np.int64)})
    assert_type(decode, millstream.Map[Any, Any])
    assert_type(millstream.encode_example({"label": 1}), bytes)
    millstream.CachedDataSource(source, "cache", max_bytes=1 << 30)
    millstream.testing.check_source(source)
    millstream.testing.check_sampler(millstream.WeightedSampler([1.0, 2.0], seed=0))
    millstream.testing.check_operation(Decode(), [b"a"])
    millstream.testing.check_iterator(lambda: iter(millstream.load([1], batch_size=1)), limit=3)
    mesh = jax.make_mesh((1,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    shard = millstream.ShardBySharding(sharding, 8, drop_remainder=True)
    assert_type(shard, millstream.ShardBySharding)
    millstream.load(source, shard_options=shard, global_batch_size=8, worker_init_fn=lambda _, __: None)


def errors() -> None:
    """Each line is an error that both checkers find: where one does not, it complains of the comment."""
    numbers = millstream.MapDataset.range(10)
    millstream.load([1], batchsize=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    millstream.IndexSampler("ten")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    millstream.HierarchicalSampler([5], window_units=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    millstream.Batch(2, batch_fn=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Decode().map("text")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    numbers.to_iter_dataset().prefetch(4)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    numbers.map(Decode())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    numbers.map(str.upper)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    numbers.to_iter_dataset().map(str.upper)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    millstream.MapTransfrom(len)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    millstream.checkpoint.Nonsense(3)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    records: DataSource[str] = [b"a"]  # type: ignore[list-item]  # pyright: ignore[reportAssignmentType]
    del records
