"""Measurements of a loader as numbers with stable names, for dashboards."""

import dataclasses
from collections.abc import Iterator, Mapping

from millstream.loader.reporting.snapshot import Kind, LoaderSnapshot, Measurements
from millstream.sharding import gathered_by_jax

PREFIX = "loader/"
"""Prefix of all names. Experiment trackers group names by the part before a slash."""

STAGE_SECONDS = "stage_seconds"


def metrics_of(snapshot: LoaderSnapshot, previous: Measurements | None = None) -> dict[str, float]:
    """Returns the measurements by name, with rates since `previous`. The names depend on operations and order alone."""
    measured = snapshot.measured
    recent = measured if previous is None else _since(measured, previous)
    seconds = recent.seconds + recent.first_seconds
    rate = recent.timed_batches / seconds if seconds else 0.0
    numbers: dict[str, float] = {}
    for metric in _metrics(snapshot):
        # A join reads several streams: their seconds are added up.
        numbers[metric.path] = numbers.get(metric.path, 0) + metric.value
    if measured.records is not None:
        numbers["records_per_second"] = rate * measured.records / max(1, measured.batches)
    numbers |= {
        "wait_share": recent.wait_share,
        "wait_share_total": measured.wait_share,
        "batches_per_second": rate,
        "wait_seconds_p50": _percentile(measured.waits, 0.5),
        "wait_seconds_p99": _percentile(measured.waits, 0.99),
    }
    return {PREFIX + path: float(value) for path, value in numbers.items()}


def exposition(snapshots: Mapping[str | None, LoaderSnapshot]) -> str:
    """Returns the measurements of loaders, by the value of the label `loader`, in Prometheus's text format.

    https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
    """
    families: dict[str, list[str]] = {}
    for loader, snapshot in snapshots.items():
        for metric in _metrics(snapshot):
            name = f"millstream_{metric.family}{'_total' if metric.is_counter else ''}"
            kind = "counter" if metric.is_counter else "gauge"
            head = [f"# HELP {name} {metric.text}", f"# TYPE {name} {kind}"]
            labels = ({} if loader is None else {"loader": loader}) | metric.labels
            text = ",".join(f'{label}="{_escaped(content)}"' for label, content in labels.items())
            sample = f"{name}{f'{{{text}}}' if text else ''} {float(metric.value)!r}"
            families.setdefault(name, head).append(sample)
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def compared_hosts(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of the process whose trainer waits most, and sums over all processes. All must call it."""
    names = ("wait_share", "batches_per_second", "errors", "worker_deaths")
    gathered = gathered_by_jax([metrics[PREFIX + name] for name in names])
    wait_shares, rates, errors, deaths = zip(*gathered, strict=True)
    slowest = wait_shares.index(max(wait_shares))
    compared = {
        "slowest_host": slowest,
        "slowest_host_wait_share": wait_shares[slowest],
        "slowest_host_batches_per_second": rates[slowest],
        "all_hosts_errors": sum(errors),
        "all_hosts_worker_deaths": sum(deaths),
    }
    return {PREFIX + name: float(value) for name, value in compared.items()}


def _since(measured: Measurements, previous: Measurements) -> Measurements:
    return Measurements(
        timed_batches=measured.timed_batches - previous.timed_batches,
        first_seconds=measured.first_seconds - previous.first_seconds,
        wait_seconds=measured.wait_seconds - previous.wait_seconds,
        trainer_seconds=measured.trainer_seconds - previous.trainer_seconds,
    )


def _percentile(values: tuple[float, ...], share: float) -> float:
    """Returns the value at a share of the sorted values, the upper one of two; 0 if there are none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


@dataclasses.dataclass(frozen=True)
class _Metric:
    """A measurement of a loader. Metrics of one family differ in their labels, the first of which is their name."""

    family: str
    value: float
    text: str
    is_counter: bool = True
    labels: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def path(self) -> str:
        """The name in the dict of all metrics."""
        family = "seconds" if self.family == STAGE_SECONDS else self.family
        return "/".join([family, *list(self.labels.values())[:1]])


def _metrics(snapshot: LoaderSnapshot) -> Iterator[_Metric]:
    measured = snapshot.measured
    yield _Metric("batches", measured.batches, "Batches delivered to the trainer.")
    yield _Metric("wait_seconds", measured.wait_seconds, "Seconds that the trainer waited, except for first batches.")
    yield _Metric("first_wait_seconds", measured.first_seconds, "Seconds that it waited for the first of each pass.")
    yield _Metric("trainer_seconds", measured.trainer_seconds, "Seconds of the trainer between two batches.")
    yield _Metric("worker_deaths", measured.deaths, "Worker processes that died and were replaced.")
    yield _Metric("worker_stalls", measured.stalls, "Reports of a worker without progress.")
    yield _Metric("errors", measured.errors, "Records that failed and were skipped.")
    yield _Metric("workers", snapshot.num_workers, "Worker processes of the loader.", is_counter=False)
    size = measured.batch_bytes or 0
    yield _Metric("batch_bytes", size, "Estimated bytes of the first batch.", is_counter=False)
    yield _Metric("step", measured.step, "Step of the newest iterator.", is_counter=False)
    if measured.records is not None:
        yield _Metric("records", measured.records, "Records of the batches delivered to the trainer.")
    if measured.epoch is not None:
        yield _Metric("epoch", measured.epoch, "Epoch of the newest iterator.", is_counter=False)
    for name, records, tokens in measured.components:
        for noun, count in (("Records", records), ("Tokens", tokens)):
            if count is not None:
                yield _Metric(
                    f"component_{noun.lower()}",
                    count,
                    f"{noun} of a mixture's component in all global batches so far.",
                    is_counter=False,
                    labels={"component": name},
                )
    number = 0
    for stage in snapshot.stages:
        # A name that depends on the index in the pipeline alone.
        short = f"operation_{number}" if stage.kind is Kind.OPERATION else stage.kind.name.lower()
        number += stage.kind is Kind.OPERATION
        labels = {"stage": short, "name": stage.name}
        text = "Seconds of a stage, summed over threads and processes."
        yield _Metric(STAGE_SECONDS, stage.seconds, text, labels=labels)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
