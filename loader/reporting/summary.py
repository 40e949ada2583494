"""The measurements of a loader: as text, as HTML, in the log of the debug mode, and as numbers with stable names.

The HTML, for notebooks and reports, loads nothing from elsewhere. The log has an execution summary of each pipeline,
a table with a row per node, once a minute while it is read and at the end. The numbers are for dashboards.
"""

import dataclasses
import logging
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

from millstream.core.html_fragments import card, escaped, figure, leaf_lines, proportions, soft
from millstream.loader.measuring import Cost, Node, Profiler
from millstream.loader.reporting.advice import Advice, advice_of
from millstream.loader.reporting.snapshot import (
    Kind,
    LoaderSnapshot,
    Measurements,
    StageSnapshot,
    aligned,
    bytes_text,
    components_text,
    each_text,
    is_bottleneck,
    is_measured,
    mixture_texts,
    seconds_text,
    share_text,
    stages_by_location,
    trainer_text,
    workers_text,
)
from millstream.sharding import gathered_by_jax

WIDTH = 80

STYLE = """
.millstream .ms-flow{margin:.1em 1em;color:var(--ms-soft)}
.millstream .ms-frame{border:1px dashed var(--ms-line);border-radius:8px;padding:.5em .7em;margin:0}
.millstream .ms-frame>.ms-soft{margin-bottom:.3em}
.millstream .ms-stage{padding:.2em 0 .2em .6em;border-left:3px solid var(--ms-line);margin:.25em 0;
overflow-wrap:anywhere}
.millstream .ms-row{display:grid;grid-template-columns:minmax(0,1fr) 7rem 3.2rem 7rem 9rem;gap:.6em;align-items:center}
.millstream .ms-number{text-align:right;white-space:nowrap}
.millstream .ms-bar{background:var(--ms-line);height:.55em;border-radius:3px;overflow:hidden}
.millstream .ms-bar>span{display:block;height:100%;background:var(--ms-bar)}
.millstream .ms-slowest{border-left-color:var(--ms-hot)}
.millstream .ms-slowest .ms-bar>span{background:var(--ms-hot)}
.millstream .ms-slowest code::after{content:"slowest";color:var(--ms-hot);margin-left:.8em;
font-family:system-ui,sans-serif}
.millstream ul{margin:.5em 0 0;padding-left:1.3em}
.millstream h1{font-size:1.3em;margin:0 0 .3em}
.millstream h2{font-size:1.1em;margin:1.4em 0 .5em}
"""

_FLOW = '<div class="ms-flow">↓</div>'


@final
class Summary:
    """The time that each stage of a loader takes, and advice. Printed, it is a page of text.

    Attributes:
        advice: pieces of advice, each with a stable identifier and a text (`advice[0].kind`, `advice[0].text`).
    """

    def __init__(self, snapshot: LoaderSnapshot) -> None:
        self._snapshot = snapshot
        self.advice: tuple[Advice, ...] = advice_of(snapshot)

    def __repr__(self) -> str:
        return "\n".join(_lines(self._snapshot, self.advice))

    def _repr_html_(self) -> str:
        return render_loader(self._snapshot, with_advice=True)


def render_text(snapshot: LoaderSnapshot) -> str:
    return "\n".join(_lines_of_loader(snapshot))


def _lines_of_loader(snapshot: LoaderSnapshot) -> Iterator[str]:
    yield f"DataLoader, shard {snapshot.shard}"
    yield f"  source  {snapshot.source.name}"
    yield f"  order   {snapshot.order.name}"
    yield from (f"  {text}" for text in mixture_texts(snapshot))
    width = max(len(stage.text) for stage in snapshot.stages)
    for location, stages in stages_by_location(snapshot):
        yield f"  ┌ {location}"
        for stage in stages:
            text = stage.text
            if is_measured(snapshot):
                mark = "  <- slowest" if is_bottleneck(snapshot, stage) else ""
                text = (
                    f"{text:<{width}}  {each_text(snapshot, stage):>17}  {share_text(snapshot.share(stage)):>5}{mark}"
                )
            yield f"  │ {text}"
            yield from (f"  │     {leaf}" for leaf in stage.structure or ())
        yield "  └"
    yield f"  trainer: {trainer_text(snapshot.measured)}"


