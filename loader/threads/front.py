"""How a pipeline was said, which decides what people have to write to have it run otherwise."""

from typing import NamedTuple


class Front(NamedTuple):
    """What advice tells people to write.

    Attributes:
        worker: what a worker is called: `worker process`.
        workers: asks for workers, with {} for how many.
        buffers: asks for finished batches ahead, with {buffer} for how many, of {workers}.
        reading: asks for threads, with {} for the `ReadOptions`.
        is_fed: whether elements come from a stream, which nobody reads by number.
        is_on_cluster: whether the workers are elsewhere, so that the cores of this machine say nothing about them.
        is_debugging: whether none of this has an effect, because everything is made in one thread to find mistakes.
    """

    worker: str = "worker process"
    workers: str = "worker_count={}"
    buffers: str = "worker_buffer_size={buffer}"
    reading: str = "read_options={}"
    is_fed: bool = False
    is_on_cluster: bool = False
    is_debugging: bool = False


LOADER = Front()
"""A `DataLoader`, or what `load` returns."""

ACTORS = Front(worker="Ray actor", workers="workers=RayWorkers(num_workers={})", is_on_cluster=True)
"""The same, with actors."""

DEBUGGED = Front(is_debugging=True)
"""The same, with `debug=True`."""

_MORE_READY = "MultiprocessingOptions({workers}, per_worker_buffer_size={buffer})"

CHAIN = Front(workers=".mp_prefetch({})", buffers=f".mp_prefetch({_MORE_READY})", reading=".to_iter_dataset({})")
"""A chain that begins with a `MapDataset`."""

MIXED_CHAIN = CHAIN._replace(reading=".prefetch({})")
"""A chain after a mixture of such chains."""

FED_CHAIN = MIXED_CHAIN._replace(is_fed=True)
"""A chain after a stream."""

ELASTIC = Front(
    workers="multiprocessing_options=MultiprocessingOptions({})", buffers=f"multiprocessing_options={_MORE_READY}"
)
"""An `ElasticIterator`."""
