"""Each advice comes where its numbers call for it, with these numbers, and stays away where they do not."""

import collections
import re
import resource
import threading
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

import millstream
from millstream.loader.measuring import ACTORS, CHAIN, DEBUGGED, ELASTIC, FED_CHAIN, LOADER, MIXED_CHAIN, Frontend
from millstream.loader.processes.fork_servers import FORK_SERVERS
from millstream.loader.reporting.advice import advice_of
from millstream.loader.reporting.snapshot import LoaderSnapshot, StageLocation
from support.clocks.owned_clock import Spend
from support.draw.loader_snapshots import snapshot_of_run, with_order, with_source, with_stage


def run_of(**measured: Any) -> LoaderSnapshot:
    """Returns the snapshot of a run whose trainer waited 4 s and worked 6 s, unless told otherwise."""
    return snapshot_of_run(**{"waits": 4.0, "trains": 6.0, **measured})


def waiting_run(**measured: Any) -> LoaderSnapshot:
    """Returns the snapshot of a run on four cores with 40 s of work, whose trainer hardly works, by default."""
    return snapshot_of_run(**{"augment": 40.0, "waits": 9.0, "trains": 1.0, "cores": 4, **measured})


def local_run(workers: int) -> LoaderSnapshot:
    """Returns the snapshot of a chain with its slow operation after `mp_prefetch`."""
    run = waiting_run(augment=9.0, workers=workers, core_seconds=0.1, frontend=CHAIN)
    return with_stage(run, "operations[0], Augment", is_local=True, location=StageLocation.TRAINER)


UNITS = with_source(snapshot_of_run(read=50.0, waits=50.0, trains=5.0, threads=4), window_units=7)
"""A run that decodes units of a source which a shuffle should keep together."""

STACKED = run_of(augment=5.0, batch=2.0, waits=5.0, trains=5.0, workers=2, batch_bytes=19_000_000)
COPIED = with_stage(STACKED, "operations[1]", location=StageLocation.TRAINER)
"""A run whose trainer's thread stacks what workers have made."""

