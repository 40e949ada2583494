"""Streams below a join, read by worker processes: one set of them does the work of all, whenever a stream is opened.

With "auto", this process does it until they are ready.
"""

import functools
import gc
import itertools
import os
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream import IterDataset, MapDataset, ReadOptions
from millstream.experimental import InterleaveIterDataset, ZipIterDataset
from millstream.loader.processes import pool
from support.faults.interrupted import interrupt_at
from support.processes.moves import move_at_random, move_once
from support.processes.process_tree import settled_workers, worker_pids
from support.processes.worker_pools import python


@pytest.fixture(params=[2, "auto"])
def two(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns two workers as a number, and as "auto", which chooses that number as soon as it can."""
    move_once(monkeypatch, 2)
    return request.param


def with_process(number: int) -> tuple[int, int]:
    """Returns a number, and the process that runs this."""
    return number, os.getpid()


def stream(number: int, length: int = 20) -> IterDataset[tuple[int, int]]:
    """Returns numbers that no other stream has, each with the process that computes it."""
    return MapDataset.range(100 * number, 100 * number + length).shuffle(seed=3).map(with_process).to_iter_dataset()


def lazy() -> IterDataset[Any]:
    """Returns nine short streams, two at a time, each of which is created when its turn comes."""
    return InterleaveIterDataset(MapDataset.range(9).map(functools.partial(stream, length=5)), cycle_length=2)


def in_turn() -> IterDataset[Any]:
    """Returns streams of different lengths, two at a time."""
    return InterleaveIterDataset([stream(0), stream(1, 3), stream(2, 11), stream(3)], cycle_length=2)


def mixed() -> IterDataset[Any]:
    return IterDataset.mix([in_turn(), stream(9)])


def lists(dataset: IterDataset[Any]) -> IterDataset[Any]:
    return dataset.batch(3, batch_fn=list)


def leaves(element: Any) -> list[tuple[int, int]]:
    """Returns the numbers and processes in an element, which may be a list of others."""
    return element if isinstance(element, list) else [element]


def numbers(elements: list[Any]) -> list[list[int]]:
    """Returns the numbers of each element."""
    return [[number for number, _ in leaves(element)] for element in elements]


def many() -> IterDataset[Any]:
    """Returns many streams, each of which asks for workers of its own."""
    return IterDataset.mix([stream(number).mp_prefetch(2) for number in range(35)])


@pytest.mark.parametrize("join", [lazy, in_turn, mixed, many])
@pytest.mark.parametrize("order", ["join", "join, lists", "lists after mp_prefetch"])
def test_all_functions_below_a_join_run_in_one_set_of_workers(join: Callable[[], IterDataset[Any]], order: str) -> None:
    """Whenever a stream is opened, and whatever follows, its functions run in one of the two processes."""
    spread = (lists(join()) if order == "join, lists" else join()).mp_prefetch(2)
    with iter(lists(spread) if order == "lists after mp_prefetch" else spread) as iterator:
        elements = [next(iterator)]
        workers = settled_workers(2)
        elements += iterator
        assert worker_pids() == workers
        assert len(workers) == 2
        assert {process for element in elements for _, process in leaves(element)} <= workers


def test_the_trainer_computes_no_element_of_workers_again() -> None:
    """Arrays of workers are the trainer's already: it does not compare them with those that it would compute itself."""
    trainer = os.getpid()

    def computed(batch: Any) -> dict[str, Any]:
        if os.getpid() == trainer:
            raise RuntimeError("the trainer computes a batch")
        return {"numbers": batch}

    streams = [MapDataset.range(100 * part).batch(10).map(computed).to_iter_dataset() for part in (1, 2)]
    with iter(IterDataset.mix(streams).mp_prefetch(1)) as batches:
        found = [next(batches)["numbers"] for _ in range(8)]
    assert all(array.flags.writeable for array in found)


@pytest.mark.parametrize("join", [lazy, in_turn, mixed, many])
@pytest.mark.parametrize("order", ["join", "join, lists", "lists after mp_prefetch"])
def test_all_functions_below_a_join_move_together(
    join: Callable[[], IterDataset[Any]], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "auto", the first elements come from this process, and later ones from one set of workers."""
    move_once(monkeypatch, 2)
    with iter(lists(join()) if "lists" in order else join()) as iterator:
        expected = numbers(list(iterator))
    spread = (lists(join()) if order == "join, lists" else join()).mp_prefetch("auto")
    with iter(lists(spread) if order == "lists after mp_prefetch" else spread) as iterator:
        elements = list(iterator)
        workers = worker_pids()
    assert numbers(elements) == expected
    assert len(workers) == 2
    processes = [process for element in elements for _, process in leaves(element)]
    assert processes[0] == os.getpid()
    assert {os.getpid()} < set(processes) <= {os.getpid()} | workers


def test_all_streams_move_wherever_auto_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that ask for "auto" below a join that does not, move each with workers of their own."""
    move_once(monkeypatch, 1)
    below = [stream(number, 50).mp_prefetch("auto") for number in range(2)]
    for dataset in (
        IterDataset.mix(below),
        lists(IterDataset.mix(below)),
        InterleaveIterDataset(below, cycle_length=2),
    ):
        with iter(dataset) as iterator:
            elements = list(iterator)
        assert numbers(elements) == numbers(list(dataset))
        assert len({process for element in elements for _, process in leaves(element)}) == 3


@pytest.mark.parametrize("number", [2, "auto"])
@pytest.mark.parametrize("dataset", [lists(lazy()), mixed()], ids=["interleave, lists", "mix of interleaves"])
def test_a_join_in_workers_that_is_interrupted_is_where_it_says(
    dataset: IterDataset[Any], number: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception at any moment of `next`: what follows is what follows its state in the stream.

    A `next` may lose its element on the way to the caller, and that one alone.
    """
    move_at_random(monkeypatch, random.Random(4))
    spread, expected = dataset.mp_prefetch(number), numbers(list(dataset))
    num_interrupted = 0
    for moment in (0, 20, 180, 1500):
        with iter(spread) as iterator:
            got = list(itertools.islice(iterator, 1))
            num_interrupted += interrupt_at(moment, lambda: got.extend(itertools.islice(iterator, 3)))  # noqa: B023
            rest = numbers(list(iterator))
        position = len(expected) - len(rest)
        assert rest == expected[position:]
        assert position in {len(got), len(got) + 1}
    assert num_interrupted > 2


def begin(dataset: IterDataset[Any], *, is_interrupted: bool) -> set[int]:
    """Returns the workers of an iterator that is used, moved, and perhaps interrupted, and then dropped."""
    iterator = iter(dataset)
    next(iterator)
    while not worker_pids():
        next(iterator)
    state, workers = iterator.get_state(), settled_workers(2)
    following = numbers([next(iterator), next(iterator)])
    iterator.set_state(state)
    assert numbers([next(iterator)]) == following[:1]
    assert worker_pids() == workers
    if is_interrupted:
        # While it sends and receives: between two requests, an interrupt leaves the workers as they are.
        assert interrupt_at(3, lambda: list(itertools.islice(iterator, 5)), "millstream.loader.processes")
    return workers


@pytest.mark.parametrize("dataset", [in_turn(), lists(in_turn())], ids=["interleave", "interleave, lists"])
def test_workers_of_a_join_survive_its_moves_and_not_its_interrupts(dataset: IterDataset[Any], two: Any) -> None:
    """`set_state` keeps the worker processes; after a Ctrl-C in `next`, no other iterator gets them."""
    spread = dataset.mp_prefetch(two)
    workers = begin(spread, is_interrupted=False)
    assert begin(spread, is_interrupted=True) == workers
    gc.collect()
    with iter(spread) as other:
        next(other)
        assert not worker_pids() & workers


def fail_at_three(element: tuple[int, int]) -> tuple[int, int]:
    if element[0] == 103:
        raise LookupError(element)
    return element


def test_workers_of_an_interrupted_recovery_are_not_used_again(two: Any) -> None:
    """After an error, `get_state` draws elements again; a Ctrl-C in that ends the workers, and none is lost."""
    dataset = IterDataset.interleave([stream(0), stream(1).map(fail_at_three)], cycle_length=2)
    with iter(dataset.mp_prefetch(two)) as iterator:
        got = []
        with pytest.raises(LookupError):
            got.extend(iterator)
        workers = worker_pids()
        assert interrupt_at(3, iterator.get_state, "millstream.loader.processes")
        assert not worker_pids() & workers
        assert iterator.step == len(got)
        with pytest.raises(LookupError):
            next(iterator)


def test_workers_of_an_interrupted_start_are_not_used_again() -> None:
    """A Ctrl-C in `start_prefetch` ends the workers, which may have got half a message, and changes no element."""
    with iter(in_turn().mp_prefetch(2)) as iterator:
        beginning = iterator.get_state()
        next(iterator)
        iterator.set_state(beginning)
        workers = worker_pids()
        assert interrupt_at(3, iterator.start_prefetch, "millstream.loader.processes")
        assert not worker_pids() & workers
        assert numbers(list(iterator)) == numbers(list(in_turn()))


def test_a_state_that_is_taken_while_an_element_is_drawn_is_refused() -> None:
    """The datasets below a join are at different elements then: an error, and the stream goes on as it was."""
    taken: list[str] = []

    def take_state(number: int) -> int:
        try:
            iterator.get_state()
        except ValueError as error:
            taken.append(str(error))
        return number

    numbers_here = MapDataset.range(6).map(take_state).to_iter_dataset(ReadOptions(num_threads=0))
    iterator = iter(ZipIterDataset([MapDataset.range(6), numbers_here]))
    assert list(iterator) == [(number, number) for number in range(6)]
    assert len(taken) == 6
    assert all("call get_state after next()" in text for text in taken)


def test_a_state_that_is_taken_while_a_join_recovers_is_refused() -> None:
    """After an error, `get_state` draws elements again. Meanwhile the join is in use, for `next`, too."""
    refused: list[str] = []

    def check(number: int) -> int:
        if number == 3 and not failed:
            failed.append(number)
            raise LookupError(number)
        if failed:
            for call in (iterator.get_state, iterator.__next__, lambda: iterator.set_state(beginning)):
                with pytest.raises(ValueError, match="This iterator is in use") as caught:
                    call()
                refused.append(str(caught.value))
        return number

    failed: list[int] = []
    numbers_here = MapDataset.range(6).map(check).to_iter_dataset(ReadOptions(num_threads=0))
    iterator = iter(ZipIterDataset([MapDataset.range(6), numbers_here]))
    beginning = iterator.get_state()
    assert list(itertools.islice(iterator, 3)) == [(number, number) for number in range(3)]
    with pytest.raises(LookupError):
        next(iterator)
    state = iterator.get_state()
    assert len(refused) >= 9
    assert state["step"] == 3
    assert list(iterator) == [(number, number) for number in range(3, 6)]


class Marked:
    """A source that leaves a file when a process drops it."""

    def __init__(self, number: int, folder: Path) -> None:
        self._number = number
        self._folder = folder

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> int:
        gc.collect()
        return self._number

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        weakref.finalize(self, (self._folder / str(self._number)).touch)


def own_class(number: int, folder: Path) -> Marked:
    """Returns a source of a class that no other has, which crosses with it."""
    made: Marked = type("MarkedOnce", (Marked,), {})(number, folder)
    return made


@pytest.mark.parametrize("make", [Marked, own_class])
def test_workers_keep_a_bounded_number_of_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[int, Path], Marked]
) -> None:
    """Workers drop the sources of streams that have ended, while later streams are read."""
    monkeypatch.setattr(pool, "MAX_IDLE_PIPELINES", 3)
    datasets = MapDataset.range(20).map(lambda number: MapDataset.source(make(number, tmp_path)))
    with iter(InterleaveIterDataset(datasets, cycle_length=2).mp_prefetch(2)) as iterator:
        assert sorted(iterator) == sorted(list(range(20)) * 4)
        dropped = {int(file.name) for file in tmp_path.iterdir()}
    assert set(range(10)) <= dropped


SCRIPT = """
import dataclasses
from millstream import MapDataset
from millstream.experimental import InterleaveIterDataset

@dataclasses.dataclass
class Point:
    number: int

def points(number):
    return MapDataset.range(number, number + 3).map(Point)

if __name__ == "__main__":
    joined = InterleaveIterDataset(MapDataset.range(20).map(points), cycle_length=2)
    found = list(joined.map(lambda point: dataclasses.replace(point, number=-point.number)).mp_prefetch(2))
    assert all(type(point) is Point for point in found)
    assert found == [Point(-point.number) for point in joined]
    alone = list(joined.mp_prefetch(2))
    assert all(type(point) is Point for point in alone)
    print(len(found), len(alone))
"""


def test_classes_of_a_script_cross_with_streams_that_are_opened_late(tmp_path: Path) -> None:
    """An element of a class of `__main__` comes back as an instance of that class, from whichever stream."""
    (tmp_path / "script.py").write_text(SCRIPT)
    ran = python("-W", "error", tmp_path / "script.py", cwd=tmp_path)
    assert ran.stderr == ""
    assert ran.stdout.split() == ["60", "60"]


def fail() -> None:
    raise OSError("no such bucket")


class Broken:
    """A source that cannot be sent to another process, or that fails to unpickle there."""

    def __init__(self, *, is_sent: bool) -> None:
        self.is_sent = is_sent

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> int:
        return number

    def __reduce__(self) -> Any:
        if not self.is_sent:
            raise TypeError("holds a socket")
        return fail, ()


@pytest.mark.parametrize(
    ("position", "is_sent", "error"), [(2, False, TypeError), (1, True, OSError), (2, True, OSError)]
)
def test_a_stream_that_workers_cannot_have_is_an_error_at_its_turn(
    position: int, is_sent: bool, error: type[Exception]
) -> None:
    """It is opened early, and all streams before it are delivered; then the error says why, also when tried again."""
    sources: list[Any] = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    sources.insert(position, Broken(is_sent=is_sent))
    datasets = MapDataset.range(4).map(lambda number: MapDataset.source(sources[number]))
    with iter(InterleaveIterDataset(datasets, cycle_length=1).mp_prefetch(2)) as iterator:
        assert list(itertools.islice(iterator, 3 * position)) == list(range(3 * position))
        for _ in range(2):
            with pytest.raises(error, match=r"holds a socket|no such bucket") as caught:
                next(iterator)
            said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
            assert ("while it unpickled the pipeline" if is_sent else "cannot be sent to worker processes") in said
