"""Lineage of a 1:1 pipeline: the record keys of a step, and the steps of record keys. Nothing is read."""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.checks import as_integer
from millstream.loader.pipeline.plan import Plan
from millstream.loader.threads.thread_settings import ThreadSettings, in_fresh_thread
from millstream.samplers.occurrences import Occurrences, checked_keys, checked_stop


def keys_of_step(plan: Plan, step: int) -> NDArray[np.int64]:
    """Returns the keys of the records in one batch of this shard, in order.

    Raises:
        IndexError: there is no such batch.
        TypeError: the pipeline is not 1:1.
    """
    if not plan.one_to_one:
        raise TypeError(
            f"record_keys(step) needs a 1:1 pipeline: the batches after {plan.deciding}, depend on the elements."
        )
    step, shard = as_integer(step, "step"), plan.shards[0]
    if not shard.block_limit:
        raise IndexError(f"step {step} does not exist: this DataLoader yields no batch.")
    if not 0 <= step < shard.block_limit:
        raise IndexError(f"step must be between 0 and {shard.block_limit - 1}, the last batch, got {step}.")
    # A user's sampler must not see settings of this thread, because other threads would then compute other keys.
    locate = functools.partial(plan.locate, step, step + 1)
    origins = locate() if ThreadSettings().are_neutral() else in_fresh_thread(locate)
    if step == shard.partition.whole_blocks:
        is_used = origins.position < shard.partition.tail.start + shard.tail_records
        return origins.record_key[is_used]
    return origins.record_key.copy()


def steps_of_keys(plan: Plan, keys: Any, start: int, stop: int | None) -> NDArray[np.int64]:
    """Returns the steps whose global batches contain each key, a row per key.

    Raises:
        TypeError: the pipeline is not 1:1, or the sampler cannot be inverted.
        ValueError: the order is endless, and stop is None.
    """
    if not plan.one_to_one:
        raise TypeError(
            f"steps_of(keys) needs a 1:1 pipeline: the batches after {plan.deciding}, depend on the elements. Keep "
            "the keys with the elements (meta_features of a packer), or filter in advance (millstream.surviving_keys)."
        )
    sampler, partition = plan.pipeline.order, plan.partition
    if not hasattr(sampler, "occurrences"):
        raise TypeError(
            f"steps_of(keys) needs a sampler that can be inverted, and {type(plan.pipeline.sampler).__name__} has no "
            "positions_of(keys)."
        )
    wanted, size = checked_keys(keys), partition.global_block
    start = as_integer(start, "start", minimum=0)
    last = None if stop is None else as_integer(stop, "stop", minimum=0) * size
    found = sampler.occurrences(wanted, checked_stop(last, partition.length))
    is_counted = (found.positions >= start * size) & plan.shards[0].are_delivered(found.positions)
    return Occurrences(found.rows[is_counted], found.positions[is_counted] // size).table(len(wanted))
