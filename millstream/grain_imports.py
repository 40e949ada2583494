"""Grain's import names, served by millstream: programs and libraries that import `grain` run unchanged.

Worker processes and Ray actors install the same finder before they unpickle a pipeline.

Every public module of Grain has its counterpart here. A private module, `grain._src.…`, serves any public name, because
libraries import those from the modules that define them in Grain, and the private names that public projects use.
Names that millstream does not have are errors that say what to write.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, final

from millstream.core.lazy_imports import raise_missing
from millstream.sharding import ShardOptions

__all__ = ["install_as_grain"]

_PUBLIC: Mapping[str, str] = {
    "grain": "millstream",
    "grain.checkpoint": "millstream.checkpoint",
    "grain.constants": "millstream.constants",
    "grain.experimental": "millstream.experimental",
    "grain.multiprocessing": "millstream.multiprocessing",
    "grain.python": "millstream.python",
    "grain.samplers": "millstream.samplers",
    "grain.sharding": "millstream.sharding",
    "grain.sources": "millstream.sources",
    "grain.transforms": "millstream.transforms",
}
"""The module that serves each public module of Grain."""

_HOMES = sorted(_PUBLIC.values(), key="millstream.checkpoint".__eq__)
"""The modules that names of private modules are searched in. Orbax, which takes a second to import, is last."""

_PRIVATE = "grain._src"

_PRIVATE_MODULES = frozenset(
    """
    autotune base batch cache checkpoint config constants core data_loader data_sources dataset device_put
    elastic_iterator example_packing exceptions experimental filter flatmap grain_logging grain_random handler
    index_shuffle index_shuffle_module interleave ipc limit load map mix operations options packing
    packing_concat_then_split packing_packed_batch parquet_dataset prefetch process_prefetch profiler python rebatch
    record repeat samplers sharding shared_memory_array shuffle slice source sources stats testing tfrecord_dataset
    transformations transforms tree_lib zip
    """.split()  # noqa: SIM905  (readable, unlike 50 lines of a list)
)
"""The components of the names of Grain's private modules. Other names are import errors, as in Grain."""


def install_as_grain() -> None:
    """Serves `import grain`, and the modules below it, from millstream, in this process and in its workers.

    Call it before anything imports `grain`. The real Grain may be installed, but is no longer imported.

    Raises:
        RuntimeError: the real Grain is already imported.

    Examples:
        >>> millstream.install_as_grain()
        >>> import grain.python as grain
        >>> grain.MapDataset is millstream.MapDataset
        True
    """
    if is_installed():
        return
    imported = sys.modules.get("grain")
    if imported is not None:
        raise RuntimeError(
            f"install_as_grain() must be called before grain is imported, but {imported!r} is already imported. Call "
            "it in the first lines of the program, or run the program as `python -m millstream.as_grain SCRIPT`."
        )
    sys.meta_path.insert(0, _Finder())


def is_installed() -> bool:
    """Returns True if this process serves `grain` from millstream."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


@final
class Installed:
    """A value whose unpickling serves `grain` from millstream. Pipelines send it to workers before anything else."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return install_as_grain, ()


@final
class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The finder of `grain` and all modules below it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of a module of Grain that millstream serves, otherwise None."""
        del path, target
        top, *names = fullname.removeprefix(_PRIVATE).split(".")
        is_private = fullname.startswith(_PRIVATE) and not top and _PRIVATE_MODULES.issuperset(names)
        if fullname not in _PUBLIC and not is_private:
            if fullname.startswith("grain."):
                raise ModuleNotFoundError(
                    f"millstream serves grain, but has no {fullname!r}. It has {', '.join(_PUBLIC)}.", name=fullname
                )
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin="millstream", is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Returns an empty module that forwards its names to millstream."""
        return _Served(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing, because names are resolved on access."""


class _Served(ModuleType):
    """A module of Grain whose names come from millstream."""

    def __getattr__(self, name: str) -> Any:
        """Returns millstream's object for a name of this module.

        Raises:
            AttributeError, ImportError: there is none.
        """
        if name.startswith("__") and name != "__version__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        below = f"{self.__name__}.{name}"
        if below in _PUBLIC:
            return import_module(below)
        served = _PUBLIC.get(self.__name__)
        homes = _HOMES if served is None else [served]
        if served is None and (make := _PRIVATE_NAMES.get(name)) is not None:
            return make()
        for home in homes:
            value = getattr(import_module(home), name, self)
            # A module of millstream is not a private module of Grain; the import system then searches for that.
            if value is not self and (served is not None or not isinstance(value, ModuleType)):
                return value
        caller = sys._getframe(1)  # noqa: SLF001  (as `warnings` does)
        return raise_missing(self, name, REMEDIES, caller, ", served by millstream,")

    def __dir__(self) -> list[str]:
        served = _PUBLIC.get(self.__name__)
        return [] if served is None else dir(import_module(served))


def _determine_worker_count(input_worker_count: int | None) -> int:
    return (os.cpu_count() or 1) if input_worker_count is None else input_worker_count


def _even_split(num_examples: int, options: ShardOptions) -> tuple[int, int]:
    """Returns the start and stop of a shard of contiguous records."""
    share, rest = divmod(num_examples, options.shard_count)
    extra = 0 if options.drop_remainder else rest
    start, stop = (share * index + min(index, extra) for index in (options.shard_index, options.shard_index + 1))
    return start, stop


class _NoSharedArray:
    """A class without instances, in place of the arrays that Grain's pipelines share between processes."""


def _source_map_dataset() -> Any:
    return import_module(_PUBLIC["grain"]).MapDataset.source


_PRIVATE_NAMES: Mapping[str, Callable[[], Any]] = {
    "SharedMemoryArray": lambda: _NoSharedArray,
    "SharedMemoryArrayMetadata": lambda: _NoSharedArray,
    "SourceMapDataset": _source_map_dataset,
    "_determine_worker_count": lambda: _determine_worker_count,
    "even_split": lambda: _even_split,
}
"""Names of private modules of Grain that public projects use, and that are not public in millstream."""


REMEDIES: Mapping[str, str] = {
    "ExecutionTrackingMode": "Leave it out: time is always measured. Call profile() or summary() on an iterator.",
    "Operation": "Write a Map, a Filter or a FlatMap, which get the data of a record.",
    "RngPool": "Write dataset.random_map(function, seed=0), whose function gets the generator of each element.",
    "ShapeDtypeStruct": "Write jax.ShapeDtypeStruct(shape, dtype).",
    "ShapeDtypeStructProtocol": "Write jax.ShapeDtypeStruct(shape, dtype).",
    "SharedMemoryArray": "Return a plain np.ndarray: every array travels in shared memory.",
    "SharedMemoryArrayMetadata": "Return a plain np.ndarray: every array travels in shared memory.",
    "SupportsInPlaceSlicing": "Leave it out: workers need no slices of a dataset.",
    "SupportsSlicedStateManagement": "Leave it out: a state fits any number of workers. For any number of shards, "
    "write ElasticIterator(dataset, global_batch_size, shard_options).",
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
