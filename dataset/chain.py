"""Straight chains: operations after a leaf that run together, and the threads that they request."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self, final

from millstream.dataset.iterators.running import FixedChain, WarmWorkers
from millstream.dataset.stream_steps import NO_THREADS, NO_WORKERS, Ahead, Join, Operate, Read, StreamStep
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.threads.shared_threads import joint_threads, min_buffer_bytes
from millstream.transforms import Transformation

_WARM = "_warm"
"""The attribute of a step with the idle worker processes of its iterators. It is not pickled."""


@final
@dataclasses.dataclass(frozen=True)
class Chain:
    """Operations after a leaf that run together.

    Attributes:
        leaf: the source of the elements: a `Read`, a join, or a stream that iterates by itself.
        reading: the threads to run them in, in this process or in each worker; None for those of the leaf.
        num_local: the number of operations after the last `mp_prefetch`, which run in this process.
        local_reading: the threads to run these in; None for the consumer's thread.
    """

    leaf: Any
    operations: tuple[Transformation, ...]
    workers: MultiprocessingOptions
    reading: ReadOptions | None
    num_local: int
    local_reading: ReadOptions | None

    @classmethod
    def of(cls, step: StreamStep) -> Self:
        operations: list[Transformation] = []
        workers, reading, num_local, local_reading, has_boundary = NO_WORKERS, None, 0, None, False
        while not step.is_leaf:
            if isinstance(step, Operate):
                operations.append(step.operation)
            elif isinstance(step, Ahead):
                if operations and step.is_boundary and not has_boundary:
                    num_local, local_reading, reading = len(operations), reading, None
                has_boundary = has_boundary or step.is_boundary
                workers = workers if workers.are_wanted else step.workers
                reading = reading or step.reading
            (step,) = step.above
        return cls(step, tuple(reversed(operations)), workers, reading, num_local, local_reading)

    @property
    def read(self) -> Read | None:
        """The leaf that reads a MapDataset; None if the chain draws from another stream."""
        return self.leaf if isinstance(self.leaf, Read) else None


def fixed_chain(step: StreamStep, chain: Chain) -> FixedChain:
    """Returns a step's chain as it was when its first iterator began. ValueError if the program has changed it."""
    warm = warm_workers_of(step)
    if warm.fixed is None:
        read = chain.read
        source, node = (None, None) if read is None else (read.source, read.above[0])
        warm.fixed = FixedChain(source, node, chain.operations)
    else:
        warm.fixed.check_unchanged()
    return warm.fixed


def is_unchanged(step: StreamStep) -> bool:
    """Returns False if the program has changed a plain value of a step's chain since its first iterator began."""
    fixed = warm_workers_of(step).fixed
    try:
        if fixed is not None:
            fixed.check_unchanged()
    except ValueError:
        return False
    return True


def warm_workers_of(step: StreamStep) -> WarmWorkers:
    warm: WarmWorkers | None = vars(step).get(_WARM)
    # If two threads begin at the same time, both get the same.
    return vars(step).setdefault(_WARM, WarmWorkers()) if warm is None else warm


def share_workers(step: StreamStep, other: StreamStep) -> None:
    """Lets a step that is the same chain as another one use its idle workers."""
    vars(step)[_WARM] = warm_workers_of(other)


def joint_reading(streams: Sequence[StreamStep], reading: ReadOptions | None = None) -> ReadOptions:
    """Returns the threads for one set of workers, or one plan, which does the work of several streams.

    `reading` has those that were requested after them, if any. The smallest limit of bytes is that of all.
    """
    requested = [_requested_reading(stream) for stream in streams]
    if reading is None:
        largest = max(requested, key=lambda one: one.num_threads, default=ReadOptions())
        num_threads = joint_threads([one.num_threads for one in requested])
        reading = dataclasses.replace(largest, num_threads=num_threads)
    return dataclasses.replace(reading, max_buffer_bytes=min_buffer_bytes([reading, *requested]))


def _requested_reading(stream: Any) -> ReadOptions:
    if not isinstance(stream, StreamStep):
        # A MapDataset of datasets, which are not known yet.
        return ReadOptions()
    chain = Chain.of(stream)
    if chain.reading is not None:
        return chain.reading
    if chain.read is not None:
        return chain.read.reading
    return joint_reading(chain.leaf.above) if isinstance(chain.leaf, Join) else NO_THREADS
