"""The arguments and attributes of a DataLoader, and one stream for all kinds of sources and samplers."""

import copy
import dataclasses
import io
import itertools
import operator
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tqdm import tqdm

import millstream
from millstream.core import tree
from millstream.samplers import IndexSampler
from millstream.sharding import NoSharding, ShardOptions
from millstream.transforms import Batch, Filter, Map, PaddedBatch, Transformation
from support.draw.random_pipelines import AddIndex, DropMultiples, Jitter, Pipeline, Scale, pipelines
from support.faults.user_faults import Unread
from support.laws import loader_of
from support.streams import comparable, drain, equal_streams

INLINE = millstream.ReadOptions(num_threads=0)


def loader_with(**changes: Any) -> millstream.DataLoader:
    arguments = {"data_source": range(10), "sampler": IndexSampler(10, num_epochs=1), "read_options": INLINE}
    return millstream.DataLoader(**(arguments | changes))  # type: ignore[arg-type]  # wrong ones are the point


def load_with(**changes: Any) -> millstream.DataLoader:
    """Returns a loader made the short way, with some arguments changed."""
    arguments = {"source": range(10), "num_epochs": 1, "read_options": INLINE}
    return millstream.load(**(arguments | changes))  # type: ignore[arg-type]  # wrong ones are the point


POSITIONALLY: Any = millstream
"""For calls that no type checker lets pass."""
SHARDED = IndexSampler(10, ShardOptions(0, 2))
PADDED = Batch(3, pad_remainder=True)

