"""Errors in worker processes: each arrives at its turn, says where it comes from, and loses nothing."""

import functools
import itertools
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.errors import WorkerDiedError, WorkerError
from millstream.loader.engine.workers import MAX_DEATHS_AT_START
from support.faults import user_faults
from support.faults.user_faults import At, Raise
from support.processes.worker_pools import BAD, BATCH, EXPECTED, SIZE, STEP, at_most, loader_of, pids_of


def error_at_its_turn(loader: millstream.DataLoader, kind: type[BaseException]) -> BaseException:
    """Returns the error that comes instead of batch STEP, having checked that nothing else is affected by it.

    Neither it nor `seek` nor `set_state` cost a process.
    """
    with iter(loader) as iterator:
        state, first = iterator.get_state(), next(iterator)
        pids = pids_of(iterator)
        assert [first.tolist(), *(next(iterator).tolist() for _ in range(STEP - 1))] == EXPECTED[:STEP]
        for _ in range(2):
            with pytest.raises(kind) as caught, at_most(1.0):
                next(iterator)
            assert iterator.step == STEP
        iterator.seek(STEP + 1)
        assert [batch.tolist() for batch in iterator] == EXPECTED[STEP + 1 :]
        assert caught.value.__cause__ is not None
        iterator.set_state(state)
        next(iterator)
        assert pids_of(iterator) == pids
    return caught.value


@pytest.mark.parametrize(
    ("source", "threads"),
    [(range(SIZE), 16), (millstream.RangeDataSource(0, SIZE), 0)],
    ids=["threads", "batched"],
)
def test_an_exception_arrives_at_its_turn(source: Any, threads: int) -> None:
    """An exception follows the batches before it, at each try, with type, operation, record key and traceback."""
    loader = loader_of(
        At(BAD, Raise(KeyError, ("key", 7))), data_source=source, read_options=millstream.ReadOptions(threads)
    )
    error = error_at_its_turn(loader, KeyError)

    assert type(error) is KeyError
    assert error.args == ("key", 7)
    assert "operation 0, At" in error.__notes__[0]
    assert f"at record key {BAD} (position {STEP * BATCH + 2})" in error.__notes__[0]
    assert "in __call__\n    raise self.kind(*self.arguments)" in str(error.__cause__)


def local_class() -> type[Exception]:
    """Returns an exception class that no module has."""

    class HiddenError(Exception):
        pass

    return HiddenError


def lying(attribute: str) -> type[Exception]:
    """Returns an exception class whose attribute raises when it is read."""
    return type("LyingError", (Exception,), {attribute: property(lambda _: 1 / 0)})


HOLDS_LOCK = "support.faults.user_faults.HoldsLockError: text"


@pytest.mark.parametrize(
    ("kind", "arguments", "arrives_as", "args"),
    [
        (user_faults.NeedsTwoError, ("text", 2), user_faults.NeedsTwoError, ("text 2",)),
        (user_faults.CannotBeShownError, (), user_faults.CannotBeShownError, ()),
        (user_faults.HoldsLockError, ("text",), WorkerError, (HOLDS_LOCK,)),
        *((kind, ("text",), kind, ("text",)) for kind in [local_class(), *map(lying, ["args", "__dict__"])]),
    ],
    ids=[
        "needs two",
        "cannot be shown",
        "cannot be pickled",
        "of a local class",
        "lies about args",
        "about attributes",
    ],
)
def test_an_unusual_exception_arrives(
    kind: type[Exception], arguments: tuple[Any, ...], arrives_as: type[Exception], args: tuple[Any, ...]
) -> None:
    """An exception keeps type, arguments, record and traceback; one that cannot be pickled is a WorkerError."""
    error = error_at_its_turn(loader_of(At(BAD, Raise(kind, arguments))), arrives_as)

    assert type(error) is arrives_as
    assert "in __call__\n    raise self.kind(*self.arguments)" in str(error.__cause__)
    if kind.__name__ != "LyingError":
        assert error.args == args
        assert f"record key {BAD}" in error.__notes__[0]
    else:
        assert str(error) == "text"


