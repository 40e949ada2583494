"""Performance advice about a loader: sentences with the measured number and the remedy.

Each rule below returns one piece of advice, or None if it does not apply. Rules are pure functions of a snapshot, so
tests need no running loader. Only `slowest_stage` reports the share of the slowest stage, with all remedies for it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

from millstream.loader.reporting.snapshot import (
    Kind,
    LoaderSnapshot,
    StageLocation,
    StageSnapshot,
    count_text,
    seconds_text,
    share_text,
    size_text,
)

MIN_SECONDS = 0.05
"""Shortest measurement, in seconds, that advice may be based on."""

NEGLIGIBLE_SHARE = 0.05
"""Largest share of the loop's time that is not worth improving."""

LARGE_SHARE = 0.2
"""Smallest share of the stages' time that earns a stage advice of its own, unless it is negligible in the loop."""

LOW_UTILIZATION = 0.5
"""Workers that are busy for a smaller share of the time are more than the trainer needs."""

TARGET_UTILIZATION = 0.7
"""Utilization of the workers that are recommended. The remainder is a reserve for slow batches."""

QUICK_SECONDS = 0.001
"""A batch that takes less time gains nothing from worker processes, because its transfer takes as long."""

MAX_GROWTH = 4
"""Largest factor by which advice raises the number of threads, actors, or workers beyond the cores, in one step."""


@dataclasses.dataclass(frozen=True)
class Advice:
    """One piece of advice.

    Attributes:
        kind: a stable identifier, for programs.
        text: one to three sentences, for people.
    """

    kind: str
    text: str


Rule = Callable[[LoaderSnapshot], Advice | None]


def advice_of(snapshot: LoaderSnapshot) -> tuple[Advice, ...]:
    """Returns the advice for a loader: findings, then remedies, most important first."""
    measured = snapshot.measured
    if snapshot.frontend.is_debugging:
        return (
            Advice(
                "debugging",
                "With debug=True, the trainer's thread runs and checks everything, so its timings say little about "
                "training. Remove debug=True to measure.",
            ),
        )
    if not measured.batches:
        return (Advice("unmeasured", "Nothing has been measured yet. Iterate over the loader first."),)
    if measured.seconds < MIN_SECONDS:
        return (
            Advice(
                "too_short",
                f"Only {count_text(measured.batches, 'batch')} in {seconds_text(measured.seconds)} have been measured, "
                "without the first of each pass: too little for advice. Try again later.",
            ),
            *_apply(snapshot, (trouble,)),
        )
    if measured.wait_share < NEGLIGIBLE_SHARE:
        return tuple(_apply(snapshot, (waiting, idle_workers, trouble)))
    if measured.reader is not None:
        text = f"Process {measured.reader} of this host reads and computes. Its summary has the times of the stages."
        return (waiting(snapshot), Advice("read_elsewhere", text), *_apply(snapshot, (trouble,)))
    slowest = slowest_stage(snapshot)
    rules: tuple[Rule, ...] = (sampler_keys, pickled_batches, copied_batches, trouble)
    if slowest is None or slowest.kind not in ("batched_reads", "read_ahead"):
        rules = (batched_reads, *rules)
    return (waiting(snapshot), *([] if slowest is None else [slowest]), *_apply(snapshot, rules))


def _apply(snapshot: LoaderSnapshot, rules: tuple[Rule, ...]) -> Iterator[Advice]:
    return (advice for rule in rules if (advice := rule(snapshot)) is not None)


def waiting(snapshot: LoaderSnapshot) -> Advice:
    measured = snapshot.measured
    text = f"The trainer waited {share_text(measured.wait_share)} of the time"
    if measured.wait_share < NEGLIGIBLE_SHARE:
        return Advice("not_waiting", f"{text}: a faster loader would not speed up training.")
    if measured.trainer_seconds >= NEGLIGIBLE_SHARE * measured.seconds:
        return Advice("waiting", f"{text}.")
    everything_else = f"Everything else in its loop took {share_text(1 - measured.wait_share)}"
    return Advice("waiting", f"{text}. {everything_else}: there is too little compute to overlap loading with.")