# Each wrong argument, with the words that its error must have: the name, the rule, what was given, what to do.
WRONG_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ({"data_source": 7}, TypeError, ("data_source", "len(source) and source[key]", "got int", "A list")),
    ({"data_source": {1, 2}}, TypeError, ("data_source", "got set")),
    ({"sampler": None}, TypeError, ("sampler", "__getitem__(position)", "NoneType")),
    ({"sampler": IndexSampler(11)}, ValueError, ("sampler", "keys up to 10,", "0 to 9", "num_records=len(source)")),
    ({"sampler": IndexSampler(2, keys=[3, 10])}, ValueError, ("keys up to 10,", "created for this source")),
    ({"operations": abs}, TypeError, ("operations", "a list", "abs", "operations=[...]")),
    ({"operations": "ab"}, TypeError, ("operations", "a list", "'ab'")),
    ({"operations": [abs, 3]}, TypeError, ("operation", "a function of one element", "got 3", "operations[1]")),
    ({"operations": [Scale]}, TypeError, ("an instance", "the class Scale", "Scale(...)", "operations[0]")),
    ({"worker_count": -1}, ValueError, ("worker_count", "at least 0", "-1")),
    ({"worker_count": 1.5}, TypeError, ("worker_count", "an integer", "1.5", "float")),
    ({"worker_buffer_size": 0}, ValueError, ("worker_buffer_size", "at least 1", "0")),
    ({"shard_options": (0, 2)}, TypeError, ("shard_options", "ShardOptions", "(0, 2)", "tuple")),
    ({"read_options": 4}, TypeError, ("read_options", "ReadOptions", "4", "int")),
    ({"operations": [abs, Jitter()]}, ValueError, ("operations[1], Jitter", "the sampler has no seed", "seed=0")),
    (
        {"sampler": SHARDED, "shard_options": ShardOptions(1, 2)},
        ValueError,
        ("shard_index=1", "to the DataLoader only"),
    ),
    ({"sampler": SHARDED, "shard_options": NoSharding()}, ValueError, ("NoSharding", "differs", "shard_count=2")),
    ({"operations": [Batch(2), PADDED]}, ValueError, ("must be the only Batch", "operations[0, 1]", "in a Map")),
    (
        {"operations": [abs, PADDED], "shard_options": ShardOptions(0, 2, drop_remainder=True)},
        ValueError,
        ("operations[1] has pad_remainder=True", "drop_remainder=True, which leaves some out", "choose one"),
    ),
    # Arguments of other loaders.
    ({"batch_size": 4}, TypeError, ("DataLoader has no argument 'batch_size'", "millstream.load(source, batch_size=")),
    ({"shuffle": True}, TypeError, ("load(source, shuffle=True, seed=0)", "DataLoader(..., sampler=IndexSampler(")),
    ({"collate_fn": list}, TypeError, ("millstream.load(source, batch_fn=...)",)),
    ({"drop_last": True}, TypeError, ("millstream.load(source, drop_remainder=True)",)),
    ({"prefetch": 4}, TypeError, ("'prefetch': batches are prefetched anyway",)),
    ({"dataset": [1]}, TypeError, ("'dataset': use data_source.",)),
    ({"transforms": []}, TypeError, ("use operations=[...].",)),
    ({"pin_memory": True}, TypeError, ("millstream.device_put(iter(loader))",)),
    ({"worker_cuont": 1}, TypeError, ("did you mean 'worker_count'?",)),
]
WRONG_ARGUMENTS_OF_LOAD: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ({"source": None}, TypeError, ("data_source", "len(source)", "NoneType")),
    ({"transformations": abs}, TypeError, ("transformations", "a list", "abs", "transformations=[...]")),
    ({"transformations": [None]}, TypeError, ("operation", "got None", "operations[0]")),
    ({"shuffle": True}, ValueError, ("A shuffle", "a seed", "seed=None")),
    ({"shuffle": 1}, TypeError, ("shuffle", "True or False", "1")),
    ({"seed": -1}, ValueError, ("seed", "between 0 and 2**64 - 1", "-1")),
    ({"seed": 0.5}, TypeError, ("seed", "integer", "0.5")),
    ({"num_epochs": 0}, ValueError, ("num_epochs", "at least 1", "None", "0")),
    ({"batch_size": 0}, ValueError, ("batch_size", "at least 1", "0")),
    ({"batch_size": 2, "drop_remainder": "no"}, TypeError, ("drop_remainder", "True or False", "'no'")),
    ({"batch_fn": tuple}, ValueError, ("batch_fn needs a batch_size, got batch_size=None",)),
    ({"drop_remainder": True}, ValueError, ("drop_remainder needs a batch_size, got batch_size=None",)),
    ({"stop": "all_exhausted"}, ValueError, ("stop must be left out without sources by name", "'all_exhausted'")),
    ({"timeout": 4}, TypeError, ("load has no argument 'timeout': use stall_timeout.",)),
    ({"collate_fn": list}, TypeError, ("use batch_fn.",)),
    ({"drop_last": True}, TypeError, ("use drop_remainder.",)),
    ({"transforms": []}, TypeError, ("use transformations=[...].",)),
    ({"sampler": None}, TypeError, ("use DataLoader(data_source=..., sampler=..., operations=[...]).",)),
    ({"batchsize": 4}, TypeError, ("did you mean 'batch_size'?",)),
]
WRONG_READ_OPTIONS: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ({"num_threads": -1}, ValueError, ("num_threads must be at least 0, got -1",)),
    ({"num_threads": 2.0}, TypeError, ("num_threads must be an integer, got 2.0 of type float",)),
    ({"prefetch_buffer_size": -1}, ValueError, ("prefetch_buffer_size must be at least 0, got -1",)),
    ({"prefetch_buffer_size": None}, TypeError, ("must be an integer, got None of type NoneType",)),
    ({"max_buffer_bytes": 0}, ValueError, ("max_buffer_bytes must be at least 1, or None, got 0",)),
]


def text_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize(
    ("make", "changes", "kind", "words"),
    [
        *((loader_with, *case) for case in WRONG_ARGUMENTS),
        *((load_with, *case) for case in WRONG_ARGUMENTS_OF_LOAD),
        *((millstream.ReadOptions, *case) for case in WRONG_READ_OPTIONS),
        (
            lambda: POSITIONALLY.DataLoader([1], 4),
            {},
            TypeError,
            ("too many positional arguments", "load(source, shuf"),
        ),
        (
            lambda: POSITIONALLY.load([1], 4),
            {},
            TypeError,
            ("too many positional arguments", "load(source, batch_size="),
        ),
    ],
)
def test_each_wrong_argument_has_its_own_error(
    make: Callable[..., object], changes: dict[str, Any], kind: type[Exception], words: tuple[str, ...]
) -> None:
    """Construction refuses every wrong argument, and says which it is, the rule, what was given and what to do."""
    with pytest.raises(kind) as caught:
        make(**changes)
    assert type(caught.value) is kind
    assert [word for word in words if word not in text_of(caught.value)] == []


