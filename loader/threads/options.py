"""How a loader runs: settings for speed and memory, none of which changes what it yields."""

import dataclasses
import math
import os
from typing import TYPE_CHECKING

from millstream.checks import as_flag, as_integer, as_integer_or_none, as_seconds, named_fields
from millstream.loader.threads import control_groups

if TYPE_CHECKING:
    from pathlib import Path


def available_cores(root: "str | Path" = control_groups.ROOT) -> int:
    """Returns how many cores this process may use, at least 1.

    Its affinity counts (and from Python 3.13 on `PYTHON_CPU_COUNT`), and the quotas of its control groups: a container
    that may use 2 cores of 64 has 2. A quota that is not a whole number is rounded up.

    Args:
        root: where `proc` and `sys` are.
    """
    if hasattr(os, "process_cpu_count"):
        cores = os.process_cpu_count()
    elif hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count()
    return max(1, min(cores or 1, control_groups.cores(root)))


@named_fields
@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """Read-ahead by threads, in this process or in each worker process.

    The threads read records and run the operations of coming blocks while the consumer works. They help where a read
    waits (disks, networks) or an operation leaves the interpreter's lock (decoding, NumPy on large arrays), and cost
    memory for what is ready early. A block that takes less than a millisecond is not worth handing over: the
    consumer's own thread makes it, so the default suits data in memory as well.

    The default is that of Grain: enough threads for a remote disk. They read further ahead only while the consumer
    has to wait, and only as many run at once as shorten its waits.

    Attributes:
        num_threads: the maximum number of reads in flight in this process, or in each worker process, 0 for none in
            advance: the consumer's or worker's thread then does everything. A read is one record, or all records of a
            call if the source reads many together. Workers have several calls in flight only where reads wait for
            storage, and run operations in one thread unless the source reads record by record.
            Quick work is done a few blocks at a time, such as records before a Filter, and small batches of rows that
            are packed ahead.
        prefetch_buffer_size: how many records may be ready or in work ahead of the consumer, rounded up to whole
            blocks (a block is one batch), and two blocks in any case, so that one is made while another waits. Example:
            batches of 64 images of 200 KB, and the default of 500 records, need at most 8 x 64 x 200 KB = 100 MB. A
            source that reads many records at once reads this many blocks at the same time: for one with a long way to
            its data, make it as many batches as should be on their way. With 0, there are no threads.
        max_buffer_bytes: the maximum number of bytes that elements read in advance may take, those of all workers
            together: batches, the children of a FlatMap, groups that are being collected, and shared memory. None for a
            quarter of the memory that is available to this process. Sizes are estimated from earlier elements. One
            block is made at a time if the maximum is below two blocks: that is slow, and a warning if it is below one.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> reading = millstream.ReadOptions(num_threads=64, prefetch_buffer_size=2048)  # a store far away
        >>> loader = millstream.load(range(1000), batch_size=128, read_options=reading)
    """

    num_threads: int = 16
    prefetch_buffer_size: int = 500
    max_buffer_bytes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_threads", as_integer(self.num_threads, "num_threads", 0))
        object.__setattr__(
            self, "prefetch_buffer_size", as_integer(self.prefetch_buffer_size, "prefetch_buffer_size", 0)
        )
        object.__setattr__(self, "max_buffer_bytes", as_integer_or_none(self.max_buffer_bytes, "max_buffer_bytes"))

    @property
    def reads_ahead(self) -> bool:
        """Whether threads work before the consumer asks."""
        return self.num_threads > 0 and self.prefetch_buffer_size > 0


@named_fields
@dataclasses.dataclass(frozen=True)
class MultiprocessingOptions:
    """Worker processes.

    Attributes:
        num_workers: how many processes, 0 for none.
        per_worker_buffer_size: how many finished blocks each worker keeps ready ahead of the consumer, at least 1; a
            block is one batch, or several small ones of rows that are packed ahead.
        stall_timeout: how many seconds, above 0, the consumer waits for a worker that is busy with one block before
            that is an error; `math.inf` for however long that takes.
        enable_profiling: accepted for Grain's sake, and without effect: `iterator.profile()` always knows what the
            workers do.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> workers = millstream.MultiprocessingOptions(num_workers=8, per_worker_buffer_size=2)
        >>> chain = millstream.MapDataset.range(1000).to_iter_dataset().batch(32).mp_prefetch(workers)
    """

    num_workers: int = 0
    per_worker_buffer_size: int = 1
    stall_timeout: float = 600.0
    enable_profiling: bool = dataclasses.field(default=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_workers", as_integer(self.num_workers, "num_workers", 0))
        object.__setattr__(
            self, "per_worker_buffer_size", as_integer(self.per_worker_buffer_size, "per_worker_buffer_size", 1)
        )
        object.__setattr__(self, "stall_timeout", as_seconds(self.stall_timeout, "stall_timeout"))
        object.__setattr__(self, "enable_profiling", as_flag(self.enable_profiling, "enable_profiling"))

    @property
    def stall_limit(self) -> str:
        """How long a worker that is busy with one block is waited for, as a sentence."""
        if math.isinf(self.stall_timeout):
            return "It is waited for, however long that takes."
        return f"After {self.stall_timeout:g} s this becomes an error (stall_timeout)."