def slowest_stage(snapshot: LoaderSnapshot) -> Advice | None:
    slowest = snapshot.slowest
    if slowest.kind is Kind.READ and snapshot.source.window_units is not None:
        return _slow_units(snapshot)
    if snapshot.pipeline_seconds < NEGLIGIBLE_SHARE * snapshot.measured.seconds:
        share = share_text(snapshot.pipeline_seconds / snapshot.measured.seconds)
        return Advice(
            "something_else",
            f"The pipeline's stages took {share} of the time, so the trainer waited for something else, for instance "
            f"because {'a stream of your own is slow, or ' * snapshot.frontend.is_fed}other programs use the cores.",
        )
    if slowest.kind is Kind.HAND_OVER or _is_copied(snapshot, slowest):
        # Other rules have the remedy.
        return None
    is_local = slowest.is_local and snapshot.num_workers > 0
    if snapshot.num_workers and snapshot.busy_share < LOW_UTILIZATION and not is_local:
        buffers = snapshot.frontend.buffers.format(workers=snapshot.num_workers, buffer=2 * snapshot.worker_buffer)
        return Advice(
            "uneven",
            f"{_utilization_text(snapshot)}: enough for this trainer on average, but single batches take longer. Keep "
            f"more of them ready with {buffers}. If that does not help, other programs use the cores.",
        )
    if slowest.kind is Kind.READ:
        return _slow_reads(snapshot)
    subject = "Finding record keys" if slowest.kind is Kind.KEYS else f"{slowest.label},"
    remedy = "Move .mp_prefetch after it, so that workers run it." if is_local else _workers_remedy(snapshot)
    return Advice("bottleneck", f"{_finding(snapshot, subject)}. {_capitalized(remedy)}")


def _slow_units(snapshot: LoaderSnapshot) -> Advice:
    if snapshot.order.is_global_shuffle:
        window = f"window_units={snapshot.source.window_units}"
        order = f"HierarchicalSampler(source.unit_sizes, {window}, seed=...), or load(source, shuffle=True)"
        if snapshot.order.kind == "PackingSampler":
            order = f"PackingSampler(..., unit_sizes=source.unit_sizes, {window})"
        cause = "because a global shuffle jumps between more units than fit into memory"
        finding = f"{snapshot.source.kind} decodes a whole unit for nearly every record, {cause}"
        return Advice("units", f"{finding}. Use {order}, or raise cache_bytes.")
    processes = " Each worker process decodes all units: use threads instead." if snapshot.num_workers else ""
    return Advice("units", f"{_finding(snapshot, 'Decoding whole units')}. Select fewer columns.{processes}")


def _slow_reads(snapshot: LoaderSnapshot) -> Advice:
    slowest = snapshot.slowest
    subject = f"{slowest.text}," if slowest.text != "read" else "Reading"
    kind, finding, remedies = "bottleneck", _finding(snapshot, subject), []
    if _reads_one_by_one(snapshot):
        kind, finding = "batched_reads", f"{finding}, one record at a time"
        remedies.append(_getitems_remedy(snapshot))
    if snapshot.num_workers or (slowest.location is StageLocation.TRAINER and snapshot.num_threads):
        remedies.append(_capitalized(_workers_remedy(snapshot)))
    elif slowest.location is StageLocation.TRAINER:
        kind, finding = "read_ahead", f"{finding}, and nothing is prefetched"
        threads = snapshot.frontend.reading.format("ReadOptions()")
        remedies.append(f"Use {threads} to read in threads while the trainer works.")
    else:
        kind = "read_further_ahead" if kind == "bottleneck" else kind
        finding += f", with up to {count_text(snapshot.records_ahead, 'record')} prefetched"
        remedies.append(f"If the storage has a high latency, prefetch more: {_more_reading(snapshot)}.")
        remedies.append(f"If reading computes, for instance decodes, {_workers_remedy(snapshot)}")
    return Advice(kind, " ".join([f"{finding}.", *remedies]))


def _more_reading(snapshot: LoaderSnapshot) -> str:
    """Returns the argument for more threads if most of them read all the time, and for a larger buffer anyway."""
    num_threads, seconds = snapshot.num_threads, snapshot.measured.seconds
    buffer_size = max(1000, 2 * snapshot.records_ahead)
    if snapshot.slowest.seconds >= LOW_UTILIZATION * num_threads * seconds:
        needed = math.ceil(snapshot.slowest.seconds / max(snapshot.measured.trainer_seconds, 1e-9))
        num_threads = max(num_threads + 1, min(needed, MAX_GROWTH * num_threads))
    return snapshot.frontend.reading.format(
        f"ReadOptions(num_threads={num_threads}, prefetch_buffer_size={buffer_size})"
    )


