"""Names of Grain that millstream does not have, with their replacements."""

from collections.abc import Mapping

REMEDIES: Mapping[str, str] = {
    "ExecutionTrackingMode": "Leave it out: time is always measured. Call profile() or summary() on an iterator.",
    "Operation": "Write a Map, a Filter or a FlatMap, which get the data of a record.",
    "RngPool": "Write dataset.random_map(function, seed=0), whose function gets the generator of each element.",
    "ShapeDtypeStruct": "Write jax.ShapeDtypeStruct(shape, dtype).",
    "ShapeDtypeStructProtocol": "Write jax.ShapeDtypeStruct(shape, dtype).",
    "SharedMemoryArray": "Return a plain np.ndarray: every array travels in shared memory.",
    "SharedMemoryArrayMetadata": "Return a plain np.ndarray: every array travels in shared memory.",
    "TfRandomMap": "Write a RandomMap that uses NumPy.",
    "ThreadPrefetchDatasetIterator": "Write iter(ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=n)).",
    "__version_info__": 'Write __version__.split(".").',
    "apply_transformations": "Write dataset.apply(transformations).",
    "get_element_spec": "Write iter(dataset).trace(), which computes one element of any dataset.",
    "get_next_index": "Write iterator.step.",
    "monitoring": "Write loader.metrics() or millstream.prometheus_text().",
    "multithread_prefetch": "Write dataset.prefetch(ReadOptions(num_threads, num_threads * buffer_size)).",
    "set_next_index": "Write iterator.seek(index).",
}
"""The replacement for each name."""