RUNS: dict[str, tuple[LoaderSnapshot, dict[str, str]]] = {
    "moments": (
        snapshot_of_run(augment=0.01, waits=0.01, trains=0.01, workers=2, deaths=2, stalls=1),
        {"too_short": "100 batches in 20 ms", "trouble": "2 worker processes died and workers stalled 1 time:"},
    ),
    "waits": (
        run_of(read=9.0, augment=22.0, waits=3.8, trains=8.2, workers=3),
        {
            "waiting": "The trainer waited 32 % of the time.",
            "bottleneck": "operations[0], Augment, takes 71 % of the workers' time. Use worker_count=4 to hide it; "
            "this machine has 8 cores.",
        },
    ),
    "waits in a chain": (
        run_of(read=9.0, augment=22.0, waits=3.8, trains=8.2, workers=3, frontend=CHAIN),
        {"bottleneck": "Use .mp_prefetch(4) to hide it"},
    ),
    "waits for actors": (
        run_of(augment=30.0, trains=8.0, workers=3, cores=3, frontend=ACTORS),
        {"bottleneck": "RayWorkers(num_workers=4) to hide it, if the cluster has room."},
    ),
    "waits for actors of two cores": (
        run_of(augment=40.0, trains=8.0, workers=2, cores=4, frontend=ACTORS),
        {"bottleneck": "RayWorkers(num_workers=3) to hide"},
    ),
    "waits for actors without training": (
        run_of(augment=30.0, waits=9.99, trains=0.01, workers=3, cores=3, frontend=ACTORS),
        {"bottleneck": "RayWorkers(num_workers=12) to shorten the waits"},
    ),
    "idle actors, one of which died": (
        run_of(augment=5.0, waits=0.1, trains=9.9, workers=4, deaths=1, frontend=ACTORS),
        {"not_waiting": "", "idle_workers": "The 4 Ray actors were busy 12 %", "trouble": "1 Ray actor died:"},
    ),
    "hidden": (
        run_of(augment=50.0, waits=0.2, trains=9.8, workers=6),
        {"not_waiting": "The trainer waited 2 % of the time"},
    ),
    "no training": (
        run_of(augment=9.9, waits=9.9, trains=0.1),
        {"waiting": "too little compute to overlap", "bottleneck": ""},
    ),
    "debug mode": (run_of(augment=9.0, threads=0, frontend=DEBUGGED), {"debugging": ""}),
    "more work than cores": (
        waiting_run(workers=2),
        {"bottleneck": "Use worker_count=4 to shorten the waits; this machine has 4 cores."},
    ),
    "more work than one core": (
        waiting_run(augment=9.0, cores=1),
        {"bottleneck": "time. Make this stage cheaper, or move work to the device: this machine"},
    ),
    "all cores": (waiting_run(workers=4), {"bottleneck": "all in use"}),
    "workers that compute": (waiting_run(workers=4, core_seconds=38.0), {"bottleneck": "all in use"}),
    "workers that sleep or wait for a store": (
        waiting_run(workers=4, core_seconds=4.0),
        {"bottleneck": "worker_count=16 to shorten the waits: the workers wait themselves"},
    ),
    "workers whose 16 threads wait for one lock": (
        waiting_run(augment=160.0, workers=4, core_seconds=38.0),
        {"bottleneck": "all in use"},
    ),
    "workers without cores, which other programs use": (
        waiting_run(workers=4, core_seconds=8.0, delay_seconds=25.0),
        {"bottleneck": "or end other programs: the workers have 0.8 of the 4 cores of this machine, and wait for more"},
    ),
    "batches that are quicker than their transfer": (
        run_of(augment=0.05, waits=0.06, trains=0.0),
        {
            "waiting": "too little compute",
            "bottleneck": "Use larger batches, or make this stage cheaper: each takes 500",
        },
    ),
    "quick reads in the trainer's thread, which has others": (
        with_stage(run_of(read=0.05, waits=0.06, trains=0.0), "read", location=StageLocation.TRAINER),
        {
            "waiting": "too little compute",
            "bottleneck": "Reading takes 100 % of the pipeline's time. Use larger batches",
        },
    ),
    "workers that sleep at times": (waiting_run(workers=4, core_seconds=14.0), {"bottleneck": "worker_count=11"}),
    "idle workers and waits": (
        run_of(augment=3.0, waits=1.0, trains=9.0, workers=2, cores=2),
        {"uneven": "The 2 worker processes were busy 15 % of the time: enough for this trainer"},
    ),
    "idle workers and waits in a chain": (
        run_of(augment=3.0, waits=1.0, trains=9.0, workers=2, cores=2, frontend=CHAIN),
        {"uneven": "with .mp_prefetch(MultiprocessingOptions(2, per_worker_buffer_size=2))"},
    ),
    "busy workers and waits": (
        run_of(augment=10.0, hand_over=0.5, waits=1.0, trains=9.0, workers=2, cores=2),
        {"bottleneck": ""},
    ),
    "threads that wait for the lock": (
        run_of(augment=160.0, waits=3.0, trains=7.0, cores=2),
        {"bottleneck": "worker_count=2 to shorten"},
    ),
    "hardly any work": (
        run_of(augment=0.1, hand_over=0.2, waits=1.0, trains=9.0, workers=2),
        {"something_else": "took 3 % of the time"},
    ),
    "no batched reads": (
        with_source(run_of(read=6.0, augment=4.0), one_by_one="Tokens"),
        {
            "batched_reads": "Reading takes 60 % of the pipeline's time, one record at a time, with up to 500 records "
            "prefetched. Add a method __getitems__(keys) to Tokens that reads a batch in one call."
        },
    ),
    "no batched reads, and a slower operation": (
        with_source(run_of(read=4.0, augment=6.0), one_by_one="Tokens"),
        {"batched_reads": "one record at a time takes 40 %", "bottleneck": "takes 60 %"},
    ),
    "no batched reads below a stream": (
        with_source(run_of(read=6.0, augment=4.0, frontend=FED_CHAIN), one_by_one="Tokens"),
        {"read_further_ahead": ".to_iter_dataset(ReadOptions(num_threads=16, prefetch"},
    ),
    "few reads and keys": (
        with_order(
            with_source(run_of(keys=0.5, read=1.0, augment=6.0, threads=0), one_by_one="Tokens"), is_vectorised=False
        ),
        {"bottleneck": ""},
    ),
    "reads of the trainer, one by one": (
        with_source(run_of(read=6.0, augment=1.0, threads=0), one_by_one="Tokens"),
        {"read_ahead": "Add a method __getitems__(keys) to Tokens that reads a batch in one call. Use"},
    ),
    "reads of the trainer": (run_of(read=6.0, augment=1.0, threads=0), {"read_ahead": ""}),
    "reads of threads": (run_of(read=60.0, augment=1.0), {"read_further_ahead": "prefetch_buffer_size=1000"}),
    "reads of threads that are busy": (
        run_of(read=150.0, waits=9.0, trains=1.0),
        {"read_further_ahead": "ReadOptions(num_threads=64, prefetch_buffer_size=1000)"},
    ),
    "reads of threads that are almost enough": (
        run_of(read=150.0, waits=2.0, trains=8.0),
        {"read_further_ahead": "ReadOptions(num_threads=19, prefetch_buffer_size=1000)"},
    ),
    "reads of workers": (run_of(read=6.0, augment=1.0, workers=1), {"bottleneck": ""}),
    "a sampler asked one by one": (
        with_order(run_of(keys=5.0, augment=5.0), is_vectorised=False, kind="Curriculum"),
        {"sampler_keys": "Curriculum is called once per position, which takes 50 %", "bottleneck": ""},
    ),
    "a sampler asked once": (run_of(keys=5.0, augment=5.0), {"bottleneck": "Finding record keys takes"}),
    "transfers": (
        run_of(augment=5.0, hand_over=5.0, workers=2, batch_bytes=19_000_000, deaths=1),
        {
            "hand_over": "The transfer of batches (19 MB each) to the trainer takes 50 % of the workers' time.",
            "bottleneck": "",
            "trouble": "1 worker process died:",
        },
    ),
    "transfers without workers": (run_of(augment=5.0, hand_over=5.0), {"bottleneck": ""}),
    "batches of workers": (STACKED, {"uneven": ""}),
    "quick copies": (with_stage(COPIED, "operations[1]", seconds=0.2), {"uneven": ""}),
    "copies after a filter": (
        with_stage(COPIED, "operations[0]", keeps_count=False),
        {
            "uneven": "",
            "copied_batches": "The trainer's thread copies the batches (19 MB each): operations[1], Batch(8), takes "
            "20 % of its time",
        },
    ),
    "copies of packed rows": (
        with_stage(COPIED, "operations[1]", regroups=True),
        {"uneven": "", "copied_batches": "PackingSampler"},
    ),
    "copies alone": (
        with_stage(run_of(augment=1.0, batch=4.0, workers=2), "operations[1]", location=StageLocation.TRAINER),
        {"copied_batches": ""},
    ),
    "a slow operation after mp_prefetch": (
        local_run(2),
        {"bottleneck": "of the pipeline's time. Move .mp_prefetch after it, so that workers run it."},
    ),
    "the same without workers": (local_run(0), {"bottleneck": "Use .mp_prefetch("}),
    "units": (UNITS, {"units": "Select fewer columns."}),
    "units in workers": (
        with_source(snapshot_of_run(read=50.0, waits=50.0, trains=5.0, workers=2), window_units=7),
        {"units": "use threads instead"},
    ),
    "units of a global shuffle": (
        with_order(UNITS, is_global_shuffle=True),
        {"units": "HierarchicalSampler(source.unit_sizes, window_units=7, seed=...)"},
    ),
    "units of packed rows": (
        with_order(UNITS, is_global_shuffle=True, kind="PackingSampler"),
        {"units": "PackingSampler(..., unit_sizes=source.unit_sizes, window_units=7)"},
    ),
    "idle workers": (
        run_of(augment=5.0, waits=0.1, trains=9.9, workers=4),
        {"not_waiting": "", "idle_workers": "were busy 12 % of the time. Use worker_count=1 to"},
    ),
    "idle workers and a busy trainer": (
        with_stage(
            run_of(augment=1.0, batch=8.0, waits=0.1, trains=9.9, workers=2),
            "operations[1]",
            location=StageLocation.TRAINER,
        ),
        {"not_waiting": "", "idle_workers": "The 2 worker processes were busy 5 % of the time."},
    ),
    "busy workers": (run_of(augment=30.0, waits=0.1, trains=9.9, workers=4), {"not_waiting": ""}),
    "one idle worker": (run_of(augment=1.0, waits=0.1, trains=9.9, workers=1), {"not_waiting": ""}),
}
"""Measurements, and the advice that follows from them: of each kind, some of its text.

That a trainer waited is advice in all of them, unless it did not, or unless there is no advice about waits.
"""


