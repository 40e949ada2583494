"""Ray Data: a stream of batches of keys, globally shuffled here, of which actors make batches of records.

It reads neither ArrayRecord nor lists by keys: its actors do that by the same sources as millstream's.
"""

from collections.abc import Iterator
from typing import Any, final

import numpy as np
import ray

from suite.case import Contender, UnsupportedError
from suite.peers.bare_loop import stacked
from suite.peers.base import Stream, our_source
from suite.peers.clusters import ray_cluster
from suite.work import SEED, Files, Records, Step, Work, apply_to_many

KEYS_IN_BLOCK = 4096
"""A task has this many records."""

WHOLE = "record"
"""The only column, where records are no dicts."""


@final
class RayDataAdapter:
    """Iterates over a `Dataset`."""

    def open(self, work: Work, contender: Contender) -> Stream:
        if not work.batch_size or not isinstance(work.source, Records | Files):
            raise UnsupportedError("it makes batches, of records that have keys")
        ray_cluster(contender.workers)
        ray.data.DataContext.get_current().enable_progress_bars = False
        return Stream(_batches(work, contender.workers))


ADAPTER = RayDataAdapter()


def _batches(work: Work, workers: int) -> Iterator[Any]:
    source = our_source(work.source) if isinstance(work.source, Files) else work.source.values  # type: ignore[union-attr]
    rng = np.random.default_rng(SEED)
    while True:
        keys = rng.permutation(len(source))
        blocks = np.array_split(keys, max(workers, len(keys) // KEYS_IN_BLOCK))
        made = ray.data.from_numpy(blocks).map_batches(
            Steps, fn_constructor_args=(source, work.steps), batch_size=work.batch_size, concurrency=workers
        )
        for batch in made.iter_batches(batch_size=work.batch_size, prefetch_batches=2 * workers):
            yield batch.get(WHOLE, batch)
        if work.one_epoch:
            return


@final
class Steps:
    """The work of an actor: reads records, and applies the steps to them."""

    def __init__(self, source: Any, steps: tuple[Step, ...]) -> None:
        self._source = source
        self._steps = steps
        self._rng = np.random.default_rng(SEED)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        keys = batch["data"].tolist()
        read = getattr(self._source, "__getitems__", None)
        records = read(keys) if read else [self._source[key] for key in keys]
        made = stacked(apply_to_many(self._steps, list(records), self._rng))
        return made if isinstance(made, dict) else {WHOLE: made}
