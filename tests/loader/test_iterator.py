"""An iterator's life: its position, errors, states and its end, with and without threads."""

import concurrent.futures
import contextlib
import copy
import gc
import json
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.errors import CheckpointError
from millstream.loader.threads import shared_threads
from millstream.transforms import Batch, Filter, FlatMap, Map, MapWithIndex, RandomMap, Transformation
from support.faults.user_faults import WAIT_SECONDS
from support.processes.worker_pools import in_background
from support.streams import comparable


def loader_of(
    reading: millstream.ReadOptions, *operations: Any, source: Any = range(20), num_epochs: int | None = 1
) -> millstream.DataLoader:
    """Returns a loader of twenty shuffled records."""
    return millstream.DataLoader(
        data_source=source,
        sampler=millstream.IndexSampler(len(source), shuffle=True, num_epochs=num_epochs, seed=3),
        operations=operations,
        read_options=reading,
    )


def fields(iterator: millstream.DataLoaderIterator) -> tuple[int, int]:
    """Returns step and position as the iterator's state records them."""
    state = json.loads(iterator.get_state())
    return state["step"], json.loads(state["position"])[0][0]


def fail_at(key: int, error: BaseException) -> Callable[[Any], Any]:
    """Returns a function that gives back its element or list of elements, and raises at one of them."""

    def function(element: Any) -> Any:
        if (key in element) if isinstance(element, list) else element == key:
            raise error
        return element

    return function


FAILING_OPERATIONS: dict[str, Callable[[int, BaseException], Transformation]] = {
    "Map": lambda key, error: Map(fail_at(key, error)),
    "RandomMap": lambda key, error: RandomMap(lambda element, _: fail_at(key, error)(element)),
    "MapWithIndex": lambda key, error: MapWithIndex(lambda _, element: fail_at(key, error)(element)),
    "Filter": lambda key, error: Filter(lambda element: fail_at(key, error)(element) is not None),
    "FlatMap": lambda key, error: FlatMap(lambda element: [fail_at(key, error)(element)], max_fan_out=1),
}


@pytest.mark.parametrize("kind", FAILING_OPERATIONS)
def test_an_error_comes_at_its_turn_and_says_where(kind: str, reading: millstream.ReadOptions) -> None:
    """All elements before the failing one are delivered; then its error: type, message, operation, record, position."""
    order = list(loader_of(reading))
    bad = order[13]
    operation = FAILING_OPERATIONS[kind](bad, LookupError("no such word"))
    with iter(loader_of(reading, abs, operation)) as iterator:
        assert [next(iterator) for _ in range(13)] == order[:13]
        with pytest.raises(LookupError, match="no such word") as caught:
            next(iterator)
    (note,) = caught.value.__notes__
    assert note.startswith(f"millstream: in operation 1, {kind}")
    assert note.endswith(f"at record key {bad} (position 13).")


def test_an_error_within_a_batch_comes_instead_of_it(reading: millstream.ReadOptions) -> None:
    """An error before, in or after a batch comes at its turn; in and after it, it names the batch's first record."""
    order, error = list(loader_of(reading)), OSError(5, "disk")
    for operations, number, record in (
        ((Map(fail_at(order[9], error)), Batch(4, batch_fn=list)), 0, 9),
        ((Batch(4, batch_fn=fail_at(order[9], error)),), 0, 8),
        ((Batch(4, batch_fn=list), Map(fail_at(order[9], error))), 1, 8),
    ):
        with iter(loader_of(reading, *operations)) as iterator:
            assert [next(iterator) for _ in range(2)] == [order[:4], order[4:8]]
            with pytest.raises(OSError, match="disk") as caught:
                next(iterator)
        note = caught.value.__notes__.pop()
        assert note.startswith(f"millstream: in operation {number}, ")
        assert note.endswith(f"record key {order[record]} (position {record}).")


class Flaky:
    """A source that fails the first time it is asked for one record."""

    def __init__(self, bad: int, kind: type[BaseException] = ConnectionError) -> None:
        self.bad = bad
        self.kind = kind
        self.left = 1

    def __len__(self) -> int:
        return 20

    def __getitem__(self, key: int) -> int:
        if key == self.bad and self.left:
            self.left -= 1
            raise self.kind("gone")
        return key


