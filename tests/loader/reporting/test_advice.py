"""Each advice comes where its numbers call for it, with these numbers, and stays away where they do not."""

import re
import time
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

import millstream
from millstream.loader.reporting.advice import advice_of
from millstream.loader.reporting.snapshot import LoaderSnapshot, Location
from millstream.loader.threads.front import ACTORS, CHAIN, DEBUGGED, ELASTIC, FED_CHAIN, LOADER, Front
from millstream.loader.threads.options import available_cores
from support.draw.loader_snapshots import snapshot_of_run, with_order, with_source, with_stage


def kinds(snapshot: LoaderSnapshot) -> list[str]:
    return [advice.kind for advice in advice_of(snapshot)]


def text_of(snapshot: LoaderSnapshot, kind: str) -> str:
    (text,) = [advice.text for advice in advice_of(snapshot) if advice.kind == kind]
    return text


def test_nothing_is_said_of_what_was_not_measured() -> None:
    """Before the first batch, and while only moments were measured, there is no advice on speed."""
    assert kinds(snapshot_of_run(augment=1.0, waits=1.0, trains=1.0)) != ["unmeasured"]
    snapshot = snapshot_of_run(augment=0.01, waits=0.01, trains=0.01)
    assert kinds(snapshot) == ["too_short"]
    assert "100 batches in 20 ms" in text_of(snapshot, "too_short")


def test_a_waiting_trainer_is_told_for_how_long_and_how_many_workers_hide_it() -> None:
    """The sentences have the share of the waits, the slowest part with its share, and how many workers hide it."""
    snapshot = snapshot_of_run(read=9.0, augment=22.0, waits=3.8, trains=6.2 + 2.0, workers=3)
    assert kinds(snapshot) == ["waiting", "bottleneck"]
    assert text_of(snapshot, "waiting") == "The trainer waited 32 % of the time."
    assert text_of(snapshot, "bottleneck") == (
        "operations[0], Augment, takes 71 % of the workers' time. Use worker_count=4 to hide it; "
        "this machine has 8 cores."
    )
    snapshot = snapshot_of_run(read=9.0, augment=22.0, waits=3.8, trains=6.2 + 2.0, workers=3, front=CHAIN)
    assert "Use .mp_prefetch(4) to hide it" in text_of(snapshot, "bottleneck")


def test_a_trainer_that_does_not_wait_is_left_alone() -> None:
    """However slow the pipeline is in itself: if it is hidden, nothing is to be done."""
    snapshot = snapshot_of_run(augment=50.0, waits=0.2, trains=9.8, workers=6)
    assert kinds(snapshot) == ["not_waiting"]
    assert text_of(snapshot, "not_waiting").startswith("The trainer waited 2 % of the time")


def test_a_loop_without_training_is_told_that() -> None:
    """Where the loop does nothing but draw batches, there is nothing to hide the loading behind."""
    assert "too little compute to overlap" in text_of(snapshot_of_run(augment=9.9, waits=9.9, trains=0.1), "waiting")
    assert "too little compute to overlap" not in text_of(
        snapshot_of_run(augment=9.0, waits=9.0, trains=1.0), "waiting"
    )


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


def test_actors_are_asked_for_as_a_cluster_has_them() -> None:
    """Not by worker_count, and whatever cores this machine has: some more, of which the cluster knows what to think."""
    run: dict[str, Any] = {"augment": 30.0, "waits": 4.0, "trains": 8.0}
    snapshot = snapshot_of_run(**run, workers=3, cores=3, front=ACTORS)
    assert text_of(snapshot, "bottleneck") == (
        "operations[0], Augment, takes 100 % of the workers' time. Use workers=RayWorkers(num_workers=4) to hide it, "
        "if the cluster has room."
    )
    # Two cores each: five would do the work, so three actors.
    assert "RayWorkers(num_workers=3) to hide" in text_of(
        snapshot_of_run(augment=40.0, waits=4.0, trains=8.0, workers=2, cores=4, front=ACTORS), "bottleneck"
    )
    snapshot = snapshot_of_run(augment=30.0, waits=9.99, trains=0.01, workers=3, cores=3, front=ACTORS)
    assert "RayWorkers(num_workers=12) to shorten the waits" in text_of(snapshot, "bottleneck")
    snapshot = snapshot_of_run(augment=5.0, waits=0.1, trains=9.9, workers=4, deaths=1, front=ACTORS)
    assert text_of(snapshot, "idle_workers") == (
        "The 4 Ray actors were busy 12 % of the time. Use workers=RayWorkers(num_workers=1) to save memory."
    )
    assert text_of(snapshot, "trouble").startswith("1 Ray actor died:")


