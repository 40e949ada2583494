"""SPDL: a pipeline of threads, each of which reads, decodes, crops and stacks one batch at a time."""

import itertools
from collections.abc import Iterator
from typing import Any, final

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from spdl.pipeline import PipelineBuilder

from suite.case import Contender, UnsupportedError
from suite.peers.bare_loop import stacked
from suite.peers.base import Stream
from suite.work import SEED, Files, Work, apply_to_many


@final
class SpdlAdapter:
    """Opens a `Pipeline`."""

    def open(self, work: Work, contender: Contender) -> Stream:
        if not isinstance(work.source, Files) or work.source.format != "array_record" or not contender.threads:
            raise UnsupportedError("it is compared on the images only")
        source = ArrayRecordDataSource(list(work.source.paths))

        def batch_of(numbered: tuple[int, list[int]]) -> Any:
            number, keys = numbered
            # A generator for each batch: threads may not share one.
            rng = np.random.default_rng((SEED, number))
            return stacked(apply_to_many(work.steps, list(source.__getitems__(keys)), rng))

        pipeline = (
            PipelineBuilder()
            .add_source(_keys(work, len(source)))
            .pipe(batch_of, concurrency=contender.threads)
            .add_sink(contender.threads)
            .build(num_threads=contender.threads)
        )
        pipeline.start()
        return Stream(iter(pipeline), pipeline.stop, loader=pipeline)


ADAPTER = SpdlAdapter()


def _keys(work: Work, num_records: int) -> Iterator[tuple[int, list[int]]]:
    size = work.batch_size or 1
    numbers = itertools.count()
    for epoch in itertools.count():
        order = np.random.default_rng((SEED, epoch)).permutation(num_records).tolist()
        for start in range(0, num_records, size):
            yield next(numbers), order[start : start + size]
        if work.one_epoch:
            return