@pytest.mark.parametrize("kind", [ConnectionError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_next_tries_again_after_an_error(kind: type[BaseException], reading: millstream.ReadOptions) -> None:
    """An error or an interrupt leaves the position as it was; once it is gone, the batch that was due comes."""
    expected = [batch.tolist() for batch in loader_of(reading, Batch(3))]
    iterator = iter(loader_of(reading, Batch(3), source=Flaky(expected[2][1], kind)))
    delivered = [next(iterator).tolist() for _ in range(2)]
    before = iterator.get_state()
    with pytest.raises(kind, match="gone"):
        next(iterator)

    assert iterator.get_state() == before
    assert fields(iterator) == (2, 6)
    assert delivered + [batch.tolist() for batch in iterator] == expected


def test_a_lasting_error_is_raised_again_or_passed_over(reading: millstream.ReadOptions) -> None:
    """`next` raises the same error as often as it is called; `seek(step + 1)` continues after the bad batch."""
    expected = [batch.tolist() for batch in loader_of(reading, Batch(3))]
    iterator = iter(loader_of(reading, Map(fail_at(expected[2][1], LookupError())), Batch(3)))
    delivered = [next(iterator).tolist() for _ in range(2)]
    for _ in range(3):
        with pytest.raises(LookupError):
            next(iterator)
        assert fields(iterator) == (2, 6)
    iterator.seek(iterator.step + 1)

    assert delivered + [batch.tolist() for batch in iterator] == expected[:2] + expected[3:]


class StoppingTogether(Flaky):
    """A source whose reads of several records raise StopIteration, as a forgotten `next()` does."""

    def __getitems__(self, keys: Sequence[int]) -> list[int]:
        return [next(iter([])) for _ in keys]


class StoppingSampler:
    """A sampler of runs that raises StopIteration at its fourteenth position."""

    __len__ = Flaky.__len__

    def record_keys(self, start: int, stop: int) -> Any:
        return np.arange(start, stop) if stop < 14 else next(iter([]))


def test_stop_iteration_of_user_code_is_an_error_not_an_end(reading: millstream.ReadOptions) -> None:
    """A stray StopIteration in an operation, a sampler or a batched read is a RuntimeError: no stream ends early."""
    sampler: Any = StoppingSampler()
    batch = Batch(3, batch_fn=fail_at(7, StopIteration()))
    for loader in (
        *(loader_of(reading, make(7, StopIteration())) for make in FAILING_OPERATIONS.values()),
        loader_of(reading, batch),
        loader_of(reading, Filter(lambda _: True), batch),
        loader_of(reading, source=StoppingTogether(-1)),
        millstream.DataLoader(data_source=range(20), sampler=sampler, read_options=reading),
    ):
        with iter(loader) as iterator, pytest.raises(RuntimeError, match="StopIteration"):
            list(iterator)
        assert iterator.step < 20


def test_the_state_can_be_taken_at_any_time(reading: millstream.ReadOptions) -> None:
    """New, reading ahead, running, exhausted, sought and closed: the state is that of the batches delivered."""
    iterator = iter(loader_of(reading, Batch(6)))
    for act, expected in (
        (bool, (0, 0)),
        (millstream.DataLoaderIterator.start_prefetch, (0, 0)),
        (next, (1, 6)),
        (list, (4, 20)),
        (lambda iterator: iterator.seek(2), (2, 12)),
        (millstream.DataLoaderIterator.close, (2, 12)),
    ):
        act(iterator)
        assert fields(iterator) == expected


def test_a_refused_state_leaves_everything_as_it_was(reading: millstream.ReadOptions) -> None:
    """A refused state changes nothing, with work in flight either: the same batches follow."""
    expected = [batch.tolist() for batch in loader_of(reading, Batch(3))]
    iterator = iter(loader_of(reading, Batch(3)))
    delivered = [next(iterator).tolist() for _ in range(2)]
    before, executor = iterator.get_state(), iterator._executor
    with pytest.raises(CheckpointError, match="Cannot read"):
        iterator.set_state(before[:-3])
    with pytest.raises(CheckpointError, match="another stream"):
        iterator.set_state(iter(loader_of(reading, Batch(3), abs)).get_state())
    with pytest.raises(ValueError, match="everything"):
        iterator.set_state(before, allow={"everything"})

    assert iterator.get_state() == before
    assert iterator._executor is executor
    assert delivered + [batch.tolist() for batch in iterator] == expected


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("millstream-read")]


@pytest.mark.parametrize("is_in_a_cycle", [False, True])
def test_dropping_the_iterator_ends_its_threads(is_in_a_cycle: bool, reading: millstream.ReadOptions) -> None:
    """Without `close`, the threads end with the last reference to the iterator; in a cycle, with a collection."""
    holder: dict[str, Any] = {"iterator": iter(loader_of(reading, Batch(3)))}
    if is_in_a_cycle:
        holder["self"] = holder
    next(holder["iterator"])
    threads = our_threads()
    gc.disable()
    try:
        del holder
        if is_in_a_cycle:
            gc.collect()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert our_threads() == []
    finally:
        gc.enable()


def test_an_exhausted_iterator_stays_exhausted(reading: millstream.ReadOptions) -> None:
    """After the end, every `next` is the end, no thread is left, and seeking back starts anew."""
    iterator = iter(loader_of(reading, Batch(3)))
    expected = [batch.tolist() for batch in iterator]

    assert our_threads() == []
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)
    assert fields(iterator) == (7, 20)
    iterator.seek(5)
    assert [batch.tolist() for batch in iterator] == expected[5:]


