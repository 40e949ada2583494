"""Options for speed and memory, none of which changes what a loader yields; and the budgets of this machine.

Limits are also those of this process's control groups, such as those of a container or a batch job. Files are read
without pathlib, which is slow to import, and the first batch of a loader with workers waits for this module.
"""

import contextlib
import dataclasses
import math
import os
import resource
import sys
from collections.abc import Callable, Iterator

from millstream.core.checks import as_flag, as_integer, as_integer_or_none, as_positive, named_fields


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
            `worker_count="auto"` reads with up to 64 if reads wait and this is the default.
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
        per_worker_buffer_size: the number of finished batches that each worker keeps ready ahead of the consumer, at
            least 1. Quick batches count as one together, up to 10 ms of work, 1 MB and 2048 records.
        enable_profiling: accepted for compatibility with Grain, without effect: `iterator.profile()` always includes
            workers.
        stall_timeout: the number of seconds, above 0, that the consumer waits for a worker that makes no progress
            before this is an error; `math.inf` to wait forever.
        worker_init_fn: called once in each worker process, replacements of dead ones included, before it computes
            anything: `worker_init_fn(index, count)` with the worker's index, 0 … count - 1. It must be picklable. None
            for nothing.
        chooses_workers: True to begin in this process, and to choose the number of workers at run time, instead of
            `num_workers`: as `worker_count="auto"` of a `DataLoader`, and `mp_prefetch("auto")`.

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
    chooses_workers: bool = dataclasses.field(default=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_workers", as_integer(self.num_workers, "num_workers", 0))
        object.__setattr__(
            self, "per_worker_buffer_size", as_integer(self.per_worker_buffer_size, "per_worker_buffer_size", 1)
        )
        object.__setattr__(
            self, "stall_timeout", as_positive(self.stall_timeout, "stall_timeout", "a number of seconds")
        )
        object.__setattr__(self, "enable_profiling", as_flag(self.enable_profiling, "enable_profiling"))
        object.__setattr__(self, "chooses_workers", as_flag(self.chooses_workers, "chooses_workers"))
        if self.chooses_workers and self.num_workers:
            raise ValueError(
                f"num_workers must be 0 with chooses_workers=True, got {self.num_workers}. Remove one of them."
            )
        if self.worker_init_fn is not None and not callable(self.worker_init_fn):
            raise TypeError(f"worker_init_fn must be a function of index and count, got {self.worker_init_fn!r}.")

    def of_number(self, num_workers: int) -> "MultiprocessingOptions":
        """Returns the same options with a number of workers."""
        return dataclasses.replace(self, num_workers=num_workers, chooses_workers=False)

    @property
    def are_wanted(self) -> bool:
        """True if there are workers, or may be at run time."""
        return self.num_workers > 0 or self.chooses_workers

    @property
    def stall_limit(self) -> str:
        """A sentence about the time after which a stall becomes an error."""
        if math.isinf(self.stall_timeout):
            return "No timeout is set: waiting indefinitely."
        return f"After {self.stall_timeout:g} s this becomes an error (stall_timeout)."


ROOT = ""
"""The folder that contains `proc` and `sys`, without its slash."""

MEMORY_SHARE = 0.5
"""The share of the available memory for batches in flight and batches kept by the consumer."""

BUFFER_SHARE = 0.25
"""The share of the available memory for elements read in advance."""

FLIGHT_BYTES = 256 << 20
"""The total size of batches that workers have in flight beyond their buffers, unless `max_buffer_bytes` is given."""

THREAD_BYTES = 160 << 20
"""Upper bound on the address space of a thread: its stack, and an arena of the C library with room to align it."""


def memory_budget() -> int:
    """Returns the total size of all arenas in bytes, a share of the memory that is available now.

    If this is little, batches cross as private copies, which take memory only while they exist.
    """
    return int(MEMORY_SHARE * memory_available())


def buffer_budget(max_bytes: int | None) -> int:
    """Returns the budget for elements read in advance, in bytes. With None, it is a share of the available memory."""
    return int(BUFFER_SHARE * memory_available()) if max_bytes is None else max_bytes


def flight_budget(max_bytes: int | None) -> int:
    """Returns the size in bytes up to which workers have more calls in flight than their buffers hold."""
    return FLIGHT_BYTES if max_bytes is None else max_bytes


def memory_available() -> int:
    """Returns the number of bytes that this process can still allocate, as far as the system reports it.

    It is the minimum of the machine's available memory, the memory left below the limits of its control groups (such as
    a container's; above them the system kills instead of refusing), and the address space left.
    """
    return min(_machine_memory(), free_address_space(), _free_memory_in_groups())


def free_address_space() -> int:
    """Returns the number of bytes that this process can still map, or `sys.maxsize` without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        mapped = int(_text_of(f"{ROOT}/proc/self/statm").split()[0]) * resource.getpagesize()
    except OSError:
        mapped = 0
    return max(0, limit - mapped)


def affordable_threads(num_threads: int) -> int:
    """Returns the number of threads, up to `num_threads`, that the limit of address space allows, but at least one.

    They may take half of the address space left. With more, the next array would raise MemoryError, however small.
    """
    return min(num_threads, max(1, free_address_space() // 2 // THREAD_BYTES))


def _machine_memory() -> int:
    try:
        lines = _text_of(f"{ROOT}/proc/meminfo").splitlines()
    except OSError:
        return 1 << 33
    fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _free_memory_in_groups() -> int:
    """Returns the number of bytes that this process's groups may still use, or `sys.maxsize` without a limit.

    File pages that the kernel can reclaim immediately do not count as used. The limits of all enclosing groups apply.
    """
    free = sys.maxsize
    for group in _groups("memory"):
        # Above `high`, the kernel throttles a process until it hardly runs.
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.high", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            with contextlib.suppress(OSError, ValueError):
                limit = int(_text_of(f"{group}/{limit_name}"))
                free = min(free, max(0, limit - int(_text_of(f"{group}/{usage_name}")) + _reclaimable(group)))
    return free


def cores_of_groups() -> int:
    """Returns the number of cores that this process's groups may use, rounded up, or `sys.maxsize` without a limit."""
    fewest = sys.maxsize
    for group in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = _text_of(f"{group}/cpu.max").split()
            fewest = min(fewest, _rounded_up(quota, period))
        with contextlib.suppress(OSError, ValueError):
            quota, period = _text_of(f"{group}/cpu.cfs_quota_us"), _text_of(f"{group}/cpu.cfs_period_us")
            fewest = min(fewest, _rounded_up(quota, period))
    return fewest


def _rounded_up(quota: str, period: str) -> int:
    """Returns a quota as a number of cores, or raises a ValueError without one: it is "max" or negative."""
    if int(quota) <= 0 or int(period) <= 0:
        raise ValueError(f"no limit: {quota}")
    return max(1, math.ceil(int(quota) / int(period)))


def _reclaimable(group: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split() for line in _text_of(f"{group}/memory.stat").splitlines())
        # Version 1 counts nested groups under separate names.
        prefix = "total_" if "total_inactive_file" in fields else ""
        return int(fields[f"{prefix}inactive_file"]) + int(fields[f"{prefix}active_file"])
    return 0


def _groups(controller: str) -> Iterator[str]:
    """Yields the folders of this process's groups and of all enclosing groups.

    A container may see the names that its groups have outside. Only the outermost folder, its own, then exists.
    """
    mount = f"{ROOT}/sys/fs/cgroup"
    try:
        lines = _text_of(f"{ROOT}/proc/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            # Version 2, alone or next to version 1.
            mounts = [mount, f"{mount}/unified"]
        elif controller in controllers.split(","):
            mounts = [f"{mount}/{controller}", f"{mount}/{controllers}"]
        else:
            continue
        for top in mounts:
            group = f"{top}/{path}".rstrip("/")
            yield group
            while len(group) > len(top):
                group = os.path.dirname(group)  # noqa: PTH120
                yield group


def _text_of(path: str) -> str:
    with open(path) as file:  # noqa: PTH123  (see above)
        return file.read()
