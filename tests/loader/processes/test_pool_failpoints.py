"""Whatever happens to a worker at whatever edge of the protocol, the stream is the oracle's.

Each test sweeps one edge: a fault at its first passage, at its second, and so on, until no worker passes it that often.
The first sweep begins before the pool starts; the others hit warm workers, and those that replaced dead ones.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import millstream
from millstream.errors import WorkerStalledError
from millstream.loader.processes import process_report
from millstream.loader.processes.pool import Pool
from millstream.loader.processes.process_report import describe_process
from millstream.transforms import Batch, Filter, FlatMap
from support.faults.failpoints import EDGES, SabotageError, Saboteur, Trap, sabotage
from support.faults.user_faults import WAIT_SECONDS, be_killed, exit_at_once, stop
from support.oracle.stream import oracle
from support.streams import comparable

# Workers need not import pytest to have the operations below.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZE = 24
SAMPLER = millstream.IndexSampler(SIZE, shuffle=True, num_epochs=1, seed=3)
MOST_PASSAGES = 60
"""No worker passes an edge this often in one run."""


def picture(number: int) -> dict[str, Any]:
    """Returns an element with a small leaf and one of 16 KB, of which a batch has a chunk of its own."""
    return {"image": np.full((64, 32), number, dtype=np.int64), "label": number}


def mean(batch: dict[str, Any]) -> Any:
    return batch["image"].mean(axis=0), batch["label"]


class Odd(Filter):
    def filter(self, element: int) -> bool:
        return element % 2 == 1


class Twins(FlatMap):
    """Doubles each number."""

    max_fan_out = 2

    def flat_map(self, element: int) -> list[int]:
        return [element, -element]


def large(number: int) -> Any:
    """Returns an element of 512 KB, more than a socket takes at once on its way to the next stage."""
    return np.full((256, 256), number)


BATCHES = (picture, Batch(4))
REGROUPED = (Odd(), Twins(), picture, Batch(4), mean)
ELEMENTS = (Twins(), picture)
LARGE = (Odd(), large, Batch(4), np.sum)


class Swept:
    """A loader with a saboteur in its pipeline, and the oracle's stream."""

    def __init__(
        self, folder: Path, edge: str, action: Callable[[], None], operations: tuple[Any, ...], **options: Any
    ) -> None:
        self.trap = Trap(folder)
        arguments: dict[str, Any] = {
            "data_source": range(SIZE),
            "sampler": SAMPLER,
            "operations": [Saboteur(edge, action, folder), *operations],
            "worker_count": 2,
            "read_options": millstream.ReadOptions(2),
        }
        self.loader = millstream.DataLoader(**(arguments | options))
        plain = millstream.DataLoader(data_source=range(SIZE), sampler=SAMPLER, operations=operations)
        self.expected = [comparable(element) for element in oracle(range(SIZE), SAMPLER, plain.operations)]
        assert self.expected == [comparable(element) for element in plain]

    def sweep(self, check: Callable[[millstream.DataLoaderIterator], None]) -> int:
        """Runs the stream with a fault at passage 1, 2, 3 … and returns how many runs had one."""
        # The first passage twice: in a pool that starts, and in one that is warm.
        fired = 0
        for n in [1, *range(1, MOST_PASSAGES)]:
            self.trap.arm(n)
            iterator = iter(self.loader)
            check(iterator)
            if not self.trap.has_fired and fired + (n > 1):
                break
            fired += self.trap.has_fired
        self.trap.disarm()
        iterator.close()
        return fired


def drain(iterator: Iterator[Any], allowed: tuple[type[Exception], ...] = ()) -> tuple[list[Any], list[Exception]]:
    """Returns a stream's elements, and the errors that came in between."""
    elements: list[Any] = []
    errors: list[Exception] = []
    while True:
        try:
            elements.append(comparable(next(iterator)))
        except StopIteration:
            return elements, errors
        except allowed as error:
            errors.append(error)
            assert len(errors) < 50, "there is no end of errors"


SENDING = ("after receive", "before pack", "half sent", "after send")


@pytest.mark.parametrize(
    ("edge", "action", "operations"),
    [
        *((edge, be_killed, BATCHES) for edge in EDGES),
        *((edge, exit_at_once, BATCHES) for edge in SENDING[2:]),
        *((edge, be_killed, REGROUPED) for edge in SENDING[1:3]),
        *((edge, be_killed, ELEMENTS) for edge in SENDING[2:]),
    ],
)
def test_death_at_any_edge_changes_nothing(
    tmp_path: Path, edge: str, action: Callable[[], None], operations: tuple[Any, ...]
) -> None:
    """A worker that ends, with a signal or with status 0, is replaced: no element is lost, none comes twice.

    It is the same where a Batch regroups what several workers have made, and without a Batch.
    """
    swept = Swept(tmp_path, edge, action, operations)

    def check(iterator: millstream.DataLoaderIterator) -> None:
        assert drain(iterator) == (swept.expected, [])

    assert swept.sweep(check) >= 1


@pytest.mark.parametrize("edge", EDGES)
def test_an_exception_at_any_edge_is_an_error_or_changes_nothing(tmp_path: Path, edge: str) -> None:
    """A bug in the protocol's own code: at most one error, which says so; then the stream resumes, complete."""
    swept = Swept(tmp_path, edge, sabotage, BATCHES)

    def check(iterator: millstream.DataLoaderIterator) -> None:
        elements, errors = drain(iterator, (SabotageError,))
        assert elements == swept.expected
        assert len(errors) <= swept.trap.has_fired

    assert swept.sweep(check) >= 1


@pytest.mark.parametrize(
    ("edge", "operations"),
    [("after receive", BATCHES), ("half sent", BATCHES), ("after send", BATCHES), ("before receive", LARGE)],
)
def test_a_stop_for_good_is_an_error_at_its_turn(
    tmp_path: Path, edge: str, operations: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that stays stopped is given up after `stall_timeout`; after the error the stream resumes, complete."""
    wait = Pool.wait

    def expect_stalls_of_the_stopped(self: Pool, seconds: float) -> Any:
        # How long others take to start and to work depends on the machine.
        for worker in self.workers:
            if worker.pid is not None and describe_process(worker.pid).startswith("stopped"):
                worker.clock.timeout = 0.2
        return wait(self, min(seconds, 0.05))

    monkeypatch.setattr(Pool, "wait", expect_stalls_of_the_stopped)
    monkeypatch.setattr(process_report, "STACKS_SECONDS", 0.01)
    swept = Swept(tmp_path, edge, stop, operations, stall_timeout=WAIT_SECONDS)
    for n in (1, 2):
        swept.trap.arm(n)
        iterator = iter(swept.loader)
        elements, errors = drain(iterator, (WorkerStalledError,))
        assert elements == swept.expected
        assert len(errors) <= swept.trap.has_fired
        assert all("no progress for 0.2 s" in str(error) for error in errors)
    swept.trap.disarm()
    iterator.close()