def test_what_was_measured_in_debug_mode_is_no_ground_for_advice() -> None:
    """It says that, and nothing else."""
    assert kinds(snapshot_of_run(augment=9.0, waits=9.0, trains=1.0, threads=0, front=DEBUGGED)) == ["debugging"]


def test_a_stream_is_not_asked_to_read_many_records() -> None:
    """Nobody reads the elements of a stream by number."""
    run: dict[str, Any] = {"read": 6.0, "augment": 4.0, "waits": 4.0, "trains": 6.0}
    assert "batched_reads" in kinds(with_source(snapshot_of_run(**run, front=CHAIN), reads_batches=False))
    assert "batched_reads" not in kinds(with_source(snapshot_of_run(**run, front=FED_CHAIN), reads_batches=False))


def test_workers_that_have_time_left_are_not_said_to_be_too_few() -> None:
    """A trainer that waits beside idle workers waits for a slow batch now and then: more ready, not more workers."""
    run: dict[str, Any] = {"augment": 3.0, "waits": 1.0, "trains": 9.0, "workers": 2, "cores": 2}
    snapshot = snapshot_of_run(**run)
    assert kinds(snapshot) == ["waiting", "uneven"]
    assert text_of(snapshot, "uneven").startswith(
        "The 2 worker processes were busy 15 % of the time: enough for this trainer on average, but "
    )
    chain = text_of(snapshot_of_run(**run, front=CHAIN), "uneven")
    assert "worker_buffer_size=2" in text_of(snapshot, "uneven")
    assert "with .mp_prefetch(MultiprocessingOptions(2, per_worker_buffer_size=2))" in chain
    busy = snapshot_of_run(**run | {"augment": 10.0})
    assert kinds(busy) == ["waiting", "bottleneck"]
    assert kinds(snapshot_of_run(**run | {"workers": 0})) == ["waiting", "bottleneck"]


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


def test_waits_for_the_lock_ask_for_no_more_workers() -> None:
    """Sixteen threads in one another's way seem to work all the time: no more was done than two cores can do."""
    snapshot = snapshot_of_run(augment=160.0, waits=3.0, trains=7.0, cores=2)
    assert "worker_count=2 to shorten" in text_of(snapshot, "bottleneck")
    snapshot = snapshot_of_run(augment=160.0, waits=0.6, trains=9.4, cores=4)
    assert "to shorten" not in text_of(snapshot, "bottleneck") or "worker_count=4" in text_of(snapshot, "bottleneck")


def test_a_pipeline_that_does_next_to_nothing_is_not_blamed() -> None:
    """A trainer that waits though there is hardly any work waits for something else; else that is not said."""
    snapshot = snapshot_of_run(augment=0.1, hand_over=0.2, waits=1.0, trains=9.0, workers=2)
    assert kinds(snapshot) == ["waiting", "something_else"]
    assert "took 3 % of the time" in text_of(snapshot, "something_else")
    assert "something_else" not in kinds(snapshot_of_run(augment=5.0, waits=1.0, trains=9.0, workers=2))


def test_a_source_without_batched_reads_is_named() -> None:
    """Its class and the share of reading are in the sentence; not so where it has them, or where reading is little."""
    snapshot = with_source(snapshot_of_run(read=6.0, augment=4.0, waits=4.0, trains=6.0), reads_batches=False)
    assert text_of(snapshot, "batched_reads").startswith(
        "Reading takes 60 % of the pipeline's time, one record at a time, with up to 500 records prefetched. "
        "Add a method __getitems__(keys) to Tokens that reads a batch in one call."
    )
    assert str([advice.text for advice in advice_of(snapshot)]).count("60 %") == 1
    assert "batched_reads" not in kinds(with_source(snapshot, reads_batches=True))
    little = with_source(snapshot_of_run(read=1.0, augment=9.0, waits=4.0, trains=6.0), reads_batches=False)
    assert "batched_reads" not in kinds(little)


