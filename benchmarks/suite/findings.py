"""From results to findings: the best of each peer, ratios, goals. Pure functions over plain data."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from suite.case import Case, Contender, Goal, Pick
from suite.contenders import RECORDS
from suite.runner import Result

COLUMNS: dict[str, Pick] = {
    "Grain DataLoader": Pick("grain", mode="DataLoader"),
    "Grain Dataset": Pick("grain", mode="Dataset"),
    "PyTorch": Pick("pytorch"),
    "tf.data": Pick("tensorflow"),
    "HF datasets": Pick("huggingface"),
    "WebDataset": Pick("webdataset"),
    "wids": Pick("wids"),
    "MosaicML Streaming": Pick("mosaicml"),
    "SPDL": Pick("spdl"),
    "OLMo-core": Pick("olmo_core"),
    "TRL": Pick("trl"),
    "Ray Data": Pick("ray_data"),
    "the bound": Pick("bare"),
}
"""The peers that millstream is compared with, the best mode of each."""

OURS = {"tf.data": Pick("millstream")}
"""The modes of millstream that count, by peer; RECORDS for those not named."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of a goal.

    Attributes:
        goal: which.
        ratio: ours to theirs; None where one of them has no value.
        met: whether it is reached; None where that is not known.
        bound: what the case's best bare loop has to theirs; None where there is none, or it is what the goal is about.
    """

    goal: Goal
    ratio: float | None
    met: bool | None
    bound: float | None


@dataclasses.dataclass(frozen=True)
class Finding:
    """All that a report says of a case.

    Attributes:
        case: which.
        results: of each contender.
        ratios: by the names of COLUMNS, how many times as good millstream's best mode is; None if that is unknown.
        verdicts: on each goal.
        breakdowns: where millstream's time goes in some of its modes, in µs per record; empty where it makes no sense.
        machine: the machine that measured the case, as `describe_machine` returns it.
    """

    case: Case
    results: Sequence[Result]
    ratios: Mapping[str, float | None]
    verdicts: Sequence[Verdict]
    breakdowns: Mapping[str, Mapping[str, float]]
    machine: Mapping[str, Any]


class Measured(NamedTuple):
    """The measurements, by case."""

    results: dict[str, list[Result]]
    breakdowns: dict[str, dict[str, dict[str, float]]]
    machines: dict[str, dict[str, Any]]


def best(case: Case, results: Iterable[Result], pick: Pick) -> Result | None:
    """Returns the best of the results chosen, by their medians; None if none has a value."""
    found = [result for result in results if pick.matches(result.contender) and result.median is not None]
    if not found:
        return None
    return (max if case.higher_is_better else min)(found, key=lambda result: result.median or 0.0)


def find(measured: Measured, cases: Mapping[str, Case]) -> list[Finding]:
    return [
        Finding(
            case=cases[name],
            results=results,
            ratios={
                title: _ratio(cases[name], measured.results, OURS.get(title, RECORDS), pick)
                for title, pick in COLUMNS.items()
            },
            verdicts=[_verdict(cases[name], goal, measured.results) for goal in cases[name].goals],
            breakdowns=measured.breakdowns.get(name, {}),
            machine=measured.machines[name],
        )
        for name in cases
        if (results := measured.results.get(name))
    ]


def _ratio(case: Case, measured: Mapping[str, Sequence[Result]], ours: Pick, theirs: Pick | float) -> float | None:
    mine = best(case, measured[case.name], ours)
    if isinstance(theirs, Pick):
        other = best(case, measured.get(theirs.case or case.name, ()), theirs)
        value = None if other is None else other.median
    else:
        value = theirs
    return None if mine is None or mine.median is None or value is None else case.ratio(mine.median, value)


def _verdict(case: Case, goal: Goal, measured: Mapping[str, Sequence[Result]]) -> Verdict:
    ratio = _ratio(case, measured, goal.ours, goal.theirs)
    of_bound = isinstance(goal.theirs, Pick) and goal.theirs.peer == "bare"
    bound = None if of_bound else _ratio(case, measured, Pick("bare"), goal.theirs)
    return Verdict(goal, ratio, None if ratio is None else ratio >= goal.at_least, bound)


def as_json(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    return [
        {
            "name": finding.case.name,
            "title": finding.case.title,
            "unit": finding.case.unit,
            "higher_is_better": finding.case.higher_is_better,
            "ratios": dict(finding.ratios),
            "goals": [
                {
                    "text": verdict.goal.text,
                    "at_least": verdict.goal.at_least,
                    "ratio": verdict.ratio,
                    "met": verdict.met,
                    "bound": verdict.bound,
                }
                for verdict in finding.verdicts
            ],
            "contenders": [_result_as_json(result) for result in finding.results],
            "microseconds_per_record": {mode: dict(stages) for mode, stages in finding.breakdowns.items()},
            "machine": dict(finding.machine),
        }
        for finding in findings
    ]


def from_json(written: Iterable[Mapping[str, Any]], cases: Mapping[str, Case]) -> Measured:
    """Returns what `as_json` wrote, of the cases and contenders that still exist."""
    measured = Measured({}, {}, {})
    for words in written:
        if (case := cases.get(words["name"])) is not None:
            results = [_result_from_json(result) for result in words["contenders"]]
            measured.results[case.name] = [result for result in results if result.contender in case.contenders]
            measured.breakdowns[case.name] = words["microseconds_per_record"]
            measured.machines[case.name] = words["machine"]
    return measured


def _result_from_json(words: Mapping[str, Any]) -> Result:
    contender = Contender(**{field.name: words[field.name] for field in dataclasses.fields(Contender)})
    return Result(contender, words["values"], words["details"], words["reason"], words["same_content"])


def _result_as_json(result: Result) -> dict[str, Any]:
    return {
        **dataclasses.asdict(result.contender),
        "label": result.contender.label,
        "median": result.median,
        "values": result.values,
        "details": result.details,
        "same_content": result.same_content,
        "reason": result.reason,
    }
