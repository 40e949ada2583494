"""Streams below a join, read by worker processes: one set of them does the work of all, whenever a stream is opened."""

import functools
import gc
import itertools
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream import IterDataset, MapDataset, ReadOptions
from millstream.dataset import (
    CacheIterDataset,
    InterleaveIterDataset,
    LimitIterDataset,
    RepeatIterDataset,
    ZipIterDataset,
)
from millstream.loader.processes import loaded_pipelines
from support.faults.interrupted import interrupt_at
from support.faults.user_faults import At, be_killed
from support.processes.process_tree import worker_pids
from support.processes.worker_pools import python
from support.stores.waiting_storage import Storage

NUM_STREAMS = 4


def with_process(number: int) -> tuple[int, int]:
    """Returns a number, and the process that runs this."""
    return number, os.getpid()


def stream(number: int, length: int = 20) -> IterDataset[tuple[int, int]]:
    """Returns numbers that no other stream has, each with the process that computes it."""
    return MapDataset.range(100 * number, 100 * number + length).shuffle(seed=3).map(with_process).to_iter_dataset()


def is_kept(element: tuple[int, int]) -> bool:
    """Keeps two elements of three."""
    return element[0] % 3 > 0


def streams() -> list[IterDataset[tuple[int, int]]]:
    """Returns streams of different lengths; one drops elements."""
    return [stream(0), stream(1, 3).filter(is_kept), stream(2, 11), stream(3)]


def opened_in_turn(count: int, length: int) -> IterDataset[Any]:
    """Returns many streams, each of which is created when its turn comes."""
    return InterleaveIterDataset(MapDataset.range(count).map(functools.partial(stream, length=length)), cycle_length=2)


JOINS: dict[str, Callable[[], IterDataset[Any]]] = {
    "interleave": lambda: InterleaveIterDataset(streams(), cycle_length=2),
    "interleave of lazy streams": lambda: opened_in_turn(9, 5),
    "zip": lambda: ZipIterDataset(streams(), strict=False),
    "limit": lambda: LimitIterDataset(stream(0), 13),
    "repeat": lambda: RepeatIterDataset(stream(0), 2),
    "repeat of cache": lambda: RepeatIterDataset(CacheIterDataset(stream(0)), 2),
    "mix": lambda: IterDataset.mix(streams()),
    "mix of mix": lambda: IterDataset.mix([IterDataset.mix(streams()), stream(9)]),
    "mix of interleaves": lambda: IterDataset.mix([InterleaveIterDataset(streams(), cycle_length=3), stream(9)]),
    "limit of repeat of interleave": lambda: LimitIterDataset(
        RepeatIterDataset(InterleaveIterDataset(streams(), cycle_length=2), 2), 70
    ),
    "interleave of zips": lambda: InterleaveIterDataset(
        [ZipIterDataset([stream(1), stream(2)]), ZipIterDataset([stream(3, 5), stream(4, 5)])], cycle_length=2
    ),
}


def leaves(element: Any) -> list[tuple[int, int]]:
    """Returns the numbers and processes in an element, which may be a tuple or a list of others."""
    if isinstance(element, tuple) and isinstance(element[0], int):
        return [(element[0], element[1])]
    return [leaf for part in element for leaf in leaves(part)]


def numbers(elements: list[Any]) -> list[list[int]]:
    """Returns the numbers of each element."""
    return [[number for number, _ in leaves(element)] for element in elements]


def in_workers(join: str, operation: str) -> IterDataset[Any]:
    """Returns a join whose streams run in workers: alone, or with an operation before or after `mp_prefetch`."""
    joined = JOINS[join]()
    if operation == "remote":
        return joined.batch(3, batch_fn=list).mp_prefetch(2)
    return joined.mp_prefetch(2).batch(3, batch_fn=list) if operation == "local" else joined.mp_prefetch(2)


