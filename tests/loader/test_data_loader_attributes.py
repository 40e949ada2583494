"""The attributes of a DataLoader and its iterator: parts, lengths, epochs, and how they look in a terminal."""

import dataclasses
import io
import operator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tqdm import tqdm

import millstream
from millstream.sharding import ShardOptions
from millstream.transforms import Batch, Filter, Map
from support.faults.user_faults import Unread

INLINE = millstream.ReadOptions(num_threads=0)


def load(size: int = 10, **options: Any) -> millstream.DataLoader:
    """Returns a loader of one epoch of numbers in the consumer's thread, with some arguments changed."""
    return millstream.load(range(size), **{"num_epochs": 1, "read_options": INLINE, **options})


def test_the_parts_of_a_loader_can_be_asked_for() -> None:
    """Source and sampler are the ones given; operations are a tuple, functions among them Maps."""
    source, sampler = [3, 1, 2], millstream.SequentialSampler(3)
    loader = millstream.DataLoader(data_source=source, sampler=sampler, operations=[abs, Batch(2)])

    assert loader.data_source is source
    assert loader.sampler is sampler
    assert [repr(operation) for operation in loader.operations] == ["Map(abs)", "Batch(batch_size=2)"]
    assert isinstance(loader.operations, tuple)


def test_arguments_by_position_are_told_the_way() -> None:
    """`DataLoader(dataset, 4)`, as PyTorch has it, is an error that names `load`."""
    with pytest.raises(TypeError, match=r"too many positional arguments.*millstream\.load\(source"):
        millstream.DataLoader([1], 4)  # type: ignore[call-arg, arg-type]
    with pytest.raises(TypeError, match=r"too many positional arguments.*load\(source, batch_size=64\)"):
        millstream.load([1], 4)  # type: ignore[call-arg, arg-type]


def test_the_length_of_an_iterator_is_what_is_left() -> None:
    """`len(iterator)` is the number of batches left: it counts down to 0 and follows every seek and resume."""
    loader = load(batch_size=3)
    iterator, resumed = iter(loader), iter(loader)
    lengths = [len(iterator)]
    for _ in iterator:
        lengths.append(len(iterator))
        if len(lengths) == 3:
            resumed.set_state(iterator.get_state())

    assert lengths == [4, 3, 2, 1, 0]
    assert operator.length_hint(resumed) == 2
    assert tqdm(resumed, file=io.StringIO()).total == 2
    assert [batch.tolist() for batch in resumed] == [[6, 7, 8], [9]]
    resumed.seek(1)
    assert len(resumed) == 3


def test_an_unknown_length_is_a_type_error_and_no_more() -> None:
    """Endless and filtered iterators have no `len`, but are true, can be listed, and shown by tqdm."""
    endless, filtered = iter(load(num_epochs=None)), iter(load(transformations=[Filter(bool)]))

    with pytest.raises(TypeError, match=r"This iterator has no len\(\): its sampler is endless"):
        len(endless)
    with pytest.raises(TypeError, match=r"This iterator has no len\(\): .* depends on operations\[0\]"):
        len(filtered)
    assert tqdm(endless, file=io.StringIO()).total is None
    assert operator.length_hint(filtered, 7) == 7
    assert list(filtered) == list(range(1, 10))
    empty = load(batch_size=11, drop_remainder=True)
    assert all(map(bool, (endless, filtered, empty, iter(empty), load(num_epochs=None))))


@pytest.mark.parametrize("shard_count", [1, 2])
def test_the_epoch_is_that_of_the_next_batch(shard_count: int) -> None:
    """`epoch` is the epoch of the next batch, from 0 to the number of epochs at the end."""
    shard = ShardOptions(0, shard_count)
    iterator = iter(load(num_epochs=3, batch_size=shard.local_batch_size(4), shard_options=shard))
    epochs = [iterator.epoch, *(iterator.epoch for _ in iterator)]

    # Batches of 4 of 10 records begin at the positions 0, 4, 8, 12, …
    assert epochs == [0, 0, 0, 1, 1, 2, 2, 2, 3]
    iterator.seek(5)
    assert iterator.epoch == 2


def test_the_epoch_with_a_filter_is_that_of_what_is_not_used_up() -> None:
    """A Filter drops elements, and the epochs pass all the same."""
    iterator = iter(load(4, num_epochs=3, transformations=[Filter(lambda number: number == 3)]))

    assert [(next(iterator), iterator.epoch) for _ in range(3)] == [(3, 1), (3, 2), (3, 3)]


@pytest.mark.third_party
def test_an_iterator_on_the_device_counts_what_it_delivered() -> None:
    """`len` and `epoch` of an iterator on the device do not count batches staged in advance."""
    with millstream.device_put(iter(load(8, num_epochs=2, batch_size=4)), buffer_size=3) as batches:
        seen = [(len(batches), batches.epoch)]
        seen += [(len(batches), batches.epoch) for _ in batches]

    assert seen == [(4, 0), (3, 0), (2, 1), (1, 1), (0, 2)]


class Mix:
    """A custom sampler with parameters and a table."""

    def __init__(self, weights: list[float]) -> None:
        self.weights = weights
        self.table = np.arange(10)
        self._hidden = weights

    def __len__(self) -> int:
        return 10

    def record_keys(self, start: int, stop: int) -> NDArray[np.int64]:
        return np.arange(start, stop)


@dataclasses.dataclass
class Lookup(Map[int, int]):
    """An operation with a large parameter."""

    table: list[int]
    scale: int = 2

    def map(self, element: int) -> int:
        return self.table[element]


class Loud(Map[int, int]):
    """An operation whose repr raises."""

    def map(self, element: int) -> int:
        return element

    def __repr__(self) -> str:
        raise RuntimeError("Not today.")


def test_a_loader_is_shown_as_what_comes_from_where() -> None:
    """Each part and each operation has a line; parameters are cut, and nothing is read or raised.

    An iterator is shown with its step and shard.
    """
    sampler: Any = Mix([0.3, 0.7])
    loader = millstream.DataLoader(
        data_source=Unread(),
        sampler=sampler,
        operations=[
            abs,
            Lookup(list(range(10**6))),
            Loud(),
            Batch(4, batch_fn=np.stack),
        ],
        read_options=INLINE,
    )

    assert repr(loader).splitlines() == [
        "DataLoader, shard 0 of 1",
        "  source  Unread of 10 records",
        "  order   Mix(weights=[0.3, 0.7], table=array of int64, shape (10,))",
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
    iterator = iter(load(shard_options=ShardOptions(0, 2)))
    next(iterator)
    assert repr(iterator) == "<DataLoaderIterator at step 1, running, shard 0 of 2>"
