"""millstream: records as they are or, where a contender says so, as columns, batched before any step."""

from typing import Any, final

import millstream
from suite.case import Contender, UnsupportedError
from suite.peers.base import Stream, columns_of
from suite.work import SEED, Columns, Files, Filter, Map, RandomMap, Records, Step, Work


@final
class MillstreamAdapter:
    """Opens a `DataLoader`."""

    def open(self, work: Work, contender: Contender) -> Stream:
        """Returns a new stream."""
        as_columns = contender.mode == "columns"
        source = millstream.InMemoryDataSource(columns_of(work)) if as_columns else _source(work)
        sampler = millstream.IndexSampler(
            len(source), shuffle=True, seed=SEED, num_epochs=1 if work.one_epoch else None
        )
        threads = contender.threads
        loader = millstream.DataLoader(
            data_source=source,
            sampler=sampler,
            operations=_operations(work, batches_first=as_columns),
            worker_count=contender.workers,
            shard_options=millstream.ShardOptions(*work.shard),
            read_options=millstream.ReadOptions() if threads is None else millstream.ReadOptions(num_threads=threads),
        )
        iterator = iter(loader)
        return Stream(iterator, iterator.close, _Position(iterator), loader)

    def sample_keys(self, num_records: int, starts: list[int], count: int) -> list[Any]:
        """Returns the record keys of `count` positions from each start on."""
        sampler = millstream.IndexSampler(num_records, shuffle=True, seed=SEED)
        return [sampler.record_keys(start, start + count) for start in starts]


ADAPTER = MillstreamAdapter()


@final
class _Position:
    def __init__(self, iterator: millstream.DataLoaderIterator) -> None:
        self._iterator = iterator
        self.get_state = iterator.get_state
        self.set_state = iterator.set_state

    def state_at(self, step: int) -> bytes:
        self._iterator.seek(step)
        return self._iterator.get_state()


def _source(work: Work) -> Any:
    match work.source:
        case Records(values):
            return values
        case Columns(arrays):
            return millstream.InMemoryDataSource(arrays)
        case Files(paths=paths):
            return millstream.ArrayRecordDataSource(list(paths))


def _operations(work: Work, *, batches_first: bool) -> list[Any]:
    batch = [millstream.Batch(work.batch_size)] if work.batch_size else []
    if not batches_first:
        return [*map(_operation, work.steps), *batch]
    if any(not isinstance(step, Map) or step.graph_of_many is not step.function for step in work.steps):
        raise UnsupportedError("a step does not take whole batches as they are")
    return [*batch, *map(_operation, work.steps)]


def _operation(step: Step) -> Any:
    match step:
        case Map():
            return step.function
        case RandomMap():
            return millstream.RandomMapTransform(step.function)
        case Filter():
            return millstream.FilterTransform(step.function)