def test_numpy_integers_are_integers() -> None:
    """Counts, seeds, steps and shards may be numpy's integers: the stream and its state are those of Python's."""

    def streams(integer: Callable[[int], Any]) -> tuple[list[Any], bytes, list[int], Any]:
        options: dict[str, Any] = {"num_epochs": 2, "seed": 7, "batch_size": 4, "worker_count": 0}
        loader = millstream.load(
            range(40),
            shuffle=True,
            shard_options=ShardOptions(integer(1), integer(2)),
            transformations=[Jitter()],
            read_options=millstream.ReadOptions(integer(0), integer(10)),
            **{name: integer(value) for name, value in options.items()},
        )
        iterator = iter(loader)
        iterator.seek(integer(3))
        keys = loader.record_keys(integer(3)).tolist()
        return [comparable(batch) for batch in iterator], iterator.get_state(), keys, loader.read_options

    assert streams(np.int64) == streams(np.uint8) == streams(int)


def test_a_shard_is_found_where_it_is_given() -> None:
    """The loader's shard counts, else the sampler's, else there is none; equal ones may be given twice."""
    shard = ShardOptions(1, 2)
    with_shard, without = IndexSampler(10, shard, num_epochs=1), IndexSampler(10, num_epochs=1)

    for sampler, options in ((with_shard, None), (without, shard), (with_shard, ShardOptions(1, 2))):
        loader = loader_with(sampler=sampler, shard_options=options)
        assert loader.shard_options == shard
        assert list(loader) == [1, 3, 5, 7, 9]
    assert loader_with(shard_options=None).shard_options == NoSharding()


def test_length_is_known_or_says_why_not() -> None:
    """`len` of a loader or iterator is a TypeError with the reason if it is not known; both are true and for tqdm."""
    for options, reason in (
        ({"num_epochs": None}, r"it is endless\. Pass num_epochs to the sampler, or to \.repeat\(\)"),
        ({"transformations": [DropMultiples(2)]}, r"the number of outputs depends on operations\[0\], "),
    ):
        loader = load_with(**options)
        for name, one in (("DataLoader", loader), ("iterator", iter(loader))):
            with pytest.raises(TypeError, match=rf"This {name} has no len\(\): {reason}"):
                len(one)
            assert one
            assert tqdm(one, file=io.StringIO()).total is None
            assert operator.length_hint(one, 7) == 7
    empty = load_with(batch_size=11, drop_remainder=True)
    assert empty
    assert iter(empty)


def test_the_length_of_an_iterator_is_what_is_left() -> None:
    """`len(iterator)` is the number of batches left: it counts down to 0 and follows every seek and resume."""
    loader = load_with(batch_size=3)
    iterator, resumed = iter(loader), iter(loader)
    lengths = [len(iterator)]
    for _ in iterator:
        lengths.append(len(iterator))
        if len(lengths) == 3:
            resumed.set_state(iterator.get_state())

    assert lengths == [len(loader), 3, 2, 1, 0]
    assert operator.length_hint(resumed) == tqdm(resumed, file=io.StringIO()).total == 2
    assert [batch.tolist() for batch in resumed] == [[6, 7, 8], [9]]
    resumed.seek(1)
    assert (len(resumed), next(resumed).tolist()) == (3, [3, 4, 5])
    assert repr(resumed) == "<DataLoaderIterator at step 2, running, shard 0 of 1>"


@pytest.mark.parametrize("shard_count", [1, 2])
def test_the_epoch_is_that_of_the_next_batch(shard_count: int) -> None:
    """`epoch` is the epoch of the next batch, from 0 to the number of epochs at the end."""
    shard = ShardOptions(0, shard_count)
    iterator = iter(load_with(num_epochs=3, batch_size=shard.local_batch_size(4), shard_options=shard))

    # Batches of 4 of 10 records begin at the positions 0, 4, 8, 12, …
    assert [iterator.epoch, *(iterator.epoch for _ in iterator)] == [0, 0, 0, 1, 1, 2, 2, 2, 3]
    iterator.seek(5)
    assert iterator.epoch == 2


