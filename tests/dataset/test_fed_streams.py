"""A stream of the user's own feeds operations that run in threads and workers: exactly once, in order, resumable."""

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from millstream import IterDataset, ReadOptions
from millstream.errors import CheckpointError
from millstream.experimental import LimitIterDataset, assert_equal_output_after_checkpoint
from millstream.loader.scheduling import feed
from support.processes.process_tree import processes_below
from support.user_streams import Counted, Numbers


def spread(dataset: IterDataset[Any], how: str) -> IterDataset[Any]:
    options: dict[str, Any] = {"inline": 0, "threads": ReadOptions(3, 100), "workers": 2}
    option = options[how]
    return dataset.mp_prefetch(option) if isinstance(option, int) else dataset.prefetch(option)


PLACES = pytest.mark.parametrize("how", ["inline", "threads", "workers"])


class Flaky(Counted):
    """The same numbers from a generator, which is over once it has failed at one of them."""

    has_failed = False

    def __iter__(self) -> Iterator[int]:  # type: ignore[override]  # as users write it
        for number in range(self.count):
            if number == FAILS_AT and not self.has_failed:
                self.has_failed = True
                raise ConnectionError("the network is gone")
            yield number


FAILS_AT = 10
FAILING: dict[str, Callable[[], IterDataset[int]]] = {
    "with states": lambda: Numbers(23, fails_at=FAILS_AT),
    "a generator": lambda: Flaky(23),
    "below a limit": lambda: LimitIterDataset(Flaky(30), 23),
    "below a mixture": lambda: IterDataset.mix([Flaky(23)]),
}


@PLACES
@pytest.mark.parametrize("kind", FAILING)
def test_an_error_of_the_stream_comes_at_its_turn(kind: str, how: str) -> None:
    """All that comes before the error is delivered, then it is raised; the next attempt continues where it was."""
    dataset = spread(FAILING[kind]().map(lambda number: number * 2).batch(3), how)
    with iter(dataset) as iterator:
        batches = [next(iterator).tolist() for _ in range(3)]
        with pytest.raises(ConnectionError, match="the network is gone"):
            next(iterator)
        state = iterator.get_state()
        batches += [batch.tolist() for batch in iterator]

        assert batches == [[2 * n for n in range(start, min(start + 3, 23))] for start in range(0, 23, 3)]
        iterator.set_state(state)
        assert next(iterator).tolist() == [18, 20, 22]


def test_a_generator_that_has_failed_begins_again() -> None:
    """It is over once it has raised, so another one is drawn from up to the element at which it failed."""
    with iter(FAILING["a generator"]()) as iterator:
        assert list(itertools.islice(iterator, FAILS_AT)) == list(range(FAILS_AT))
        with pytest.raises(ConnectionError):
            next(iterator)
        assert list(iterator) == list(range(FAILS_AT, 23))


@PLACES
def test_an_error_of_an_operation_names_the_element(how: str) -> None:
    """An operation that fails at an element is an error at its turn, which says where; it comes again."""
    dataset = spread(Numbers(9).map(lambda number: 1 // (number - 4)), how)
    with iter(dataset) as iterator:
        assert list(itertools.islice(iterator, 4)) == [-1, -1, -1, -1]
        for _ in range(2):
            with pytest.raises(ZeroDivisionError) as caught:
                next(iterator)
            assert "position 4" in "".join(caught.value.__notes__)


@PLACES
def test_nothing_is_left(how: str) -> None:
    """A closed iterator has no threads and processes, nor has one that nobody holds; closing it twice is one time."""
    dataset = spread(Numbers(10_000).map(lambda number: number).batch(8), how)
    iterator = iter(dataset)
    next(iterator)
    iterator.close()
    iterator.close()
    assert processes_below() == []
    with pytest.raises(ValueError, match="Trying to advance a closed iterator"):
        next(iterator)
    assert iterator.get_state()["stream"] is not None
    dropped = iter(dataset)
    next(dropped)
    reference = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert reference() is None


def test_a_state_holds_a_little_more_than_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the stream's states are saved rarely, elements are drawn again, and exactly those delivered are skipped."""
    monkeypatch.setattr(feed, "KEPT_ELEMENTS", 16)
    dataset = Numbers(100).map(lambda number: number).filter(lambda number: number % 4 != 1).batch(5)
    assert_equal_output_after_checkpoint(dataset)


def test_the_stream_is_read_once_and_not_ahead() -> None:
    """Without workers and threads, no more elements are drawn than requested, up to one call."""
    stream = iter(Numbers(1_000_000).map(lambda number: number))
    list(itertools.islice(stream, 3))

    assert stream.get_state()["states"][0]["step"] <= 8


@pytest.mark.parametrize("how", ["inline", "threads"])
def test_a_state_after_the_end_of_a_stream_is_an_error(how: str) -> None:
    """In a stream that was made shorter, nothing comes at a position after its end: not the end, which hides that."""
    longer, stream = (spread(IterDataset.source(range(3)).repeat(n).map(abs), how) for n in (3, 1))
    for size, step in ((1, 5), (3, 2)):
        with iter(longer.batch(size)) as iterator:
            list(itertools.islice(iterator, step))
            state = iterator.get_state()
        with iter(stream.batch(size)) as iterator:
            iterator.set_state(state)
            for _ in range(2):
                with pytest.raises(CheckpointError, match=f"after {size * step} elements of a stream, which has 3"):
                    next(iterator)
            assert iterator.step == step
    for size in (1, 2, 3):
        with iter(stream.batch(size)) as iterator:
            list(iterator)
            state = iterator.get_state()
            iterator.set_state(state)
            assert list(iterator) == []
