"""A join waits between two draws: what is finished is delivered meanwhile, and an interrupted wait changes nothing."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from millstream import IterDataset, MapDataset, ReadOptions
from millstream.experimental import InterleaveIterDataset
from millstream.loader.engine import policy
from millstream.loader.threads.waiting import TimedQueue
from support.faults.interrupted import Interruption, before_instructions, moments_of
from support.faults.user_faults import WAIT_SECONDS, Pipe, wait_at


class Held:
    """Numbers, one of which is read once a pipe has a byte."""

    def __init__(self, pipe: Path, key: int) -> None:
        self._pipe = pipe
        self._key = key

    def __len__(self) -> int:
        return 4

    def __getitem__(self, key: int) -> int:
        if key == self._key:
            wait_at(self._pipe)
        return key


class Recorded:
    """Numbers from 10 on, and the keys of all reads."""

    def __init__(self) -> None:
        self.keys: list[int] = []

    def __len__(self) -> int:
        return 4

    def __getitem__(self, key: int) -> int:
        self.keys.append(key)
        return 10 + key


@contextlib.contextmanager
def held(folder: Path, key: int) -> Iterator[tuple[IterDataset[int], Pipe]]:
    """Yields the numbers below 4, one of which waits for a pipe, and the pipe. The block must not wait for it."""
    with Pipe(folder / "go") as go:
        timer = threading.Timer(WAIT_SECONDS, lambda: go.put(9))
        timer.start()
        try:
            yield MapDataset.source(Held(go.path, key)).to_iter_dataset(ReadOptions(1, 4)), go
            assert not timer.finished.is_set()
        finally:
            timer.cancel()
            timer.join()


@pytest.mark.parametrize("place", ["threads", "workers", "a join in workers"])
def test_outputs_are_delivered_while_an_input_is_awaited(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished outputs do not wait for an element that only later outputs need."""
    # All calls begin ahead.
    monkeypatch.setattr(policy, "HAND_OVER_SECONDS", 0.0)
    with held(tmp_path, 1) as (stream, go):
        joined = InterleaveIterDataset([MapDataset.range(10, 14), stream], cycle_length=2)
        dataset: IterDataset[Any] = joined.map(lambda number: -number).batch(2, batch_fn=list)
        if place == "threads":
            dataset = dataset.prefetch(ReadOptions(1, 4))
        else:
            # As many workers as reads: no call waits behind the read that is held, in the queue of its worker.
            dataset = (joined if place == "a join in workers" else dataset).mp_prefetch(8)
        with iter(dataset) as iterator:
            first = [next(iterator), next(iterator)] if place == "a join in workers" else next(iterator)
            go.put(9)
            rest = list(iterator)
    expected = [[number, number - 10] for number in range(10, 14)]
    if place == "a join in workers":
        assert first + rest == [number for pair in expected for number in pair]
    else:
        assert [first, *rest] == [[-one, -other] for one, other in expected]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("join", ["zip", "interleave", "mix"])
def test_elements_that_were_drawn_do_not_wait_for_further_ones(join: str, workers: int, tmp_path: Path) -> None:
    """Operations that many elements go through in one call get those that are there before others are waited for."""

    def joined(following: IterDataset[int]) -> IterDataset[Any]:
        one, other = (MapDataset.range(40).to_iter_dataset(ReadOptions(num_threads=0)) for _ in range(2))
        return JOINS[join](one.repeat(2).take(44), other.concatenate(following)).mp_prefetch(workers).map(repr)

    with held(tmp_path, 0) as (stream, go), iter(joined(stream)) as iterator:
        before = list(itertools.islice(iterator, 40 if join == "zip" else 80))
        go.put(9)
        assert before + list(iterator) == list(joined(MapDataset.range(4).to_iter_dataset()))


@contextlib.contextmanager
def interrupted_wait(go: Pipe) -> Iterator[None]:
    """Raises KeyboardInterrupt in the block when this thread begins to wait for others, which then read on."""
    left = [Interruption()]

    def interrupt() -> None:
        if left:
            go.put()
            raise left.pop()

    with pytest.raises(Interruption), at_waits(interrupt):
        yield


@contextlib.contextmanager
def at_waits(act: Callable[[], None]) -> Iterator[None]:
    """Calls a function in the block when this thread begins to wait for others."""
    waiting = TimedQueue.take.__code__

    def check(code: CodeType, offset: int) -> None:
        if code is waiting and offset in moments_of(code):
            act()

    with before_instructions(check):
        yield


JOINS: dict[str, Callable[[Any, Any], IterDataset[Any]]] = {
    "zip": lambda one, other: one.zip(other),
    "interleave": lambda one, other: IterDataset.interleave([one, other], cycle_length=2),
    "mix": lambda one, other: IterDataset.mix([one, other]),
    "mix to the end": lambda one, other: IterDataset.mix([one, other], stop="drop_exhausted"),
    "zip after skip": lambda one, other: one.skip(1).zip(other.skip(1)),
    "zip of cache": lambda one, other: one.cache().zip(other.cache()),
}


@pytest.mark.parametrize("join", JOINS)
def test_an_interrupted_wait_leaves_the_inputs_where_they_are(join: str, tmp_path: Path) -> None:
    """After a Ctrl-C, the next element comes without drawing others again."""
    source = Recorded()
    recorded = MapDataset.source(source).to_iter_dataset(ReadOptions(num_threads=0))
    with iter(JOINS[join](recorded, MapDataset.range(4).to_iter_dataset())) as plain:
        expected = list(plain)
    source.keys.clear()
    with held(tmp_path, 1) as (stream, go), iter(JOINS[join](recorded, stream)) as iterator:
        got: list[Any] = []
        with interrupted_wait(go):
            got.extend(iterator)
        with interrupted_wait(go):
            got.extend(iterator)
        go.put(9)
        got.extend(iterator)
    assert got == expected
    assert sorted(source.keys) == list(range(4))


def test_an_interrupted_wait_does_not_change_the_state(tmp_path: Path) -> None:
    """The state is that of the latest element, although the next stream was opened to fetch another one."""
    with held(tmp_path, 0) as (stream, go):
        joined = MapDataset.range(1).to_iter_dataset(ReadOptions(num_threads=0)).concatenate(stream)
        with iter(joined) as iterator:
            assert next(iterator) == 0
            state = iterator.get_state()
            with interrupted_wait(go):
                next(iterator)
            assert iterator.get_state() == state
            go.put(9)
            assert list(iterator) == [0, 1, 2, 3]


@pytest.mark.parametrize("join", JOINS)
def test_a_wait_does_not_change_the_states(join: str, tmp_path: Path) -> None:
    """The state after each element is that of a reader that never waits, also where a stream follows another one."""
    here = ReadOptions(num_threads=0)

    def states(following: IterDataset[Any]) -> list[Any]:
        streams = (
            MapDataset.range(2).to_iter_dataset(here).concatenate(following),
            MapDataset.range(6).to_iter_dataset(),
        )
        with iter(JOINS[join](*streams)) as iterator:
            return [iterator.get_state() for _ in iterator]

    with held(tmp_path, 0) as (stream, go):
        with at_waits(go.put):
            waited = states(stream)
        go.put(9)
        assert waited == states(MapDataset.source(Held(go.path, 0)).to_iter_dataset(here))
