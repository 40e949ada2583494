"""Measures millstream beside its peers, on the same work, in one run: some twenty minutes on two cores.

    python benchmarks
    python benchmarks --cases=tokens,images --peers=millstream,grain --repeats=7
    python benchmarks --cases=              measures nothing: writes the report again

Writes `latest.json` and `latest.md` into the output folder; what is there of other cases is kept, with its commit and
machine. Peers that are not installed are reported as absent. The machine should do nothing else.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from absl import app, flags
from tqdm import tqdm

from suite.cases import CASES, Scale
from suite.machine import describe_machine
from suite.peers import PEERS
from suite.report import Measured, as_json, from_json, markdown
from suite.runner import run

CASE_NAMES = flags.DEFINE_list("cases", list(CASES), f"Which cases to measure, of: {', '.join(CASES)}.")
PEER_NAMES = flags.DEFINE_list("peers", list(PEERS), f"Who takes part, of: {', '.join(PEERS)}.")
REPEATS = flags.DEFINE_integer("repeats", 5, "How often the chosen mode of each peer is measured.", 1)
TINY = flags.DEFINE_bool("tiny", False, "Whether only to see that everything runs: nothing is measured well.")
OUTPUT = flags.DEFINE_string("output", str(Path(__file__).parent / "results"), "The folder for the results.")


def write(folder: Path, measured: Iterable[Measured]) -> str:
    """Writes the results next to each other, and returns the report."""
    folder.mkdir(parents=True, exist_ok=True)
    written = as_json(measured)
    lines = [json.dumps(case, ensure_ascii=False) for case in written]
    (folder / "latest.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
    # Of what is written: a report that is made again later is the same.
    report = markdown(list(from_json(written).values()))
    (folder / "latest.md").write_text(report)
    return report


def chosen(names: list[str], known: dict[str, Any], flag: str) -> list[str]:
    if unknown := [name for name in names if name and name not in known]:
        raise app.UsageError(f"--{flag}: there is no {unknown[0]!r}; there are {', '.join(known)}.")
    return [name for name in known if name in names]


def main(_: list[str]) -> None:
    cases = chosen(CASE_NAMES.value, CASES, "cases")
    peers = chosen(PEER_NAMES.value, dict(PEERS), "peers")
    scale = Scale.tiny() if TINY.value else dataclasses.replace(Scale(), repeats=REPEATS.value)
    folder = Path(OUTPUT.value)
    known = folder / "latest.json"
    measured = from_json(json.loads(known.read_text())) if known.exists() else {}
    report = write(folder, [measured[name] for name in CASES if name in measured])
    with tqdm(cases, disable=None, unit=" cases") as bar:
        for name in bar:
            results = run(CASES[name], scale, peers, bar.set_postfix_str)
            measured[name] = Measured(CASES[name], results, describe_machine())
            # After each case: a run that is interrupted has not been for nothing.
            report = write(folder, [measured[name] for name in CASES if name in measured])
    print(report)


if __name__ == "__main__":
    app.run(main)
