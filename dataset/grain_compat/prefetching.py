"""Prefetching by threads, and options for a whole chain, under Grain's names."""

from typing import Any, SupportsIndex

from millstream.checks import as_integer
from millstream.dataset.chain import Chain
from millstream.dataset.iter_dataset import IterDataset
from millstream.dataset.options import DatasetOptions
from millstream.dataset.stream_nodes import Ahead, ReadIterDataset
from millstream.dataset.streams import as_stream
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions


class ThreadPrefetchIterDataset(Ahead):
    """The same elements, prefetched by a thread.

    A chain over a `MapDataset` prefetches by itself, as set by its `ReadOptions`, and is unchanged. After a stream
    (a mixture, or a user-defined dataset), the operations run in the thread, and the stream itself in the thread of the
    consumer. Directly after a combination, the thread serves those of its datasets that do not prefetch.

    Args:
        parent: the dataset.
        prefetch_buffer_size: the maximum number of elements that are ready or in work, rounded up as in `ReadOptions`;
            0 for no thread.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> dataset = millstream.MapDataset.range(4).map(lambda x: x * 10)
        >>> list(millstream.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=2))
        [0, 10, 20, 30]
    """

    def __init__(self, parent: Any, *, prefetch_buffer_size: SupportsIndex) -> None:
        size = as_integer(prefetch_buffer_size, "prefetch_buffer_size", minimum=0)
        stream = as_stream(parent, "parent")
        reading = ReadOptions(1, size) if size and not _works_ahead(stream) else None
        super().__init__(stream, MultiprocessingOptions(), reading)


class WithOptionsIterDataset(Ahead):
    """The same elements, with options for the whole chain.

    Args:
        parent: the dataset.
        options: the options.

    Raises:
        TypeError: an argument is of the wrong kind.

    Examples:
        >>> options = millstream.experimental.DatasetOptions(min_shm_size=1024)
        >>> list(millstream.experimental.WithOptionsIterDataset(millstream.MapDataset.range(3), options))
        [0, 1, 2]
    """

    def __init__(self, parent: Any, options: DatasetOptions) -> None:
        if not isinstance(options, DatasetOptions):
            raise TypeError(f"options must be DatasetOptions, got {type(options).__name__}.")
        super().__init__(as_stream(parent, "parent"), MultiprocessingOptions(), None)
        self.options = options


def multithread_prefetch(
    ds: Any, num_threads: SupportsIndex, buffer_size: SupportsIndex, sequential_slice: bool = False
) -> IterDataset[Any]:
    """Returns the same elements, prefetched by threads.

    Args:
        ds: the dataset.
        num_threads: the number of threads, 0 for none.
        buffer_size: the maximum number of elements that each keeps ready.
        sequential_slice: accepted for compatibility with Grain, without effect: there is one order of elements.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> dataset = millstream.MapDataset.range(4).map(lambda x: x * 10)
        >>> list(millstream.experimental.multithread_prefetch(dataset, num_threads=2, buffer_size=4))
        [0, 10, 20, 30]
    """
    del sequential_slice
    threads = as_integer(num_threads, "num_threads", minimum=0)
    size = as_integer(buffer_size, "buffer_size", minimum=1)
    reading = ReadOptions(threads, threads * size) if threads else None
    return Ahead(as_stream(ds, "ds"), MultiprocessingOptions(), reading)


def _works_ahead(dataset: IterDataset[Any]) -> bool:
    """True if a dataset prefetches by itself."""
    chain = Chain.of(dataset)
    if chain.num_local:
        return chain.local_reading is not None
    if chain.workers.num_workers or chain.reading:
        return True
    return isinstance(chain.leaf, ReadIterDataset) and chain.leaf.reading.reads_ahead
