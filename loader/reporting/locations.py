"""The stages of a loader as they are drawn: those that one kind of worker does, side by side, in one frame."""

import itertools

from millstream.loader.reporting.quantities import count_text
from millstream.loader.reporting.snapshot import Kind, LoaderFacts, Place, StageFacts


def frames(facts: LoaderFacts) -> list[tuple[str, list[StageFacts]]]:
    """Returns the stages in their order, in runs that are done in one place, each with who does it."""
    shown = [stage for stage in facts.stages if stage.kind is not Kind.HAND_OVER]
    runs = [(place, list(run)) for place, run in itertools.groupby(shown, key=lambda stage: stage.place)]
    if facts.num_workers:
        # On their way out of the workers; what the trainer's thread does comes after it.
        row = next(number for number, (place, _) in enumerate(runs) if place is Place.WORKERS)
        runs[row][1].append(facts.stage(Kind.HAND_OVER))
    return [(_who(facts, place), run) for place, run in runs]


def is_bottleneck(facts: LoaderFacts, stage: StageFacts) -> bool:
    """Whether a stage is the one to look at: the slowest of all, once something was measured."""
    return facts.pipeline_seconds > 0 and stage is facts.slowest


def _who(facts: LoaderFacts, place: Place) -> str:
    threads = f" with up to {count_text(facts.num_threads, 'thread')}" if facts.num_threads else ""
    if place is Place.WORKERS:
        return f"{count_text(facts.num_workers, facts.front.worker)}{threads}{' each' * (facts.num_workers > 1)}"
    if place is Place.THREADS:
        return f"up to {count_text(facts.num_threads, 'thread')} of the trainer's process"
    return "the trainer's thread"