@pytest.mark.parametrize(
    ("join", "operation"),
    # What follows `mp_prefetch` is the same for all joins.
    [*itertools.product(JOINS, ["none", "remote"]), ("interleave of lazy streams", "local"), ("mix of mix", "local")],
)
def test_a_join_in_workers_resumes_anywhere(join: str, operation: str) -> None:
    """Elements and states are those without workers, and each resumes with the other, in workers that are warm.

    The functions of all streams run in the same two processes.
    """
    alone, spread = JOINS[join](), in_workers(join, operation)
    if operation != "none":
        alone = alone.batch(3, batch_fn=list)
    expected = numbers(list(alone))
    elements = list(spread)
    workers = worker_pids()
    assert numbers(elements) == expected
    assert len(workers) == 2
    assert {process for element in elements for _, process in leaves(element)} <= workers
    for step in (0, 1, len(expected) // 2, len(expected)):
        with iter(alone) as here:
            list(itertools.islice(here, step))
            state = here.get_state()
        there = iter(spread)
        assert numbers(list(itertools.islice(there, step))) == expected[:step]
        assert there.get_state() == state
        del there
        other = iter(spread)
        next(other)
        other.set_state(state)
        assert numbers(list(other)) == expected[step:]
        other.set_state(state)
        assert numbers(list(itertools.islice(other, 2))) == expected[step : step + 2]
        assert worker_pids() == workers
        del other
    iter(spread).close()


@pytest.mark.parametrize(
    ("join", "operation"), [("interleave of lazy streams", "remote"), ("mix of interleaves", "none")]
)
def test_a_join_in_workers_that_is_interrupted_is_where_it_says(join: str, operation: str) -> None:
    """An exception at any moment of `next`: what follows is what follows its state in the stream.

    A `next` may lose its element on the way to the caller, and that one alone.
    """
    spread = in_workers(join, operation)
    expected = numbers(list(JOINS[join]() if operation == "none" else JOINS[join]().batch(3, batch_fn=list)))
    num_interrupted = 0
    for moment in (0, 5, 20, 180, 500, 1500):
        with iter(spread) as iterator:
            got = list(itertools.islice(iterator, 1))
            num_interrupted += interrupt_at(moment, lambda: got.extend(itertools.islice(iterator, 3)))  # noqa: B023
            rest = numbers(list(iterator))
        position = len(expected) - len(rest)
        assert rest == expected[position:]
        assert position in {len(got), len(got) + 1}
    assert num_interrupted > 3


def begin(dataset: IterDataset[Any], *, is_interrupted: bool) -> set[int]:
    """Returns the workers of an iterator that is used, moved, and perhaps interrupted, and then dropped."""
    iterator = iter(dataset)
    next(iterator)
    state, workers = iterator.get_state(), worker_pids()
    following = numbers([next(iterator), next(iterator)])
    iterator.set_state(state)
    assert numbers([next(iterator)]) == following[:1]
    assert worker_pids() == workers
    if is_interrupted:
        # While it sends and receives: between two requests, an interrupt leaves the workers as they are.
        assert interrupt_at(3, lambda: list(itertools.islice(iterator, 5)), "millstream.loader.processes")
    return workers


@pytest.mark.parametrize("operation", ["none", "remote"])
def test_workers_of_a_join_survive_its_moves_and_not_its_interrupts(operation: str) -> None:
    """`set_state` keeps the worker processes; after a Ctrl-C in `next`, no other iterator gets them."""
    dataset = in_workers("interleave", operation)
    workers = begin(dataset, is_interrupted=False)
    assert begin(dataset, is_interrupted=True) == workers
    gc.collect()
    with iter(dataset) as other:
        next(other)
        assert not worker_pids() & workers


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


@pytest.mark.parametrize("killer", [0, 4, 8])
def test_a_replaced_worker_gets_the_streams_that_were_opened_late(tmp_path: Path, killer: int) -> None:
    """Wherever a worker dies, another one continues with all streams."""
    kill = At(5 * killer + 2, be_killed, tmp_path / "killed")
    datasets = MapDataset.range(9).map(lambda number: MapDataset.range(5 * number, 5 * number + 5).map(kill))
    joined = InterleaveIterDataset(datasets, cycle_length=3)
    found = list(joined.mp_prefetch(2))
    assert (tmp_path / "killed").exists()
    assert found == list(joined)


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
    monkeypatch.setattr(loaded_pipelines, "MAX_IDLE_PIPELINES", 3)
    datasets = MapDataset.range(20).map(lambda number: MapDataset.source(make(number, tmp_path)))
    with iter(InterleaveIterDataset(datasets, cycle_length=2).mp_prefetch(2)) as iterator:
        assert sorted(iterator) == sorted(list(range(20)) * 4)
        dropped = {int(file.name) for file in tmp_path.iterdir()}
    assert set(range(10)) <= dropped


SCRIPT = """
import dataclasses
from millstream import MapDataset
from millstream.dataset import InterleaveIterDataset

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


@functools.cache
def storage() -> Storage:
    """Returns the storage of this process."""
    return Storage(NUM_STREAMS)


class FarAway:
    """A source whose reads, of all its copies in a process, wait for each other."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, key: int) -> int:
        return int(storage()[key]["tokens"][0])


@pytest.mark.parametrize(
    "join", [lambda parts: InterleaveIterDataset(parts, cycle_length=NUM_STREAMS), IterDataset.mix]
)
def test_a_worker_reads_several_streams_at_the_same_time(join: Callable[[Any], IterDataset[Any]]) -> None:
    """If each stream may have one read in flight, those of all streams are in flight at the same time in a worker."""
    parts = [MapDataset.source(FarAway()).to_iter_dataset(ReadOptions(1, 16)) for _ in range(NUM_STREAMS)]
    with iter(join(parts).mp_prefetch(1)) as iterator:
        assert NUM_STREAMS in itertools.islice(iterator, 5000)


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