def _finding(snapshot: LoaderSnapshot, subject: str) -> str:
    whose = "the workers'" if snapshot.slowest.location is StageLocation.WORKERS else "the pipeline's"
    return f"{subject} takes {share_text(snapshot.share(snapshot.slowest))} of {whose} time"


def batched_reads(snapshot: LoaderSnapshot) -> Advice | None:
    read = snapshot.stage(Kind.READ)
    if not _reads_one_by_one(snapshot) or not _is_large(snapshot, read):
        return None
    return Advice(
        "batched_reads",
        f"Reading one record at a time takes {share_text(snapshot.share(read))} of the pipeline's time. "
        f"{_getitems_remedy(snapshot)}",
    )


def _reads_one_by_one(snapshot: LoaderSnapshot) -> bool:
    return bool(snapshot.source.one_by_one) and not snapshot.frontend.is_fed


def _getitems_remedy(snapshot: LoaderSnapshot) -> str:
    return f"Add a method __getitems__(keys) to {snapshot.source.one_by_one} that reads a batch in one call."


def _capitalized(sentence: str) -> str:
    return f"{sentence[0].upper()}{sentence[1:]}"


def _workers_remedy(snapshot: LoaderSnapshot) -> str:
    """Returns a sentence, without a capital, with the number of workers to use on this machine, or another remedy."""
    if snapshot.frontend.is_on_cluster or snapshot.choice:
        return _chosen_remedy(snapshot) if snapshot.choice else _actors_remedy(snapshot)
    each = snapshot.pipeline_seconds / max(1, snapshot.measured.batches)
    if not snapshot.num_workers and each < QUICK_SECONDS:
        cause = f"each takes {seconds_text(each)}, less than its transfer from a worker process"
        return f"use larger batches, or make this stage cheaper: {cause}."
    cores, needed = snapshot.num_cores, _needed_cores(snapshot)
    if snapshot.num_workers >= cores:
        return _full_machine_remedy(snapshot)
    machine = f"this machine has {count_text(cores, 'core')}"
    if needed <= cores:
        return f"use {snapshot.frontend.workers.format(max(needed, snapshot.num_workers + 1))} to hide it; {machine}."
    if cores == 1:
        return f"make this stage cheaper, or move work to the device: {machine}."
    return f"use {snapshot.frontend.workers.format(cores)} to shorten the waits; {machine}."


def _chosen_remedy(snapshot: LoaderSnapshot) -> str:
    return f'make this stage cheaper, or move work to the device: "auto" chose {snapshot.choice}.'


def _full_machine_remedy(snapshot: LoaderSnapshot) -> str:
    """Returns the remedy, as above, if there are as many workers as cores."""
    used, cores = snapshot.used_cores, count_text(snapshot.num_cores, "core")
    enough = TARGET_UTILIZATION * snapshot.num_cores
    if used is None or used >= enough:
        return f"make this stage cheaper, or move work to the device: this machine has {cores}, all in use."
    have = f"{used:.1f} of the {cores} of this machine"
    if used + snapshot.missing_cores >= enough:
        return f"make this stage cheaper, or end other programs: the workers have {have}, and wait for more."
    more = snapshot.frontend.workers.format(_workers_for_waiting(snapshot, used))
    return f"use {more} to shorten the waits: the workers wait themselves, and use {have}."


def _workers_for_waiting(snapshot: LoaderSnapshot, used: float) -> int:
    """Returns the number of workers that would hide their own waits, within what the cores allow."""
    needed = math.ceil(snapshot.pipeline_seconds / max(snapshot.measured.trainer_seconds, 1e-9))
    limit = min(MAX_GROWTH * snapshot.num_workers, int(snapshot.num_cores * snapshot.num_workers / max(used, 1e-9)))
    return max(snapshot.num_workers + 1, min(needed, limit))


def _actors_remedy(snapshot: LoaderSnapshot) -> str:
    needed = max(
        snapshot.num_workers + 1, math.ceil(_needed_cores(snapshot) * snapshot.num_workers / snapshot.num_cores)
    )
    limit = MAX_GROWTH * snapshot.num_workers
    effect = "hide it" if needed <= limit else "shorten the waits"
    return f"use {snapshot.frontend.workers.format(min(needed, limit))} to {effect}, if the cluster has room."


