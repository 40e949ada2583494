"""Documents packed into rows: how long the plan takes, how full the rows are, and how fast they come."""

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from suite import data
from suite.case import Case, Contender, Goal, Measurement, Pick, Run
from suite.contenders import chain_goals, chains, modes
from suite.data import ROW_LENGTH
from suite.peers import PEERS
from suite.scale import Scale
from suite.steps import identity
from suite.work import SEED, Map, Records, Work

ROWS_IN_BATCH = 8


def _documents(scale: Scale) -> Work:
    documents = data.documents(scale.pick(tiny=512, quick=30_000, full=100_000))
    return Work(Records(documents), (), ROWS_IN_BATCH, row_length=ROW_LENGTH)


def number_of_documents(batch: Any) -> int:
    """Returns how many documents a batch of packed rows holds, or a list of documents."""
    return int(batch["tokens_segment_ids"].max(axis=1).sum()) if isinstance(batch, dict) else len(batch)


def sums_of_documents(batch: Any) -> Any:
    """Returns for each document its length and the weighted sum of its tokens: packing must keep both."""
    if not isinstance(batch, dict):
        return np.array([_sums(document) for document in batch])
    return np.array(
        [
            _sums(row[segments == number])
            for row, segments in zip(batch["tokens"], batch["tokens_segment_ids"], strict=True)
            for number in range(1, segments.max() + 1)
        ]
    )


def _sums(document: Any) -> tuple[int, int]:
    tokens = document.astype(np.int64)
    return len(tokens), int((tokens * np.arange(1, len(tokens) + 1)).sum())


def number_of_cells(batch: Any) -> int:
    """Returns how many tokens and paddings a batch has."""
    return int(batch["tokens"].size)


def tokens_alone(batch: Any) -> Any:
    """Returns the tokens without padding: what is kept where documents are cut."""
    return batch["tokens"][batch["tokens_segment_ids"] > 0]


def measure_plan(run: Run) -> Measurement:
    """Returns the seconds that it takes to plan the rows of very many documents from their lengths."""
    lengths = data.document_lengths(run.scale.pick(tiny=10_000, quick=1_000_000, full=10_000_000))
    run.gate()
    if run.contender.peer == "bare":
        start = time.perf_counter()
        lengths.argsort(kind="stable") if run.contender.mode == "sort" else lengths.cumsum()
        return Measurement(time.perf_counter() - start)
    if run.contender.peer == "olmo_core":
        adapter: Any = PEERS["olmo_core"].adapter()
        start = time.perf_counter()
        rows = adapter.plan(lengths, ROW_LENGTH)
        seconds = time.perf_counter() - start
        return Measurement(seconds, {"documents": len(lengths), "rows": rows})
    import millstream  # noqa: PLC0415  (only where it is measured)

    start = time.perf_counter()
    sampler = millstream.PackingSampler(
        lengths, ROW_LENGTH, seed=SEED, strategy=run.contender.mode, shuffle=True, num_epochs=1
    )
    seconds = time.perf_counter() - start
    rows = sampler.num_records
    return Measurement(
        seconds, {"documents": len(lengths), "rows": rows, "fill": float(lengths.sum()) / rows / ROW_LENGTH}
    )


def measure_rows_ahead(run: Run) -> Measurement:
    """Returns the seconds until all rows of an epoch have been made, the plan included."""
    work = dataclasses.replace(run.work(), one_epoch=True)
    documents = work.source.values if isinstance(work.source, Records) else []
    adapter: Any = PEERS[run.contender.peer].adapter()
    if run.contender.peer == "trl":
        table = adapter.table(documents)
        run.gate()
        start = time.perf_counter()
        rows = adapter.rows(table, ROW_LENGTH)
    else:
        run.gate()
        start = time.perf_counter()
        stream = adapter.open(work, run.contender)
        rows = sum(len(batch["tokens"]) for batch in stream.batches)
        stream.close()
    return Measurement(time.perf_counter() - start, {"documents": len(documents), "rows": rows})


def measure_fill(run: Run) -> Measurement:
    """Returns how much of the rows of an epoch is filled, in percent."""
    work = run.work()
    stream = PEERS[run.contender.peer].adapter().open(work, run.contender)
    run.gate()
    tokens = sum(len(document) for document in work.source.values) if isinstance(work.source, Records) else 0
    rows = filled = 0
    # About an epoch of an endless stream: rows that are short because an epoch ends would count for more in one.
    while filled < tokens:
        batch = next(stream.batches)
        rows += len(batch["tokens"])
        filled += int(np.count_nonzero(batch["tokens_segment_ids"]))
    stream.close()
    return Measurement(100 * filled / rows / ROW_LENGTH)