@pytest.mark.parametrize("case", RUNS)
def test_advice_is_of_what_was_measured(case: str) -> None:
    """Advice of these kinds comes, with these numbers, and of no other kind."""
    snapshot, expected = RUNS[case]
    if not expected.keys() & {"debugging", "not_waiting", "too_short"}:
        expected = {"waiting": "", **expected}
    found = {advice.kind: advice.text for advice in advice_of(snapshot)}

    assert found.keys() == expected.keys()
    assert {kind: text for kind, text in expected.items() if text not in found[kind]} == {}


def test_operations_after_mp_prefetch_are_local() -> None:
    """The stages of a chain say which operations the trainer's thread runs because they follow `mp_prefetch`."""
    chain = millstream.MapDataset.range(8).to_iter_dataset().map(abs).mp_prefetch(1).map(float).batch(2)
    with iter(chain) as iterator:
        stages = {stage.name: stage for stage in iterator.insight.snapshot().stages}
    names = ("Map(abs)", "Map(float)", "Batch(batch_size=2)")
    assert [stages[name].is_local for name in names] == [False, True, True]


WRITTEN = re.compile(r"\.?\b\w+(?:=\w+\([^()]*\)|=\w+|\((?:\w+\([^()]*\)|\d+)\))")
"""An argument, or a step of a chain: `worker_count=4`, `.prefetch(ReadOptions(num_threads=16))`."""

