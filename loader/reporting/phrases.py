"""Phrases about a loader that its renderings share: the threads and workers, the trainer, and the stages of each."""

import itertools
from collections.abc import Iterator, Sequence

from millstream.loader.reporting.quantities import bytes_text, count_text, seconds_text, share_text
from millstream.loader.reporting.snapshot import Kind, LoaderSnapshot, Location, Measurements, StageSnapshot

COMPONENTS_SHOWN = 8
"""The number of a mixture's components that a line of text names."""


def workers_text(snapshot: LoaderSnapshot) -> str:
    """Returns the number of workers, threads and cores, as part of a sentence."""
    threads = count_text(snapshot.num_threads, "thread") if snapshot.num_threads else "no threads"
    cores = count_text(snapshot.num_cores, "core")
    if snapshot.num_workers:
        workers = count_text(snapshot.num_workers, snapshot.front.worker)
        each = " each" if snapshot.num_workers > 1 else ""
        return f"{workers} with {threads}{each}, {cores}{' for them' if snapshot.front.is_on_cluster else ''}"
    return f"no worker processes, {'up to ' if snapshot.num_threads else ''}{threads}, {cores}"


def trainer_text(measured: Measurements) -> str:
    """Returns the batches that the trainer received so far and its wait, as part of a sentence."""
    if not measured.batches:
        return "no batch yet"
    size = "" if measured.batch_bytes is None else f" of {bytes_text(measured.batch_bytes)}"
    batches = f"{count_text(measured.batches, 'batch')}{size}"
    if not measured.seconds:
        return batches
    return f"{batches} in {seconds_text(measured.seconds)}, {share_text(measured.wait_share)} of it waiting"


def mixture_texts(snapshot: LoaderSnapshot) -> Iterator[str]:
    """Yields lines about a mixture: the shares that its weights stand for, and its components so far.

    The first is like `mixture web 75 %, books 25 %; from position 800: web 50 %, books 50 %`.
    """
    if snapshot.order.bars:
        shares = [f"{f'{caption}: ' if caption else ''}{_shares_text(parts)}" for caption, parts in snapshot.order.bars]
        yield f"mixture {'; '.join(shares)}"
    if text := components_text(snapshot.measured):
        yield text


def components_text(measured: Measurements) -> str:
    """Returns the components of a mixture so far: `so far web 1,200 records, books 400 records`; "" if none are known.

    Rows of documents have their tokens as well: `web 30 rows of 1,890 tokens`.
    """
    if not measured.step or not measured.components:
        return ""
    noun = "record" if measured.components[0].tokens is None else "row"
    counts = [
        f"{name} {count_text(records, noun)}" + ("" if tokens is None else f" of {count_text(tokens, 'token')}")
        for name, records, tokens in measured.components
    ]
    return f"so far {_listed(counts)}"


def _shares_text(parts: Sequence[tuple[str, float]]) -> str:
    total = sum(size for _, size in parts) or 1.0
    return _listed([f"{name} {share_text(size / total)}" for name, size in parts])


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - COMPONENTS_SHOWN
    return ", ".join([*texts[:COMPONENTS_SHOWN], *([f"{more} more"] if more > 0 else [])])


def size_text(snapshot: LoaderSnapshot) -> str:
    """Returns the size of a batch in parentheses, after a space; "" if it is not known."""
    size = snapshot.measured.batch_bytes
    return "" if size is None else f" ({bytes_text(size)} each)"


def stages_by_location(snapshot: LoaderSnapshot) -> Iterator[tuple[str, list[StageSnapshot]]]:
    """Yields runs of consecutive stages that run in the same threads or processes, each with a name for these."""
    shown = [stage for stage in snapshot.stages if stage.kind is not Kind.HAND_OVER]
    runs = [(location, list(run)) for location, run in itertools.groupby(shown, key=lambda stage: stage.location)]
    if snapshot.num_workers:
        # The transfer comes after the workers' last stage, and before those of the trainer's thread.
        row = next(number for number, (location, _) in enumerate(runs) if location is Location.WORKERS)
        runs[row][1].append(snapshot.stage(Kind.HAND_OVER))
    return ((_location_text(snapshot, location), run) for location, run in runs)


def is_measured(snapshot: LoaderSnapshot) -> bool:
    """Returns True if stages have durations. Before a batch, these are those of lookups such as `record_keys(step)`."""
    return snapshot.measured.batches > 0 and snapshot.pipeline_seconds > 0


def is_bottleneck(snapshot: LoaderSnapshot, stage: StageSnapshot) -> bool:
    """Returns True if a stage is the slowest of those measured."""
    return is_measured(snapshot) and stage is snapshot.slowest


def each_text(snapshot: LoaderSnapshot, stage: StageSnapshot) -> str:
    """Returns the time of a measured stage per batch: `3.2 ms per batch`."""
    return f"{seconds_text(stage.seconds / snapshot.measured.batches)} per batch"


def _location_text(snapshot: LoaderSnapshot, location: Location) -> str:
    threads = f" with up to {count_text(snapshot.num_threads, 'thread')}" if snapshot.num_threads else ""
    if location is Location.WORKERS:
        each = " each" if snapshot.num_workers > 1 else ""
        return f"{count_text(snapshot.num_workers, snapshot.front.worker)}{threads}{each}"
    if location is Location.THREADS:
        return f"up to {count_text(snapshot.num_threads, 'thread')} of the trainer's process"
    return "the trainer's thread"
