"""The rate at which a warm stream delivers records, and the stages in which millstream spends its time."""

import collections
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from suite.case import Case, Measurement, Run
from suite.peers import PEERS

ELEMENTS_AT_ONCE = 256
"""Single elements are taken from the iterator this many at a time, in C: the clock is read in between."""


def measure_rate(run: Run) -> Measurement:
    """Returns the records per second of an endless stream, after it has warmed up."""
    work = run.work()
    stream = PEERS[run.contender.peer].adapter().open(work, run.contender)
    try:
        take = taker(stream.batches, work.batch_size, run.case)
        take_for(take, run.scale.warm_seconds, at_least=2)
        run.gate()
        processor = time.process_time()
        records, seconds = take_for(take, run.scale.seconds, at_least=1)
        busy = (time.process_time() - processor) / seconds
    finally:
        stream.close()
    return Measurement(records / seconds, {"processors_busy_in_consumer": round(busy, 3)})


def taker(batches: Iterator[Any], batch_size: int | None, case: Case) -> Callable[[], int]:
    """Returns what takes some records and says how many."""
    consume, count = case.consume, case.count or num_rows
    if batch_size is None:

        def take_elements() -> int:
            collections.deque(itertools.islice(batches, ELEMENTS_AT_ONCE), maxlen=0)
            return ELEMENTS_AT_ONCE

        return take_elements

    def take_batch() -> int:
        batch = next(batches)
        if consume is not None:
            consume(batch)
        return count(batch)

    return take_batch


def num_rows(batch: Any) -> int:
    while isinstance(batch, dict):
        batch = next(iter(batch.values()))
    return len(batch)


def take_for(take: Callable[[], int], seconds: float, at_least: int) -> tuple[int, float]:
    """Takes for this long, and at least this often; returns the records taken and the seconds that passed."""
    records = times = 0
    start = now = time.perf_counter()
    while times < at_least or now - start < seconds:
        records += take()
        times += 1
        now = time.perf_counter()
    return records, now - start


def break_down(run: Run) -> dict[str, float]:
    """Returns µs per delivered record for each stage, by the profile that every loader keeps.

    Without workers and threads all stages lie inside `next`: what is left of it is the schedule and the iterator. With
    workers it is the time of all of them, added up; the hand-over is theirs and the trainer's.
    """
    work = run.work()
    stream = PEERS["millstream"].adapter().open(work, run.contender)
    run.gate()
    take = taker(stream.batches, work.batch_size, run.case)
    take_for(take, run.scale.warm_seconds, at_least=2)
    before = stream.loader.profile()
    records, _ = take_for(take, run.scale.seconds, at_least=2)
    after = stream.loader.profile()
    stream.close()
    stages = {stage: 1e6 * (after[stage] - before[stage]) / records for stage in after}
    inside = stages.pop("next")
    consumer = stages.pop("consumer")
    if run.contender.workers:
        return stages
    return {**stages, "the rest of next": inside - sum(stages.values()), "consumer": consumer}
