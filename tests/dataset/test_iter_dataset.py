"""A stream yields what its plain oracle gives, wherever its elements are made, and resumes everywhere."""

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from millstream import Batch, IterDataset, MapDataset, ReadOptions
from millstream.transforms import ConcatThenSplit, Rebatch
from support.draw.streams import ERRORS, Errors, Stream, as_document, streams
from support.everywhere import THREADS, assert_same_everywhere, assert_survives_interrupts, in_workers
from support.laws import assert_resumes_everywhere
from support.processes.moves import move_at_random


@settings(max_examples=75)
@given(streams(6, fails=True), st.randoms(use_true_random=False), st.sampled_from(ERRORS))
def test_a_stream_is_the_oracles_in_the_consumers_thread_and_in_others(
    stream: Stream, chance: random.Random, errors: Errors
) -> None:
    """Elements, errors and states are the same with any budget, from the beginning and from any state."""
    note(repr(stream))
    assert_same_everywhere(stream, chance, chance.sample(THREADS, 2), errors)


@settings(max_examples=6)
@given(streams(6, fails=True), st.randoms(use_true_random=False), st.sampled_from(ERRORS), st.booleans())
def test_a_stream_is_the_oracles_in_workers(stream: Stream, chance: random.Random, errors: Errors, kills: bool) -> None:
    """So they are in workers, of the whole stream or of parts of it, also while workers are killed."""
    note(repr(stream))
    assert_same_everywhere(stream, chance, [in_workers(chance), chance.choice(THREADS)], errors, kills=kills)


@settings(max_examples=6)
@given(streams(6, fails=True), st.randoms(use_true_random=False), st.sampled_from(ERRORS), st.booleans())
def test_a_stream_is_the_oracles_while_its_work_moves(
    stream: Stream, chance: random.Random, errors: Errors, kills: bool
) -> None:
    """So they are while "auto" moves it between this process and workers, also while these are killed."""
    place = in_workers(chance, ["auto"])
    note(f"{stream!r} in {place}")
    with pytest.MonkeyPatch.context() as patch:
        move_at_random(patch, random.Random(chance.random()))
        assert_same_everywhere(stream, chance, [place], errors, kills=kills)
        assert_survives_interrupts(stream, chance, place)


@settings(max_examples=60)
@given(streams(6, fails=True), st.randoms(use_true_random=False))
def test_a_stream_that_is_interrupted_is_where_it_says(stream: Stream, chance: random.Random) -> None:
    """After an exception of a signal handler at any moment of `next`, what follows is what follows its state."""
    note(repr(stream))
    assert_survives_interrupts(stream, chance, chance.choice(THREADS))


def test_operations_that_split_may_follow_each_other() -> None:
    """However many there are: parts of parts have indices below 2**63, and draws of their own. Each state resumes."""
    one: IterDataset[Any] = MapDataset.range(40).to_iter_dataset().map(as_document)
    splitting = [ConcatThenSplit({"x": 5}), Batch(1), Rebatch(3), Rebatch(2)]
    split = one.apply(splitting)
    numbered = split.map_with_index(lambda index, _: index)
    indices = list(numbered)
    drawn = list(split.random_map(lambda _, rng: int(rng.integers(2**62)), seed=1))

    assert len(indices) == len(set(indices)) == len(set(drawn)) > 10
    assert all(0 <= index < 2**63 for index in indices)
    assert list(numbered.mp_prefetch(2)) == indices
    assert_resumes_everywhere(MapDataset.range(2, 4).to_iter_dataset().map(as_document).apply(splitting))


@pytest.mark.parametrize("chain", ["dense", "sparse"])
def test_errors_count_the_operations_as_they_are_written(chain: str) -> None:
    """Operations that the library inserts into a chain are not counted in the numbers that errors name."""

    def fail(element: int) -> int:
        raise KeyError(element)

    start = MapDataset.range(9).map(abs)
    dataset = (
        (start if chain == "dense" else start.filter(lambda number: number >= 0)).to_iter_dataset().map(fail).batch(3)
    )
    with pytest.raises(KeyError) as caught:
        next(iter(dataset))
    # Of a sparse MapDataset, the operations are its own; of a dense one, they are compiled with those after it.
    assert f"in operation {1 if chain == 'dense' else 0}, Map(" in caught.value.__notes__[0]


