"""The benchmarks run, at a tiny size, compare what is delivered, and report what was measured."""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suite import data
from suite.cases import CASES, Scale
from suite.orders import Order, Session, content_of, expected_content
from suite.peers import PEERS
from suite.report import TIMES, Measured, as_json, from_json, markdown, number, ratio_text
from suite.runner import Result, run
from suite.steps import identity
from suite.work import Contender, Map, Records, Work
from support.processes.worker_pools import python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MACHINE: dict[str, Any] = {
    "commit": "0123",
    "date": "2026-11-28",
    "processor": "P",
    "cores": 2,
    "memory_gb": 1,
    "system": "S",
    "python": "3",
    "numpy": "2",
    "versions": {"Grain": "1"},
    "copy_bytes_per_s": 4e9,
    "pread_bytes_per_s": 2e9,
}
"""A machine that measured a case."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder for the files of all cases."""
    return tmp_path_factory.mktemp("data")


def result_of(peer: str, *values: float, mode: str = "a mode", trial: float = 1.0) -> Result:
    return Result(Contender(peer, mode), trial, list(values), [0.1, 0.2])


@pytest.mark.parametrize("name", CASES)
def test_a_case_measures_millstream(name: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Millstream delivers the right records in the first of its modes, and its measurement is a positive number."""
    monkeypatch.setattr(data, "FOLDER", files)
    contender = next(contender for contender in CASES[name].contenders if contender.peer == "millstream")
    session = Session(Order(name, contender, Scale.tiny()))
    assert session.open() == {}
    assert session.measure()["value"] > 0
    session.close()


def test_every_case_has_two_modes_of_each_peer() -> None:
    """No side has more tries than the other: each peer of a case has two modes, and an adapter in the suite."""
    for case in CASES.values():
        peers = [contender.peer for contender in case.contenders]
        assert {peers.count(peer) for peer in peers} == {2}, case.name
    assert {contender.peer for case in CASES.values() for contender in case.contenders} == set(PEERS)
    for peer in PEERS.values():
        assert (BENCHMARKS / Path(*peer.module.split("."))).with_suffix(".py").exists()


def test_the_flags_that_are_shown_are_known() -> None:
    """`make bench` and the commands of the page about the benchmarks have no flag that the program lacks."""
    texts = [(BENCHMARKS / "../Makefile").read_text(), (BENCHMARKS / "README.md").read_text()]
    commands = [command for text in texts for command in re.findall(r"python benchmarks\b[^`]*?(?=[`\n])", text)]
    shown = {flag for command in commands for flag in re.findall(r"--(\w+)", command)}
    assert len(commands) >= 3
    assert shown <= set(re.findall(r'DEFINE_\w+\(\s*"(\w+)"', (BENCHMARKS / "__main__.py").read_text()))


def test_other_contents_are_found_out() -> None:
    """Contents are equal for any order and batching; a record lost, doubled, changed or of another type is noticed."""
    work = Work(Records(list(range(100))), (Map(identity),), 8)
    expected = expected_content(work, identity)
    backwards = [np.arange(99, 49, -1), np.arange(50)]
    assert content_of(backwards, identity) == expected
    lost, doubled = np.arange(99), np.append(np.arange(100), 7)
    changed, retyped = np.append(np.arange(99), 7), np.arange(100.0)
    for batch in (lost, doubled, changed, retyped):
        assert content_of([batch], identity) != expected


def test_the_command_line_measures_reports_and_says_who_is_absent(tmp_path: Path) -> None:
    """The command writes JSON and Markdown that hold every contender; a peer that is not installed is called absent."""
    broken = tmp_path / "path" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    flags = ["--tiny", "--cases=numbers", "--peers=millstream,pytorch", f"--output={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": str(broken.parent), "MILLSTREAM_BENCHMARK_DATA": str(tmp_path / "data")}
    done = python(BENCHMARKS, *flags, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    report, results = (tmp_path / "latest.md").read_text(), json.loads((tmp_path / "latest.json").read_text())
    assert done.stdout == f"{report}\n"
    contenders = [contender for case in results for contender in case["contenders"]]
    absent = [contender for contender in contenders if contender["peer"] != "millstream"]
    assert len(absent) == 2
    assert all("not installed here" in contender["reason"] and not contender["values"] for contender in absent)
    chosen = [contender for contender in contenders if contender["values"]]
    assert [contender["peer"] for contender in chosen] == ["millstream"]
    assert report.count("not installed here") == len(absent)


def test_a_contender_that_fails_is_reported(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies gives its last words instead of a number, and the others go on."""
    monkeypatch.setenv("MILLSTREAM_BENCHMARK_DATA", str(files))
    failing, sound = Contender("nobody", "a mode"), CASES["numbers"].contenders[0]
    case = dataclasses.replace(CASES["numbers"], contenders=(failing, sound))
    first, second = run(case, Scale.tiny(), ["nobody", "millstream"], lambda _: None)
    assert first.values == []
    assert "KeyError: 'nobody'" in str(first.reason)
    assert len(second.values) == 1


def test_ratios_are_those_of_the_turns_and_have_their_interval() -> None:
    """The ratio of each turn counts; an interval with 1 inside is undecided; where less is better, less wins."""
    rates = [result_of("millstream", 90.0, 100.0, 110.0), result_of("grain", 30.0, 50.0, 220.0)]
    assert Measured(CASES["tokens"], rates, MACHINE).ratios("grain") == [3.0, 2.0, 0.5]
    assert ratio_text([3.0, 2.0, 0.5]) == f"2{TIMES} (0.5 to 3), undecided"
    assert ratio_text([3.0, 2.0, 1.5]) == f"2{TIMES} (1.5 to 3)"
    assert Measured(CASES["memory"], rates, MACHINE).ratios("grain") == [1 / 3, 0.5, 2.0]
    report = markdown([Measured(CASES["tokens"], rates, MACHINE)])
    assert f"| 2{TIMES} (0.5 to 3), undecided | 1 |" in report
    assert "Measured on 2 cores" in report
    assert "Commit 0123, 2026-11-28" in report


def test_results_are_read_back_as_they_were_written() -> None:
    """A run of a few cases keeps what is known of the others: the JSON holds all that the report is made of."""
    results = [result_of("millstream", 1.0, 2.0), Result(Contender("grain", "Dataset", 2), reason="not installed here")]
    before = Measured(CASES["tokens"], results, MACHINE)
    assert from_json(json.loads(json.dumps(as_json([before])))) == {"tokens": before}
    assert from_json([{**as_json([before])[0], "case": "gone"}]) == {}


def test_the_report_is_that_of_the_results() -> None:
    """Nobody has changed a number by hand: the page is what the results beside it make."""
    written = json.loads((BENCHMARKS / "results/latest.json").read_text())
    assert markdown(list(from_json(written).values())) == (BENCHMARKS / "results/latest.md").read_text()


def test_numbers_have_three_digits_at_most() -> None:
    """A number in a table shows what was measured, not more."""
    texts = {0.012345: "0.012", 3.14159: "3.1", 123.4: "123", 12_345.6: "12,300", 7_654_321.0: "7,650,000"}
    assert {value: number(value) for value in texts} == texts
