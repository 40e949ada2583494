"""Streams below an interleave, a zip, a mixture and the like are read in parallel, and not much further than needed."""

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from millstream import IterDataset, MapDataset, ReadOptions
from millstream.experimental import (
    CacheIterDataset,
    InterleaveIterDataset,
    LimitIterDataset,
    RepeatIterDataset,
    ZipIterDataset,
)
from millstream.loader.engine import policy
from millstream.loader.threads import shared_threads
from support.clocks.owned_clock import CLOCK
from support.draw.chains import CountedSource
from support.faults.user_faults import WAIT_SECONDS
from support.stores.waiting_storage import Storage

NUM_STREAMS = 4
LENGTH = 1000

MAX_OUTPUTS = 1000
"""The number of outputs after which as many reads as allowed must have been in flight."""


class Gate:
    """Reads of all streams, which end only when `count` of them are in flight at once.

    Attributes:
        most: the largest number of reads that were in flight at once.
        num_begun: the number of reads that have begun.
        is_passed: True unless a read has waited for the others in vain.
    """

    def __init__(self, count: int) -> None:
        self.most = self.num_begun = 0
        self.is_passed = True
        self._in_flight = 0
        self._count = count
        self._changed = threading.Condition()

    def read(self) -> None:
        """Waits for the others, in vain for a bounded time."""
        with self._changed:
            self._in_flight += 1
            self.num_begun += 1
            self.most = max(self.most, self._in_flight)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self.most >= self._count, WAIT_SECONDS):
                self.is_passed = False
            self._in_flight -= 1


class Gated:
    """A source whose reads pass a gate."""

    def __init__(self, first: int, gate: Gate) -> None:
        self._first = first
        self._gate = gate

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, number: int) -> int:
        self._gate.read()
        return self._first + number


def gated(gate: Gate, reading: ReadOptions | None = None) -> list[IterDataset[Any]]:
    return [MapDataset.source(Gated(number * LENGTH, gate)).to_iter_dataset(reading) for number in range(NUM_STREAMS)]


def keep(_: Any) -> bool:
    return True


def filtered(streams: list[IterDataset[Any]]) -> list[IterDataset[Any]]:
    return [stream.filter(keep) for stream in streams]


def interleave(streams: list[IterDataset[Any]]) -> IterDataset[Any]:
    return InterleaveIterDataset(streams, cycle_length=NUM_STREAMS)


JOINS: dict[str, Callable[[list[IterDataset[Any]]], IterDataset[Any]]] = {
    "interleave": interleave,
    "zip": ZipIterDataset,
    "mix": IterDataset.mix,
    "mix of filtered": lambda streams: IterDataset.mix(filtered(streams)),
    "limit of interleave": lambda streams: LimitIterDataset(interleave(streams), 100),
    "repeat of interleave": lambda streams: RepeatIterDataset(interleave(streams), 2),
    "cache of interleave": lambda streams: CacheIterDataset(interleave(streams)),
    "interleave of limits": lambda streams: interleave([LimitIterDataset(stream, 100) for stream in streams]),
    "mix of zips": lambda streams: IterDataset.mix([ZipIterDataset(streams[:2]), ZipIterDataset(streams[2:])]),
    "map of interleave": lambda streams: interleave(streams).map(str),
    "batch of filtered mix": lambda streams: IterDataset.mix(filtered(streams)).batch(NUM_STREAMS),
    "prefetched map of interleave": lambda streams: interleave(streams).map(str).prefetch(ReadOptions(2, 4)),
}


@pytest.mark.parametrize("join", JOINS)
def test_all_streams_below_a_join_are_read_at_the_same_time(join: str) -> None:
    """The first element comes only if a read of each stream is in flight at once."""
    gate = Gate(NUM_STREAMS)
    with iter(JOINS[join](gated(gate))) as iterator:
        next(iterator)
    assert gate.is_passed


def peak_of(document: dict[str, Any]) -> int:
    """Returns the number of reads that were in flight so far, which a document of a Storage holds."""
    return int(document["tokens"][0])


