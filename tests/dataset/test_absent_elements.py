"""Elements that are absent or fail are passed over, wherever it shows; states do not tell one plan from another."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

import millstream
from millstream import MapDataset, ReadOptions, experimental
from support.faults.user_faults import refuse_sevens


def holes(number: int) -> int | None:
    return None if number in {13, 14, 29} else number


def batches(dataset: Any) -> list[Any]:
    return [batch.tolist() for batch in dataset]


EXPECTED = [number for number in range(30) if holes(number) is not None]
CHUNKS = [EXPECTED[start : start + 4] for start in range(0, len(EXPECTED), 4)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_known", [False, True])
def test_an_absent_element_is_passed_over(is_known: bool, workers: int) -> None:
    """Batches are of the elements that are there, whether a filter says that some are not, or a map returns None."""
    dataset = MapDataset.range(30)
    made = dataset.filter(lambda number: holes(number) is not None) if is_known else dataset.map(holes)
    stream = made.to_iter_dataset().batch(4).mp_prefetch(workers)

    assert batches(stream) == CHUNKS
    assert list(made) == EXPECTED
    assert list(made.to_iter_dataset(allow_nones=True)) == [holes(number) for number in range(30)]


def a_chain() -> millstream.IterDataset[Any]:
    return MapDataset.range(30).map(holes).to_iter_dataset().map(lambda number: number)


def a_mixture() -> millstream.IterDataset[Any]:
    return millstream.IterDataset.mix([a_chain(), MapDataset.range(30).to_iter_dataset()]).map(abs)


@pytest.mark.parametrize("is_placed", [False, True])
@pytest.mark.parametrize("make", [a_chain, a_mixture])
def test_batches_are_counted_before_and_after_an_absent_element(
    make: Callable[[], millstream.IterDataset[Any]], is_placed: bool
) -> None:
    """Each delivered element counts once, on a device too, although another plan takes over."""
    iterator: Any = iter(make())
    with millstream.device_put(iterator) if is_placed else iterator as batches_here:
        beginning = batches_here.get_state()
        for count in (5, 20):
            assert len(list(itertools.islice(batches_here, count))) == count
        assert (batches_here.metrics()["loader/batches"], batches_here.metrics()["loader/step"]) == (25.0, 25.0)
        batches_here.set_state(beginning)
        next(batches_here)
        assert (batches_here.metrics()["loader/batches"], batches_here.metrics()["loader/step"]) == (26.0, 1.0)


def test_a_position_that_was_sought_cannot_have_absent_elements_before() -> None:
    """`seek` counts positions; where it then shows that some are empty, that is an error which says what to do."""
    stream = MapDataset.range(30).map(holes).to_iter_dataset().batch(4)
    with iter(stream) as iterator:
        iterator.seek(2)
        assert next(iterator).tolist() == [8, 9, 10, 11]
        with pytest.raises(ValueError, match="filter"):
            next(iterator)
    with iter(stream) as iterator, iter(stream) as other:
        iterator.seek(0)
        assert batches(iterator) == batches(other)


def test_seek_costs_nothing_where_all_are_there() -> None:
    """Any step of an endless dense chain is sought at once; behind a filter, elements are counted."""
    stream = MapDataset.range(10).repeat().to_iter_dataset(ReadOptions(0, 0)).batch(4)
    with iter(stream) as iterator:
        iterator.seek(10**12)
        assert next(iterator).tolist() == [0, 1, 2, 3]
    with iter(MapDataset.range(30).filter(lambda n: n % 2).to_iter_dataset().batch(4)) as iterator:
        iterator.seek(2)
        assert next(iterator).tolist() == [17, 19, 21, 23]


def test_none_of_an_operation_is_an_element() -> None:
    """After the MapDataset, None is an ordinary element, which only a filter drops."""
    stream = MapDataset.range(4).to_iter_dataset().map(lambda number: None if number == 2 else number)

    assert list(stream) == [0, 1, None, 3]
    assert list(stream.filter(lambda number: number is not None)) == [0, 1, 3]


def test_no_map_of_a_dataset_sees_an_absent_element() -> None:
    """Maps after the one that returns None are not called, whatever they would make of it."""
    records: Any = [0, None, 2, 3]
    dataset = MapDataset.source(records).map(holes).map(lambda number: None if number == 2 else number)

    assert list(dataset.map(repr).to_iter_dataset().map(lambda text: text * 2)) == ["00", "33"]


def test_an_empty_dataset_yields_nothing() -> None:
    """A MapDataset without elements is an empty stream."""
    for stream in (MapDataset.range(0).to_iter_dataset(), MapDataset.range(5)[3:3].to_iter_dataset().batch(2)):
        with iter(stream) as iterator:
            assert list(itertools.islice(iterator, 1)) == []
            assert iter(stream).get_state() == iterator.get_state()


@pytest.mark.parametrize("absent", [0, 1])
def test_a_state_after_an_absent_element_is_kept_by_a_fresh_iterator(absent: int) -> None:
    """Its step counts elements, of which there are fewer than positions; the fresh one has not met the absent one."""
    dataset = MapDataset.range(3).map(lambda number: None if number == absent else number).to_iter_dataset()
    with iter(dataset) as iterator:
        first = next(iterator)
        second = next(iterator)
        state = iterator.get_state()
    with iter(dataset) as fresh:
        fresh.set_state(state)
        assert fresh.get_state() == state
        assert list(fresh) == [number for number in range(3) if number not in (absent, first, second)]


def skipping(dataset: Any, **options: Any) -> Any:
    return experimental.WithOptionsIterDataset(dataset, experimental.DatasetOptions(on_error="skip", **options))


NUMBERS = millstream.MapDataset.range(40)
ODD = [number for number in range(40) if number % 7]

CHAINS: dict[str, Any] = {
    "a map of the MapDataset": lambda: NUMBERS.map(refuse_sevens).to_iter_dataset(),
    "a map after it": lambda: NUMBERS.to_iter_dataset().map(refuse_sevens),
    "absent elements stay": lambda: NUMBERS.to_iter_dataset(allow_nones=True).map(refuse_sevens),
    "after a filter": lambda: NUMBERS.filter(lambda _: True).to_iter_dataset().map(refuse_sevens),
    "a stream": lambda: NUMBERS.to_iter_dataset().mp_prefetch(millstream.MultiprocessingOptions(0)).map(refuse_sevens),
    "a limit": lambda: experimental.LimitIterDataset(NUMBERS.to_iter_dataset(), 40).map(refuse_sevens),
    "a mixture of one": lambda: millstream.IterDataset.mix([NUMBERS.to_iter_dataset().map(refuse_sevens)], [1.0]),
    "workers": lambda: NUMBERS.to_iter_dataset().map(refuse_sevens).mp_prefetch(millstream.MultiprocessingOptions(1)),
    "only full batches": lambda: (
        NUMBERS.map(refuse_sevens).to_iter_dataset().batch(2, drop_remainder=True, batch_fn=list).flat_map(list, 2)
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_elements_that_fail_are_dropped(name: str) -> None:
    """Elements that fail are dropped in every kind of chain, from every state, and in the batches that follow."""
    iterator = iter(skipping(CHAINS[name]()))
    states = []
    for number in ODD:
        states.append(iterator.get_state())
        assert next(iterator) == number
    assert list(iterator) == []
    for step in range(0, len(ODD), 5):
        iterator.set_state(states[step])
        assert next(iterator) == ODD[step]
    iterator.close()


def test_the_limit_is_that_of_the_options() -> None:
    """The error of one element too many is raised, and bad options are refused."""
    numbers = iter(skipping(NUMBERS.to_iter_dataset().map(refuse_sevens), max_errors=2))
    assert [next(numbers) for _ in range(12)] == ODD[:12]
    with pytest.raises(ValueError, match="14 is a multiple of 7"):
        next(numbers)
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'skip'"):
        experimental.DatasetOptions(on_error="ignore")