def test_errors_name_the_dataset_of_several() -> None:
    """Of those that are mixed, concatenated, selected from or zipped by position, each error says which it is of."""

    def fail(element: int) -> int:
        raise KeyError(element)

    good, bad = MapDataset.range(3), MapDataset.range(3).filter(bool).map(fail)
    joined: dict[str, MapDataset[Any]] = {
        "dataset 'bad' of mix": MapDataset.mix({"good": good, "bad": bad}),
        "dataset 1 of concatenate": MapDataset.concatenate([good, bad]),
        "dataset 1 of select_from_datasets": MapDataset.select_from_datasets([good, bad], [(0, 1), (1, 2)]),
        "dataset 1 of zip": good.zip(bad),
    }
    for words, dataset in joined.items():
        for read in (list, lambda dataset: [dataset[position] for position in range(len(dataset))]):
            with pytest.raises(KeyError) as caught:
                read(dataset)
            assert any(words in note for note in caught.value.__notes__), caught.value.__notes__


def test_errors_name_the_stream_of_several() -> None:
    """Of streams that are mixed, zipped, interleaved or in a row, too."""

    def fail(element: int) -> int:
        raise KeyError(element)

    good, bad = MapDataset.range(3).to_iter_dataset(), MapDataset.range(3).to_iter_dataset().map(fail)
    joined: dict[str, IterDataset[Any]] = {
        "dataset 'bad' of mix": IterDataset.mix({"good": good, "bad": bad}),
        "dataset 1 of mix": IterDataset.mix([good, bad], stop="all_exhausted"),
        "dataset 1 of zip": good.zip(bad),
        "dataset 1 of interleave": IterDataset.interleave([good, bad], cycle_length=2),
        "dataset 1 of concatenate": good.concatenate(bad),
    }
    for words, dataset in joined.items():
        with pytest.raises(KeyError) as caught:
            list(dataset)
        assert any(words in note for note in caught.value.__notes__), caught.value.__notes__


def test_an_error_of_a_users_iterable_names_the_element() -> None:
    """The error of an iterable has a note with its name and the number of the element, once, in each place."""

    def numbers() -> Iterator[int]:
        yield from range(3)
        raise ConnectionError

    alone = IterDataset.source(numbers)
    for dataset in (alone, alone.map(abs), alone.map(abs).mp_prefetch(1), IterDataset.mix([alone]), alone.skip(2)):
        with pytest.raises(ConnectionError) as caught:
            list(dataset)
        notes = [note for note in caught.value.__notes__ if "numbers" in note]
        assert len(notes) == 1
        assert "at element 3." in notes[0]


def test_an_iterator_shows_what_it_does() -> None:
    """Its operations by name, whatever stands in for absent elements; what draws from streams says where to ask."""
    numbers = MapDataset.range(20).map(float).map(lambda number: None if number == 13 else number)
    sparse = numbers.filter(lambda number: number != 4).to_iter_dataset()
    for dataset, first, count in ((numbers.to_iter_dataset(), "Map(float)", 3), (sparse, "Batch(batch_size=4)", 1)):
        with iter(dataset.batch(4)) as iterator:
            leaves = iterator.trace().leaves
            assert len(list(iterator)) == 5
            labels = [label for label in iterator.profile() if label.startswith("operations")]
        assert list(leaves)[1].endswith(first)
        assert list(leaves)[-1] == f"operations[{count - 1}], Batch(batch_size=4)"
        assert leaves[list(leaves)[-1]] == ("element: float64 (4,)",)
        assert labels[-1].endswith("Batch(batch_size=4)")
        assert "5 batches" in repr(iterator.summary())

    mixed: IterDataset[Any] = IterDataset.mix([sparse, sparse])
    with iter(mixed) as iterator, iter(mixed.map(float)) as fed:
        list(fed)
        assert "operations[0], Map(float)" in fed.profile()
        for call in (iterator.trace, fed.trace):
            with pytest.raises(NotImplementedError, match="datasets that it draws from"):
                call()