def test_two_iterators_of_a_loader_are_independent(reading: millstream.ReadOptions) -> None:
    """Each iterator has a position of its own, whatever the others do."""
    loader = loader_of(reading, RandomMap(lambda element, rng: element + rng.random()), Batch(3))
    expected = [comparable(batch) for batch in loader]
    one, other = iter(loader), iter(loader)
    assert comparable(next(one)) == comparable(next(other)) == expected[0]
    other.seek(4)
    assert comparable(next(one)) == expected[1]
    assert [comparable(batch) for batch in other] == expected[4:]
    assert [comparable(batch) for batch in one] == expected[2:]


def test_seek_has_bounds(reading: millstream.ReadOptions) -> None:
    """A step beyond the end, below 0 or not whole is an error that keeps the position, 1:1 or not."""
    one_to_one = iter(loader_of(reading, Batch(3)))
    filtered = iter(loader_of(reading, Filter(lambda element: element % 2), Batch(3)))
    for iterator, length in ((one_to_one, 7), (filtered, 4)):
        first = next(iterator).tolist()
        for step in (length + 1, -1):
            with pytest.raises(IndexError, match=f"step must be .*{length}|step must be (between|at least) 0"):
                iterator.seek(step)
        with pytest.raises(TypeError):
            iterator.seek(1.5)  # type: ignore[arg-type]  # that is the point
        assert iterator.step == 1
        iterator.seek(length)
        assert list(iterator) == []
        iterator.seek(0)
        assert next(iterator).tolist() == first
        iterator.close()


def test_seek_reaches_as_far_as_positions_do(reading: millstream.ReadOptions) -> None:
    """An endless stream can be entered anywhere at once; beyond 63 bits of positions there is a clear error."""
    iterator = iter(loader_of(reading, Batch(4), num_epochs=None))
    for step in (2**61 - 1, 10**17):
        iterator.seek(step)
        assert next(iterator).tolist() == iterator._plan.locate(step, step + 1).record_key.tolist()
    with pytest.raises(IndexError, match=f"between 0 and {2**61}"):
        iterator.seek(2**61 + 1)
    assert fields(iterator) == (10**17 + 1, 4 * (10**17 + 1))
    iterator.close()


def test_counting_to_a_step_reports_errors_in_between(reading: millstream.ReadOptions) -> None:
    """A seek that must compute batches raises their error, and the position stays."""
    bad = list(loader_of(reading))[5]
    with iter(loader_of(reading, FAILING_OPERATIONS["Filter"](bad, LookupError()))) as iterator:
        for step in (6, 7):
            with pytest.raises(LookupError):
                iterator.seek(step)
            assert iterator.step == 0
        iterator.seek(5)
        assert iterator.step == 5


def test_batches_are_the_consumers_own(reading: millstream.ReadOptions) -> None:
    """Every array can be written to, and writing to it changes no other batch: memory is never used twice."""
    source = [{"a": np.full(4, number), "b": number} for number in range(20)]
    loader = loader_of(reading, Batch(3), source=source, num_epochs=2)
    expected, kept = [comparable(batch) for batch in loader], []
    for number, batch in enumerate(loader):
        assert comparable(batch) == expected[number]
        for leaf in batch.values():
            assert leaf.flags.writeable
            assert leaf.flags.c_contiguous
            leaf[...] = -number
        kept.append(batch)

    assert all(np.all(leaf == -number) for number, batch in enumerate(kept) for leaf in batch.values())
    assert all(np.all(record["a"] == number) for number, record in enumerate(source))


@pytest.mark.parametrize("operations", [(Batch(3),), (Filter(lambda _: True), Batch(3)), (Batch(3), Batch(2), abs)])
def test_delivered_batches_are_not_kept(operations: tuple[Any, ...], reading: millstream.ReadOptions) -> None:
    """The memory of a batch is free when its consumer lets go of it: no reference is left in the iterator."""
    gc.disable()
    try:
        with iter(loader_of(reading, *operations, source=range(24))) as iterator:
            for _ in range(3):
                batch = next(iterator)
                watched = weakref.ref(batch)
                del batch
                assert watched() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "options", [millstream.ReadOptions(2), millstream.ReadOptions(0), millstream.ReadOptions(4, 0)]
)
def test_start_prefetch_reads_in_the_background_if_options_allow(options: millstream.ReadOptions) -> None:
    """It starts reading at once and changes nothing; without threads, or room for records, nothing is read early."""
    is_read = threading.Event()

    def read(key: int) -> int:
        is_read.set()
        return key

    with iter(loader_of(options, read, Batch(3))) as iterator:
        assert not is_read.is_set()
        iterator.start_prefetch()
        iterator.start_prefetch()
        if options.reads_ahead:
            assert is_read.wait(WAIT_SECONDS)
        else:
            assert not is_read.is_set()
            assert our_threads() == []
        assert iterator.step == 0
        inline = loader_of(millstream.ReadOptions(0), Batch(3))
        assert [batch.tolist() for batch in iterator] == [batch.tolist() for batch in inline]


