"""Each advice comes where its numbers call for it, with these numbers, and stays away where they do not."""

import re
import time
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

import millstream
from millstream.loader.measuring.front import ACTORS, CHAIN, DEBUGGED, ELASTIC, FED_CHAIN, LOADER, Front
from millstream.loader.reporting.advice import advice_of
from millstream.loader.reporting.snapshot import LoaderSnapshot, Location
from millstream.loader.threads.options import available_cores
from support.draw.loader_snapshots import snapshot_of_run, with_order, with_source, with_stage


def kinds(snapshot: LoaderSnapshot) -> list[str]:
    return [advice.kind for advice in advice_of(snapshot)]


def text_of(snapshot: LoaderSnapshot, kind: str) -> str:
    (text,) = [advice.text for advice in advice_of(snapshot) if advice.kind == kind]
    return text


def run_of(**measured: Any) -> LoaderSnapshot:
    """Returns the snapshot of a run whose trainer waited 4 s and worked 6 s, unless told otherwise."""
    return snapshot_of_run(**{"waits": 4.0, "trains": 6.0, **measured})


COPIED = with_stage(
    run_of(augment=5.0, batch=2.0, waits=5.0, trains=5.0, workers=2, batch_bytes=19_000_000),
    "operations[1]",
    location=Location.TRAINER,
)
"""A run whose trainer's thread stacks what workers have made."""

ALL_KINDS: dict[str, tuple[LoaderSnapshot, dict[str, str]]] = {
    "moments": (snapshot_of_run(augment=0.01, waits=0.01, trains=0.01), {"too_short": "100 batches in 20 ms"}),
    "waits": (
        run_of(read=9.0, augment=22.0, waits=3.8, trains=8.2, workers=3),
        {
            "waiting": "The trainer waited 32 % of the time.",
            "bottleneck": "operations[0], Augment, takes 71 % of the workers' time. Use worker_count=4 to hide it; "
            "this machine has 8 cores.",
        },
    ),
    "waits in a chain": (
        run_of(read=9.0, augment=22.0, waits=3.8, trains=8.2, workers=3, front=CHAIN),
        {"waiting": "", "bottleneck": "Use .mp_prefetch(4) to hide it"},
    ),
    "waits for actors": (
        run_of(augment=30.0, trains=8.0, workers=3, cores=3, front=ACTORS),
        {
            "waiting": "",
            "bottleneck": "operations[0], Augment, takes 100 % of the workers' time. Use "
            "workers=RayWorkers(num_workers=4) to hide it, if the cluster has room.",
        },
    ),
    "waits for actors of two cores": (
        run_of(augment=40.0, trains=8.0, workers=2, cores=4, front=ACTORS),
        {"waiting": "", "bottleneck": "RayWorkers(num_workers=3) to hide"},
    ),
    "waits for actors without training": (
        run_of(augment=30.0, waits=9.99, trains=0.01, workers=3, cores=3, front=ACTORS),
        {"waiting": "", "bottleneck": "RayWorkers(num_workers=12) to shorten the waits"},
    ),
    "idle actors, one of which died": (
        run_of(augment=5.0, waits=0.1, trains=9.9, workers=4, deaths=1, front=ACTORS),
        {
            "not_waiting": "",
            "idle_workers": "The 4 Ray actors were busy 12 % of the time. Use workers=RayWorkers(num_workers=1) to "
            "save memory.",
            "trouble": "1 Ray actor died:",
        },
    ),
    "hidden": (
        run_of(augment=50.0, waits=0.2, trains=9.8, workers=6),
        {"not_waiting": "The trainer waited 2 % of the time"},
    ),
    "no training": (
        run_of(augment=9.9, waits=9.9, trains=0.1),
        {"waiting": "too little compute to overlap", "bottleneck": ""},
    ),
    "debug mode": (run_of(augment=9.0, threads=0, front=DEBUGGED), {"debugging": ""}),
    "idle workers and waits": (
        run_of(augment=3.0, waits=1.0, trains=9.0, workers=2, cores=2),
        {
            "waiting": "",
            "uneven": "The 2 worker processes were busy 15 % of the time: enough for this trainer on average, but ",
        },
    ),
    "idle workers and waits in a chain": (
        run_of(augment=3.0, waits=1.0, trains=9.0, workers=2, cores=2, front=CHAIN),
        {"waiting": "", "uneven": "with .mp_prefetch(MultiprocessingOptions(2, per_worker_buffer_size=2))"},
    ),
    "busy workers and waits": (
        run_of(augment=10.0, waits=1.0, trains=9.0, workers=2, cores=2),
        {"waiting": "", "bottleneck": ""},
    ),
    "threads that wait for the lock": (
        run_of(augment=160.0, waits=3.0, trains=7.0, cores=2),
        {"waiting": "", "bottleneck": "worker_count=2 to shorten"},
    ),
    "hardly any work": (
        run_of(augment=0.1, hand_over=0.2, waits=1.0, trains=9.0, workers=2),
        {"waiting": "", "something_else": "took 3 % of the time"},
    ),
    "no batched reads": (
        with_source(run_of(read=6.0, augment=4.0), one_by_one="Tokens"),
        {
            "waiting": "",
            "batched_reads": "Reading takes 60 % of the pipeline's time, one record at a time, with up to 500 records "
            "prefetched. Add a method __getitems__(keys) to Tokens that reads a batch in one call.",
        },
    ),
    "reads of the trainer": (run_of(read=6.0, augment=1.0, threads=0), {"waiting": "", "read_ahead": ""}),
    "reads of threads": (
        run_of(read=60.0, augment=1.0),
        {"waiting": "", "read_further_ahead": "prefetch_buffer_size=1000"},
    ),
    "reads of workers": (run_of(read=6.0, augment=1.0, workers=1), {"waiting": "", "bottleneck": ""}),
    "few reads": (run_of(read=1.0, augment=6.0, threads=0), {"waiting": "", "bottleneck": ""}),
    "a sampler asked one by one": (
        with_order(run_of(keys=5.0, augment=5.0), is_vectorised=False, kind="Curriculum"),
        {
            "waiting": "",
            "sampler_keys": "Curriculum is called once per position, which takes 50 %",
            "bottleneck": "",
        },
    ),
    "transfers": (
        run_of(augment=5.0, hand_over=5.0, workers=2, batch_bytes=19_000_000),
        {
            "waiting": "",
            "hand_over": "The transfer of batches (19 MB each) to the trainer takes 50 % of the workers' time.",
            "bottleneck": "",
        },
    ),
    "copies after a filter": (
        with_stage(COPIED, "operations[0]", keeps_count=False),
        {
            "waiting": "",
            "uneven": "",
            "copied_batches": "The trainer's thread copies the batches (19 MB each): operations[1], Batch(8), takes "
            "20 % of its time",
        },
    ),
    "copies of packed rows": (
        with_stage(COPIED, "operations[1]", regroups=True),
        {"waiting": "", "uneven": "", "copied_batches": "PackingSampler"},
    ),
    "copies alone": (
        with_stage(run_of(augment=1.0, batch=4.0, workers=2), "operations[1]", location=Location.TRAINER),
        {"waiting": "", "copied_batches": ""},
    ),
    "idle workers": (
        run_of(augment=5.0, waits=0.1, trains=9.9, workers=4),
        {
            "not_waiting": "",
            "idle_workers": "The 4 worker processes were busy 12 % of the time. Use worker_count=1 to",
        },
    ),
    "busy workers": (run_of(augment=30.0, waits=0.1, trains=9.9, workers=4), {"not_waiting": ""}),
    "one idle worker": (run_of(augment=1.0, waits=0.1, trains=9.9, workers=1), {"not_waiting": ""}),
}
"""Measurements, and the advice that follows from them: of each kind, some of its text."""