def test_the_epoch_with_a_filter_is_that_of_what_is_not_used_up() -> None:
    """A Filter drops elements, and the epochs pass all the same."""
    kept = Filter(lambda number: number == 3)
    iterator = iter(load_with(source=range(4), num_epochs=3, transformations=[kept]))

    assert [(next(iterator), iterator.epoch) for _ in range(3)] == [(3, 1), (3, 2), (3, 3)]


def flattened(values: Sequence[Any]) -> NDArray[np.int64]:
    """Returns all numbers of some elements: a batch that keeps every record key, however nested its elements are."""
    return np.concatenate([np.ravel(value) for value in values])


@given(pipelines(st.builds(Batch, st.integers(1, 6), st.booleans(), st.just(flattened))))
@settings(deadline=None, max_examples=100)
def test_record_keys_are_those_of_the_batch(pipeline: Pipeline) -> None:
    """`record_keys(step)` of every step, the tail of every shard included, is what an identity pipeline delivers."""
    loader = loader_of(pipeline)
    batches = (batch.batch[batch.mask] if isinstance(batch, PaddedBatch) else batch for batch in loader)
    delivered = [np.ravel(batch).tolist() for batch in batches]

    assert [loader.record_keys(step).tolist() for step in range(len(loader))] == delivered
    rule = f"between 0 and {len(loader) - 1}, the last batch" if len(loader) else "this DataLoader yields no batch"
    for step in (-1, len(loader)):
        with pytest.raises(IndexError, match=rule):
            loader.record_keys(step)


def test_record_keys_of_an_endless_loader_reach_far() -> None:
    """Any step of an endless order can be asked about, up to the last position that 63 bits can number."""
    loader = load_with(num_epochs=None, batch_size=4)
    last = (1 << 63) // 4 - 1

    assert loader.record_keys(10**14).tolist() == [(4 * 10**14 + i) % 10 for i in range(4)]
    with pytest.raises(IndexError, match=f"between 0 and {last}, the last batch"):
        loader.record_keys(last + 1)
    with pytest.raises(TypeError, match="integer"):
        loader.record_keys(1.5)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(TypeError, match="needs a 1:1 pipeline"):
        load_with(transformations=[DropMultiples(2)]).record_keys(0)
    # The keys are the caller's own.
    loader.record_keys(0)[:] = -1

    assert loader.record_keys(0).tolist() == [0, 1, 2, 3]
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]


@given(
    size=st.integers(1, 30),
    order=st.fixed_dictionaries({"shuffle": st.booleans(), "num_epochs": st.just(2), "seed": st.just(5)}),
    batch=st.none() | st.tuples(st.integers(1, 7), st.booleans(), st.sampled_from([None, tuple])),
    operations=st.lists(st.sampled_from([Scale(3), Jitter(), AddIndex(), DropMultiples(3), abs]), max_size=3),
)
@settings(deadline=None, max_examples=100)
def test_load_is_the_long_form(size: int, order: dict[str, Any], batch: Any, operations: list[Transformation]) -> None:
    """`load` is a DataLoader with an IndexSampler and a Batch at the end: the same batches and the same states."""
    arguments = dict(zip(("batch_size", "drop_remainder", "batch_fn"), batch or (), strict=False))
    short = load_with(source=range(size), transformations=operations, **order, **arguments)
    batches = [] if batch is None else [Batch(*batch)]
    sampler = IndexSampler(size, **order)
    long = loader_with(data_source=range(size), sampler=sampler, operations=[*operations, *batches])
    one, other = iter(short), iter(long)

    assert drain(one) == drain(other)
    assert one.get_state() == other.get_state()


