"""Where and how far ahead a chain works, under the names that Grain gives it: threads, and options for all of it."""

import dataclasses
import enum
from typing import Any, SupportsIndex

from millstream.checks import as_integer, named_fields
from millstream.dataset.chain import Chain
from millstream.dataset.iter_dataset import IterDataset
from millstream.dataset.stream_nodes import Ahead, ReadIterDataset
from millstream.dataset.streams import as_stream
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions


class ThreadPrefetchIterDataset(Ahead):
    """The same elements, made ahead in a thread.

    A chain over a `MapDataset` works ahead by itself, as its `ReadOptions` say, and stays as it is. After a stream
    (a mixture, a dataset of your own), the operations run in the thread; the stream itself is drawn from in the
    consumer's.

    Args:
        parent: the dataset.
        prefetch_buffer_size: how many elements may be ready or in work, rounded up as in `ReadOptions`; 0 for no
            thread.
    """

    def __init__(self, parent: Any, *, prefetch_buffer_size: SupportsIndex) -> None:
        size = as_integer(prefetch_buffer_size, "prefetch_buffer_size", minimum=0)
        stream = as_stream(parent, "parent")
        reading = ReadOptions(1, size) if size and not _works_ahead(stream) else None
        super().__init__(stream, MultiprocessingOptions(), reading)


class WithOptionsIterDataset(Ahead):
    """The same elements, under options for the whole chain.

    Args:
        parent: the dataset.
        options: the options.
    """

    def __init__(self, parent: Any, options: "DatasetOptions") -> None:
        if not isinstance(options, DatasetOptions):
            raise TypeError(f"options must be DatasetOptions, got {type(options).__name__}.")
        super().__init__(as_stream(parent, "parent"), MultiprocessingOptions(), None)
        self.options = options


class ExecutionTrackingMode(enum.Enum):
    """What Grain measures while a dataset is read. Here, time is always measured, at no cost that can be noticed."""

    DISABLED = enum.auto()
    """Nothing."""
    STAGE_TIMING = enum.auto()
    """The time of each operation."""


@named_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Grain's options for a whole chain. None of them changes the elements, here or there.

    Attributes:
        filter_warn_threshold_ratio: accepted for Grain's sake, and without effect: a filter is reported in the log
            where it keeps nothing for a whole epoch.
        filter_raise_threshold_ratio: refused unless None: a filter may drop all it wants.
        execution_tracking_mode: accepted for Grain's sake, and without effect.
        min_shm_size: accepted for Grain's sake, and without effect: large arrays always travel in shared memory.
    """

    filter_warn_threshold_ratio: float | None = 0.9
    filter_raise_threshold_ratio: float | None = None
    execution_tracking_mode: ExecutionTrackingMode = ExecutionTrackingMode.DISABLED
    min_shm_size: int = 0

    def __post_init__(self) -> None:
        if self.filter_raise_threshold_ratio is not None:
            raise ValueError(
                f"filter_raise_threshold_ratio={self.filter_raise_threshold_ratio!r} is not supported: count in the "
                "filter, and raise there."
            )
        if not isinstance(self.execution_tracking_mode, ExecutionTrackingMode):
            raise TypeError(
                f"execution_tracking_mode must be an ExecutionTrackingMode, got {self.execution_tracking_mode!r}."
            )

    def merge(self, other: "DatasetOptions") -> "DatasetOptions":
        """Returns these options, and those of another one where it says anything but the default."""
        defaults = DatasetOptions()
        said = {
            field.name: getattr(other, field.name)
            for field in dataclasses.fields(other)
            if getattr(other, field.name) != getattr(defaults, field.name)
        }
        return dataclasses.replace(self, **said)


def multithread_prefetch(
    ds: Any, num_threads: SupportsIndex, buffer_size: SupportsIndex, sequential_slice: bool = False
) -> IterDataset[Any]:
    """Returns the same elements, made ahead by threads.

    Args:
        ds: the dataset.
        num_threads: how many threads, 0 for none.
        buffer_size: how many elements each may have ready.
        sequential_slice: accepted for Grain's sake, and without effect: the elements come in one order.
    """
    del sequential_slice
    threads = as_integer(num_threads, "num_threads", minimum=0)
    size = as_integer(buffer_size, "buffer_size", minimum=1)
    reading = ReadOptions(threads, threads * size) if threads else None
    return Ahead(as_stream(ds, "ds"), MultiprocessingOptions(), reading)


def _works_ahead(dataset: IterDataset[Any]) -> bool:
    """Whether what a dataset yields is made ahead without being asked for it."""
    chain = Chain.of(dataset)
    if chain.workers.num_workers or chain.reading:
        return True
    return isinstance(chain.leaf, ReadIterDataset) and chain.leaf.reading.reads_ahead