def test_the_repr_of_an_iterator_says_what_runs() -> None:
    """Its repr has the position, who works, and the operations; of one that draws from others, from which."""
    numbers = MapDataset.range(20).map(float).to_iter_dataset()
    mixture = IterDataset.mix([numbers, numbers])
    with iter(numbers.batch(4).mp_prefetch(2)) as read, iter(mixture.map(abs)) as mixed, iter(mixture) as drawn:
        assert repr(read) == "<ReadIterator at step 0, idle, 2 workers: Map(float), Batch(batch_size=4)>"
        next(read)
        next(mixed)
        assert repr(read).startswith("<ReadIterator at step 1, running, 2 workers: ")
        assert repr(mixed) == (
            "<MixtureIterator at step 1, running, up to 32 threads, reads a mixture of 2: Map(float), Map(abs)>"
        )
        assert repr(drawn) == "<JoinIterator, open, draws from mix(weights={0: 1, 1: 1})>"
    assert repr(read).startswith("<ReadIterator at step 1, closed, ")
    assert repr(drawn) == "<JoinIterator, closed, draws from mix(weights={0: 1, 1: 1})>"
    with iter(IterDataset.mix([numbers.filter(bool)]).map(abs)) as fed:
        draws = "draws from mix(weights={0: 1})"
        assert repr(fed) == f"<FedIterator at step 0, idle, in this thread, {draws}: Map(abs)>"


def test_nothing_prefetches_before_it_is_asked() -> None:
    """ReadOptions(0, 0) starts no thread that prefetches, and asking for a state starts none either."""

    def readers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("millstream-read")]

    before = readers()
    assert list(itertools.islice(MapDataset.range(9).to_iter_dataset(ReadOptions(0, 0)).map(abs), 4)) == [0, 1, 2, 3]
    iter(MapDataset.range(9).to_iter_dataset(ReadOptions(4, 8))).get_state()
    assert readers() == before


class Named:
    """A plain class that takes an argument of its own."""

    def __init__(self, *arguments: Any, name: str = "", **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.name = name


class NamedStream(Named, IterDataset[int]):
    """A stream that is derived from a plain class as well."""

    def __iter__(self) -> Any:
        return iter(self._parent)


def test_streams_are_derived_from_plain_classes_too() -> None:
    """No class gets in another's way, and such a stream may stand anywhere; one without parents says so."""
    stream = NamedStream(MapDataset.range(4).to_iter_dataset(), name="stream")
    assert (list(stream.map(abs).batch(3, batch_fn=list)), stream.name) == ([[0, 1, 2], [3]], "stream")
    with pytest.raises(AttributeError, match="no parents"):
        _ = NamedStream()._parent


def streams_mixed(chain: Any) -> Any:
    other = MapDataset.range(2).to_iter_dataset()
    return IterDataset.mix([chain if isinstance(chain, IterDataset) else chain.to_iter_dataset(), other])


@pytest.mark.parametrize(
    "deeper",
    [
        lambda chain: MapDataset.concatenate([chain, MapDataset.range(2)]),
        lambda chain: MapDataset.mix([chain, MapDataset.range(2)]),
        lambda chain: chain.map(abs).shuffle(seed=0),
        streams_mixed,
    ],
    ids=["concatenate", "mix", "map and shuffle", "mixed streams"],
)
def test_a_chain_that_can_be_constructed_can_be_read(deeper: Callable[[Any], Any]) -> None:
    """A chain too deep for Python's stack is refused by the constructor; any other is read, and resumes."""
    chain: Any = MapDataset.range(4)
    error = ""
    while not error:
        try:
            chain, last = deeper(chain), chain
        except ValueError as refused:
            error = str(refused)
    stream = last if isinstance(last, IterDataset) else last.to_iter_dataset()
    iterator = iter(stream)
    next(iterator)
    state = iterator.get_state()
    expected = next(iterator)
    iterator.set_state(state)

    assert next(iterator) == expected
    assert "at most 100 datasets from its end to its sources, got 101. Mix or concatenate" in error
