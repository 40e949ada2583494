"""Parts of sentences about a loader: who works for it, and what the trainer got."""

from millstream.loader.reporting.quantities import bytes_text, count_text, seconds_text, share_text
from millstream.loader.reporting.snapshot import LoaderFacts, Measured


def who_works(facts: LoaderFacts) -> str:
    """Returns who makes the batches, as a part of a sentence."""
    threads = count_text(facts.num_threads, "thread") if facts.num_threads else "no threads"
    if facts.num_workers:
        workers = count_text(facts.num_workers, facts.front.worker)
        where = " for them" if facts.front.is_on_cluster else ""
        return f"{workers} with {threads}{' each' if facts.num_workers > 1 else ''}, {_cores(facts)}{where}"
    return (
        f"no worker processes, up to {threads}, {_cores(facts)}"
        if facts.num_threads
        else (f"no worker processes, {threads}, {_cores(facts)}")
    )


def trainer_text(measured: Measured) -> str:
    """Returns what the trainer got so far, as a part of a sentence."""
    if not measured.batches:
        return "no batch yet"
    size = "" if measured.batch_bytes is None else f" of {bytes_text(measured.batch_bytes)}"
    if not measured.seconds:
        return f"{count_text(measured.batches, 'batch')}{size}"
    return (
        f"{count_text(measured.batches, 'batch')}{size} in {seconds_text(measured.seconds)}, "
        f"{share_text(measured.wait_share)} of it waiting"
    )


def _cores(facts: LoaderFacts) -> str:
    return count_text(facts.num_cores, "core")