@pytest.mark.parametrize("case", ALL_KINDS)
def test_advice_is_of_what_was_measured(case: str) -> None:
    """Advice of these kinds comes, with these numbers, and of no other kind."""
    snapshot, expected = ALL_KINDS[case]
    found = {advice.kind: advice.text for advice in advice_of(snapshot)}

    assert found.keys() == expected.keys()
    assert {kind: text for kind, text in expected.items() if text not in found[kind]} == {}


@pytest.mark.parametrize(
    ("kind", "snapshot"),
    [
        ("batched_reads", with_source(run_of(read=6.0, augment=4.0), one_by_one="")),
        ("batched_reads", with_source(run_of(read=1.0, augment=9.0), one_by_one="Tokens")),
        ("batched_reads", with_source(run_of(read=6.0, augment=4.0, front=FED_CHAIN), one_by_one="Tokens")),
        ("sampler_keys", with_order(run_of(keys=5.0, augment=5.0), is_vectorised=True)),
        ("sampler_keys", with_order(run_of(keys=0.5, augment=5.0), is_vectorised=False)),
        ("hand_over", run_of(augment=5.0, hand_over=0.5, workers=2)),
        ("hand_over", run_of(augment=5.0, hand_over=5.0)),
        ("copied_batches", with_stage(COPIED, "operations[1]", location=Location.WORKERS)),
        ("copied_batches", with_stage(COPIED, "operations[1]", seconds=0.2)),
        ("something_else", run_of(augment=5.0, waits=1.0, trains=9.0, workers=2)),
    ],
)
def test_advice_stays_away_where_it_would_not_help(kind: str, snapshot: LoaderSnapshot) -> None:
    """There is nothing to change, it would save little, or it cannot be changed."""
    assert kind not in kinds(snapshot)