def test_the_threads_of_all_streams_below_a_join_have_a_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads all streams ask for, no more than MAX_SHARED_THREADS reads are in flight."""
    monkeypatch.setattr(shared_threads, "MAX_SHARED_THREADS", 6)
    source = MapDataset.source(Storage(6)).map(peak_of)
    with iter(interleave([source.to_iter_dataset(ReadOptions(2, 64))] * NUM_STREAMS)) as iterator:
        assert max(itertools.islice(iterator, MAX_OUTPUTS)) == 6


@pytest.mark.parametrize("join", JOINS)
def test_all_streams_together_are_read_as_far_ahead_as_one(join: str) -> None:
    """Before the first output, one buffer of records is prefetched, plus a few for calls, not one buffer per stream."""
    gate, buffer, outputs = Gate(1), 48, 20
    with iter(JOINS[join](gated(gate, ReadOptions(2, buffer)))) as iterator:
        for _ in range(outputs):
            next(iterator)
        begun = gate.num_begun
    used = outputs * NUM_STREAMS
    assert begun <= used + 2 * buffer


def test_many_fast_streams_are_read_in_calls_that_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of each stream in the buffer is two records, but a call of a thread reads more if they take no time."""
    monkeypatch.setattr(policy, "HAND_OVER_SECONDS", 1e-4)
    monkeypatch.setattr(time, "perf_counter", CLOCK.perf_counter)
    source = CountedSource(0, LENGTH)
    streams = [MapDataset.source(source).to_iter_dataset(ReadOptions(2, 128)).filter(bool) for _ in range(64)]
    with iter(IterDataset.mix(streams).batch(64)) as iterator:
        assert len(list(itertools.islice(iterator, 150))) == 150
    assert len(source.calls) < 64 * 150 / 2


def test_short_streams_are_opened_before_their_turn() -> None:
    """In an interleave, the first reads of the next streams are in flight while earlier streams are drawn from."""
    free, gate = Gate(1), Gate(3)
    sources = [Gated(number, free if number < 2 else gate) for number in range(8)]
    streams = [MapDataset.source(source)[:1].to_iter_dataset() for source in sources]
    assert list(InterleaveIterDataset(streams, cycle_length=2)) == list(range(8))
    assert gate.is_passed


def test_elements_do_not_wait_for_a_stream_behind_many_holes() -> None:
    """A few positions of the MapDataset are looked at in advance, and further ones when nothing else is left."""
    looked_at: list[int] = []

    def stream(number: int) -> IterDataset[int] | None:
        looked_at.append(number)
        is_hole = number % 1000 > 2
        return None if is_hole else MapDataset.range(3 + 9 * (number % 1000)).to_iter_dataset(ReadOptions(0, 0))

    with iter(IterDataset.interleave(MapDataset.range(2002).map(stream), cycle_length=2)) as iterator:
        for _ in range(20):
            next(iterator)
        assert max(looked_at) < 100
        assert sum(1 for _ in iterator) == 2 * (3 + 12 + 21) + 3 + 12 - 20
    assert max(looked_at) == 2001


def test_a_stream_that_comes_later_is_read_as_far_ahead_as_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the consumer had to wait for a stream, all records of a short next stream are read together."""
    monkeypatch.setattr(policy, "HAND_OVER_SECONDS", 0.0)
    monkeypatch.setattr(policy, "SOLO_CALLS", 0)
    free, gate = Gate(1), Gate(4)
    sources = [Gated(number * LENGTH, free if number < 3 else gate) for number in range(6)]
    streams = [MapDataset.source(source)[:4].to_iter_dataset() for source in sources]
    assert len(list(InterleaveIterDataset(streams, cycle_length=1))) == 4 * len(streams)
    assert gate.is_passed


def test_operations_after_a_slow_one_are_not_run_far_ahead() -> None:
    """While one element is slow, threads run a local operation for no more elements than their buffer has room for."""
    begun: list[int] = []
    changed = threading.Condition()

    def slow(number: int) -> int:
        with changed:
            begun.append(number)
            changed.notify_all()
            if number == 5:
                # In vain, unless threads run ahead without a limit.
                changed.wait_for(lambda: len(begun) > 100, 0.5)
        return number

    few = ReadOptions(2, 4)
    limited = LimitIterDataset(MapDataset.range(LENGTH).to_iter_dataset(), LENGTH)
    with iter(limited.prefetch(few).mp_prefetch(1).map(slow).prefetch(few)) as iterator:
        assert list(itertools.islice(iterator, 6)) == list(range(6))
        assert len(begun) < 30