class Backwards:
    """A custom sampler with what Grain asks of one: the records from the last to the first."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, position: int) -> millstream.RecordMetadata:
        return millstream.RecordMetadata(position, self.size - 1 - position)


class BackwardsAtRandom(Backwards):
    """The same order, with randomness that the sampler provides itself."""

    def __getitem__(self, position: int) -> millstream.RecordMetadata:
        rng = np.random.default_rng([99, position])
        return millstream.RecordMetadata(position, self.size - 1 - position, rng)


def test_a_custom_sampler_without_length_is_endless() -> None:
    """A sampler that does not say how long it is never ends, and has neither `len` nor epochs."""

    class Evens:
        def __getitem__(self, position: int) -> millstream.RecordMetadata:
            return millstream.RecordMetadata(position, 2 * position % 10)

    loader = loader_with(sampler=Evens())

    assert list(itertools.islice(loader, 7)) == [0, 2, 4, 6, 8, 0, 2]
    assert iter(loader).epoch is None
    with pytest.raises(TypeError, match="endless"):
        len(loader)


def test_a_custom_sampler_brings_its_own_randomness() -> None:
    """Each operation draws its own from the sampler's generators: the same on every pass, after a seek, in threads."""

    def draw(element: Any, rng: np.random.Generator) -> tuple[Any, int]:
        return element, int(rng.integers(1 << 62))

    operations = [millstream.RandomMap(draw), millstream.RandomMap(draw)]
    changes = {"sampler": BackwardsAtRandom(10), "operations": operations}
    loader, threaded = loader_with(**changes), loader_with(**changes, read_options=millstream.ReadOptions(2))
    elements, later = list(loader), iter(loader)
    later.seek(4)

    assert list(loader) == elements
    assert list(later) == elements[4:]
    assert list(threaded) == elements
    assert len({number for (_, one), other in elements for number in (one, other)}) == 20


def test_a_custom_sampler_without_randomness_cannot_serve_a_random_operation() -> None:
    """A random operation needs a sampler with generators: an error at construction, or later at the record."""

    class FirstOnly(Backwards):
        def __getitem__(self, position: int) -> millstream.RecordMetadata:
            rng = np.random.default_rng(0) if position == 0 else None
            return millstream.RecordMetadata(position, position, rng)

    with pytest.raises(ValueError, match=r"operations\[0\], Jitter, needs randomness"):
        loader_with(sampler=Backwards(10), operations=[Jitter()])
    iterator = iter(loader_with(sampler=FirstOnly(10), operations=[Jitter()]))
    next(iterator)
    with pytest.raises(ValueError, match="the sampler gave no rng at position 1") as caught:
        next(iterator)
    assert "record key 1" in text_of(caught.value)


@dataclasses.dataclass
class Squares:
    """A source that reads one record at a time."""

    size: int = 10
    calls: list[Any] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: Any) -> Any:
        self.calls.append(key)
        return key**2


class BatchedSquares(Squares):
    """The same records, read many at a time, too."""

    def __getitems__(self, keys: Sequence[int]) -> list[int]:
        self.calls.append(list(keys))
        return [key**2 for key in keys]


def test_the_batched_read_is_used_for_every_batch() -> None:
    """One call of `__getitems__` a batch, with plain integers, and none of `__getitem__`; else one call a record."""
    batched, single = BatchedSquares(), Squares()

    batches = [batch.tolist() for batch in load_with(source=batched, batch_size=4)]
    assert batches == [[0, 1, 4, 9], [16, 25, 36, 49], [64, 81]]
    assert batched.calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert {type(key) for call in batched.calls for key in call} == {int}
    assert len(list(load_with(source=single, batch_size=4))) == 3
    assert single.calls == list(range(10))
    # Without a Batch, too, there are fewer calls than records.
    many = BatchedSquares(2000)
    assert list(load_with(source=many)) == [key**2 for key in range(2000)]
    assert len(many.calls) < 200


def test_an_iterator_of_a_loader_that_is_closed_meanwhile_is_closed() -> None:
    """If another thread closes the loader while an iterator is constructed, the constructor raises."""
    loader = millstream.load(range(8), num_epochs=1, batch_size=4)

    class ClosingState(bytes):
        def __bytes__(self) -> bytes:
            loader.close()
            return self[:]

    state = ClosingState(iter(loader).get_state())

    with pytest.raises(ValueError, match="This DataLoader is closed"):
        millstream.DataLoaderIterator(loader, state)


def test_sources_of_every_kind_are_read() -> None:
    """Lists, tuples, arrays, strings of bytes and whatever has `len` and `[]` are sources."""

    def texts(source: Any) -> Iterator[Any]:
        return (np.asarray(element).tolist() for element in load_with(source=source))

    assert list(texts([3, 1, 2])) == list(texts((3, 1, 2))) == list(texts(np.array([3, 1, 2]))) == [3, 1, 2]
    assert list(texts(bytes([3, 1, 2]))) == [3, 1, 2]
    assert list(texts(np.arange(4).reshape(2, 2))) == [[0, 1], [2, 3]]