def _lines(snapshot: LoaderSnapshot, advice: Sequence[Advice]) -> Iterator[str]:
    yield f"{snapshot.source.name}, {snapshot.order.name}"
    yield from mixture_texts(snapshot)
    yield f"{workers_text(snapshot)}; {trainer_text(snapshot.measured)}"
    if snapshot.measured.reader is not None:
        yield f"process {snapshot.measured.reader} of this host reads and computes for this one"
    if snapshot.choice:
        yield from textwrap.wrap(f'"auto" chose {snapshot.choice}', WIDTH, subsequent_indent="  ")
    yield ""
    yield from _table(snapshot)
    yield ""
    for item in advice:
        yield from textwrap.wrap(item.text, WIDTH, initial_indent="* ", subsequent_indent="  ", break_long_words=False)


def _table(snapshot: LoaderSnapshot) -> list[str]:
    measured = snapshot.measured

    def row(label: str, location: str, seconds: float, share: float) -> tuple[str, ...]:
        each = seconds_text(seconds / measured.batches) if measured.batches else ""
        return label, location, f"{seconds:.3f}", each, f"{share:.0%}"

    stages = snapshot.running_stages
    total = measured.seconds or 1.0
    head, *lines = aligned(
        [
            ("stage", "where", "seconds", "per batch", "share"),
            *(row(stage.text, stage.location.value, stage.seconds, snapshot.share(stage)) for stage in stages),
            ("the first batch of each pass", "", f"{measured.first_seconds:.3f}", "", ""),
            row("the trainer waits", "trainer", measured.wait_seconds, measured.wait_seconds / total),
            *_longest_waits(measured),
            row("the trainer works", "trainer", measured.trainer_seconds, measured.trainer_seconds / total),
        ],
        left=2,
    )
    marks = ["  <- slowest" if is_bottleneck(snapshot, stage) else "" for stage in stages]
    rule = "-" * len(head)
    return [head, rule, *map(str.__add__, lines, marks), rule, *lines[len(stages) :]]


def _longest_waits(measured: Measurements) -> Iterator[tuple[str, ...]]:
    """Yields a row with the waits that half of the last batches, and 99 % of them, did not exceed."""
    if measured.waits:
        half, most = (seconds_text(_percentile(measured.waits, share)) for share in (0.5, 0.99))
        yield f"p50, p99 of the last {len(measured.waits):,} waits", "trainer", "", f"{half}, {most}", ""


def render_loader(snapshot: LoaderSnapshot, *, iterator: str = "", with_advice: bool = False) -> str:
    """Returns the rendering of a loader, if given after the description of a chain's iterator, with its style sheet."""
    before = (card("iterator", iterator), '<div class="ms-flow">runs</div>') if iterator else ()
    after = (advice_list(snapshot),) if with_advice else ()
    return figure(*before, loader_boxes(snapshot), *after, style=STYLE)


def loader_boxes(snapshot: LoaderSnapshot) -> str:
    """Returns boxes for source, order, stages by location, and trainer, without a style sheet."""
    source, order = (
        card(kind, described.name, *(proportions(shares, caption) for caption, shares in described.bars), soft(text))
        for kind, described, text in (
            ("source", snapshot.source, ""),
            ("order", snapshot.order, components_text(snapshot.measured)),
        )
    )
    boxes = [source, order, *_frames(snapshot), _trainer(snapshot)]
    return _FLOW.join(boxes)


def advice_list(snapshot: LoaderSnapshot) -> str:
    return f"<ul>{''.join(f'<li>{escaped(item.text)}</li>' for item in advice_of(snapshot))}</ul>"


def _frames(snapshot: LoaderSnapshot) -> Iterator[str]:
    for location, stages in stages_by_location(snapshot):
        rows = "".join(_stage(snapshot, stage) for stage in stages)
        yield f'<div class="ms-frame"><div class="ms-soft">{escaped(location)}</div>{rows}</div>'


def _stage(snapshot: LoaderSnapshot, stage: StageSnapshot) -> str:
    mark = " ms-slowest" if is_bottleneck(snapshot, stage) else ""
    numbers = _numbers(snapshot, stage) if is_measured(snapshot) else ""
    leaves = leaf_lines(stage.structure or ())
    row = f'<div class="ms-row"><code>{escaped(stage.text)}</code>{numbers}</div>'
    return f'<div class="ms-stage{mark}">{row}{leaves}</div>'


