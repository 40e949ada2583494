"""Worker processes and threads: when they begin, what they win, what they weigh."""

import dataclasses
import os
import time

import psutil

from suite import data
from suite.case import Case, Contender, Goal, Measurement, Pick, Run
from suite.cases.files import token_work
from suite.contenders import modes, with_workers
from suite.peers import PEERS
from suite.scale import Scale
from suite.steps import identity, is_chosen
from suite.work import Columns, Filter, Map, Records, Work

READ_SECONDS = 0.005
MEMORY_WORKERS = 4
MEGABYTE = 1_000_000


def _cpu_filter(scale: Scale) -> Work:
    return Work(Records(data.integers(scale.pick(tiny=1024, quick=65_536, full=65_536))), (Filter(is_chosen),), 64)


def _waiting(scale: Scale) -> Work:
    source = data.SlowSource(scale.pick(tiny=128, quick=65_536, full=65_536), READ_SECONDS)
    return Work(Records(source), (Map(identity),), 32)


def _large(scale: Scale) -> Work:
    return Work(Columns(data.feature_columns(scale.pick(tiny=65_536, quick=1 << 20, full=1 << 22))), (), 256)


def measure_first_batch(run: Run) -> Measurement:
    """Returns the seconds from nothing to the first batch; the peer is imported already."""
    work = run.work()
    adapter = PEERS[run.contender.peer].adapter()
    run.gate()
    start = time.perf_counter()
    stream = adapter.open(work, run.contender)
    next(stream.batches)
    seconds = time.perf_counter() - start
    stream.close()
    return Measurement(seconds)


def measure_memory(run: Run) -> Measurement:
    """Returns the MB that the loader adds to this process and its children, per worker, pages shared counted once."""
    work = run.work()
    adapter = PEERS[run.contender.peer].adapter()
    run.gate()
    before = memory_of_all()
    size = sum(array.nbytes for array in work.source.arrays.values()) if isinstance(work.source, Columns) else 0
    if run.contender.peer == "bare":
        return Measurement(size / MEGABYTE / run.contender.workers)
    stream = adapter.open(work, run.contender)
    for _ in range(8 * run.contender.workers):
        next(stream.batches)
    after = memory_of_all()
    stream.close()
    added = (after.proportional - before.proportional) / run.contender.workers / MEGABYTE
    private = (after.private - before.private) / run.contender.workers / MEGABYTE
    return Measurement(added, {"private_mb_per_worker": private, "source_mb": size / MEGABYTE})


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Bytes of this process and its children: pages shared split among those who share them (PSS), and private ones."""

    proportional: int
    private: int


def memory_of_all() -> _Memory:
    here = psutil.Process(os.getpid())
    found = [process.memory_full_info() for process in (here, *here.children(recursive=True))]
    return _Memory(sum(memory.pss for memory in found), sum(memory.uss for memory in found))


def _first_batch(workers: int, goals: tuple[Goal, ...] = ()) -> Case:
    return Case(
        name=f"first_batch_{workers}",
        title=f"seconds to the first batch of the tokens, {workers} worker{'s'[: workers != 1]}",
        make_work=token_work,
        contenders=with_workers(workers),
        goals=goals,
        measure=measure_first_batch,
        unit="s",
        higher_is_better=False,
    )


CASES = (
    Case(
        name="cpu_filter",
        title="a filter of 30 µs of Python before the batch; records that are kept",
        make_work=_cpu_filter,
        contenders=(
            *modes("millstream"),
            *modes("grain", "DataLoader", "Dataset"),
            Contender("pytorch"),
            Contender("pytorch", workers=2, mode="fork"),
            Contender("pytorch", workers=2, mode="forkserver"),
            Contender("tensorflow"),
            Contender("bare", mode="loop"),
            Contender("bare", mode="loop", copies=2),
        ),
        goals=(Goal("2 workers 1.5 times none", 1.5, Pick("millstream", 0), Pick("millstream", 2)),),
    ),
    Case(
        name="latency",
        title="a source that takes 5 ms per record, batch 32",
        make_work=_waiting,
        contenders=(
            Contender("millstream"),
            Contender("millstream", threads=16),
            Contender("grain", mode="DataLoader"),
            Contender("grain", threads=16, mode="DataLoader"),
            Contender("grain", threads=16, mode="Dataset"),
            Contender("pytorch"),
            Contender("pytorch", workers=16, mode="fork"),
            Contender("tensorflow"),
        ),
        goals=(Goal("16 threads 12 times none", 12, Pick("millstream", threads=0), Pick("millstream", threads=16)),),
    ),
    _first_batch(1),
    _first_batch(
        2,
        (
            Goal("within 0.25 s", 1, 0.25),
            Goal("a quarter of Grain's time", 4, Pick("grain")),
        ),
    ),
    _first_batch(8),
    Case(
        name="memory",
        title=f"MB that {MEMORY_WORKERS} workers add, each, to a source of 1 GB in memory (256 MB in quick runs)",
        make_work=_large,
        contenders=(
            *with_workers(MEMORY_WORKERS),
            Contender("bare", workers=MEMORY_WORKERS, mode="one copy for all workers"),
        ),
        goals=(Goal("1.3 times one copy for all workers, at most", 1 / 1.3, Pick("bare")),),
        measure=measure_memory,
        unit="MB",
        higher_is_better=False,
    ),
)