def test_no_more_workers_than_cores_are_recommended() -> None:
    """Where the cores do not suffice, the advice says so; where all are at work, it does not ask for more."""
    snapshot = snapshot_of_run(augment=40.0, waits=9.0, trains=1.0, workers=2, cores=4)
    assert "Use worker_count=4 to shorten the waits; this machine has 4 cores." in text_of(snapshot, "bottleneck")
    snapshot = snapshot_of_run(augment=40.0, waits=9.0, trains=1.0, workers=4, cores=4)
    assert "all in use" in text_of(snapshot, "bottleneck")
    for core_seconds, advised in ((38.0, None), (4.0, "worker_count=16"), (14.0, "worker_count=11")):
        snapshot = snapshot_of_run(augment=40.0, waits=9.0, trains=1.0, workers=4, cores=4, core_seconds=core_seconds)
        text = text_of(snapshot, "bottleneck")
        # Workers that sleep or wait for a store leave their cores idle.
        assert ("all in use" in text) == (advised is None)
        assert advised is None or advised in text
    snapshot = snapshot_of_run(augment=9.0, waits=9.0, trains=1.0, cores=1)
    assert "worker_count" not in text_of(snapshot, "bottleneck")


def test_a_slow_operation_after_mp_prefetch_belongs_before_it() -> None:
    """The advice is to move mp_prefetch, however idle the workers are; without workers, it asks for some."""
    local = {"is_local": True, "location": Location.TRAINER}
    for workers, advised in ((2, "Move .mp_prefetch after it, so that workers run it."), (0, "Use .mp_prefetch(")):
        run = snapshot_of_run(augment=9.0, waits=9.0, trains=1.0, workers=workers, core_seconds=0.1, front=CHAIN)
        snapshot = with_stage(run, "operations[0], Augment", **local)
        assert kinds(snapshot) == ["waiting", "bottleneck"]
        assert advised in text_of(snapshot, "bottleneck")
    chain = millstream.MapDataset.range(8).to_iter_dataset().map(abs).mp_prefetch(1).map(float).batch(2)
    with iter(chain) as iterator:
        stages = {stage.name: stage for stage in iterator.insight.snapshot().stages}
    assert [(name, stages[name].is_local) for name in ("Map(abs)", "Map(float)", "Batch(batch_size=2)")] == [
        ("Map(abs)", False),
        ("Map(float)", True),
        ("Batch(batch_size=2)", True),
    ]


RUNS: tuple[dict[str, Any], ...] = (
    {"augment": 9.0, "waits": 4.0, "trains": 6.0},
    {"augment": 9.0, "waits": 4.0, "trains": 6.0, "workers": 1},
    {"augment": 90.0, "waits": 9.9, "trains": 0.1, "workers": 2},
    {"augment": 3.0, "waits": 1.0, "trains": 9.0, "workers": 2},
    {"augment": 1.0, "waits": 0.1, "trains": 9.9, "workers": 4},
    {"read": 60.0, "waits": 6.0, "trains": 4.0},
    {"read": 6.0, "waits": 6.0, "trains": 4.0, "threads": 0},
)
"""What calls for advice that says what to write."""

WRITTEN = re.compile(r"\.?\b\w+(?:=\w+\([^()]*\)|=\w+|\((?:\w+\([^()]*\)|\d+)\))")
"""An argument, or a step of a chain: `worker_count=4`, `.prefetch(ReadOptions(num_threads=16))`."""


def written_by(front: Front) -> set[str]:
    """Returns what advice tells people to write, of all that can be wrong."""
    runs = [run for run in RUNS if run.get("workers") or not front.is_on_cluster]
    texts = [advice.text for run in runs for advice in advice_of(snapshot_of_run(**run, front=front))]
    return {written for text in texts for written in WRITTEN.findall(text)}


def as_arguments(written: str) -> Any:
    return eval(f"dict({written})", {name: getattr(millstream, name) for name in millstream.__all__})


@pytest.mark.parametrize(
    ("front", "make"),
    [
        (LOADER, lambda **arguments: millstream.load(range(8), **arguments)),
        (
            LOADER,
            lambda **arguments: millstream.DataLoader(
                data_source=range(8), sampler=millstream.SequentialSampler(8), **arguments
            ),
        ),
        (
            ELASTIC,
            lambda **arguments: millstream.experimental.ElasticIterator(
                millstream.MapDataset.range(8), 4, millstream.ShardOptions(0, 1), **arguments
            ),
        ),
    ],
    ids=["load", "DataLoader", "ElasticIterator"],
)
def test_what_advice_tells_people_to_write_is_taken(front: Front, make: Callable[..., Any]) -> None:
    """Each argument that it names is one of what the pipeline was made with, by that name and with such a value."""
    written = written_by(front)
    asked = {text.partition("=")[0] for text in (front.workers, front.buffers)}
    assert {text.partition("=")[0] for text in written} == asked | {"read_options"}
    for text in written:
        make(**as_arguments(text)).close()


