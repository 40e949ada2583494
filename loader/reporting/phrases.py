"""Phrases that renderings share: numbers with a unit, tables of them, the threads and workers, and the trainer."""

import itertools
from collections.abc import Iterator, Sequence

from millstream.loader.reporting.snapshot import Kind, LoaderSnapshot, Location, Measurements, StageSnapshot

COMPONENTS_SHOWN = 8


def bytes_text(number: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(number) < 999.5:
            return _with_unit(number, unit)
        number /= 1000
    return _with_unit(number, "TB")


def seconds_text(seconds: float) -> str:
    if not seconds:
        return "0 s"
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return _with_unit(seconds * factor, unit)
    return _with_unit(seconds, "s")


def share_text(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def count_text(number: int, noun: str) -> str:
    """Returns a count with its noun: `1 batch`, `12,000 records`."""
    plural = noun if number == 1 else f"{noun}es" if noun.endswith(("ch", "s")) else f"{noun}s"
    return f"{number:,} {plural}"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Returns rows of a table as lines: the first `left` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    adjust = [str.ljust if number < left else str.rjust for number in range(len(widths))]
    cells = ([fit(cell, width) for fit, cell, width in zip(adjust, row, widths, strict=True)] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]


def _with_unit(number: float, unit: str) -> str:
    # Two significant digits, as in 1.5 and 19.
    digits = 0 if abs(number) >= 9.95 or number == int(number) else 1
    return f"{number:,.{digits}f} {unit}"


def workers_text(snapshot: LoaderSnapshot) -> str:
    threads = count_text(snapshot.num_threads, "thread") if snapshot.num_threads else "no threads"
    cores = count_text(snapshot.num_cores, "core")
    if snapshot.num_workers:
        workers = count_text(snapshot.num_workers, snapshot.front.worker)
        each = " each" if snapshot.num_workers > 1 else ""
        return f"{workers} with {threads}{each}, {cores}{' for them' if snapshot.front.is_on_cluster else ''}"
    return f"no worker processes, {'up to ' if snapshot.num_threads else ''}{threads}, {cores}"


def trainer_text(measured: Measurements) -> str:
    if not measured.batches:
        return "no batch yet"
    size = "" if measured.batch_bytes is None else f" of {bytes_text(measured.batch_bytes)}"
    batches = f"{count_text(measured.batches, 'batch')}{size}"
    if not measured.seconds:
        return batches
    return f"{batches} in {seconds_text(measured.seconds)}, {share_text(measured.wait_share)} of it waiting"


def mixture_texts(snapshot: LoaderSnapshot) -> Iterator[str]:
    """Yields the shares of a mixture's weights, then its components so far.

    The first is like `mixture web 75 %, books 25 %; from position 800: web 50 %, books 50 %`.
    """
    if snapshot.order.bars:
        shares = [f"{f'{caption}: ' if caption else ''}{_shares_text(sizes)}" for caption, sizes in snapshot.order.bars]
        yield f"mixture {'; '.join(shares)}"
    if text := components_text(snapshot.measured):
        yield text


def components_text(measured: Measurements) -> str:
    """Returns `so far web 1,200 records, books 400 records`; for rows of documents, `web 30 rows of 1,890 tokens`."""
    if not measured.step or not measured.components:
        return ""
    noun = "record" if measured.components[0].tokens is None else "row"
    counts = [
        f"{name} {count_text(records, noun)}" + ("" if tokens is None else f" of {count_text(tokens, 'token')}")
        for name, records, tokens in measured.components
    ]
    return f"so far {_listed(counts)}"


def _shares_text(sizes: Sequence[tuple[str, float]]) -> str:
    total = sum(size for _, size in sizes) or 1.0
    return _listed([f"{name} {share_text(size / total)}" for name, size in sizes])


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - COMPONENTS_SHOWN
    return ", ".join([*texts[:COMPONENTS_SHOWN], *([f"{more} more"] if more > 0 else [])])


def size_text(snapshot: LoaderSnapshot) -> str:
    size = snapshot.measured.batch_bytes
    return "" if size is None else f" ({bytes_text(size)} each)"


def stages_by_location(snapshot: LoaderSnapshot) -> Iterator[tuple[str, list[StageSnapshot]]]:
    """Yields runs of consecutive stages that run in the same threads or processes, each with a name for these."""
    shown = [stage for stage in snapshot.stages if stage.kind is not Kind.HAND_OVER]
    runs = [(location, list(run)) for location, run in itertools.groupby(shown, key=lambda stage: stage.location)]
    if snapshot.num_workers:
        # The transfer comes after the workers' last stage, and before those of the trainer's thread.
        row = next((number for number, (location, _) in enumerate(runs) if location is Location.WORKERS), -1)
        runs[row][1].append(snapshot.stage(Kind.HAND_OVER))
    return ((_location_text(snapshot, location), run) for location, run in runs)


def is_measured(snapshot: LoaderSnapshot) -> bool:
    """Returns True if there are batches, and durations of stages."""
    return snapshot.measured.batches > 0 and snapshot.pipeline_seconds > 0


def is_bottleneck(snapshot: LoaderSnapshot, stage: StageSnapshot) -> bool:
    return is_measured(snapshot) and stage is snapshot.slowest


def each_text(snapshot: LoaderSnapshot, stage: StageSnapshot) -> str:
    return f"{seconds_text(stage.seconds / snapshot.measured.batches)} per batch"


def _location_text(snapshot: LoaderSnapshot, location: Location) -> str:
    threads = f" with up to {count_text(snapshot.num_threads, 'thread')}" if snapshot.num_threads else ""
    if location is Location.WORKERS:
        each = " each" if snapshot.num_workers > 1 else ""
        return f"{count_text(snapshot.num_workers, snapshot.front.worker)}{threads}{each}"
    if location is Location.THREADS:
        return f"up to {count_text(snapshot.num_threads, 'thread')} of the trainer's process"
    return "the trainer's thread"