def test_the_parts_of_a_loader_can_be_asked_for() -> None:
    """Source and sampler are the ones given; operations are a tuple, functions among them Maps."""
    source, sampler = [3, 1, 2], millstream.SequentialSampler(3)
    loader = loader_with(data_source=source, sampler=sampler, operations=[abs, Batch(2)])

    assert loader.data_source is source
    assert loader.sampler is sampler
    assert isinstance(loader.operations, tuple)
    assert [repr(operation) for operation in loader.operations] == ["Map(abs)", "Batch(batch_size=2)"]


@dataclasses.dataclass
class Lookup(Map[int, int]):
    """An operation with a large parameter."""

    table: list[int]
    scale: int = 2

    def map(self, element: int) -> int:
        return self.table[element]


class Loud(Map[int, int]):
    """An operation whose repr raises."""

    map = Lookup.map

    def __repr__(self) -> str:
        raise RuntimeError("Not today.")


def test_a_loader_is_shown_as_what_comes_from_where() -> None:
    """Each part and operation has a line with its parameters, cut; nothing is raised or read, nor by `len` and keys."""
    operations = [abs, Lookup(list(range(10**6))), Loud(), Batch(4, batch_fn=np.stack)]
    loader = loader_with(data_source=Unread(), sampler=Backwards(10), operations=operations)

    assert repr(loader).splitlines() == [
        "DataLoader, shard 0 of 1",
        "  source  Unread of 10 records",
        "  order   Backwards(size=10)",
        "  ┌ the trainer's thread",
        "  │ keys",
        "  │ read",
        "  │ operations[0], Map(abs)",
        "  │ operations[1], Lookup(table=[0, 1, 2, 3, 4, 5, ...], scale=2)",
        "  │ operations[2], Loud",
        "  │ operations[3], Batch(batch_size=4, batch_fn=stack)",
        "  └",
        "  trainer: no batch yet",
    ]
    assert (len(loader), loader.record_keys(1).tolist()) == (3, [5, 4, 3, 2])
    iter(loader)


class Kept(list[Any]):
    """A list that reads as lists do."""


def mapped_zeros() -> Any:
    """Rows of a file that may be written to."""
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, "f8", "w+", shape=(6, 3))


HELD: dict[str, Any] = {
    "arrays": [np.full(3, key, np.float32) for key in range(6)],
    "structures": [{"x": np.full(3, key), "nested": [np.full(2, key), {"y": np.zeros(key)}]} for key in range(6)],
    "rows of an array": np.arange(18.0).reshape(6, 3),
    "a subclass of list": Kept({"x": np.full(3, key)} for key in range(6)),
    "a mapped file": mapped_zeros(),
    "rows of records": np.zeros((6, 3), [("x", "f8")]).view(np.recarray)["x"],
    "windows": millstream.WindowDataSource([{"x": np.arange(4.0), "y": np.ones(2)}] * 3, 3, lengths=[4, 4, 4]),
    "columns": millstream.InMemoryDataSource({"x": np.arange(18).reshape(6, 3), "y": np.arange(6)}),
    "several": millstream.ConcatenatedDataSource([[np.ones(2)] * 3, [np.zeros(2)] * 3]),
}


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("operations", [[], [lambda element: element], [millstream.WindowShuffle(4, seed=0)]])
def test_what_a_loader_yields_is_the_trainers(name: str, operations: list[Any]) -> None:
    """A trainer may change elements in place, as those of workers: the next pass and the source are as before."""
    source = HELD[name]
    loader = millstream.load(source, num_epochs=1, transformations=operations, read_options=INLINE)

    def pass_over() -> list[Any]:
        kept = []
        for element in loader:
            kept.append(copy.deepcopy(element))
            for _, leaf in tree.leaves(element):
                if isinstance(leaf, np.ndarray):
                    np.add(leaf, 100, out=leaf)
        return kept

    before = copy.deepcopy([source[key] for key in range(6)])
    assert equal_streams(pass_over(), pass_over())
    assert equal_streams(before, [source[key] for key in range(6)])


