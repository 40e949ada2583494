"""The recording knows who worked on what and when, is bounded, and changes nothing; the report shows it."""

import itertools
import json
import os
import platform
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import hypothesis
import pytest
from hypothesis import strategies

import millstream
from millstream.loader import measuring
from millstream.loader.measuring import STARTS, TRAINER, TRAINS, WAITS, Event, Sample, Span
from millstream.loader.processes.pool import Pool
from millstream.loader.reporting.report import WIDTH, chrome_trace, timeline
from support.documents.html_pages import Page

# Workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def spend(value: Any) -> Any:
    """Returns the value after a moment of work."""
    end = time.perf_counter() + 0.003
    while time.perf_counter() < end:
        pass
    return value


def loader_of(*operations: Any, workers: int = 0, threads: int = 0, records: bool = True) -> millstream.DataLoader:
    """Returns a loader of one shuffled epoch of 32 numbers in batches of 4."""
    return millstream.load(
        range(32),
        shuffle=True,
        seed=0,
        num_epochs=1,
        transformations=operations,
        batch_size=4,
        worker_count=workers,
        read_options=millstream.ReadOptions(num_threads=threads),
        enable_profiling=records,
    )


def trace_of(loader: millstream.DataLoader, folder: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(loader.report(folder / "trace.json").read_text())["traceEvents"]
    return events


@pytest.mark.parametrize(("workers", "threads"), [(0, 0), (0, 4), (2, 0)], ids=["inline", "threads", "workers"])
def test_the_recording_says_who_worked_on_which_batch(workers: int, threads: int, tmp_path: Path) -> None:
    """Every block was worked on by somebody, within the time of the pass; the trainer waited for each.

    The batches are those of a loader that records nothing.
    """
    expected = [batch.tobytes() for batch in loader_of(records=False)]
    begin = time.perf_counter()
    with loader_of(spend, workers=workers, threads=threads) as loader:
        assert [batch.tobytes() for batch in loader] == expected
        events = trace_of(loader, tmp_path)
    end = time.perf_counter()
    pieces = [event for event in events if event["ph"] == "X"]
    what = "batch" if workers else "operations[0], Map(spend)"
    work = [piece for piece in pieces if piece["name"].startswith(what)]
    batches = {batch for one in work for batch in range(one["args"]["first batch"], one["args"]["last batch"] + 1)}
    assert batches == set(range(8))
    assert all(begin * 1e6 <= piece["ts"] <= piece["ts"] + piece["dur"] <= end * 1e6 + 1 for piece in pieces)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    if workers:
        assert {names[piece["pid"]] for piece in work} == {"worker"}
        assert all(piece["args"]["operations[0], Map(spend) (ms)"] > 0 for piece in work)
    else:
        assert set(names) == {os.getpid()}
    assert sum(piece["name"] == STARTS for piece in pieces) == 1
    assert sum(piece["name"] == WAITS for piece in pieces) >= 1


def test_a_worker_that_is_quicker_than_the_fork_server_is_in_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work of a worker is recorded as its own, though nobody else has said yet which process it is."""
    monkeypatch.setattr(Pool, "_serve_fork_server", lambda _: None)
    with loader_of(workers=1) as loader:
        assert len(list(loader)) == 8
        events = trace_of(loader, tmp_path)
    calls = [event for event in events if event["name"].startswith("batch")]
    made = [range(event["args"]["first batch"], event["args"]["last batch"] + 1) for event in calls]
    assert sorted(itertools.chain.from_iterable(made)) == list(range(8))
    assert {event["pid"] for event in calls}.isdisjoint({os.getpid()})


def test_nothing_is_recorded_unless_asked(tmp_path: Path) -> None:
    """The page says how to ask; a trace is refused, as any other suffix; a pickled loader records as the first did."""
    loader = loader_of(records=False)
    assert len(list(loader)) == 8
    assert "enable_profiling=True" in Page(loader.report(tmp_path / "page.html").read_text()).text
    for name, said in (("trace.json", "enable_profiling=True"), ("page.pdf", r"must end in \.html or \.json, got")):
        with pytest.raises(ValueError, match=said):
            loader.report(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    copy = cloudpickle.loads(cloudpickle.dumps(loader_of()))
    assert len(list(copy)) == 8
    assert any(event["ph"] == "X" for event in trace_of(copy, tmp_path))


def test_a_report_has_advice_picture_timeline_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page that is whole and asks for nothing outside of it."""
    monkeypatch.setattr(measuring, "SAMPLE_SECONDS", 0.0)
    loader = loader_of(spend)
    for _ in loader:
        spend(None)
    path = loader.report(str(tmp_path / "report.html"))
    page = Page(path.read_text())
    for words in (
        "Advice",
        f"Python {platform.python_version()}, millstream {millstream.__version__}",
        platform.node(),
        "The trainer waited",
        "operations[0], Map(spend)",
        "the trainer's thread",
        "Memory",
        "trainer: at most",
    ):
        assert words in page.text
    assert page.tags.count("svg") == 1
    assert "None." in page.text


def test_a_report_needs_no_metadata_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that was not installed, for instance one of a source tree, has a version as well."""
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setattr(sys.modules["torch"], "__version__", "2.9+source", raising=False)

    path = millstream.load(range(2)).report(tmp_path / "report.html")

    assert "torch 2.9+source" in Page(path.read_text()).text


def test_deaths_are_in_the_report_even_if_nothing_is_recorded(tmp_path: Path) -> None:
    """When, and how the worker ended; metrics and advice count it, too."""
    marker = tmp_path / "died"

    def die_once(value: int) -> int:
        if value == 5 and not marker.exists():
            marker.touch()
            os._exit(3)
        return value

    with loader_of(die_once, workers=1, records=False) as loader:
        assert len(list(loader)) == 8
        text = Page(loader.report(tmp_path / "report.html").read_text()).text
        assert "exited with status 3" in text
        assert loader.metrics()["loader/worker_deaths"] == 1.0
        assert "trouble" in {advice.kind for advice in loader.summary().advice}


def test_a_recording_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a run, the last pieces of work are kept, and no more."""
    monkeypatch.setattr(measuring, "MAX_SPANS", 10)
    loader = loader_of()
    assert len(list(loader)) == 8
    recording = loader.insight.profiler.recorder
    assert recording is not None
    assert len(recording.spans) == 10
    assert recording.spans[-1].what == WAITS


def test_threads_are_told_apart() -> None:
    """Work in the trainer's thread is the trainer's; that of another has the thread's name."""
    recording = measuring.Recorder()
    profiler = measuring.Profiler((), recording)
    read = profiler.timed("read", lambda *_: None)
    profiler.begin_wait(measuring.Waiter())
    read(3, 5)
    thread = threading.Thread(target=read, args=(None,), name="other")
    thread.start()
    thread.join()
    assert [(span.who, span.blocks) for span in recording.spans] == [(TRAINER, (3, 4)), ("other", None)]


TIMES = strategies.floats(0, 100)
SPANS = strategies.builds(
    lambda who, process, what, start, seconds, blocks: Span(who, process, what, start, start + seconds, blocks),
    strategies.sampled_from([TRAINER, "thread", "worker <1>"]),
    strategies.sampled_from([None, 7]),
    strategies.sampled_from([STARTS, WAITS, TRAINS, "read", "operations[0], <&>"]),
    TIMES,
    TIMES,
    strategies.none() | strategies.tuples(strategies.integers(0, 9), strategies.integers(0, 9)),
)


@hypothesis.given(
    strategies.lists(SPANS, max_size=40),
    strategies.lists(strategies.builds(Sample, TIMES, strategies.sampled_from([TRAINER, "w"]), strategies.integers(1))),
    strategies.lists(strategies.builds(Event, TIMES, strategies.text(min_size=1).filter(str.splitlines))),
)
def test_any_recording_can_be_shown(spans: list[Span], memory: list[Sample], events: list[Event]) -> None:
    """Drawings are whole; a trace is JSON with every piece, each on a track that has a name, none of them number 0."""
    Page(timeline(spans, events))
    traced = json.loads(chrome_trace(spans, memory, events))["traceEvents"]
    pieces = [event for event in traced if event["ph"] == "X"]
    named = {event["pid"] for event in traced if event["name"] == "process_name"}
    assert len(pieces) == len(spans)
    assert {event["pid"] for event in traced} <= named
    threads = {(event["pid"], event["tid"]) for event in traced if event["name"] == "thread_name"}
    pieces += [event for event in traced if event["ph"] == "i"]
    assert {(piece["pid"], piece["tid"]) for piece in pieces} <= threads
    assert all(process and thread for process, thread in threads)
    assert sum(event["ph"] == "i" for event in traced) == len(events)


def test_a_drawing_is_bounded() -> None:
    """Pieces that are too near to each other are drawn as one: a long recording is no larger than a short one."""
    spans = [Span(TRAINER, None, "read", number / 5000, (number + 1) / 5000) for number in range(20_000)]
    assert timeline(spans, []).count("<rect") <= WIDTH + 3