def test_what_advice_tells_people_to_write_for_actors_is_taken() -> None:
    """A loader with these actors says so: making it starts none."""
    written = written_by(ACTORS)
    assert {text.partition("(")[0] for text in written} == {"workers=RayWorkers", "worker_buffer_size=2"}
    for text in written:
        arguments = {"workers": millstream.RayWorkers(1)} | as_arguments(text)
        loader = millstream.load(range(8), **arguments)
        assert loader.workers == arguments["workers"]
        assert loader.multiprocessing_options.per_worker_buffer_size == arguments.get("worker_buffer_size", 1)


@pytest.mark.parametrize(
    ("front", "before"),
    [(CHAIN, "MapDataset.range(8)"), (FED_CHAIN, "MapDataset.range(8).to_iter_dataset()")],
    ids=["after a MapDataset", "after a stream"],
)
def test_the_steps_that_advice_tells_people_to_write_are_those_of_a_chain(front: Front, before: str) -> None:
    """Each can be written there, and takes what is in its parentheses."""
    written = written_by(front)
    assert {text.partition("(")[0] for text in written} == {
        front.workers.partition("(")[0],
        front.reading.partition("(")[0],
    }
    for text in written:
        between = "" if text.startswith((".to_iter_dataset", ".prefetch")) else ".to_iter_dataset()" * (front is CHAIN)
        names = {name: getattr(millstream, name) for name in millstream.__all__}
        assert isinstance(eval(before + between + text, names), millstream.IterDataset)


@pytest.mark.parametrize("waits", [0.0, 0.01, 5.0], ids=["hidden", "moments", "waiting"])
def test_deaths_and_stalls_are_named_whatever_else_there_is(waits: float) -> None:
    """With how many there were; where there were none, nothing is said."""
    run = {"augment": 5.0, "waits": waits, "trains": 0.0 if waits == 0.01 else 5.0, "workers": 2}
    snapshot = snapshot_of_run(**run, deaths=2, stalls=1)  # type: ignore[arg-type]
    assert text_of(snapshot, "trouble").startswith("2 worker processes died and workers stalled 1 time:")
    assert text_of(snapshot_of_run(**run, deaths=1), "trouble").startswith("1 worker process died:")  # type: ignore[arg-type]
    assert "trouble" not in kinds(snapshot_of_run(**run))  # type: ignore[arg-type]


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
    snapshot = snapshot_of_run(
        **run,
        workers=workers,
        threads=threads,
        cores=cores,
    )
    given = advice_of(snapshot)
    assert given
    assert len({advice.kind for advice in given}) == len(given)
    for advice in given:
        assert advice.text.endswith(".")
        for word in advice.text.replace(";", " ").split():
            if word.startswith("worker_count="):
                assert 1 <= int(word.removeprefix("worker_count=")) <= max(cores, workers - 1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_global_shuffle", [False, True])
def test_slow_units_are_not_answered_with_workers(workers: int, *, is_global_shuffle: bool) -> None:
    """Where decoding units is slow, the advice is the order, fewer columns or threads: never workers or read-ahead."""
    snapshot = snapshot_of_run(read=50.0, waits=50.0, trains=5.0, workers=workers, threads=4)
    snapshot = with_order(with_source(snapshot, window_units=7), is_global_shuffle=is_global_shuffle)
    texts = {advice.kind: advice.text for advice in advice_of(snapshot)}
    assert not set(texts) & {"bottleneck", "read_further_ahead", "uneven"}
    assert ("window_units=7" in texts["units"]) == is_global_shuffle
    assert "worker_count" not in " ".join(texts.values())
    packed = with_order(snapshot, kind="PackingSampler", is_global_shuffle=True)
    assert "PackingSampler(..., unit_sizes=source.unit_sizes, window_units=7)" in str(advice_of(packed))
    assert "units" not in kinds(with_source(snapshot, window_units=None))


def test_advice_tells_workers_that_sleep_from_workers_that_compute() -> None:
    """As many workers as cores: where they sleep, more of them are advised; the cores that they use are measured."""
    cores = available_cores()
    with millstream.load(range(40 * cores), num_epochs=1, transformations=[sleep], worker_count=cores) as loader:
        list(loader)
        snapshot = loader.insight.snapshot()
    assert snapshot.measured.core_seconds is not None
    assert snapshot.measured.core_seconds < 0.7 * snapshot.pipeline_seconds
    (advice,) = [advice.text for advice in loader.summary().advice if advice.kind == "bottleneck"]
    assert "all in use" not in advice
    assert "to shorten the waits: the workers wait themselves" in advice


def sleep(number: int) -> int:
    time.sleep(0.01)
    return number
