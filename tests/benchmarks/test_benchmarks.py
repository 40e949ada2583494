"""The benchmarks run: a case of each group, at a tiny size; the tables of benchmarks/scale.md are what was measured."""

import dataclasses
import json
import os
import xml.etree.ElementTree as ET
from operator import attrgetter
from pathlib import Path

import pytest
from at_scale import tables

from suite import data
from suite.case import Case, Contender, Goal, Pick
from suite.cases import CASES, GROUPS, cluster
from suite.findings import Measured, as_json, find, from_json
from suite.orders import carry_out, content_of, expected_content
from suite.peers import PEERS
from suite.peers.clusters import RAY_ACTORS
from suite.plot import ROWS, chart_of
from suite.report import TIMES, markdown, number
from suite.runner import Order, Outcome, Result, Runner
from suite.scale import TINY
from suite.steps import identity
from suite.work import Map, Records, Work
from support.processes.worker_pools import python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

MACHINE = {"processor": "P", "cores": 2, "memory_gb": 1, "system": "S", "python": "3", "numpy": "2"}
MACHINE |= {"versions": {"Grain": "1"}}
"""A machine that measured a case."""

pytestmark = pytest.mark.slow


def measured_here(**results: list[Result]) -> Measured:
    return Measured(results, {}, dict.fromkeys(results, MACHINE))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder for the files of all cases."""
    return tmp_path_factory.mktemp("data")


def rates_of(ours: float, **peers: float) -> list[Result]:
    """Returns the results of millstream, and of peers in the mode that each has."""
    modes = {"grain": "Dataset"}
    rates = {"millstream": ours, **peers}
    return [Result(Contender(peer, mode=modes.get(peer, "")), [rate]) for peer, rate in rates.items()]


def outcome_of(case: str, contender: Contender, task: str) -> Outcome:
    return carry_out(Order(case, contender, TINY.name, task), lambda: None)


@pytest.mark.parametrize("case", [group.CASES[0] for group in GROUPS if group is not cluster], ids=attrgetter("name"))
def test_a_case_of_each_group_measures_millstream_and_its_bounds(
    case: Case, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of millstream's modes and each bound gives a positive number, and millstream delivers the right records."""
    monkeypatch.setattr(data, "FOLDER", files)
    for contender in case.contenders:
        is_ours = contender.peer.startswith("millstream")
        if is_ours or contender.peer == "bare":
            measured = outcome_of(case.name, contender, "measure")
            assert measured.reason is None
            assert measured.value is not None
            assert measured.value > 0
        if is_ours and case.measure is None:
            assert outcome_of(case.name, contender, "check") == Outcome(value=1.0)


