"""Replacements for arguments that users know from PyTorch, TensorFlow and Grain."""

from types import MappingProxyType

_LOAD = "use millstream.load(source, {}), or DataLoader(..., {})."

DATA_LOADER_BY_NAME = (
    "Pass its arguments by name, DataLoader(data_source=..., sampler=..., operations=[...]), "
    "or use millstream.load(source, shuffle=True, seed=0, batch_size=...)."
)

LOAD_BY_NAME = "Pass all arguments but the source by name, as in load(source, batch_size=64)."

_EVERYWHERE = {
    "num_workers": "use worker_count.",
    "prefetch_factor": "use worker_buffer_size for workers, or read_options for threads.",
    "prefetch": "batches are prefetched anyway; read_options sets how many records.",
    "num_threads": "use read_options=ReadOptions(num_threads=...).",
    "timeout": "use stall_timeout.",
    "pin_memory": "use millstream.device_put(iter(loader)), which moves batches to the device in advance.",
    "persistent_workers": "remove it: workers are kept for the next pass anyway.",
    "multiprocessing_context": "remove it: workers never inherit the state of this process.",
    "generator": "use seed, of the IndexSampler or of millstream.load.",
}

DATA_LOADER_REPLACEMENTS = MappingProxyType(
    {
        **_EVERYWHERE,
        "dataset": "use data_source.",
        "source": "use data_source.",
        "batch_size": _LOAD.format("batch_size=...", "operations=[..., Batch(...)]"),
        "batch_sampler": _LOAD.format("batch_size=...", "operations=[..., Batch(...)]"),
        "drop_last": _LOAD.format("drop_remainder=True", "operations=[..., Batch(..., drop_remainder=True)]"),
        "drop_remainder": _LOAD.format("drop_remainder=True", "operations=[..., Batch(..., drop_remainder=True)]"),
        "collate_fn": _LOAD.format("batch_fn=...", "operations=[..., Batch(..., batch_fn=...)]"),
        "batch_fn": _LOAD.format("batch_fn=...", "operations=[..., Batch(..., batch_fn=...)]"),
        "shuffle": _LOAD.format("shuffle=True, seed=0", "sampler=IndexSampler(..., shuffle=True, seed=0)"),
        "seed": _LOAD.format("seed=0", "sampler=IndexSampler(..., seed=0)"),
        "num_epochs": _LOAD.format("num_epochs=...", "sampler=IndexSampler(..., num_epochs=...)"),
        "transform": "use operations=[...].",
        "transforms": "use operations=[...].",
        "transformations": "use operations=[...].",
    }
)

LOAD_REPLACEMENTS = MappingProxyType(
    {
        **_EVERYWHERE,
        "data_source": "pass the source first, without a name: load(source, ...).",
        "dataset": "pass the source first, without a name: load(source, ...).",
        "sampler": "use DataLoader(data_source=..., sampler=..., operations=[...]).",
        "operations": "use transformations=[...].",
        "transform": "use transformations=[...].",
        "transforms": "use transformations=[...].",
        "drop_last": "use drop_remainder.",
        "collate_fn": "use batch_fn.",
        "epochs": "use num_epochs.",
        "repeat": "use num_epochs.",
    }
)
