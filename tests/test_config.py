"""`millstream.config`: Grain's settings, what they print and log, and their errors."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.loader.reporting import summary

OUTPUT, DEBUG = "py_dataset_visualization_output_dir", "py_debug_mode"


@pytest.fixture(autouse=True)
def defaults_afterwards() -> Iterator[None]:
    """Restores the settings, which are those of the whole process."""
    yield
    millstream.config.update(OUTPUT, None)
    millstream.config.update(DEBUG, False)


def records(count: int = 40) -> list[str]:
    return [json.dumps({"a": [row] * 3}) for row in range(count)]


def decoded(text: str) -> np.ndarray:
    return np.array(json.loads(text)["a"])


def test_settings_are_attributes_and_have_defaults() -> None:
    """A setting is read as an attribute or by name, and an update is seen by both."""
    config = millstream.config
    assert (config.py_debug_mode, config.py_dataset_visualization_output_dir) == (False, None)

    config.update(DEBUG, True)

    assert config.py_debug_mode is config.get_or_default(DEBUG) is millstream.python.config.py_debug_mode is True
    assert repr(config) == (
        "Config(py_dataset_visualization_output_dir=None, py_debug_mode=True, py_permanently_disable_stats=False)"
    )
    config.update("py_permanently_disable_stats", True)  # nothing to disable
    config.update("py_permanently_disable_stats", False)


def test_bad_settings_are_errors_that_say_what_to_write(tmp_path: Path) -> None:
    """Unknown names list the known ones, and values of another kind name the rule."""
    known = f"It has {OUTPUT}, {DEBUG}"
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=known):
        millstream.config.update("py_debugmode", True)
    with pytest.raises(AttributeError, match="py_debugmode"):
        millstream.config.py_debugmode = True  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="py_debug_mode must be True or False"):
        millstream.config.update(DEBUG, "yes")
    with pytest.raises(TypeError, match="must be None, '' or a folder, got 3"):
        millstream.config.update(OUTPUT, 3)
    with pytest.raises(ValueError, match="which is a file"):
        millstream.config.update(OUTPUT, tmp_path / "file")
    assert (millstream.config.py_debug_mode, millstream.config.py_dataset_visualization_output_dir) == (False, None)


def test_a_diagram_is_printed_for_each_iterator_that_the_user_makes(capsys: pytest.CaptureFixture[str]) -> None:
    """Chains, MapDatasets and loaders print one diagram per iterator; those below them print none of their own."""
    chain = millstream.MapDataset.source(records()).map(decoded)
    stream = millstream.IterDataset.mix([chain.to_iter_dataset(), chain.to_iter_dataset()]).batch(2)
    loader = millstream.load(records(), transformations=[decoded], batch_size=4)
    every: list[Any] = [chain, stream, loader]
    for made in every:
        iter(made).close()
    assert capsys.readouterr().out == ""

    millstream.config.update(OUTPUT, "")
    for _ in range(2):
        iter(stream).close()
    printed = capsys.readouterr().out
    next(iter(chain))
    of_chain = capsys.readouterr().out
    with iter(loader):
        of_loader = capsys.readouterr().out

    nodes = [("source(list of 40 records)", "str[]"), (".map(decoded)", "int64[3]"), (".to_iter_dataset()", "int64[3]")]
    every_node = [("mix(weights={0: 1, 1: 1})", "int64[3]"), *nodes * 2, (".apply(Batch(batch_size=2))", "int64[2,3]")]
    lines = [line.strip(" -'") for line in printed.splitlines()]
    assert lines == 2 * ["IterDataset", *(line for node in every_node for line in node)]
    assert re.findall(r"^ {6}(.*)$", of_chain, re.MULTILINE) == ["'str[]'", "'int64[3]'", "'int64[3]'"]
    assert "element: int64 (3,)" in of_loader
    assert "element: int64 (4, 3)" in of_loader


def test_a_diagram_changes_no_element_and_hides_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """The elements are those without a diagram. A node that fails is displayed with its error, and fails when read."""

    def broken(text: str) -> str:
        raise RuntimeError(f"no {text[:2]}")

    chain = millstream.MapDataset.source(records()).map(decoded).shuffle(seed=3).to_iter_dataset()
    expected = [value.tolist() for value in chain]
    millstream.config.update(OUTPUT, "")
    assert [value.tolist() for value in chain] == expected
    capsys.readouterr()

    iterator = iter(millstream.MapDataset.source(records()).map(broken).to_iter_dataset())

    assert "unknown: RuntimeError: no {" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=r"no \{"):
        next(iterator)
    iterator.close()


def test_a_stream_loses_no_record_to_a_diagram(capsys: pytest.CaptureFixture[str]) -> None:
    """A source that returns whatever comes next is not read for a diagram."""

    class Stream:
        def __init__(self) -> None:
            self.rest = iter("abc")

        def __len__(self) -> int:
            return 2**40

        def __getitem__(self, key: int) -> str:
            return next(self.rest)

    millstream.config.update(OUTPUT, "")
    chain = millstream.MapDataset.source(Stream()).to_iter_dataset(millstream.ReadOptions(num_threads=1))
    assert list(chain) == ["a", "b", "c"]
    assert "may be a stream" in capsys.readouterr().out


def test_a_folder_gets_a_page_for_each_iterator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder is created, and each iterator adds an HTML file with nodes and shapes; nothing is printed."""
    folder = tmp_path / "new" / "diagrams"
    chain = millstream.MapDataset.source(records()).map(decoded).to_iter_dataset().batch(2)
    loader = millstream.load(records(), transformations=[decoded], batch_size=4)

    millstream.config.update(OUTPUT, folder)
    every: list[Any] = [chain, loader, chain]
    for made in every:
        iter(made).close()

    pages = [path.read_text() for path in folder.iterdir()]
    assert all(page.lower().startswith("<!doctype html>") for page in pages)
    assert sorted(("int64[2,3]" in page, "int64 (4, 3)" in page) for page in pages) == [
        (False, True),
        *[(True, False)] * 2,
    ]
    assert capsys.readouterr().out == ""