NAMES = {name: getattr(millstream, name) for name in millstream.__all__}


ADVISED: tuple[dict[str, Any], ...] = (
    {"augment": 9.0, "waits": 4.0, "trains": 6.0},
    {"augment": 9.0, "waits": 4.0, "trains": 6.0, "workers": 1},
    {"augment": 90.0, "waits": 9.9, "trains": 0.1, "workers": 2},
    {"augment": 3.0, "waits": 1.0, "trains": 9.0, "workers": 2},
    {"augment": 1.0, "waits": 0.1, "trains": 9.9, "workers": 4},
    {"read": 60.0, "waits": 6.0, "trains": 4.0},
    {"read": 6.0, "waits": 6.0, "trains": 4.0, "threads": 0},
)
"""Runs that call for advice that says what to write."""


def as_arguments(written: str) -> Any:
    return eval(f"dict({written})", NAMES)


def chain_with(before: str) -> Callable[[str], object]:
    """Returns a function that writes a step of a chain after what is before it, made a stream if it must be one."""

    def write(step: str) -> object:
        is_read = step.startswith((".to_iter_dataset", ".prefetch"))
        is_streamed = is_read or before.startswith("IterDataset.")
        chain = eval(f"{before}{'' if is_streamed else '.to_iter_dataset()'}{step}", NAMES)
        assert isinstance(chain, millstream.IterDataset)
        return chain

    return write


@pytest.mark.parametrize(
    ("frontend", "write"),
    [
        (LOADER, lambda text: millstream.load(range(8), **as_arguments(text))),
        (
            LOADER,
            lambda text: millstream.DataLoader(
                data_source=range(8), sampler=millstream.SequentialSampler(8), **as_arguments(text)
            ),
        ),
        (
            ELASTIC,
            lambda text: millstream.experimental.ElasticIterator(
                millstream.MapDataset.range(8), 4, millstream.ShardOptions(0, 1), **as_arguments(text)
            ).close(),
        ),
        # A loader with actors starts none before it is iterated over.
        (ACTORS, lambda text: millstream.load(range(8), **{"workers": millstream.RayWorkers(1)} | as_arguments(text))),
        (CHAIN, chain_with("MapDataset.range(8)")),
        (MIXED_CHAIN, chain_with("IterDataset.mix([MapDataset.range(8).to_iter_dataset()])")),
        (FED_CHAIN, chain_with("MapDataset.range(8)")),
    ],
    ids=["load", "DataLoader", "ElasticIterator", "actors", "chain", "mixture", "chain after a stream"],
)
def test_what_advice_tells_people_to_write_is_taken(frontend: Frontend, write: Callable[[str], object]) -> None:
    """Each argument or step is one of what the pipeline was made with, and takes such a value."""
    runs = [run for run in ADVISED if run.get("workers") or not frontend.is_on_cluster]
    texts = [advice.text for run in runs for advice in advice_of(snapshot_of_run(**run, frontend=frontend))]
    written = {found for text in texts for found in WRITTEN.findall(text)}

    asked = [frontend.workers, frontend.buffers, *([] if frontend.is_on_cluster else [frontend.reading])]
    assert {re.split("[=(]", text)[0] for text in written} == {re.split("[=(]", text)[0] for text in asked}
    for text in written:
        write(text)


