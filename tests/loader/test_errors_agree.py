"""An error is the same one whoever meets it: the consumer's thread, a thread of the readers, or a worker process."""

import asyncio
import bdb
import contextlib
import pdb  # noqa: T100  (what a debugger does in a worker is the question)
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.core.descriptions import described
from millstream.transforms import Batch, FilterTransform, FlatMap
from support.faults.user_faults import At, Raise

SIZE = 300
BAD = 200
WAYS = {
    "inline": (0, millstream.ReadOptions(0)),
    "threads": (0, millstream.ReadOptions(3)),
    "worker with threads": (1, millstream.ReadOptions(3)),
}
"""The numbers of workers and of threads."""


class FailingSampler:
    """Raises at one position."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> millstream.RecordMetadata:
        if index == BAD:
            raise LookupError(index)
        return millstream.RecordMetadata(index, index)


def bool_of(batch: Any) -> bool:
    """Drops some batches."""
    return bool(batch[0] % 3)


def fails_in_batch(batch: Any) -> Any:
    """Fails in the batch with a number."""
    if BAD + 1 in batch:
        raise ValueError(BAD)
    return batch


class FailingSource:
    """Raises at one record, read alone or with others."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    __len__ = FailingSampler.__len__

    def __getitem__(self, key: int) -> int:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[int]) -> list[int]:
        if BAD in keys:
            raise self.kind
        return list(keys)


def loader_of(way: str, source: Any, sampler: Any, *operations: Any) -> millstream.DataLoader:
    """Returns a loader that works in one of the ways."""
    worker_count, reading = WAYS[way]
    return millstream.DataLoader(
        data_source=source, sampler=sampler, operations=operations, worker_count=worker_count, read_options=reading
    )


def outcome_of(way: str, source: Any, sampler: Any, *operations: Any) -> tuple[list[Any], type, tuple[Any, ...], Any]:
    """Returns what comes before the error of a loader, and the type, the arguments and the notes of the error."""
    came: list[Any] = []
    with iter(loader_of(way, source, sampler, *operations)) as iterator:
        try:
            came.extend(map(str, iterator))
        except BaseException as error:  # noqa: BLE001  (any exception is what this is about)
            assert iterator.step == len(came)
            return came, type(error), error.args, getattr(error, "__notes__", None)
    raise AssertionError("no error came")


@pytest.mark.parametrize(
    ("source", "operations"),
    [(range(SIZE), ()), (range(SIZE), (Batch(7),)), (millstream.RangeDataSource(0, SIZE), (Batch(7),))],
    ids=["elements", "batches", "batched reads"],
)
def test_an_error_of_the_sampler(source: Any, operations: tuple[Any, ...]) -> None:
    """All that comes before the position arrives first, the note names the sampler, and `seek` passes over it."""
    outcomes = {way: outcome_of(way, source, FailingSampler(), *operations) for way in WAYS}

    came, kind, arguments, notes = outcomes["inline"]
    assert outcomes == dict.fromkeys(WAYS, outcomes["inline"])
    assert (len(came), kind, arguments) == (BAD // 7 if operations else BAD, LookupError, (BAD,))
    assert f"FailingSampler raised this at position {BAD}" in notes[0]
    assert notes[1:] == [f"millstream: in the sampler, at block {len(came)}."]
    for way in WAYS:
        with iter(loader_of(way, source, FailingSampler(), *operations)) as iterator:
            iterator.seek(len(came) + 1)
            assert np.ravel(next(iterator))[0] == (len(came) + 1) * (7 if operations else 1)


@pytest.mark.parametrize(
    ("kind", "operations"),
    [(KeyboardInterrupt, (Batch(7),)), (GeneratorExit, ()), (asyncio.CancelledError, (Batch(7),))],
)
def test_an_exception_that_is_no_error(kind: type[BaseException], operations: tuple[Any, ...]) -> None:
    """A BaseException keeps its type and origin; only KeyboardInterrupt, inline, may come before its turn."""
    operation = At(BAD, Raise(kind, ("why",)))
    outcomes = {way: outcome_of(way, range(SIZE), in_order(), operation, *operations) for way in WAYS}

    _, *error = outcomes["inline"]
    assert [outcome[1:] for outcome in outcomes.values()] == [tuple(error)] * len(WAYS)
    note = f"millstream: in operation 0, {described(operation)}, at record key {BAD} (position {BAD})."
    assert error == [kind, ("why",), [note]]
    counts = {way: len(came) for way, (came, *_) in outcomes.items()}
    if kind is KeyboardInterrupt:
        # Threads leave cheap calls to the consumer's thread, where it may be Ctrl-C, and comes at once.
        for way in ("inline", "threads"):
            assert counts.pop(way) <= (BAD // 7 if operations else BAD)
    assert set(counts.values()) == {BAD // 7 if operations else BAD}
    # The same holds where records are read, many at once.
    for way in WAYS:
        came, found, *_ = outcome_of(way, FailingSource(kind), in_order(), Batch(7))
        assert (len(came), found) == (BAD // 7, kind)


def is_kept(number: int) -> bool:
    return number % 3 > 0 and not BAD - 8 < number < BAD


def with_bad_child(number: int) -> Iterator[int]:
    yield number
    if number == BAD:
        raise ValueError(number)


STOPPED: dict[str, tuple[Any, Any, list[Any]]] = {
    "sampler": (range(SIZE), FailingSampler(), [FilterTransform(is_kept)]),
    "source": (FailingSource(ValueError), None, [FilterTransform(is_kept)]),
    "end of the source": (FailingSource(StopIteration), None, [FilterTransform(is_kept)]),
    "filter, then the error": (range(SIZE), None, [FilterTransform(is_kept), At(BAD + 1, Raise(ValueError))]),
    "the error, filter, batch": (range(SIZE), None, [At(BAD, Raise(ValueError)), FilterTransform(is_kept), Batch(7)]),
    "the error, batch, filter": (range(SIZE), None, [At(BAD, Raise(ValueError)), Batch(7), FilterTransform(bool_of)]),
    "batch, filter, the error": (range(SIZE), None, [Batch(7), FilterTransform(bool_of), fails_in_batch]),
    "second child": (range(SIZE), None, [FlatMap(with_bad_child, 2), FilterTransform(is_kept)]),
}
"""Sources, samplers and operations of streams that stop with an error, or early."""


@pytest.mark.parametrize("name", STOPPED)
def test_states_before_an_error_agree(name: str) -> None:
    """The states before each element, and after the error, are equal for all workers, threads and call sizes."""
    source, sampler, operations = STOPPED[name]
    found = []
    for way in WAYS:
        with iter(loader_of(way, source, sampler or in_order(), *operations)) as iterator:
            states: list[bytes] = []
            with contextlib.suppress(LookupError, ValueError):
                states.extend(iterator.get_state() for _ in iterator)
            found.append([*states, iterator.get_state()])
    assert len(found[0]) > BAD // 14
    assert found == [found[0]] * len(WAYS)


def in_order() -> millstream.IndexSampler:
    return millstream.IndexSampler(SIZE, num_epochs=1)


def test_a_debugger_in_a_worker_says_how_to_debug() -> None:
    """A worker has no terminal: the error names the setting under which a debugger works."""
    loader = loader_of("worker with threads", range(SIZE), in_order(), At(2, pdb.set_trace))
    with iter(loader) as iterator, pytest.raises(bdb.BdbQuit) as caught:
        list(iterator)

    assert "pass debug=True to the DataLoader" in caught.value.__notes__[-1]