def summaries(log: pytest.LogCaptureFixture) -> list[dict[str, list[str]]]:
    """Returns the logged summaries: the cells of each row, by its node."""
    found = []
    for message in log.messages:
        if message.startswith("Execution summary: "):
            rows = [re.split(r" {2,}", line) for line in message.split("---\n")[1].splitlines()]
            found.append({row[0]: row[1:] for row in rows})
    return found


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_debug_mode_logs_a_row_per_node_of_a_chain(
    caplog: pytest.LogCaptureFixture, workers: int, *, sparse: bool
) -> None:
    """At the end, one summary has the number of elements of each node, wherever it ran, filters included."""
    chain = millstream.MapDataset.source(records()).map(decoded)
    if sparse:
        chain = chain.filter(lambda array: array[0] % 2 == 0)
    stream = chain.to_iter_dataset().batch(2).mp_prefetch(workers)

    list(stream)
    millstream.config.update(DEBUG, True)
    list(stream)

    (summary,) = summaries(caplog)
    elements = {node.split(", ")[-1].removeprefix("."): cells[-2] for node, cells in summary.items() if len(cells) > 2}
    assert elements["read"] == elements.get("map(decoded)", elements.get("Map(decoded)")) == "40"
    if sparse:
        assert elements["filter(<lambda>)"] == "20"
    assert elements["Batch(batch_size=2)"] == ("10" if sparse else "20")
    assert all(cells[0].endswith("%") for cells in summary.values())


def test_the_debug_mode_measures_times_and_sizes_of_a_loader(caplog: pytest.LogCaptureFixture) -> None:
    """Total, least, most and mean time agree with what an operation took, and memory with its arrays."""

    def sized(_: int) -> np.ndarray:
        return np.zeros(1_000_000, np.uint8)

    millstream.config.update(DEBUG, True)
    in_this_thread = millstream.ReadOptions(num_threads=0)
    loader = millstream.load(range(8), num_epochs=1, transformations=[sized], batch_size=4, read_options=in_this_thread)
    with iter(loader) as iterator:
        next(iterator)
        assert summaries(caplog) == []
    (summary,) = summaries(caplog)

    share, total, least, most, mean, elements, memory = summary["operations[0], Map(sized)"]
    assert (elements, memory) == ("4", "4 MB")
    assert summary["operations[1], Batch(batch_size=4)"][-2:] == ["1", "4 MB"]
    assert seconds(least) <= seconds(mean) <= seconds(most) <= seconds(total)
    assert 0 <= int(share.split()[0]) <= 100


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number.replace(",", "")) * {"µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]


def test_a_summary_comes_once_a_period_and_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a pipeline is read, summaries come when the period is over; the last one only if something followed."""
    monkeypatch.setattr(summary, "PERIOD_SECONDS", 0.0)
    millstream.config.update(DEBUG, True)
    loader = millstream.load(records(), num_epochs=1, batch_size=10)
    assert len(list(loader)) == 4

    assert 2 <= len(summaries(caplog)) <= 5

    monkeypatch.undo()
    caplog.clear()
    iterator = iter(millstream.load(records(), batch_size=10))
    next(iterator)
    assert summaries(caplog) == []
    del iterator
    assert len(summaries(caplog)) == 1


def test_without_the_debug_mode_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """No summary without the setting, and none for iterators made after it is off again."""
    millstream.config.update(DEBUG, True)
    millstream.config.update(DEBUG, False)
    with caplog.at_level(logging.DEBUG, "millstream"):
        list(millstream.load(records(), num_epochs=1, batch_size=10))
        list(millstream.MapDataset.source(records()).to_iter_dataset())
    assert summaries(caplog) == []
