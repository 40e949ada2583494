"""Measures `worker_count="auto"` beside no, one and two worker processes: some five minutes on two cores.

    python benchmarks/workers.py
    python benchmarks/workers.py --cases=tiny,text --turns=5

Each measurement is a process of its own, which draws batches as fast as it can: for 5 s that are not counted, in which
"auto" chooses, and for 1 s that counts. Those with a number of workers choose nothing, and do not count 1.5 s. The four
are measured in turn, and a ratio is that of a turn. Writes `results/workers.md`.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from absl import app, flags
from tqdm import tqdm

from suite.cases import CASES, Case, Scale
from suite.machine import describe_machine
from suite.peers import PEERS
from suite.report import number, ratio_text
from suite.runner import environment
from suite.steps import identity
from suite.work import Contender, Map, Records, Work


def _tiny(scale: Scale) -> Work:
    return Work(Records(range(scale.count(1 << 20, 2048))), (Map(identity),), 256)


ALL = {
    "tiny": Case("tiny", "ints in memory, a function that returns them, batch 256", _tiny, ()),
    **{name: CASES[name] for name in ("tokens", "images", "filter", "text", "far")},
}
MAX_LOAD = 1.0
"""The average number of processes that were ready to run, above which the report warns."""

WORKERS: tuple[int | str, ...] = (0, 1, 2, "auto")

NAMES = flags.DEFINE_list("cases", list(ALL), f"Which cases to measure, of: {', '.join(ALL)}.")
TURNS = flags.DEFINE_integer("turns", 3, "How often each is measured.", 1)
WARM_SECONDS = flags.DEFINE_float("warm_seconds", 5.0, "The seconds in which auto chooses.", 0.0)
SECONDS = flags.DEFINE_float("seconds", 1.0, "The seconds that count.", 0.0)
TINY = flags.DEFINE_bool("tiny", False, "Whether only to see that everything runs: nothing is measured well.")
OUTPUT = flags.DEFINE_string("output", str(Path(__file__).parent / "results" / "workers.md"), "The results.")
ONE = flags.DEFINE_string("one", "", "Of a process that measures: the case and the number of workers, as JSON.")


def measure_here(name: str, workers: Any) -> dict[str, Any]:
    """Returns the records per second of a loader in this process, and the number of workers that it has then."""
    scale = Scale.tiny() if TINY.value else Scale()
    case = ALL[name]
    stream = PEERS["millstream"].adapter().open_stream(case.work(scale), Contender("millstream", "load", workers))
    draw(stream.batches, case, WARM_SECONDS.value if workers == "auto" else min(1.5, WARM_SECONDS.value))
    rate = draw(stream.batches, case, SECONDS.value)
    chosen = re.search(r'"auto" chose (\w+)', " ".join(str(stream.batches.summary()).split()))
    stream.close()
    return {"rate": rate, "chosen": chosen[1] if chosen else str(workers)}


def draw(batches: Any, case: Case, seconds: float) -> float:
    """Draws batches for this long, one at least. Returns the records per second."""
    records, start = 0, time.perf_counter()
    while not records or time.perf_counter() - start < seconds:
        records += case.count(next(batches))
    return records / (time.perf_counter() - start)


def measure(name: str, workers: int | str) -> dict[str, Any]:
    """Returns what a new process measures."""
    options = [f"--{flag.name}={flag.value}" for flag in (WARM_SECONDS, SECONDS, TINY)]
    command = [sys.executable, __file__, f"--one={json.dumps([name, workers])}", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment())
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(name: str, turns: list[list[dict[str, Any]]]) -> str:
    """Returns a row of the table, given what was measured with each of WORKERS in each turn."""
    rates = [[one["rate"] for one in turn] for turn in turns]
    best = max(range(len(WORKERS) - 1), key=lambda mode: median(turn[mode] for turn in rates))
    cells = [number(median(turn[mode] for turn in rates)) for mode in range(len(WORKERS))]
    ratios = [ratio_text([turn[-1] / turn[mode] for turn in rates]) for mode in (best, 0)]
    chosen = ", ".join(turn[-1]["chosen"] for turn in turns)
    return f"| `{name}` | {ALL[name].title} | {' | '.join(cells)} | {' | '.join(ratios)} | {chosen} |"


def report(rows: list[str], load: float) -> str:
    machine = describe_machine()
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}"
    how = f"medians of {TURNS.value} turns, after {WARM_SECONDS.value:g} s"
    lines = [
        '# How many workers `worker_count="auto"` chooses, and what it reaches',
        "",
        f"Commit {machine['commit']}, {machine['date']}: {where}.",
        "",
        *([f"**The machine did other work, too: its load was {load:.0f} before.**", ""] if load > MAX_LOAD else []),
        f"Records per second of a trainer that does nothing else, {how}. [How it is measured](../README.md).",
        "",
        "| case | work | no worker | 1 | 2 | auto | auto, of the best number | auto, of no worker | chosen |",
        "|---|---|--:|--:|--:|--:|---|---|---|",
        *rows,
    ]
    return "\n".join([*lines, ""])


def main(_: list[str]) -> None:
    if ONE.value:
        print(json.dumps(measure_here(*json.loads(ONE.value))))
        return
    if unknown := set(NAMES.value) - set(ALL):
        raise app.UsageError(f"--cases: there is no {min(unknown)!r}; there are {', '.join(ALL)}.")
    rows, load = [], os.getloadavg()[0]
    for name in tqdm(NAMES.value, disable=None, unit=" cases"):
        turns = [[measure(name, workers) for workers in WORKERS] for _ in range(TURNS.value)]
        rows.append(row(name, turns))
        print(rows[-1], flush=True)
    Path(OUTPUT.value).write_text(report(rows, load))


if __name__ == "__main__":
    app.run(main)