SECONDS = strategies.one_of(strategies.just(0.0), strategies.floats(1e-6, 1e6))


@hypothesis.given(
    strategies.tuples(*[SECONDS] * 7),
    strategies.integers(0, 64),
    strategies.integers(0, 16),
    strategies.integers(1, 64),
)
def test_advice_of_any_numbers_is_sentences(seconds: tuple[float, ...], workers: int, threads: int, cores: int) -> None:
    """Whatever was measured, there is advice, each kind once, and it never asks for more workers than cores."""
    names = ("keys", "read", "augment", "batch", "hand_over", "waits", "trains")
    run: dict[str, Any] = dict(zip(names, seconds, strict=True))
    given = advice_of(snapshot_of_run(**run, workers=workers, threads=threads, cores=cores))
    assert given
    assert len({advice.kind for advice in given}) == len(given)
    for advice in given:
        assert advice.text.endswith(".")
        for word in advice.text.replace(";", " ").split():
            if word.startswith("worker_count="):
                assert 1 <= int(word.removeprefix("worker_count=")) <= max(cores, workers - 1)


def test_the_cores_that_workers_use_are_measured() -> None:
    """Workers that wait, here on a clock of their own, take time of the pipeline and hardly any of a core."""
    with millstream.load(range(64), num_epochs=1, transformations=[Spend(0.125)], worker_count=2) as loader:
        assert len(list(loader)) == 64
        snapshot = loader.insight.snapshot()
    assert snapshot.pipeline_seconds >= 8.0
    assert snapshot.measured.core_seconds is not None
    assert 0.0 < snapshot.measured.core_seconds < 0.7 * snapshot.pipeline_seconds


def computed(number: int) -> int:
    for _ in range(20_000):
        number = (number * 31 + 7) % 1_000_003
    return number


def test_threads_are_not_counted_as_cores() -> None:
    """Workers whose threads compute one at a time use the cores that the system says, however many threads wait."""
    # The system counts workers when their fork server has ended.
    FORK_SERVERS.end_idle()
    with millstream.load(range(400), num_epochs=1, transformations=[computed], batch_size=8, worker_count=1) as loader:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with iter(loader) as batches:
            assert len(list(batches)) == 50
        used, seconds = loader.insight.snapshot().used_cores, loader.insight.snapshot().measured.seconds
    FORK_SERVERS.end_idle()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used is not None
    # The rest of the workers' time was their start, and what they computed before the first batch.
    assert 0.3 * spent < used * seconds < spent


@pytest.mark.parametrize("seconds", [2.0**-24, 2.0**-10], ids=["quick", "slow"])
@pytest.mark.usefixtures("owned_clock")
def test_a_stage_is_where_its_calls_ran(seconds: float) -> None:
    """The thread that spends more time in an operation is the one that the summary names, the trainer's or others."""
    places: list[StageLocation] = []
    trainer, spend = threading.get_ident(), Spend(seconds)

    def work(number: int) -> Any:
        places.append(StageLocation.TRAINER if threading.get_ident() == trainer else StageLocation.THREADS)
        return spend(number)

    with millstream.load(range(4_000), num_epochs=1, transformations=[work]) as loader:
        assert len(list(loader)) == 4_000
        stage = next(stage for stage in loader.insight.snapshot().stages if "work" in stage.label)
    ((most, _),) = collections.Counter(places).most_common(1)
    assert stage.location is most is (StageLocation.TRAINER if seconds < 1e-6 else StageLocation.THREADS)