def _needed_cores(snapshot: LoaderSnapshot) -> int:
    """Returns the number of cores that would finish the pipeline's work while the trainer computes."""
    # Threads that wait for the GIL seem busy: the work cannot exceed the capacity of the cores.
    work = min(snapshot.pipeline_seconds, snapshot.num_cores * snapshot.measured.seconds)
    return math.ceil(work / max(snapshot.measured.trainer_seconds, 1e-9))


def sampler_keys(snapshot: LoaderSnapshot) -> Advice | None:
    keys = snapshot.stage(Kind.KEYS)
    if snapshot.order.is_vectorised or not _is_large(snapshot, keys):
        return None
    return Advice(
        "sampler_keys",
        f"{snapshot.order.kind} is called once per position, which takes {share_text(snapshot.share(keys))} of the "
        "pipeline's time. Add a method record_keys(start, stop) that returns the keys of many positions in one call.",
    )


def pickled_batches(snapshot: LoaderSnapshot) -> Advice | None:
    hand_over = snapshot.stage(Kind.HAND_OVER)
    if not snapshot.num_workers or not _is_large(snapshot, hand_over):
        return None
    return Advice(
        "hand_over",
        f"The transfer of batches{size_text(snapshot)} to the trainer takes {share_text(snapshot.share(hand_over))} "
        "of the workers' time. Numeric arrays arrive without a copy; strings, bytes, lists and other objects are "
        "pickled. Turn them into arrays in an operation, and keep small dtypes such as uint8 until the batch is on the "
        "device.",
    )


def copied_batches(snapshot: LoaderSnapshot) -> Advice | None:
    copying = [stage for stage in snapshot.stages if _is_copied(snapshot, stage)]
    seconds = sum(stage.seconds for stage in copying)
    if not copying or seconds < NEGLIGIBLE_SHARE * snapshot.measured.seconds:
        return None
    finding = (
        f"The trainer's thread copies the batches{size_text(snapshot)}: {copying[0].label}, takes "
        f"{share_text(seconds / snapshot.measured.seconds)} of its time, because a batch depends on the elements that "
        "were dropped before it."
    )
    if any(not stage.keeps_count and not stage.regroups for stage in snapshot.stages):
        remedy = (
            "Filter in advance: millstream.surviving_keys finds the keys, and a DataLoader with "
            "IndexSampler(len(keys), keys=keys) reads them."
        )
    else:
        finding = finding.replace("the elements that were dropped before it", "the sizes of the elements")
        remedy = "If lengths are known in advance, a DataLoader with a PackingSampler builds the rows in its workers."
    return Advice("copied_batches", f"{finding} {remedy}")


def idle_workers(snapshot: LoaderSnapshot) -> Advice | None:
    if snapshot.num_workers < 2 or snapshot.choice:
        return None
    enough = max(1, math.ceil(snapshot.worker_seconds / (TARGET_UTILIZATION * snapshot.measured.seconds)))
    if snapshot.busy_share >= LOW_UTILIZATION or enough >= snapshot.num_workers:
        return None
    return Advice(
        "idle_workers",
        f"{_utilization_text(snapshot)}. Use {snapshot.frontend.workers.format(enough)} to save memory.",
    )


def trouble(snapshot: LoaderSnapshot) -> Advice | None:
    measured = snapshot.measured
    events = []
    if measured.deaths:
        events.append(f"{count_text(measured.deaths, snapshot.frontend.worker)} died")
    if measured.stalls:
        events.append(f"workers stalled {count_text(measured.stalls, 'time')}")
    if not events:
        return None
    text = _capitalized(" and ".join(events))
    return Advice("trouble", f"{text}: the log of `millstream` has the records and the cause.")


def _utilization_text(snapshot: LoaderSnapshot) -> str:
    workers = count_text(snapshot.num_workers, snapshot.frontend.worker)
    verb = "was" if snapshot.num_workers == 1 else "were"
    return f"The {workers} {verb} busy {share_text(snapshot.busy_share)} of the time"


def _is_large(snapshot: LoaderSnapshot, stage: StageSnapshot) -> bool:
    return snapshot.share(stage) >= LARGE_SHARE and stage.seconds >= NEGLIGIBLE_SHARE * snapshot.measured.seconds


def _is_copied(snapshot: LoaderSnapshot, stage: StageSnapshot) -> bool:
    is_here = stage.kind is Kind.OPERATION and stage.location is StageLocation.TRAINER and not stage.is_local
    return is_here and snapshot.num_workers > 0
