"""Corner cases that a client of Grain meets, and what is decided about each, where no other test says so."""

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import millstream as grain


def numbers(stop: int) -> "grain.MapDataset[int]":
    return grain.MapDataset.range(stop)


def plain(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_none_is_no_element_but_part_of_one() -> None:
    """Positions stay, and so does the length: it is iterating that passes over None. Zipped, it stays in its tuple."""
    dataset = grain.MapDataset.source([1, None, 3]).map(lambda x: None if x == 3 else x)

    assert (len(dataset), dataset[0], dataset[1], dataset[2], list(dataset)) == (3, 1, None, None, [1])
    assert list(grain.experimental.ZipMapDataset([dataset, numbers(3)])) == [(1, 0), (None, 1), (None, 2)]


def test_a_generator_of_ones_own_may_be_kept() -> None:
    """The one that an operation gets is used again for other elements; one made from what it draws is the element's."""
    kept = list(numbers(4).random_map(lambda _, rng: np.random.default_rng(rng.integers(2**63)), seed=3))
    drawn = list(numbers(4).random_map(lambda _, rng: np.random.default_rng(rng.integers(2**63)).random(), seed=3))

    assert [rng.random() for rng in kept] == drawn


def test_reading_ahead_may_be_switched_off() -> None:
    """ReadOptions(0, 0) is legal, starts no thread, and changes no element; nor does asking for a state start one."""
    threads = threading.active_count()
    iterator = iter(numbers(9).to_iter_dataset(grain.ReadOptions(0, 0)).map(abs))
    assert list(itertools.islice(iterator, 4)) == [0, 1, 2, 3]
    other = iter(numbers(9).to_iter_dataset(grain.ReadOptions(4, 8)))
    other.get_state()

    assert threading.active_count() <= threads


class Named:
    """A plain class that takes an argument of its own."""

    def __init__(self, *arguments: Any, name: str = "", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.name = name


class NamedStream(Named, grain.IterDataset[int]):
    """A stream that is derived from a plain class as well."""

    def __iter__(self) -> Iterator[int]:  # type: ignore[override]  # any iterator will do
        return iter(self._parent)


def test_streams_are_derived_from_plain_classes_too() -> None:
    """No class gets in another's way, and such a stream may stand anywhere; one without parents says so."""
    stream = NamedStream(numbers(4).to_iter_dataset(), name="stream")

    assert plain(stream.map(abs).batch(3)) == [[0, 1, 2], [3]]
    assert stream.name == "stream"
    with pytest.raises(AttributeError, match="no parents"):
        _ = NamedStream()._parent


class Rounds:
    """An order of one's own without a length."""

    def __getitem__(self, index: int) -> grain.RecordMetadata:
        return grain.RecordMetadata(index=index, record_key=index % 7)


def test_an_order_of_ones_own_goes_with_shard_options() -> None:
    """The loader shards the positions of a custom sampler like any others."""
    loader = grain.DataLoader(
        data_source=np.arange(7) * 10,
        sampler=Rounds(),
        shard_options=grain.ShardOptions(1, 2),
        operations=[grain.Batch(2)],
    )
    with iter(loader) as iterator:
        assert plain(itertools.islice(iterator, 3)) == [[20, 30], [60, 0], [30, 40]]


def test_a_stream_is_not_sliced() -> None:
    """Indexing or slicing a stream is a ValueError that names the alternative."""
    stream = grain.MapDataset.range(8).to_iter_dataset()

    for key in (0, slice(1, 3)):
        with pytest.raises(ValueError, match=r"Slice or index the MapDataset, before to_iter_dataset\(\)"):
            stream[key]


def streams_mixed(chain: Any) -> Any:
    other = grain.MapDataset.range(2).to_iter_dataset()
    return grain.IterDataset.mix([chain if isinstance(chain, grain.IterDataset) else chain.to_iter_dataset(), other])


@pytest.mark.parametrize(
    "deeper",
    [
        lambda chain: grain.MapDataset.concatenate([chain, grain.MapDataset.range(2)]),
        lambda chain: grain.MapDataset.mix([chain, grain.MapDataset.range(2)]),
        lambda chain: chain.map(abs).shuffle(seed=0),
        streams_mixed,
    ],
    ids=["concatenate", "mix", "map and shuffle", "mixed streams"],
)
def test_a_chain_that_can_be_constructed_can_be_read(deeper: Callable[[Any], Any]) -> None:
    """A chain too deep for Python's stack is refused by the constructor; any other is read, and resumes."""
    chain: Any = grain.MapDataset.range(4)
    error = ""
    while not error:
        try:
            chain, last = deeper(chain), chain
        except ValueError as refused:
            error = str(refused)
    stream = last if isinstance(last, grain.IterDataset) else last.to_iter_dataset()
    iterator = iter(stream)
    next(iterator)
    state = iterator.get_state()
    expected = next(iterator)
    iterator.set_state(state)

    assert next(iterator) == expected
    assert "at most 100 datasets from its end to its sources, got 101. Mix or concatenate" in error
