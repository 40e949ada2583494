"""SPDL: a pipeline of threads, each of which reads, steps and stacks one batch at a time."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from spdl.pipeline import PipelineBuilder

from suite.peers import Stream
from suite.work import SEED, Contender, Files, UnsupportedError, Work, apply_to_many, stacked


def open_stream(work: Work, contender: Contender) -> Stream:
    """Returns the batches of a `Pipeline` of as many threads as the mode says, "2 threads"."""
    if not isinstance(work.source, Files) or work.source.format != "array_record":
        raise UnsupportedError("it is compared on ArrayRecord files only")
    threads = int(contender.mode.split()[0])
    source = ArrayRecordDataSource(list(work.source.paths))

    def batch_of(numbered: tuple[int, list[int]]) -> Any:
        number, keys = numbered
        # A generator for each batch: threads may not share one.
        rng = np.random.default_rng((SEED, number))
        return stacked(apply_to_many(work.steps, list(source.__getitems__(keys)), rng))

    pipeline = (
        PipelineBuilder()
        .add_source(_keys(work, len(source)))
        .pipe(batch_of, concurrency=threads)
        .add_sink(threads)
        .build(num_threads=threads)
    )
    pipeline.start()
    return Stream(iter(pipeline), pipeline.stop)


def _keys(work: Work, num_records: int) -> Iterator[tuple[int, list[int]]]:
    numbers = itertools.count()
    for epoch in itertools.count():
        order = np.random.default_rng((SEED, epoch)).permutation(num_records).tolist()
        for start in range(0, num_records, work.batch_size):
            yield next(numbers), order[start : start + work.batch_size]
        if work.one_epoch:
            return
