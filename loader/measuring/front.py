"""The frontends of pipelines: the API with which a pipeline was built, so that advice names the same arguments."""

from typing import NamedTuple


class Front(NamedTuple):
    """The API with which a pipeline was built.

    Attributes:
        worker: the name of one worker, such as `worker process`.
        workers: the argument that sets the number of workers, with {} for the number.
        buffers: the argument that sets the finished batches per worker, with {buffer} for their number and {workers}
            for that of workers.
        reading: the argument that sets threads, with {} for the `ReadOptions`.
        is_fed: True if elements come from a stream, which is not read by position.
        is_on_cluster: True if the workers run on other machines, so that this machine's cores are irrelevant.
        is_debugging: True if nothing of this has an effect, because everything runs in one thread.
    """

    worker: str = "worker process"
    workers: str = "worker_count={}"
    buffers: str = "worker_buffer_size={buffer}"
    reading: str = "read_options={}"
    is_fed: bool = False
    is_on_cluster: bool = False
    is_debugging: bool = False


LOADER = Front()
"""A `DataLoader`, or the result of `load`."""

ACTORS = Front(worker="Ray actor", workers="workers=RayWorkers(num_workers={})", is_on_cluster=True)
"""A `DataLoader` with Ray actors."""

DEBUGGED = Front(is_debugging=True)
"""A `DataLoader` with `debug=True`."""

_MORE_READY = "MultiprocessingOptions({workers}, per_worker_buffer_size={buffer})"

CHAIN = Front(workers=".mp_prefetch({})", buffers=f".mp_prefetch({_MORE_READY})", reading=".to_iter_dataset({})")
"""A chain that begins with a `MapDataset`."""

MIXED_CHAIN = CHAIN._replace(reading=".prefetch({})")
"""A chain after a mixture of such chains."""

FED_CHAIN = CHAIN._replace(is_fed=True)
"""A chain after a stream. What reads is below the stream, in threads of its own."""

ELASTIC = Front(
    workers="multiprocessing_options=MultiprocessingOptions({})", buffers=f"multiprocessing_options={_MORE_READY}"
)
"""An `ElasticIterator`."""
