"""Measures millstream beside its peers, on the same work, in one run.

    python benchmarks                           everything: some three hours
    python benchmarks --scale=quick             everything, short: about an hour
    python benchmarks --cases=tiny,tokens --peers=millstream,grain --repeats=3
    python benchmarks --cases=                  nothing: writes the report and draws the chart again

Writes `<name>.json`, `<name>.md` and `<name>.svg` into the output folder; the name is `latest` for a full run with all
peers, and else that of the scale. A full run of some cases keeps what `latest` says of the others, so that the
hours can be spread over several nights. Peers that are not installed are reported as absent.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import app, flags
from tqdm import tqdm

from suite.case import Case
from suite.cases import CASES
from suite.findings import Finding, Measured, as_json, find, from_json
from suite.machine import describe_machine
from suite.peers import PEERS
from suite.plot import chart_of
from suite.report import markdown
from suite.runner import Runner
from suite.scale import FULL, SCALES, Scale

SCALE = flags.DEFINE_enum("scale", "full", list(SCALES), "tiny: does it run? quick: a look. full: the record.")
CASE_NAMES = flags.DEFINE_list("cases", list(CASES), f"Which cases to measure, of: {', '.join(CASES)}.")
PEER_NAMES = flags.DEFINE_list("peers", list(PEERS), f"Who takes part, of: {', '.join(PEERS)}.")
COMPARE = flags.DEFINE_bool("compare", True, "Whether to compare the records that the contenders deliver.")
REPEATS = flags.DEFINE_integer("repeats", None, "How often each contender runs; by default as the scale says.", 1)
OUTPUT = flags.DEFINE_string("output", str(Path(__file__).parent / "results"), "The folder for the results.")


def measure_all(
    scale: Scale,
    repeats: int,
    cases: list[Case],
    measured: Measured,
) -> Iterator[list[Finding]]:
    """Yields the findings after each case, those known before among them, and shows how far it has got."""
    with tqdm(disable=None, unit=" runs", smoothing=0) as bar:

        def advance(text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update()

        runner = Runner(scale, repeats, PEER_NAMES.value, compare=COMPARE.value, progress=advance)
        bar.reset(sum(map(runner.num_processes, cases)))
        for case in cases:
            measured.results[case.name] = runner.run(case)
            measured.breakdowns[case.name] = runner.explain(case)
            measured.machines[case.name] = describe_machine()
            yield find(measured, CASES)


def write(path: Path, scale: Scale, found: list[Finding]) -> str:
    """Writes the results next to each other, with the suffixes of their formats, and returns the report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    chart = chart_of(found)
    report = markdown(scale, found, None if chart is None else path.with_suffix(".svg").name)
    if chart is not None:
        path.with_suffix(".svg").write_text(chart)
    results = {"scale": scale.name, "cases": as_json(found)}
    path.with_suffix(".json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    path.with_suffix(".md").write_text(report)
    return report


def chosen(names: list[str], known: dict[str, Any], flag: str) -> None:
    if unknown := [name for name in names if name not in known]:
        raise app.UsageError(f"--{flag}: there is no {unknown[0]!r}; there are {', '.join(known)}.")


def main(_: list[str]) -> None:
    chosen(CASE_NAMES.value, CASES, "cases")
    chosen(PEER_NAMES.value, PEERS, "peers")
    scale = SCALES[SCALE.value]
    for_the_record = scale is FULL and set(PEER_NAMES.value) >= set(PEERS)
    path = Path(OUTPUT.value) / ("latest" if for_the_record else scale.name)
    known = path.with_suffix(".json")
    before = json.loads(known.read_text())["cases"] if for_the_record and known.exists() else []
    measured = from_json(before, CASES)
    found = find(measured, CASES)
    report = ""
    # After each case: a run that is interrupted has not been for nothing.
    chosen_cases = [CASES[name] for name in CASES if name in CASE_NAMES.value]
    for found in measure_all(scale, REPEATS.value or scale.repeats, chosen_cases, measured):
        report = write(path, scale, found)
    if not chosen_cases and found:
        report = write(path, scale, found)
    print(report)


if __name__ == "__main__":
    app.run(main)
