"""An error is the same one whoever meets it: the consumer's thread, a thread of the crew, or a worker process."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from faults import At, Raise

import millstream
from millstream.transforms import Batch

SIZE = 1000
BAD = 300
WAYS = {
    "inline": (0, millstream.ReadOptions(0)),
    "threads": (0, millstream.ReadOptions(3)),
    "worker": (1, millstream.ReadOptions(0)),
    "worker with threads": (1, millstream.ReadOptions(3)),
}
"""How many workers there are, and how many threads."""


class FailingSampler:
    """Raises at one position."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> millstream.RecordMetadata:
        if index == BAD:
            raise LookupError(index)
        return millstream.RecordMetadata(index, index)


class FailingSource:
    """Raises at one record, read alone or with others."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, key: int) -> int:
        if key == BAD:
            raise self.kind
        return key

    def __getitems__(self, keys: Sequence[int]) -> list[int]:
        return [self[key] for key in keys]


def outcome_of(way: str, source: Any, sampler: Any, *operations: Any) -> tuple[list[Any], type, tuple[Any, ...], Any]:
    """Returns what comes before the error of a loader, and the type, the arguments and the notes of the error."""
    worker_count, reading = WAYS[way]
    loader = millstream.DataLoader(
        data_source=source, sampler=sampler, operations=operations, worker_count=worker_count, read_options=reading
    )
    came: list[Any] = []
    with iter(loader) as iterator:
        try:
            came.extend(map(str, iterator))
        except BaseException as error:  # noqa: BLE001  (any exception is what this is about)
            assert iterator.step == len(came)
            return came, type(error), error.args, getattr(error, "__notes__", None)
    raise AssertionError("no error came")


@pytest.mark.parametrize("operations", [(), (Batch(7),)], ids=["elements", "batches"])
@pytest.mark.parametrize("source", [range(SIZE), millstream.RangeDataSource(0, SIZE)], ids=["single", "batched"])
def test_an_error_of_the_sampler(source: Any, operations: tuple[Any, ...]) -> None:
    """All that comes before the position arrives first, and the note says that it was the sampler's."""
    outcomes = {way: outcome_of(way, source, FailingSampler(), *operations) for way in WAYS}

    came, kind, arguments, notes = outcomes["inline"]
    assert outcomes == dict.fromkeys(WAYS, outcomes["inline"])
    assert (len(came), kind, arguments) == (BAD // 7 if operations else BAD, LookupError, (BAD,))
    assert notes[1:] == [f"millstream: in the sampler, asked for the records of unit {len(came)}."]