def lock_adder() -> Callable[[int], Any]:
    """Returns a function whose results can be pickled, except for that of the bad element."""
    return lambda number: {"number": number, "more": [0, (threading.Lock(), "text")] if number == BAD else None}


def test_an_element_that_cannot_be_pickled_is_named() -> None:
    """The elements before it are delivered; the error names leaf, type and record; the next one can be had."""
    order = [number for batch in EXPECTED for number in batch]
    place = order.index(BAD)
    with iter(loader_of(operations=[lock_adder()])) as iterator:
        assert [next(iterator)["number"] for _ in range(place)] == order[:place]
        with pytest.raises(TypeError) as caught, at_most(1.0):
            next(iterator)
        iterator.seek(place + 1)
        assert [element["number"] for element in iterator] == order[place + 1 :]
    assert "['more'][1][0] of type lock" in str(caught.value)
    assert caught.value.__notes__ == [f"millstream: at record key {BAD} (position {place})."]


def test_elements_before_one_that_cannot_be_unpickled_here_are_delivered() -> None:
    """Without a Batch many elements share a message; only the one that cannot be unpickled is an error."""
    home, order = os.getpid(), [number for batch in EXPECTED for number in batch]
    bad = order[STEP * BATCH]
    iterator = iter(loader_of(operations=[lambda number: user_faults.NeedsHome(home) if number == bad else number]))
    delivered: list[int] = []
    with pytest.raises(LookupError, match="not here") as caught, iterator:
        delivered.extend(iterator)

    assert delivered == order[: STEP * BATCH]
    assert f"from the record {bad} " in caught.value.__notes__[-1]


@pytest.mark.parametrize("buffer_size", [1, 4])
def test_elements_that_cannot_go_on_to_another_worker_are_an_error_at_their_turn(buffer_size: int) -> None:
    """If a Batch regroups, the batches before the error are delivered, and it names the records."""
    home, numbers = os.getpid(), [number for batch in EXPECTED for number in batch]
    bad = numbers[STEP * BATCH + 2]

    class All(millstream.Filter):
        def filter(self, element: Any) -> bool:
            return element is not None

    loader = loader_of(
        operations=[
            lambda number: user_faults.StaysWithin(home) if number == bad else number,
            All(),
            millstream.Batch(BATCH, batch_fn=list),
        ],
        worker_buffer_size=buffer_size,
    )
    with iter(loader) as iterator:
        assert [next(iterator) for _ in range(STEP)] == EXPECTED[:STEP]
        for _ in range(2):
            with pytest.raises(TypeError, match="stays here") as caught:
                next(iterator)
            assert iterator.step == STEP
    assert ", ".join(map(str, EXPECTED[STEP])) in caught.value.__notes__[-1]


def test_a_pipeline_that_cannot_be_pickled_is_named() -> None:
    """The error names the part of the pipeline, its attribute and the remedy."""
    with pytest.raises(TypeError, match=r"operations\[1\], Locked \(attribute lock\) cannot be sent to worker proc"):
        next(iter(loader_of(abs, user_faults.Locked())))
    source = user_faults.Numbers(SIZE)
    source.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"data_source \(attribute lock\) cannot be sent to worker proc"):
        next(iter(loader_of(data_source=source)))
    lock = threading.Lock()
    with pytest.raises(TypeError, match="worker_init_fn cannot be sent to worker proc"):
        next(iter(loader_of(worker_init_fn=lambda *_: lock.release())))

    class Trainer:
        def __init__(self) -> None:
            self.step, self.source, self.lock = 3, source, threading.Lock()

        def tokenize(self, number: int) -> int:
            return number

    with pytest.raises(TypeError, match=r" \(Numbers\.lock, \S*Trainer\.lock\) cannot be sent to worker proc"):
        next(iter(loader_of(Trainer().tokenize)))