def _numbers(snapshot: LoaderSnapshot, stage: StageSnapshot) -> str:
    share = snapshot.share(stage)
    rate = f"{snapshot.measured.batches / stage.seconds:,.0f} batches/s" if stage.seconds else ""
    return _bar(share) + "".join(
        f'<span class="ms-number{soft}" title="{title}">{escaped(text)}</span>'
        for text, soft, title in (
            (share_text(share), "", "share of all stages' time"),
            (each_text(snapshot, stage), "", "time per batch, summed over threads and processes"),
            (rate, " ms-soft", "rate of one core that runs this stage only"),
        )
    )


def _trainer(snapshot: LoaderSnapshot) -> str:
    measured = snapshot.measured
    fragments = [soft(trainer_text(measured))]
    if measured.seconds:
        fragments.append(
            '<div class="ms-row"><span>waits</span>'
            f'{_bar(measured.wait_share)}<span class="ms-number">{share_text(measured.wait_share)}</span></div>'
        )
    return card("trainer", "next(batches)", *fragments)


def _bar(share: float) -> str:
    return f'<div class="ms-bar"><span style="width:{share:.1%}"></span></div>'


PERIOD_SECONDS = 60.0
COLUMNS = ("node", "wait share", "total", "min", "max", "mean", "elements", "memory")


@final
class ExecutionLog:
    """Writes summaries of a pipeline, given a function that returns its measurements so far."""

    def __init__(self, profiler: Profiler, snapshot: Callable[[], LoaderSnapshot]) -> None:
        self._profiler = profiler
        self._snapshot = snapshot
        self._due = time.perf_counter() + PERIOD_SECONDS
        self._written = 0

    def write_if_due(self) -> None:
        if time.perf_counter() >= self._due:
            self.write()

    def write(self) -> None:
        """Writes a summary, unless nothing was delivered after the last one."""
        self._due = time.perf_counter() + PERIOD_SECONDS
        snapshot, costs = self._snapshot(), self._profiler.costs
        if costs is not None and snapshot.measured.batches > self._written:
            self._written = snapshot.measured.batches
            # A warning, because programs that do not configure logging see no other level.
            logging.getLogger("millstream").warning("%s", _execution_summary(snapshot, costs.read()))


def _execution_summary(snapshot: LoaderSnapshot, costs: Mapping[Node, Cost]) -> str:
    lines = aligned([COLUMNS, *_rows(snapshot, costs)])
    rule = "-" * max(map(len, lines))
    return "\n".join(
        [
            f"Execution summary: {snapshot.source.name}, {trainer_text(snapshot.measured)}",
            f"{workers_text(snapshot)}",
            "The wait share is the share of the time of all nodes, summed over threads and workers. Times are totals",
            "and per element of a call. The memory is that of the elements of the largest call.",
            lines[0],
            rule,
            *lines[1:],
        ]
    )


def _rows(snapshot: LoaderSnapshot, costs: Mapping[Node, Cost]) -> Iterator[tuple[str, ...]]:
    nodes = sorted(node for node in costs if node[0])
    total = snapshot.pipeline_seconds or 1.0
    for stage in snapshot.running_stages:
        cost = costs.get((0, stage.label), Cost())
        # The functions of a packer that return no elements have a duration, too.
        seconds = stage.seconds if not cost.elements or stage.regroups else cost.seconds
        if stage.kind is Kind.READ:
            # The nodes of a MapDataset run within the read, and have rows of their own.
            seconds = max(0.0, seconds - sum(costs[node].seconds for node in nodes))
            cost = cost._replace(max_seconds=0.0) if nodes else cost
        yield _row(stage.label, seconds, seconds / total, cost)
        if stage.kind is Kind.READ:
            for node in nodes:
                yield _row(node[1], costs[node].seconds, costs[node].seconds / total, costs[node])


def _row(label: str, seconds: float, share: float, cost: Cost) -> tuple[str, ...]:
    row = (label, share_text(share), seconds_text(seconds))
    if not cost.elements:
        return *row, "", "", "", "", ""
    extremes = (seconds_text(cost.min_seconds), seconds_text(cost.max_seconds)) if cost.max_seconds else ("", "")
    mean = seconds_text(seconds / cost.elements)
    return *row, *extremes, mean, f"{cost.elements:,}", bytes_text(cost.max_bytes)


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