def _as_they_come(name: str, packing: str, view: Callable[[Any], Any]) -> Case:
    """Returns the case of one way to pack documents whose lengths are not known ahead."""

    def work(scale: Scale) -> Work:
        documents = data.documents(scale.pick(tiny=128, quick=30_000, full=100_000))
        return Work(Records(documents), (), ROWS_IN_BATCH, row_length=ROW_LENGTH, packing=packing)

    return Case(
        name=name,
        title=f"documents in memory, packed as they come ({packing}) into rows of 2,048 tokens, batch {ROWS_IN_BATCH}",
        make_work=work,
        contenders=(
            *modes("millstream"),
            *chains(),
            *modes("grain", "Dataset"),
        ),
        goals=(
            *chain_goals(10),
            Goal("10 times Grain, without workers", 10, Pick("grain", 0), Pick("millstream", 0)),
        ),
        unit="cells/s",
        view=view,
        count=number_of_cells,
    )


BY_WORKERS = "rows by workers"
"""An operation on rows follows the packer: workers then lay the rows out."""


def measure_consumer(run: Run) -> Measurement:
    """Returns the milliseconds that a batch takes this process, while workers do theirs: the least of some rounds."""
    work = run.work()
    if run.contender.mode == BY_WORKERS:
        work = dataclasses.replace(work, steps=(Map(identity),))
    stream = PEERS[run.contender.peer].adapter().open(work, run.contender)
    num_batches = run.scale.pick(tiny=2, quick=500, full=2000)
    spent = []
    for _ in range(6):
        start = time.process_time()
        for _ in itertools.islice(stream.batches, num_batches):
            pass
        spent.append(time.process_time() - start)
    stream.close()
    # The first round begins before the workers do.
    return Measurement(1000 * min(spent[1:]) / num_batches)


_WHOLE = ("Dataset", "Dataset, best fit")
"""Grain's packers of whole documents: the first is first fit."""

CASES = (
    Case(
        name="pack_plan",
        title="the plan of 10^7 documents in rows of 2,048 tokens, from their lengths (10^6 in quick runs)",
        make_work=_documents,
        contenders=(
            Contender("millstream", mode="best_fit"),
            Contender("olmo_core"),
            Contender("bare", mode="sort"),
        ),
        goals=(Goal("no longer than to sort the lengths, twice at most", 0.5, Pick("bare")),),
        measure=measure_plan,
        unit="s",
        higher_is_better=False,
    ),
    Case(
        name="pack_plan_split",
        title="the same, of documents laid end to end and cut",
        make_work=_documents,
        contenders=(Contender("millstream", mode="concat_then_split"), Contender("bare", mode="sums")),
        measure=measure_plan,
        unit="s",
        higher_is_better=False,
    ),
    Case(
        name="pack_ahead",
        title="until 100,000 documents in memory (30,000 in quick runs) are in rows of 2,048 tokens, the plan included",
        make_work=_documents,
        contenders=(
            *modes("millstream"),
            Contender("grain", mode="Dataset, best fit"),
            Contender("trl"),
        ),
        goals=(Goal("no later than TRL, without workers", 1, Pick("trl"), Pick("millstream", 0)),),
        measure=measure_rows_ahead,
        unit="s",
        higher_is_better=False,
    ),
    Case(
        name="pack_fill",
        title="how full rows of 2,048 tokens are",
        make_work=_documents,
        contenders=(
            Contender("millstream"),
            *(Contender("grain", mode=mode) for mode in (*_WHOLE, "Dataset, concatenated")),
        ),
        goals=(Goal("99.9 %", 1, 99.9),),
        measure=measure_fill,
        unit="%",
    ),
    Case(
        name="pack_rows",
        title=f"documents in memory, packed into rows of 2,048 tokens, batch {ROWS_IN_BATCH}; documents that come",
        make_work=_documents,
        contenders=(
            Contender("millstream"),
            Contender("millstream", threads=None),
            Contender("millstream", workers=2),
            *modes("millstream_unpacked"),
            *(Contender("grain", mode=mode) for mode in _WHOLE),
            Contender("grain", workers=2, mode="Dataset"),
            Contender("bare", mode="loop"),
            Contender("bare", mode="documents"),
        ),
        goals=(
            Goal("5 times Grain", 5, Pick("grain")),
            Goal("0.8 of the bare loop, without workers", 0.8, Pick("bare", mode="loop"), Pick("millstream", 0)),
        ),
        view=sums_of_documents,
        count=number_of_documents,
    ),
    Case(
        name="pack_consumer",
        title=f"time of the consumer for a batch of {ROWS_IN_BATCH} rows, packed as they come (first fit), 2 workers",
        make_work=lambda scale: dataclasses.replace(_documents(scale), packing="first fit"),
        contenders=(
            Contender("millstream", workers=2, threads=None),
            Contender("millstream", workers=2, threads=None, mode=BY_WORKERS),
        ),
        goals=(
            Goal(
                "laying rows out takes the consumer no longer than having workers do it",
                1,
                Pick("millstream", mode=BY_WORKERS),
                Pick("millstream", mode=""),
            ),
        ),
        measure=measure_consumer,
        unit="ms",
        higher_is_better=False,
    ),
    _as_they_come("pack_first_fit", "first fit", sums_of_documents),
    _as_they_come("pack_best_fit", "best fit", sums_of_documents),
    _as_they_come("pack_split", "concatenated", tokens_alone),
)
