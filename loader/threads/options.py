"""Options for speed and memory. None of them changes what a loader yields."""

import dataclasses
import math
import os
from collections.abc import Callable

from millstream.core.checks import as_flag, as_integer, as_integer_or_none, as_seconds, named_fields
from millstream.loader.threads.resources import cores_of_groups


def available_cores() -> int:
    """Returns the number of cores that this process may use, at least 1.

    It is limited by the process's affinity (from Python 3.13 on also by `PYTHON_CPU_COUNT`) and by the quotas of its
    control groups: a container that may use 2 cores of 64 has 2. A fractional quota is rounded up.
    """
    cores: int | None
    if hasattr(os, "process_cpu_count"):
        cores = os.process_cpu_count()
    elif hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count()
    return max(1, min(cores or 1, cores_of_groups()))


@named_fields
@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """Read-ahead by threads, in this process or in each worker process.

    The threads read records and run the operations of coming blocks while the consumer works. They help if a read
    waits (for a disk or network) or if an operation releases the interpreter's lock (decoding, NumPy on large arrays).
    They cost memory for elements that are ready early. Blocks of plain data in memory (lists, arrays, a
    `RangeDataSource`) that take less than a millisecond run in the consumer's own thread, so the default suits these as
    well. Reads of files, networks or a class of your own never run there, because nothing could end one that hangs.

    The defaults are those of Grain: enough threads for a remote disk. They read further ahead only while the consumer
    has to wait, and only as many run concurrently as shorten its waits.

    Attributes:
        num_threads: the maximum number of reads in flight in this process, or in each worker process. The numbers of
            chains below an interleave, mixture or zip add up, to at most 64. With 0, nothing is read ahead, and the
            consumer's or worker's thread does everything. A read is one record, or all records of a call if the
            source has batched reads; in a mixture, those of one source. Workers have several calls in flight only if
            reads wait for storage, and run operations in one thread unless the source reads record by record. Quick
            work, such as records before a Filter or small batches of packed rows, is done several blocks per call.
        prefetch_buffer_size: the maximum number of records that are ready or in work ahead of the consumer, rounded up
            to whole blocks (a block is one batch), and at least two blocks, so that one is computed while another
            waits. Example: batches of 64 images of 200 KB, with the default of 500 records, need at most
            8 x 64 x 200 KB = 100 MB. For high-latency storage with batched reads, set it to the number of batches that
            should be in flight, in records. With 0, there are no threads.
        max_buffer_bytes: the maximum total size of elements made in advance, in bytes, over all workers: batches, the
            children of a FlatMap, groups that are being collected, and shared memory. Default: a quarter of the memory
            that is available to this process, and 256 MB for batches that workers make beyond `worker_count * (1 +
            worker_buffer_size)` because reads wait. Sizes are estimated from earlier elements. If it is below two
            blocks, one block is computed at a time, which is slow. If it is below one block, a warning is logged.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> reading = millstream.ReadOptions(num_threads=64, prefetch_buffer_size=2048)  # a remote store
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
        """True if threads work before the consumer asks."""
        return self.num_threads > 0 and self.prefetch_buffer_size > 0


@named_fields
@dataclasses.dataclass(frozen=True)
class MultiprocessingOptions:
    """Worker processes.

    Attributes:
        num_workers: the number of processes; 0 for none.
        per_worker_buffer_size: the number of finished blocks that each worker keeps ready ahead of the consumer, at
            least 1. A block is one batch, or several small batches of packed rows.
        enable_profiling: accepted for compatibility with Grain, without effect: `iterator.profile()` always includes
            workers.
        stall_timeout: the number of seconds, above 0, that the consumer waits for a worker that makes no progress
            before this is an error; `math.inf` to wait forever.
        worker_init_fn: called once in each worker process, replacements of dead ones included, before it computes
            anything: `worker_init_fn(index, count)` with the worker's index, 0 … count - 1. It must be picklable. None
            for nothing.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> workers = millstream.MultiprocessingOptions(num_workers=8, per_worker_buffer_size=2)
        >>> chain = millstream.MapDataset.range(1000).to_iter_dataset().batch(32).mp_prefetch(workers)
    """

    num_workers: int = 0
    per_worker_buffer_size: int = 1
    enable_profiling: bool = dataclasses.field(default=False, repr=False)
    stall_timeout: float = 600.0
    worker_init_fn: Callable[[int, int], object] | None = dataclasses.field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_workers", as_integer(self.num_workers, "num_workers", 0))
        object.__setattr__(
            self, "per_worker_buffer_size", as_integer(self.per_worker_buffer_size, "per_worker_buffer_size", 1)
        )
        object.__setattr__(self, "stall_timeout", as_seconds(self.stall_timeout, "stall_timeout"))
        object.__setattr__(self, "enable_profiling", as_flag(self.enable_profiling, "enable_profiling"))
        if self.worker_init_fn is not None and not callable(self.worker_init_fn):
            raise TypeError(f"worker_init_fn must be a function of index and count, got {self.worker_init_fn!r}.")

    @property
    def stall_limit(self) -> str:
        """A sentence about the time after which a stall becomes an error."""
        if math.isinf(self.stall_timeout):
            return "No timeout is set: waiting indefinitely."
        return f"After {self.stall_timeout:g} s this becomes an error (stall_timeout)."
