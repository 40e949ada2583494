"""Advice about a loader: sentences, each with the number that it rests on and with what to do about it.

Each function below gives one kind of advice, or none. They see numbers only, so what holds for a loader can be tried
out without running it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

from millstream.loader.reporting.quantities import bytes_text, count_text, seconds_text, share_text
from millstream.loader.reporting.snapshot import Kind, LoaderFacts, Place, StageFacts

FEW_SECONDS = 0.05
"""What was measured for less than this says nothing yet."""

WAITING = 0.05
"""A trainer that waits for less than this part of the time would not gain from a faster loader."""

LARGE_SHARE = 0.2
"""A part of the work that takes at least this share of it, and WAITING of the time, is worth advice of its own."""

IDLE = 0.5
"""Workers that work for less than this part of the time are more than are needed."""

MORE_ACTORS = 4
"""No more than this many times the actors are recommended at once: what that many need is measured with them."""

COMFORTABLE = 0.7
"""How busy the workers may be that are recommended: the slowest of some batches should not be waited for."""


@dataclasses.dataclass(frozen=True)
class Advice:
    """One sentence or two.

    Attributes:
        kind: which advice it is, in a word: stable, for programs.
        text: what people read.
    """

    kind: str
    text: str


def advice_of(facts: LoaderFacts) -> tuple[Advice, ...]:
    """Returns what to say about a loader: what was found first, then what to do, the most important first."""
    measured = facts.measured
    if facts.front.is_debugging:
        return (
            Advice(
                "debugging",
                "debug=True makes everything in the trainer's thread, and checks it: what takes long here says little "
                "about training. Leave debug out to measure.",
            ),
        )
    if not measured.batches:
        return (Advice("unmeasured", "Nothing has been measured yet: iterate over the loader, then ask again."),)
    if measured.seconds < FEW_SECONDS:
        return (
            Advice(
                "too_short",
                f"Only {count_text(measured.batches, 'batch')} in {seconds_text(measured.seconds)} were measured, the "
                "first of each pass left out: too little for advice. Ask again later.",
            ),
            *_given(facts, (trouble,)),
        )
    rules = (
        (waiting, units, bottleneck, batched_reads, read_ahead, sampler_keys, pickled_batches, copied_batches)
        if measured.wait_share >= WAITING
        else (not_waiting, idle_workers)
    )
    return tuple(_given(facts, (*rules, trouble)))


Rule = Callable[[LoaderFacts], Advice | None]


def _given(facts: LoaderFacts, rules: tuple[Rule, ...]) -> Iterator[Advice]:
    return (advice for rule in rules if (advice := rule(facts)) is not None)


def waiting(facts: LoaderFacts) -> Advice:
    """Says how long the trainer waited."""
    text = f"The trainer waited {share_text(facts.measured.wait_share)} of the time."
    if facts.measured.trainer_seconds < WAITING * facts.measured.seconds:
        text += (
            f" It did next to nothing between two batches ({share_text(1 - facts.measured.wait_share)} of the time): "
            "there is no training to hide the loading behind."
        )
    return Advice("waiting", text)


def not_waiting(facts: LoaderFacts) -> Advice:
    """Says that the trainer did not wait."""
    return Advice(
        "not_waiting",
        f"The trainer waited {share_text(facts.measured.wait_share)} of the time: a faster loader would not make "
        "training faster.",
    )


def units(facts: LoaderFacts) -> Advice | None:
    """Says that units are decoded again and again because the order does not stay among a few of them."""
    if facts.source.window_units is None or facts.stage(Kind.READ) is not facts.slowest:
        return None
    if facts.order.is_global_shuffle:
        order = f"HierarchicalSampler(source.unit_sizes, window_units={facts.source.window_units}, seed=...)"
        return Advice(
            "units",
            f"{facts.source.kind} decodes a whole unit for nearly each record, because a global shuffle does not stay "
            f"among the units in memory: use {order}, or load(source, shuffle=True), or raise cache_bytes.",
        )
    processes = " Each worker process decodes all units: use threads instead." if facts.num_workers else ""
    return Advice(
        "units",
        f"Decoding units of {facts.source.kind} takes {share_text(facts.share(facts.slowest))} of the pipeline's time: "
        f"select fewer columns.{processes}",
    )


def batched_reads(facts: LoaderFacts) -> Advice | None:
    """Says that a source which is read record by record should read many at once."""
    read = facts.stage(Kind.READ)
    share = facts.share(read)
    if facts.source.reads_many or facts.front.is_fed or not _is_large(facts, read):
        return None
    return Advice(
        "batched_reads",
        f"{facts.source.kind}.__getitems__ is missing: reading record by record takes {share_text(share)} of the "
        "pipeline's time. Give the class a __getitems__(keys) that reads a whole batch in one call.",
    )


def read_ahead(facts: LoaderFacts) -> Advice | None:
    """Says that nothing is read while the trainer works, or not enough of what is far away."""
    read = facts.stage(Kind.READ)
    share = facts.share(read)
    if read is not facts.slowest or facts.num_workers or not _is_large(facts, read):
        return None
    if facts.source.window_units is not None and read.place is not Place.TRAINER:
        # `units` says what helps.
        return None
    takes = f"Reading takes {share_text(share)} of the pipeline's time"
    if read.place is Place.TRAINER:
        return Advice(
            "read_ahead",
            f"{takes}, and nothing is read ahead: {facts.front.reading.format('ReadOptions()')} has threads read while "
            "the trainer works.",
        )
    further = f"ReadOptions(num_threads={facts.num_threads}, prefetch_buffer_size={max(1000, 2 * facts.records_ahead)})"
    return Advice(
        "read_further_ahead",
        f"{takes}, at most {count_text(facts.records_ahead, 'record')} ahead. If the storage is far away, read further "
        f"ahead: {facts.front.reading.format(further)}.",
    )


def sampler_keys(facts: LoaderFacts) -> Advice | None:
    """Says that a sampler which is asked position by position should answer for many at once."""
    keys = facts.stage(Kind.KEYS)
    share = facts.share(keys)
    if facts.order.answers_for_many or not _is_large(facts, keys):
        return None
    return Advice(
        "sampler_keys",
        f"{facts.order.kind} is asked for each position alone: that takes {share_text(share)} of the pipeline's time. "
        "Give the class a record_keys(start, stop) that answers for many.",
    )


def bottleneck(facts: LoaderFacts) -> Advice | None:
    """Says which part of the work takes longest, and how many workers would hide it; or what else it is."""
    slowest = facts.slowest
    if slowest.kind is Kind.READ and facts.source.window_units is not None:
        # `units` says what helps.
        return None
    if facts.pipeline_seconds < WAITING * facts.measured.seconds:
        return Advice(
            "something_else",
            f"The work itself took {share_text(facts.pipeline_seconds / facts.measured.seconds)} of the time, so "
            "the trainer waited for something else: other programs on this machine, perhaps.",
        )
    if slowest.kind is Kind.HAND_OVER or (slowest.place is Place.TRAINER and _is_done_elsewhere(facts, slowest)):
        # Other advice is about that.
        return None
    if facts.num_workers and facts.busy_share < IDLE:
        buffers = facts.front.buffers.format(workers=facts.num_workers, buffer=2 * facts.worker_buffer)
        return Advice(
            "uneven",
            f"{_worked_text(facts)}, enough for this trainer, but not evenly: {buffers} would have more batches ready "
            "for when some take long. If that does not help, other programs have kept this one from the cores.",
        )
    share = facts.share(slowest)
    whose = "the workers'" if facts.num_workers else "the pipeline's"
    takes = f"{slowest.label}{',' * (slowest.kind is Kind.OPERATION)} takes {share_text(share)} of {whose} time"
    remedy = _more_actors(facts) if facts.front.is_on_cluster else _more_workers(facts)
    return Advice("bottleneck", f"{takes}: {remedy}")


def _more_workers(facts: LoaderFacts) -> str:
    """Returns how many workers would help on this machine, or what else would."""
    cores, needed = facts.num_cores, _needed_cores(facts)
    has = f"this machine has {count_text(cores, 'core')}"
    if facts.num_workers >= cores:
        used = facts.used_cores
        if used is None or used >= COMFORTABLE * cores:
            return f"{has}, all at work: make it cheaper, or move work to the device."
        return (
            f"{_workers_text(facts, _workers_for_waiting(facts, used))} would shorten the waits, because the workers "
            f"wait themselves: {has}, of which they use {used:.1f}."
        )
    if needed <= cores:
        return f"{_workers_text(facts, max(needed, facts.num_workers + 1))} would hide it; {has}."
    if cores == 1:
        return f"{has}: make it cheaper, or move work to the device."
    return f"{_workers_text(facts, cores)} would shorten the waits; {has}."


def _workers_for_waiting(facts: LoaderFacts, used: float) -> int:
    """Returns how many workers would hide their own waits: as many as are needed, or as the cores suffice for."""
    needed = math.ceil(facts.pipeline_seconds / max(facts.measured.trainer_seconds, 1e-9))
    most = min(MORE_ACTORS * facts.num_workers, int(facts.num_cores * facts.num_workers / max(used, 1e-9)))
    return max(facts.num_workers + 1, min(needed, most))


def _more_actors(facts: LoaderFacts) -> str:
    """Returns how many actors would help: as many as are needed, but no more than a few times those that there are."""
    needed = max(facts.num_workers + 1, math.ceil(_needed_cores(facts) * facts.num_workers / facts.num_cores))
    most = MORE_ACTORS * facts.num_workers
    if needed <= most:
        return f"{_workers_text(facts, needed)} would hide it, where the cluster has room for them."
    return f"{_workers_text(facts, most)} would shorten the waits, where the cluster has room for them."


def _needed_cores(facts: LoaderFacts) -> int:
    """Returns how many cores would do the work while the trainer trains."""
    # Threads that wait for Python's lock count as working: no more was done than the cores can do.
    work = min(facts.pipeline_seconds, facts.num_cores * facts.measured.seconds)
    return math.ceil(work / max(facts.measured.trainer_seconds, 1e-9))


def _workers_text(facts: LoaderFacts, count: int) -> str:
    return facts.front.workers.format(count)


def pickled_batches(facts: LoaderFacts) -> Advice | None:
    """Says that the way from the workers to the trainer takes long."""
    hand_over = facts.stage(Kind.HAND_OVER)
    share = facts.share(hand_over)
    if not facts.num_workers or not _is_large(facts, hand_over):
        return None
    return Advice(
        "hand_over",
        f"Handing batches over takes {share_text(share)} of the workers' time{_size_text(facts)}. Arrays of numbers "
        "arrive without a copy; strings, bytes, lists and objects are pickled. Turn them into arrays in an operation, "
        "and keep small types such as uint8 small until they are on the device.",
    )


def copied_batches(facts: LoaderFacts) -> Advice | None:
    """Says that the trainer's own thread puts the batches together."""
    copying = [stage for stage in facts.stages if _is_copied_by_trainer(facts, stage)]
    seconds = sum(stage.seconds for stage in copying)
    if not copying or seconds < WAITING * facts.measured.seconds:
        return None
    size = "" if facts.measured.batch_bytes is None else f"Batches are {bytes_text(facts.measured.batch_bytes)}, and "
    text = (
        f"{size}the trainer's thread copies them: {copying[0].label}, takes "
        f"{share_text(seconds / facts.measured.seconds)} of its time, since it takes elements as they come. "
    )
    if any(not stage.keeps_count and not stage.regroups for stage in facts.stages):
        text += (
            "Filter ahead: millstream.surviving_keys finds the keys for a DataLoader's IndexSampler(len(keys), "
            "keys=keys)."
        )
    else:
        text += "Where lengths are known ahead, a DataLoader's PackingSampler has the workers make the rows."
    return Advice("copied_batches", text[0].upper() + text[1:])


