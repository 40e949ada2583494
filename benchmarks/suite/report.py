"""The findings as Markdown: ratios first, then every number that they come from."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from suite.findings import COLUMNS, Finding
from suite.peers import PEERS
from suite.runner import Result
from suite.scale import Scale

DASH = "\N{EN DASH}"
NOTHING = DASH
TIMES = "\N{MULTIPLICATION SIGN}"


def markdown(scale: Scale, findings: Sequence[Finding], plot: str | None = "latest.svg") -> str:
    """Returns the whole report."""
    sections = [
        "# Benchmarks",
        _introduction(scale, findings),
        "## How many times faster",
        (
            "millstream's best mode against the best mode of each peer: above 1 millstream is ahead, below 1 behind. "
            '"The bound" is a bare loop that does the same, or only the part that no loader can save; what is missing '
            "to 1 is what a loader costs."
        ),
        *([f"![How many times faster millstream is, by case and peer]({plot})"] if plot else []),
        _ratio_table(findings),
        "## Goals",
        (
            '"The bound" is here what the best bare loop of the case would reach: a goal above it is hardly within '
            "reach of any loader, on this machine."
        ),
        _goal_table(findings),
        "## All numbers",
        *(_case_section(finding) for finding in findings),
    ]
    return "\n\n".join(sections) + "\n"


def _machines(findings: Sequence[Finding]) -> list[str]:
    """Returns a description of each machine that measured a case: its number in the list is its name in the table."""
    return list(dict.fromkeys(_description(finding.machine) for finding in findings))


def _description(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, {machine['system']}, "
        f"Python {machine['python']}, NumPy {machine['numpy']}, {versions}."
    )


def _introduction(scale: Scale, findings: Sequence[Finding]) -> str:
    counts = {len(result.values) for finding in findings for result in finding.results if result.values}
    runs = " to ".join(map(str, sorted({min(counts), max(counts)}))) if counts else "no"
    judged = "" if scale.name == "full" else f" **A {scale.name} run: too short to be quoted.**"
    machines = "\n".join(f"{number}. {text}" for number, text in enumerate(_machines(findings), 1))
    return (
        f"Each case was measured on one machine, named by its number:\n\n{machines}\n\n"
        f"Each number is the median of {runs} run{'s'[: runs != '1']}, with the lowest and the highest; each run "
        f"is in its own process, the contenders in turn. A rate is taken over {scale.seconds} s from a stream that "
        "is already running. All contenders do the same to the same data, each in several modes that suit it; before "
        "measuring, the records that they deliver are compared: the last column of each table shows the outcome."
        f"{judged}"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Returns a table whose first `left` columns are set left, the others right."""
    rule = ["---" if column < left else "--:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def _ratio_table(findings: Sequence[Finding]) -> str:
    titles = [title for title in COLUMNS if any(finding.ratios[title] is not None for finding in findings)]
    machines = _machines(findings)
    rows = [
        [
            f"`{finding.case.name}`",
            finding.case.title,
            *(_times(finding.ratios[title]) for title in titles),
            str(machines.index(_description(finding.machine)) + 1),
        ]
        for finding in findings
    ]
    return _table(["", "case", *titles, "machine"], rows, left=2)


def _goal_table(findings: Iterable[Finding]) -> str:
    words = {True: "yes", False: "**no**", None: "not known"}
    rows = [
        [
            f"`{finding.case.name}`",
            verdict.goal.text,
            _times(verdict.goal.at_least),
            _times(verdict.ratio),
            words[verdict.met],
            _times(verdict.bound),
        ]
        for finding in findings
        for verdict in finding.verdicts
    ]
    return _table(["case", "goal", "wanted", "measured", "reached", "the bound"], rows, left=2)


def _case_section(finding: Finding) -> str:
    case = finding.case
    better = "more is better" if case.higher_is_better else "less is better"
    rows = [_contender_row(result) for result in finding.results]
    parts = [
        f"### `{case.name}`: {case.title}",
        _table(["", "mode", f"{case.unit} ({better})", f"lowest {DASH} highest", "records"], rows, left=2),
    ]
    for mode, breakdown in finding.breakdowns.items():
        whole = sum(breakdown.values())
        stages = ", ".join(f"{name} {spent:.3g} µs ({spent / whole:.0%})" for name, spent in breakdown.items())
        parts.append(f"Where millstream's time goes with {mode}, per record: {stages}.")
    return "\n\n".join(parts)


def _contender_row(result: Result) -> list[str]:
    title, label = PEERS[result.contender.peer].title, result.contender.label
    if result.median is None:
        return [title, label, NOTHING, _escaped(result.reason or ""), NOTHING]
    spread = f"{number(min(result.values))} {DASH} {number(max(result.values))}"
    reason = f"; then: {_escaped(result.reason)}" if result.reason else ""
    content = {True: "the same", False: "**others**", None: NOTHING}[result.same_content]
    return [title, label, number(result.median), spread + reason, content]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def number(value: float) -> str:
    """Returns a number with three significant digits, large ones with separators."""
    if value >= 1000:
        digits = max(0, len(str(int(value))) - 3)
        return f"{round(value, -digits):,.0f}"
    return f"{value:.3g}"


def _times(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"{ratio:,.0f}{TIMES}" if ratio >= 100 else f"{ratio:.2g}{TIMES}"