def test_reads_that_could_be_ahead_are_named() -> None:
    """Without threads and workers, threads; with threads, more records ahead; with workers, neither."""
    snapshot = snapshot_of_run(read=6.0, augment=1.0, waits=6.0, trains=4.0, threads=0)
    assert kinds(snapshot) == ["waiting", "read_ahead"]
    snapshot = snapshot_of_run(read=60.0, augment=1.0, waits=6.0, trains=4.0)
    assert "prefetch_buffer_size=1000" in text_of(snapshot, "read_further_ahead")
    assert "86 % of" not in text_of(snapshot, "read_further_ahead")
    snapshot = snapshot_of_run(read=6.0, augment=1.0, waits=6.0, trains=4.0, workers=1)
    assert not {"read_ahead", "read_further_ahead"} & set(kinds(snapshot))
    snapshot = snapshot_of_run(read=1.0, augment=6.0, waits=6.0, trains=4.0, threads=0)
    assert not {"read_ahead", "read_further_ahead"} & set(kinds(snapshot))


def test_a_sampler_that_is_asked_one_by_one_is_named() -> None:
    """Its class and the share; not so for one that answers for many, or where it takes little."""
    snapshot = with_order(
        snapshot_of_run(keys=5.0, augment=5.0, waits=5.0, trains=5.0), is_vectorised=False, kind="Curriculum"
    )
    assert text_of(snapshot, "sampler_keys").startswith("Curriculum is called once per position, which takes 50 %")
    assert "sampler_keys" not in kinds(with_order(snapshot, is_vectorised=True))
    little = with_order(snapshot_of_run(keys=0.5, augment=5.0, waits=5.0, trains=5.0), is_vectorised=False)
    assert "sampler_keys" not in kinds(little)


def test_batches_that_are_pickled_are_named() -> None:
    """A hand-over that takes long is named with the size of the batches; a short one is not."""
    snapshot = snapshot_of_run(augment=5.0, hand_over=5.0, waits=5.0, trains=5.0, workers=2, batch_bytes=19_000_000)
    assert "The transfer of batches (19 MB each) to the trainer takes 50 % of the workers' time." in text_of(
        snapshot, "hand_over"
    )
    assert "hand_over" not in kinds(snapshot_of_run(augment=5.0, hand_over=0.5, waits=5.0, trains=5.0, workers=2))
    assert "hand_over" not in kinds(snapshot_of_run(augment=5.0, hand_over=5.0, waits=5.0, trains=5.0))


def test_batches_that_the_trainer_copies_are_named() -> None:
    """Where its own thread stacks what workers have made, with size and share, and what avoids it."""
    run = snapshot_of_run(augment=5.0, batch=2.0, waits=5.0, trains=5.0, workers=2, batch_bytes=19_000_000)
    copied = with_stage(run, "operations[1]", location=Location.TRAINER)
    filtered = with_stage(copied, "operations[0]", keeps_count=False)
    assert text_of(filtered, "copied_batches").startswith(
        "The trainer's thread copies the batches (19 MB each): operations[1], Batch(8), takes 20 % of its time"
    )
    assert "surviving_keys" in text_of(filtered, "copied_batches")
    packed = with_stage(copied, "operations[1]", regroups=True)
    assert "PackingSampler" in text_of(packed, "copied_batches")
    assert "copied_batches" not in kinds(run)
    assert "copied_batches" not in kinds(with_stage(copied, "operations[1]", seconds=0.2))


def test_the_trainers_own_copying_is_not_blamed_on_the_workers() -> None:
    """Where it is the slowest part, more workers would not help, and are not recommended."""
    run = snapshot_of_run(augment=1.0, batch=4.0, waits=5.0, trains=5.0, workers=2)
    assert kinds(with_stage(run, "operations[1]", location=Location.TRAINER)) == ["waiting", "copied_batches"]


def test_workers_that_have_little_to_do_are_named() -> None:
    """With how much they worked and how many would do; not so where they are busy, or where there is one."""
    snapshot = snapshot_of_run(augment=5.0, waits=0.1, trains=9.9, workers=4)
    assert "The 4 worker processes were busy 12 % of the time. Use worker_count=1 to" in text_of(
        snapshot, "idle_workers"
    )
    assert "idle_workers" not in kinds(snapshot_of_run(augment=30.0, waits=0.1, trains=9.9, workers=4))
    assert "idle_workers" not in kinds(snapshot_of_run(augment=1.0, waits=0.1, trains=9.9, workers=1))


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