@pytest.mark.parametrize("stop", [millstream.DataLoaderIterator.close, millstream.DataLoaderIterator.interrupt])
def test_stopping_ends_the_wait_of_another_thread(
    stop: Callable[[millstream.DataLoaderIterator], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `next` that waits for threads raises as soon as another thread has closed or interrupted the iterator."""
    monkeypatch.setattr(shared_threads, "CLOSE_SECONDS", 0.1)
    is_read, goes_on = threading.Event(), threading.Event()

    def read(key: int) -> int:
        is_read.set()
        goes_on.wait(WAIT_SECONDS)
        return key

    def stop_when_read() -> None:
        assert is_read.wait(WAIT_SECONDS)
        stop(iterator)

    iterator = iter(loader_of(millstream.ReadOptions(2), read, Batch(3)))
    with in_background(stop_when_read), pytest.raises(ValueError, match="closed"):
        next(iterator)
    goes_on.set()
    assert iterator.step == 0


def test_start_prefetch_in_mid_stream_changes_nothing(reading: millstream.ReadOptions) -> None:
    """Between two batches, at the end and on runs of several elements, reading ahead never loses or repeats one."""
    with iter(loader_of(reading)) as iterator:
        for expected in loader_of(reading):
            iterator.start_prefetch()
            assert next(iterator) == expected
        iterator.start_prefetch()
        assert list(iterator) == []


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_kept_alive_by_what_was_used(fails: bool, reading: millstream.ReadOptions) -> None:
    """Source, loader and iterator go when their user lets go of them: there is no hidden reference.

    No collector has to run, except after an error, whose traceback refers to all frames that it came through.
    """
    source = Flaky(4 if fails else -1)
    loader = loader_of(reading, Batch(3), source=source)
    iterator = iter(loader)
    watched: list[weakref.ref[Any]] = [weakref.ref(loader), weakref.ref(source), weakref.ref(iterator)]
    gc.disable()
    try:
        next(iterator)
        with contextlib.suppress(ConnectionError):
            list(iterator)
        iterator.seek(2)
        next(iterator)
        iterator.get_state()
        len(loader)
        iterator.close()
        del source, loader, iterator
        if fails:
            gc.collect()
        assert [reference() for reference in watched] == [None] * 3
    finally:
        gc.enable()


class Remembers(Map):
    """An operation with a private cache."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def map(self, element: int) -> int:
        return self._seen.setdefault(element, element)


def test_a_loader_is_what_its_operations_were_when_it_was_built(reading: millstream.ReadOptions) -> None:
    """Using an operation changes no state of a loader, of one that is built from it afterwards neither."""
    shared = Remembers()
    first = loader_of(reading, shared, Batch(3))
    list(first)
    used = iter(first)
    next(used)
    fresh = iter(loader_of(reading, Remembers(), Batch(3)))
    fresh.set_state(used.get_state(), strict=True)
    assert [batch.tolist() for batch in fresh] == [batch.tolist() for batch in used]

    later = iter(loader_of(reading, shared, Batch(3)))
    later.set_state(fresh.get_state(), strict=True)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_iterator_cannot_be_copied(reading: millstream.ReadOptions, copied: Any) -> None:
    """A copy would share what works ahead, and so the batches: the error says how to get another iterator."""
    with iter(loader_of(reading, Batch(3))) as iterator, pytest.raises(TypeError, match="set_state"):
        copied(iterator)


def test_threads_that_share_an_iterator_get_each_batch_once_or_an_error(reading: millstream.ReadOptions) -> None:
    """Four threads draw from one iterator: each batch comes to one of them, or one is told; none waits forever."""
    expected = [batch.tolist() for batch in loader_of(reading, Batch(3))]
    got: list[Any] = []

    def draw() -> None:
        while True:
            try:
                got.append(next(iterator).tolist())
            except ValueError as error:
                assert "is in use" in str(error)  # noqa: PT017
            except StopIteration:
                return

    with (
        iter(loader_of(reading, Batch(3))) as iterator,
        concurrent.futures.ThreadPoolExecutor(4) as threads,
    ):
        for drawing in [threads.submit(draw) for _ in range(4)]:
            drawing.result(WAIT_SECONDS)
    assert sorted(got) == sorted(expected)