def test_a_function_that_cannot_be_pickled_is_named_with_its_variable() -> None:
    """The error names the function's variable, and its advice, creating the object on first use, works."""
    lock = threading.Lock()

    def guarded(number: int) -> int:
        with lock:
            return number

    with pytest.raises(TypeError, match=r"\(variable lock of test_a_func.*guarded\) cannot be .*\n.*functools.cache"):
        next(iter(loader_of(guarded)))
    make_lock = functools.cache(threading.Lock)
    assert [batch.tolist() for batch in loader_of(lambda number: [make_lock().locked(), number][1])] == EXPECTED


def test_a_pipeline_that_cannot_be_unpickled_is_an_error() -> None:
    """An exception of unpickling the pipeline keeps its type and gets a note that a worker process raised it."""
    source = user_faults.Numbers(SIZE, on_arrival=Raise(ConnectionError, ("no network",)))
    with iter(loader_of(data_source=source)) as iterator:
        for _ in range(2):
            with pytest.raises(ConnectionError, match="no network") as caught:
                next(iterator)

    assert caught.value.__notes__ == ["millstream: a worker process raised this while it unpickled the pipeline."]
    assert "__setstate__" in str(caught.value.__cause__)


class AtHome:
    """The orders of a file that only the process with this number has."""

    home = os.getpid()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, position: int) -> int:
        return position

    def of_epoch(self, number: int) -> "AtHome":
        if os.getpid() != self.home:
            raise FileNotFoundError(number)
        return self


def test_an_epoch_that_cannot_be_begun_in_a_worker_is_an_error() -> None:
    """The exception of `of_epoch` arrives, and no worker dies of it."""
    with loader_of(sampler=AtHome()) as loader, pytest.raises(FileNotFoundError) as caught:
        [list(epoch) for _, epoch in loader.epochs(2)]
    assert caught.value.__notes__[0] == "millstream: a worker process raised this while it began epoch 0."


@pytest.mark.parametrize(
    ("fault", "spares_first"),
    [(user_faults.crash, False), (user_faults.leave, False), (user_faults.exit_at_once, True)],
)
def test_workers_that_die_at_birth_are_an_error(
    fault: Callable[[], None], *, spares_first: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A pipeline that kills processes that unpickle it is soon an error; the stream continues while one can start."""
    births, sampler = tmp_path / "births", millstream.IndexSampler(SIZE, seed=0)

    def be_born() -> None:
        with births.open("a") as file:
            file.write("born\n")
        if not spares_first or not user_faults.first_time(births.with_name("first")):
            fault()

    came: list[Any] = []
    with iter(loader_of(data_source=user_faults.Numbers(SIZE, on_arrival=be_born), sampler=sampler)) as iterator:
        with pytest.raises(WorkerDiedError, match="Worker processes die while they start"), at_most(4.0):
            came.extend(iterator)
        assert iterator.step == len(came)
    expected = itertools.islice(loader_of(sampler=sampler, worker_count=0), len(came))
    assert [batch.tolist() for batch in came] == [batch.tolist() for batch in expected]
    assert MAX_DEATHS_AT_START <= births.read_text().count("born") <= MAX_DEATHS_AT_START + 5
    assert capfd.readouterr().err == ""


def have_no_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))


def test_workers_that_fail_by_themselves_are_said_to(capfd: pytest.CaptureFixture[str]) -> None:
    """If a worker lacks a descriptor of its own, the report does not blame user code, and its error is printed."""
    source = user_faults.Numbers(SIZE, on_arrival=have_no_descriptors)
    with pytest.raises(WorkerDiedError, match=r"while they start\. The last one failed between two calls"):
        next(iter(loader_of(data_source=source, worker_count=1)))
    assert "Too many open files" in capfd.readouterr().err
