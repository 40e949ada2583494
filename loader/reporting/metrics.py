"""Measurements of a loader as numbers with stable names, for dashboards."""

import dataclasses
from collections.abc import Iterator, Mapping

from millstream.loader.reporting.snapshot import Kind, LoaderSnapshot, Measurements, StageSnapshot

PREFIX = "loader/"
"""Prefix of all names. Experiment trackers group names by the part before a slash."""


def metrics_of(snapshot: LoaderSnapshot, previous: Measurements | None = None) -> dict[str, float]:
    """Returns the measurements by name. The names depend on the operations and the order alone.

    Args:
        snapshot: the loader.
        previous: the measurements since which rates are computed; None for the start.
    """
    measured = snapshot.measured
    recent = _since(measured, previous or Measurements())
    if not recent.seconds:
        # Nothing has happened since the previous call.
        recent = measured
    seconds = recent.seconds + recent.first_seconds
    numbers = {metric.name: metric.value for metric in _metrics(snapshot)}
    numbers |= {
        "wait_share": recent.wait_share,
        "wait_share_total": measured.wait_share,
        "batches_per_second": recent.batches / seconds if seconds else 0.0,
        "wait_seconds_p50": _percentile(measured.waits, 0.5),
        "wait_seconds_p99": _percentile(measured.waits, 0.99),
    }
    numbers |= {f"component_records/{name}": count for name, count in measured.components}
    numbers |= {f"seconds/{name}": stage.seconds for name, stage in _named_stages(snapshot)}
    return {PREFIX + name: float(value) for name, value in numbers.items()}


def exposition(snapshots: Mapping[str | None, LoaderSnapshot]) -> str:
    """Returns the measurements of loaders in Prometheus's text format.

    https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format

    Args:
        snapshots: the loaders by the value of the label `loader`; None for no label.
    """
    return "".join(f"{line}\n" for line in _exposition_lines(snapshots))


def _since(measured: Measurements, previous: Measurements) -> Measurements:
    return Measurements(
        batches=measured.batches - previous.batches,
        first_seconds=measured.first_seconds - previous.first_seconds,
        wait_seconds=measured.wait_seconds - previous.wait_seconds,
        trainer_seconds=measured.trainer_seconds - previous.trainer_seconds,
    )


def _percentile(values: tuple[float, ...], share: float) -> float:
    """Returns the smallest value that at least this share of the values does not exceed; 0 if there are none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


@dataclasses.dataclass(frozen=True)
class _Metric:
    """A measurement of a loader.

    Attributes:
        name: its name.
        value: its value.
        text: its description, for Prometheus.
        is_counter: True if it never decreases.
    """

    name: str
    value: float
    text: str
    is_counter: bool = True


def _metrics(snapshot: LoaderSnapshot) -> list[_Metric]:
    measured = snapshot.measured
    metrics = [
        _Metric("batches", measured.batches, "Batches delivered to the trainer."),
        _Metric("wait_seconds", measured.wait_seconds, "Seconds that the trainer waited, except for first batches."),
        _Metric("first_wait_seconds", measured.first_seconds, "Seconds that it waited for the first of each pass."),
        _Metric("trainer_seconds", measured.trainer_seconds, "Seconds of the trainer between two batches."),
        _Metric("worker_deaths", measured.deaths, "Worker processes that died and were replaced."),
        _Metric("worker_stalls", measured.stalls, "Reports of a worker without progress."),
        _Metric("errors", measured.errors, "Records that failed and were skipped."),
        _Metric("workers", snapshot.num_workers, "Worker processes of the loader.", is_counter=False),
        _Metric("batch_bytes", measured.batch_bytes or 0, "Bytes of the arrays in the first batch.", is_counter=False),
        _Metric("step", measured.step, "Step of the newest iterator.", is_counter=False),
    ]
    if measured.records is not None:
        metrics.append(_Metric("records", measured.records, "Records of the batches delivered to the trainer."))
    if measured.epoch is not None:
        metrics.append(_Metric("epoch", measured.epoch, "Epoch of the newest iterator.", is_counter=False))
    return metrics


def _named_stages(snapshot: LoaderSnapshot) -> Iterator[tuple[str, StageSnapshot]]:
    """Yields the stages, each with a name that depends on its index in the pipeline alone."""
    number = 0
    for stage in snapshot.stages:
        if stage.kind is Kind.OPERATION:
            yield f"operation_{number}", stage
            number += 1
        else:
            yield stage.kind.name.lower(), stage


def _exposition_lines(snapshots: Mapping[str | None, LoaderSnapshot]) -> Iterator[str]:
    metrics = {name: {metric.name: metric for metric in _metrics(one)} for name, one in snapshots.items()}
    families = {metric.name: metric for of_loader in metrics.values() for metric in of_loader.values()}
    for first in families.values():
        family = f"millstream_{first.name}{'_total' if first.is_counter else ''}"
        yield from _head(family, first.text, is_counter=first.is_counter)
        for name, of_loader in metrics.items():
            if first.name in of_loader:
                yield _sample(family, _loader_label(name), of_loader[first.name].value)
    if any(one.measured.components for one in snapshots.values()):
        family = "millstream_component_records"
        yield from _head(family, "Records of a mixture's component in all global batches so far.", is_counter=False)
    for name, one in snapshots.items():
        for component, count in one.measured.components:
            yield _sample(family, {**_loader_label(name), "component": component}, count)
    if snapshots:
        family = "millstream_stage_seconds_total"
        yield from _head(family, "Seconds of a stage, summed over threads and processes.")
    for name, one in snapshots.items():
        for short, stage in _named_stages(one):
            yield _sample(family, {**_loader_label(name), "stage": short, "name": stage.name}, stage.seconds)


def _head(family: str, text: str, *, is_counter: bool = True) -> Iterator[str]:
    yield f"# HELP {family} {text}"
    yield f"# TYPE {family} {'counter' if is_counter else 'gauge'}"


def _loader_label(name: str | None) -> dict[str, str]:
    return {} if name is None else {"loader": name}


def _sample(family: str, labels: Mapping[str, str], value: float) -> str:
    text = ",".join(f'{label}="{_escaped(content)}"' for label, content in labels.items())
    return f"{family}{f'{{{text}}}' if text else ''} {float(value)!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
