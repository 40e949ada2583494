"""The results as JSON and as Markdown: ratios with their interval first, then every number that they come from."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from suite.cases import CASES, FAR_SECONDS, Case
from suite.peers import PEERS
from suite.runner import Result
from suite.work import Contender

OURS = "millstream"
TIMES = "\N{MULTIPLICATION SIGN}"
NOTHING = "\N{EN DASH}"


@dataclasses.dataclass(frozen=True)
class Measured:
    """The results of a case, and the machine that measured them."""

    case: Case
    results: Sequence[Result]
    machine: Mapping[str, Any]

    def of(self, peer: str) -> Result | None:
        """Returns the result of the peer's chosen mode."""
        return next((result for result in self.results if result.contender.peer == peer and result.values), None)

    def ratios(self, peer: str) -> list[float]:
        """Returns how many times as good millstream is, for each turn in which both were measured."""
        ours, theirs = self.of(OURS), self.of(peer)
        if ours is None or theirs is None:
            return []
        return [self.case.ratio(*pair) for pair in zip(ours.values, theirs.values, strict=False)]


def as_json(measured: Iterable[Measured]) -> list[dict[str, Any]]:
    return [
        {
            "case": one.case.name,
            "machine": dict(one.machine),
            "contenders": [
                {
                    **dataclasses.asdict(result.contender),
                    "trial": _rounded(result.trial),
                    "values": list(map(_rounded, result.values)),
                    "waits_ms": list(map(_rounded, result.waits)),
                    **({"reason": result.reason} if result.reason else {}),
                }
                for result in one.results
            ],
        }
        for one in measured
    ]


def from_json(written: Iterable[Mapping[str, Any]]) -> dict[str, Measured]:
    """Returns what `as_json` wrote, of the cases that still exist, by name."""
    found = {}
    for words in written:
        if (case := CASES.get(words["case"])) is not None:
            results = [
                Result(
                    Contender(one["peer"], one["mode"], one["workers"]),
                    one["trial"],
                    one["values"],
                    one["waits_ms"],
                    one.get("reason"),
                )
                for one in words["contenders"]
            ]
            found[case.name] = Measured(case, results, words["machine"])
    return found


def ratio_text(ratios: Sequence[float]) -> str:
    """Returns the median ratio and the interval of all turns, "undecided" where it holds 1."""
    if not ratios:
        return NOTHING
    low, middle, high = min(ratios), median(ratios), max(ratios)
    text = f"{number(middle)}{TIMES} ({number(low)} to {number(high)})"
    return f"{text}, undecided" if low < 1 < high else text


def number(value: float) -> str:
    """Returns a number with two or three significant digits, large ones with separators."""
    if value >= 1000:
        digits = max(0, len(str(int(value))) - 3)
        return f"{round(value, -digits):,.0f}"
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


def markdown(measured: Sequence[Measured]) -> str:
    """Returns the whole report."""
    machines = list(dict.fromkeys(_description(one.machine) for one in measured))
    two_cores = any(one.machine["cores"] <= 2 for one in measured)
    parts = [
        "# Benchmarks",
        *(["**Measured on 2 cores: what more workers would do on a larger machine is not shown here.**"] * two_cores),
        "\n".join(f"{place}. {text}" for place, text in enumerate(machines, 1)),
        (
            "Each number is the median of the turns. Each peer has two modes, and was measured in the better one, "
            "which another measurement chose. [How it is measured](../README.md)."
        ),
        "## How many times as good millstream is",
        (
            "Above 1 millstream is ahead, below 1 behind; in brackets the lowest and highest of all turns. Where these "
            "are on both sides of 1, the turns do not decide."
        ),
        _ratio_table(measured, machines),
        "## How near to a limit of the machine",
        (
            "What millstream delivers, beside what one thread of the machine can copy or `pread` from the page cache; "
            "of far reads, how many are in flight."
        ),
        _limit_table(measured),
        "## All numbers",
        *map(_section, measured),
    ]
    return "\n\n".join(parts) + "\n"


def _description(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"Commit {machine['commit']}, {machine['date']}: {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gb']} GB, {machine['system']}, Python {machine['python']}, NumPy {machine['numpy']}, "
        f"{versions}."
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _ratio_table(measured: Sequence[Measured], machines: Sequence[str]) -> str:
    present = {result.contender.peer for one in measured for result in one.results if result.values}
    peers = [peer for peer in PEERS if peer in present and peer != OURS]
    rows = [
        [
            f"`{one.case.name}`",
            one.case.title,
            *(ratio_text(one.ratios(peer)) for peer in peers),
            str(machines.index(_description(one.machine)) + 1),
        ]
        for one in measured
    ]
    return _table(["", "case", *(PEERS[peer].title for peer in peers), "machine"], rows)


def _limit_table(measured: Iterable[Measured]) -> str:
    rows = []
    for one in measured:
        ours = one.of(OURS)
        if ours is None or ours.median is None or not one.case.limit:
            continue
        if one.case.limit == "requests":
            text = f"{ours.median * FAR_SECONDS:.0f} in flight"
            rows.append([f"`{one.case.name}`", text, f"reads of {FAR_SECONDS * 1e3:.0f} ms", NOTHING])
        else:
            speed = ours.median * one.case.record_bytes
            limit = one.machine[f"{one.case.limit}_bytes_per_s"]
            words = [f"{speed / 1e6:,.0f} MB/s", f"{one.case.limit} {limit / 1e6:,.0f} MB/s", f"{speed / limit:.2f}"]
            rows.append([f"`{one.case.name}`", *words])
    return _table(["case", "millstream", "limit", "part"], rows)


def _section(one: Measured) -> str:
    rows = [_row(one.case, result) for result in one.results]
    head = ["", "mode", one.case.unit, "lowest to highest", "MB/s", "p50 and p99 of `next`, ms", "to choose the mode"]
    return f"### `{one.case.name}`: {one.case.title}\n\n{_table(head, rows)}"


def _row(case: Case, result: Result) -> list[str]:
    names = [PEERS[result.contender.peer].title, result.contender.label]
    trial = NOTHING if result.trial is None else number(result.trial)
    if result.median is None:
        reason = (result.reason or "not chosen").replace("|", "\\|").replace("\n", " ")
        return [*names, NOTHING, reason, NOTHING, NOTHING, trial]
    spread = f"{number(min(result.values))} to {number(max(result.values))}"
    speed = number(result.median * case.record_bytes / 1e6) if case.kind == "rate" else NOTHING
    waits = " and ".join(map(number, result.waits)) or NOTHING
    return [*names, number(result.median), spread, speed, waits, trial]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