def test_a_global_batch_is_shared_by_all_hosts() -> None:
    """`global_batch_size` is that of all shards together, whatever their number; not beside a batch_size."""
    whole = list(millstream.load(range(24), num_epochs=1, shuffle=True, seed=0, global_batch_size=12))
    for count in (1, 3, 4):
        parts = [
            list(
                millstream.load(
                    range(24),
                    num_epochs=1,
                    shuffle=True,
                    seed=0,
                    global_batch_size=12,
                    shard_options=ShardOptions(index, count, drop_remainder=True),
                )
            )
            for index in range(count)
        ]
        assert [np.concatenate(step).tolist() for step in zip(*parts, strict=True)] == [one.tolist() for one in whole]
    with pytest.raises(ValueError, match="batch_size and global_batch_size exclude each other, got 4 and 8"):
        millstream.load(range(24), batch_size=4, global_batch_size=8)
    with pytest.raises(ValueError, match="global_batch_size must be a positive multiple of shard_count = 5, got 12"):
        millstream.load(range(24), global_batch_size=12, shard_options=ShardOptions(0, 5, drop_remainder=True))


def change_all(element: Any) -> Any:
    """Changes what it gets in place: each array, list and dict of it."""
    for leaf in [leaf for _, leaf in tree.leaves(element) if isinstance(leaf, np.ndarray)]:
        np.add(leaf, 100, out=leaf)
    if isinstance(element, dict):
        element["new"] = len(element.get("nested", ()))
        element.get("nested", []).append(np.zeros(1))
    return element


@pytest.mark.parametrize("name", HELD)
def test_what_an_operation_changes_in_place_is_its_own(name: str) -> None:
    """Data in memory stay as they are, so each epoch, reader and place gets the same records."""
    source, given = HELD[name], copy.deepcopy([HELD[name][key] for key in range(6)])
    once = list(map(change_all, copy.deepcopy(given)))
    batched: list[Any] = [Batch(2, batch_fn=list), lambda batch: list(map(change_all, batch))]
    for operations in ([change_all], batched):
        loader = millstream.load(source, num_epochs=2, transformations=operations, read_options=INLINE)
        elements = list(loader) if len(operations) == 1 else list(itertools.chain.from_iterable(loader))
        assert equal_streams(elements, once * 2)
    chain = millstream.MapDataset.source(source)
    both = millstream.experimental.ZipMapDataset([chain.map(change_all), chain]).repeat(2)
    assert equal_streams(list(both), list(zip(once, given, strict=True)) * 2)
    assert equal_streams([source[key] for key in range(6)], given)


def kind_of(element: Any) -> type:
    return type(element)


def test_rows_of_a_mapped_file_are_plain_arrays() -> None:
    """As in a worker process, so they stack with those of an array in memory."""
    mapped = mapped_zeros()
    mixed = millstream.load(
        {"mapped": mapped, "array": np.ones((4, 3))}, weights=[1, 1], batch_size=4, read_options=INLINE
    )
    with iter(mixed) as batches:
        assert sorted(next(batches)[:, 0].tolist()) == [0, 0, 1, 1]
    streams: list[Any] = [
        millstream.load(mapped, num_epochs=1, transformations=[kind_of], read_options=INLINE),
        millstream.MapDataset.source(mapped).map(kind_of),
        millstream.IterDataset.source(mapped).map(kind_of),
    ]
    assert [list(stream) for stream in streams] == [[np.ndarray] * 6] * 3


@pytest.mark.parametrize("keywords", [{"read_options": INLINE}, {"worker_count": 1}])
def test_large_data_in_memory_cannot_be_changed(keywords: dict[str, Any]) -> None:
    """Arrays of more than 1 MiB are not copied: changing one in place is an error, in a worker and without."""
    images = [np.zeros((1 << 20) + 1, np.uint8) for _ in range(3)]
    with pytest.raises(ValueError, match=r"read-only[\s\S]*record key 0"):
        list(millstream.load(images, num_epochs=1, transformations=[change_all], **keywords))
    loader = millstream.load(images, num_epochs=2, batch_size=1, batch_fn=list, **keywords)
    for (image,) in loader:
        assert not image.any()
        np.add(image, 1, out=image)