def idle_workers(facts: LoaderFacts) -> Advice | None:
    """Says that fewer workers would do."""
    if facts.num_workers < 2:
        return None
    enough = max(1, math.ceil(facts.pipeline_seconds / (COMFORTABLE * facts.measured.seconds)))
    if facts.busy_share >= IDLE or enough >= facts.num_workers:
        return None
    return Advice(
        "idle_workers",
        f"{_worked_text(facts)}: {_workers_text(facts, enough)} would do, and take less memory.",
    )


def trouble(facts: LoaderFacts) -> Advice | None:
    """Says that workers died or stalled."""
    measured = facts.measured
    happened = []
    if measured.deaths:
        happened.append(f"{count_text(measured.deaths, facts.front.worker)} died")
    if measured.stalls:
        happened.append(f"workers stalled {count_text(measured.stalls, 'time')}")
    if not happened:
        return None
    text = " and ".join(happened)
    return Advice("trouble", f"{text[0].upper()}{text[1:]}: the log of `millstream` says at which records, and why.")


def _worked_text(facts: LoaderFacts) -> str:
    return f"The {count_text(facts.num_workers, facts.front.worker)} worked {share_text(facts.busy_share)} of the time"


def _is_large(facts: LoaderFacts, stage: StageFacts) -> bool:
    return facts.share(stage) >= LARGE_SHARE and stage.seconds >= WAITING * facts.measured.seconds


def _is_done_elsewhere(facts: LoaderFacts, stage: StageFacts) -> bool:
    """Whether something else than more workers takes this part of the work off the trainer's thread."""
    return stage.kind is Kind.READ or _is_copied_by_trainer(facts, stage)


def _is_copied_by_trainer(facts: LoaderFacts, stage: StageFacts) -> bool:
    return bool(facts.num_workers) and stage.kind is Kind.OPERATION and stage.place is Place.TRAINER


def _size_text(facts: LoaderFacts) -> str:
    size = facts.measured.batch_bytes
    return "" if size is None else f", {bytes_text(size)} each"
