"""Facts about loaders that nobody has built: what is shown of them can be tried out without running anything."""

import dataclasses
from typing import Any

from millstream.loader.reporting.snapshot import (
    Kind,
    LoaderFacts,
    Measured,
    OrderFacts,
    Place,
    SourceFacts,
    StageFacts,
)
from millstream.loader.threads.front import LOADER, Front


def facts_of_run(
    *,
    keys: float = 0.0,
    read: float = 0.0,
    augment: float = 0.0,
    batch: float = 0.0,
    hand_over: float = 0.0,
    waits: float = 0.0,
    trains: float = 0.0,
    workers: int = 0,
    threads: int = 16,
    cores: int = 8,
    front: Front = LOADER,
    **measured: Any,
) -> LoaderFacts:
    """Returns facts about a loader with an operation and a Batch: seconds by stage, who works, and what was counted."""
    place = Place.WORKERS if workers else Place.THREADS if threads else Place.TRAINER
    return LoaderFacts(
        source=SourceFacts("Tokens of 1000 records", "Tokens", 1000, reads_many=True),
        order=OrderFacts("IndexSampler(num_records=1000)", "IndexSampler", None, answers_for_many=True),
        stages=(
            StageFacts("keys", "record keys", Kind.KEYS, place, keys),
            StageFacts("read", "read", Kind.READ, place, read),
            StageFacts("operations[0], Augment", "Augment", Kind.OPERATION, place, augment),
            StageFacts("operations[1], Batch(8)", "Batch(8)", Kind.OPERATION, place, batch),
            StageFacts("hand-over", "hand-over", Kind.HAND_OVER, place, hand_over),
        ),
        measured=Measured(batches=100, wait_seconds=waits, trainer_seconds=trains, **measured),
        shard="0 of 1",
        num_workers=workers,
        worker_buffer=1,
        num_threads=threads,
        records_ahead=500,
        num_cores=cores,
        front=front,
    )


def with_stage(facts: LoaderFacts, which: str, **changes: Any) -> LoaderFacts:
    """Returns the same facts with one stage changed: that whose label begins so."""
    stages = tuple(
        dataclasses.replace(stage, **changes) if stage.label.startswith(which) else stage for stage in facts.stages
    )
    return dataclasses.replace(facts, stages=stages)


def with_source(facts: LoaderFacts, **changes: Any) -> LoaderFacts:
    """Returns the same facts about another source."""
    return dataclasses.replace(facts, source=dataclasses.replace(facts.source, **changes))


def with_order(facts: LoaderFacts, **changes: Any) -> LoaderFacts:
    """Returns the same facts about another order."""
    return dataclasses.replace(facts, order=dataclasses.replace(facts.order, **changes))
