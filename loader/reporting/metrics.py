"""Measurements of a loader as numbers with stable names, for those who plot them."""

import dataclasses
from collections.abc import Iterator, Mapping

from millstream.loader.reporting.snapshot import Kind, LoaderFacts, StageFacts

PREFIX = "loader/"
"""Trackers of experiments make a group of names that begin alike up to a slash."""


def metrics_of(facts: LoaderFacts) -> dict[str, float]:
    """Returns the measurements by name. The names depend on the number of operations alone."""
    numbers = {metric.name: metric.value for metric in _metrics(facts)}
    stages = {f"seconds/{name}": stage.seconds for name, stage in _named_stages(facts)}
    shares = {"wait_share": facts.measured.wait_share}
    return {PREFIX + name: float(value) for name, value in (numbers | shares | stages).items()}


def exposition(facts: Mapping[str | None, LoaderFacts]) -> str:
    """Returns the measurements of loaders in Prometheus's text format.

    https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format

    Args:
        facts: of each loader, by the value of the label `loader`; None for no label.
    """
    return "".join(f"{line}\n" for line in _exposition_lines(facts))


@dataclasses.dataclass(frozen=True)
class _Metric:
    """A measurement of a whole loader.

    Attributes:
        name: what it is called.
        value: what was measured.
        text: what it is, as a sentence.
        is_counter: whether it only ever grows.
    """

    name: str
    value: float
    text: str
    is_counter: bool = True


def _metrics(facts: LoaderFacts) -> list[_Metric]:
    measured = facts.measured
    return [
        _Metric("batches", measured.batches, "Batches that the trainer got."),
        _Metric("wait_seconds", measured.wait_seconds, "Seconds in which the trainer waited, first batches left out."),
        _Metric("first_wait_seconds", measured.first_seconds, "Seconds in which it waited for the first of each pass."),
        _Metric("trainer_seconds", measured.trainer_seconds, "Seconds of the trainer between two batches."),
        _Metric("worker_deaths", measured.deaths, "Worker processes that died and were replaced."),
        _Metric("worker_stalls", measured.stalls, "Times that a worker was reported for making no progress."),
        _Metric("workers", facts.num_workers, "Worker processes that the loader has.", is_counter=False),
        _Metric("batch_bytes", measured.batch_bytes or 0, "Bytes of the arrays of the first batch.", is_counter=False),
    ]


def _named_stages(facts: LoaderFacts) -> Iterator[tuple[str, StageFacts]]:
    """Yields the parts of the work, each with a name that depends on its place in the pipeline alone."""
    number = 0
    for stage in facts.stages:
        if stage.kind is Kind.OPERATION:
            yield f"operation_{number}", stage
            number += 1
        else:
            yield stage.kind.name.lower(), stage


def _exposition_lines(facts: Mapping[str | None, LoaderFacts]) -> Iterator[str]:
    metrics = {name: _metrics(one) for name, one in facts.items()}
    for number, first in enumerate(next(iter(metrics.values()), [])):
        family = f"millstream_{first.name}{'_total' if first.is_counter else ''}"
        yield from _head(family, first.text, is_counter=first.is_counter)
        for name, of_loader in metrics.items():
            yield _sample(family, _loader_label(name), of_loader[number].value)
    if facts:
        family = "millstream_stage_seconds_total"
        yield from _head(family, "Seconds that a part of the pipeline took, over all threads and processes.")
    for name, one in facts.items():
        for short, stage in _named_stages(one):
            yield _sample(family, {**_loader_label(name), "stage": short, "name": stage.name}, stage.seconds)


def _head(family: str, text: str, *, is_counter: bool = True) -> Iterator[str]:
    yield f"# HELP {family} {text}"
    yield f"# TYPE {family} {'counter' if is_counter else 'gauge'}"


def _loader_label(name: str | None) -> dict[str, str]:
    return {} if name is None else {"loader": name}


def _sample(family: str, labels: Mapping[str, str], value: float) -> str:
    text = ",".join(f'{label}="{_escaped(words)}"' for label, words in labels.items())
    return f"{family}{f'{{{text}}}' if text else ''} {float(value)!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
