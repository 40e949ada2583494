"""What to write here instead of the arguments that people know from PyTorch, TensorFlow and Grain."""

from types import MappingProxyType

_LOAD = "write millstream.load(source, {}), or DataLoader(..., {})."

DATA_LOADER_NEEDS_NAMES = (
    "Its arguments are given by name, DataLoader(data_source=..., sampler=..., operations=[...]); "
    "the short way is millstream.load(source, shuffle=True, seed=0, batch_size=...)."
)

LOAD_NEEDS_NAMES = "After the source, its arguments are given by name, as in load(source, batch_size=64)."

_EVERYWHERE = {
    "num_workers": "write worker_count.",
    "prefetch_factor": "write worker_buffer_size for workers, or read_options for threads.",
    "prefetch": "batches are read ahead anyway; read_options says how far.",
    "num_threads": "write read_options=ReadOptions(num_threads=...).",
    "timeout": "write stall_timeout.",
    "pin_memory": "write millstream.device_put(iter(loader)), which moves batches to the device ahead of time.",
    "persistent_workers": "leave it out: workers wait for the next pass anyway.",
    "multiprocessing_context": "leave it out: workers never inherit the state of this process.",
    "worker_init_fn": "leave it out, and draw from the generator that a RandomMapTransform gets.",
    "generator": "write seed, of the IndexSampler or of millstream.load.",
}

DATA_LOADER_HABITS = MappingProxyType(
    {
        **_EVERYWHERE,
        "dataset": "write data_source.",
        "source": "write data_source.",
        "batch_size": _LOAD.format("batch_size=...", "operations=[..., Batch(...)]"),
        "batch_sampler": _LOAD.format("batch_size=...", "operations=[..., Batch(...)]"),
        "drop_last": _LOAD.format("drop_remainder=True", "operations=[..., Batch(..., drop_remainder=True)]"),
        "drop_remainder": _LOAD.format("drop_remainder=True", "operations=[..., Batch(..., drop_remainder=True)]"),
        "collate_fn": _LOAD.format("batch_fn=...", "operations=[..., Batch(..., batch_fn=...)]"),
        "batch_fn": _LOAD.format("batch_fn=...", "operations=[..., Batch(..., batch_fn=...)]"),
        "shuffle": _LOAD.format("shuffle=True, seed=0", "sampler=IndexSampler(..., shuffle=True, seed=0)"),
        "seed": _LOAD.format("seed=0", "sampler=IndexSampler(..., seed=0)"),
        "num_epochs": _LOAD.format("num_epochs=...", "sampler=IndexSampler(..., num_epochs=...)"),
        "transform": "write operations=[...].",
        "transforms": "write operations=[...].",
        "transformations": "write operations=[...].",
    }
)
"""What to write instead of arguments that DataLoader does not have, by name."""

LOAD_HABITS = MappingProxyType(
    {
        **_EVERYWHERE,
        "data_source": "the source comes first, without a name: load(source, ...).",
        "dataset": "the source comes first, without a name: load(source, ...).",
        "sampler": "write DataLoader(data_source=..., sampler=..., operations=[...]).",
        "operations": "write transformations=[...].",
        "transform": "write transformations=[...].",
        "transforms": "write transformations=[...].",
        "drop_last": "write drop_remainder.",
        "collate_fn": "write batch_fn.",
        "epochs": "write num_epochs.",
        "repeat": "write num_epochs.",
    }
)
"""What to write instead of arguments that `load` does not have, by name."""