def test_a_case_on_a_cluster_delivers_the_right_records(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for actors of Ray, in a process of its own, with which their cluster ends. Nothing else is measured."""
    monkeypatch.setenv("MILLSTREAM_BENCHMARK_DATA", str(files))
    case = cluster.CASES[0]
    actors = tuple(contender for contender in case.contenders if contender.mode == RAY_ACTORS)
    case = dataclasses.replace(case, contenders=actors)
    (result,) = Runner(TINY, 0, ["millstream"], compare=True, progress=lambda _: None).run(case)
    assert result.reason is None
    assert result.same_content


@pytest.mark.parametrize("workers", [0, 2])
def test_the_breakdown_names_every_stage(workers: int, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, reading, each operation and the rest have their share, even where a filter makes a second stage.

    Workers run beside the trainer: their stages are not part of its time in `next`.
    """
    monkeypatch.setattr(data, "FOLDER", files)
    explained = outcome_of("tiny_filter", Contender("millstream", workers=workers), "explain")
    assert explained.reason is None
    stages = [stage.partition(",")[0] for stage in explained.details]
    rest = [] if workers else ["the rest of next", "consumer"]
    assert stages == ["keys", "read", "operations[0]", "operations[1]", "hand-over", *rest]


def test_other_contents_are_found_out() -> None:
    """Contents are equal for any order and batching; a record lost, doubled, changed or of another type is noticed."""
    work = Work(Records(list(range(100))), (Map(identity),), 8)
    expected = expected_content(work, identity)
    backwards = [list(reversed(range(50, 100))), list(range(50))]
    assert content_of(backwards, identity, batched=True) == expected
    lost, doubled = [range(99)], [range(100), [7]]
    changed, retyped = [[*range(99), 7]], [[float(value) for value in range(100)]]
    for batches in (lost, doubled, changed, retyped):
        assert content_of(map(list, batches), identity, batched=True) != expected


def test_the_command_line_measures_reports_and_says_who_is_absent(tmp_path: Path) -> None:
    """The command writes JSON and Markdown that hold every contender; a peer that is not installed is called absent."""
    broken = tmp_path / "path" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    flags = ["--scale=tiny", "--cases=hdf5,get_state", "--peers=millstream,pytorch", f"--output={tmp_path}"]
    done = python(BENCHMARKS, *flags, env={**os.environ, "PYTHONPATH": str(broken.parent)}, timeout=500)
    assert done.returncode == 0, done.stderr
    report, results = (tmp_path / "tiny.md").read_text(), json.loads((tmp_path / "tiny.json").read_text())
    assert done.stdout == f"{report}\n"
    assert not (tmp_path / "tiny.svg").exists(), "nobody to be compared with"
    contenders = [contender for case in results["cases"] for contender in case["contenders"]]
    absent = [contender for contender in contenders if contender["peer"] == "pytorch"]
    assert {contender["peer"] for contender in contenders} == {"bare", "millstream", "pytorch"}
    assert all(contender["median"] > 0 for contender in contenders if contender not in absent)
    assert all(contender["median"] is None and "not installed here" in contender["reason"] for contender in absent)
    assert report.count("not installed here") == len(absent)


def test_a_contender_that_takes_too_long_is_stopped_and_reported() -> None:
    """Beyond the limit a process is killed, and the report says so instead of giving a number."""
    impatient = dataclasses.replace(TINY, limit_seconds=0.01)
    (result, *_) = Runner(impatient, 1, ["millstream"], compare=True, progress=lambda _: None).run(CASES["get_state"])
    assert result.values == []
    assert result.reason is not None
    assert "took too long" in result.reason


def test_ratios_compare_the_best_modes_and_are_above_one_where_we_win() -> None:
    """The best median of each peer counts, the lowest where less is better; goals are judged by the same ratios."""
    case = dataclasses.replace(
        CASES["tiny"], goals=(Goal("twice Grain", 2, Pick("grain")), Goal("thrice Grain", 3, Pick("grain")))
    )
    rates = [
        Result(Contender("millstream"), [90.0, 100.0, 500.0]),
        Result(Contender("millstream", workers=2), [10.0]),
        Result(Contender("grain", mode="DataLoader"), [20.0]),
        Result(Contender("grain", mode="Dataset"), [40.0]),
        Result(Contender("pytorch"), [], reason="not installed here"),
        Result(Contender("bare", mode="loop"), [110.0]),
    ]
    (finding,) = find(measured_here(tiny=rates), {"tiny": case})
    assert finding.ratios["Grain DataLoader"] == 5
    assert finding.ratios["Grain Dataset"] == 2.5
    assert finding.ratios["PyTorch"] is None
    assert [(verdict.ratio, verdict.met, verdict.bound) for verdict in finding.verdicts] == [
        (2.5, True, 2.75),
        (2.5, False, 2.75),
    ]

    (latency,) = find(measured_here(tiny=rates), {"tiny": dataclasses.replace(case, higher_is_better=False)})
    assert latency.ratios["Grain DataLoader"] == 2

    report = markdown(TINY, [finding])
    assert "not installed here" in report
    assert "**no**" in report
    assert "the median of 1 to 3 runs," in report
    assert "(latest.svg)" in report


def test_the_chart_labels_the_peers_that_took_part() -> None:
    """The peers that took part in a case have a bar of it, with their ratio beside it."""
    rates = rates_of(90.0, grain=30.0, pytorch=100.0, mosaicml=9.0)
    chart = chart_of(find(measured_here(tiny=rates, tokens=rates[:1]), CASES))
    assert chart is not None
    shapes = list(ET.fromstring(chart).iter("{http://www.w3.org/2000/svg}text"))
    ratios = [shape.text for shape in shapes if (shape.text or "").endswith(TIMES)]
    assert ratios == [f"3{TIMES}", f"0.9{TIMES}"]


def test_a_report_on_other_peers_has_their_column_and_no_picture() -> None:
    """The picture shows four peers: where none of them took part, there is nothing to draw."""
    (finding,) = find(measured_here(tiny=rates_of(90.0, mosaicml=10.0)), {"tiny": CASES["tiny"]})
    assert chart_of([finding]) is None
    report = markdown(TINY, [finding], None)
    assert "| case | MosaicML Streaming |" in report
    assert f"| 9{TIMES} |" in report
    assert "![" not in report


def test_results_are_read_back_as_they_were_written() -> None:
    """A run of a few cases keeps what is known of the others: the JSON holds all that the report is made of."""
    contenders = CASES["tiny"].contenders
    measured = {
        "tiny": [
            Result(contenders[0], [1.0, 2.0], {"processors_busy_in_consumer": 0.5}, None, same_content=True),
            Result(contenders[1], [], {}, "not installed here"),
        ]
    }
    breakdowns = {"tiny": {"0 workers": {"keys": 0.25}}}
    before = Measured(measured, breakdowns, {"tiny": MACHINE})
    written = json.loads(json.dumps(as_json(find(before, CASES))))
    assert from_json(written, CASES) == before
    assert from_json(written, {}) == Measured({}, {}, {})


def test_records_are_compared_with_records() -> None:
    """The columns of millstream count against tf.data, which holds columns too, and against no other peer."""
    case = CASES["nested"]
    columns = Result(Contender("millstream", threads=0, mode="columns"), [900.0])
    rates = [*rates_of(100.0, grain=10.0, tensorflow=10.0), columns]
    (finding,) = find(measured_here(nested=rates), {"nested": case})
    assert finding.ratios["Grain Dataset"] == 10
    assert finding.ratios["tf.data"] == 90
    assert [verdict.ratio for verdict in finding.verdicts] == [10]


def test_each_row_names_the_machine_that_measured_it() -> None:
    """Two machines are described once each, and each case has the number of its own."""
    rates = rates_of(90.0, grain=10.0)
    machines = {"tiny": MACHINE, "tokens": {**MACHINE, "processor": "Q"}}
    report = markdown(TINY, find(Measured({"tiny": rates, "tokens": rates}, {}, machines), CASES), None)
    assert "1. P, 2 cores" in report
    assert "2. Q, 2 cores" in report
    assert [line.split("|")[-2].strip() for line in report.splitlines() if line.startswith("| `t")][:2] == ["1", "2"]


def test_numbers_have_three_digits() -> None:
    """A number in a table shows what was measured, not more."""
    texts = {0.012345: "0.0123", 3.14159: "3.14", 123.4: "123", 12_345.6: "12,300", 7_654_321.0: "7,650,000"}
    assert {value: number(value) for value in texts} == texts


def test_every_peer_has_an_adapter_module() -> None:
    """Every peer that takes part in a case is known, and its adapter is a file of the suite; pictures show cases."""
    assert ROWS.keys() <= CASES.keys()
    assert {contender.peer for case in CASES.values() for contender in case.contenders} == set(PEERS)
    for peer in PEERS.values():
        assert (BENCHMARKS / Path(*peer.module.split("."))).with_suffix(".py").exists()


def test_the_page_is_what_was_measured() -> None:
    """Nobody has changed a number by hand: the page has the tables of the results that lie beside the benchmarks."""
    measured = json.loads((BENCHMARKS / "results" / "scale.json").read_text())
    page = (BENCHMARKS / "scale.md").read_text()
    assert [table for table in tables(measured) if table not in page] == []
    assert [value for value in measured["machine"].values() if str(value) not in page] == []


def test_it_measures_and_hosts_have_their_parts_of_the_order(tmp_path: Path) -> None:
    """With a few hosts: each host's keys are those of the order, before and after a resume, or the script fails."""
    found = tmp_path / "scale.json"
    python(BENCHMARKS / "at_scale.py", f"--output={found}", cwd=tmp_path, check=True, timeout=500)
    measured = json.loads(found.read_text())
    assert measured["checkpoints"][-1]["hosts"] == 4
    assert measured["packing"][-1]["documents"] == 10_000
    assert "| 4 hosts, mixture of 10 |" in "".join(tables(measured))
