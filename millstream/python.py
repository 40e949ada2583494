"""The names of `grain.python`, the older interface, for code with `import grain.python as grain`."""

from typing import TYPE_CHECKING

from millstream import experimental
from millstream.configuration import config
from millstream.constants import DATASET_INDEX, EPOCH, INDEX, META_FEATURES, RECORD, RECORD_KEY, SEED
from millstream.dataset import DatasetIterator, IterDataset, MapDataset
from millstream.dataset.grain_compat.older_operations import (
    FilterOperation,
    MapOperation,
    RandomMapOperation,
    Record,
)
from millstream.loader import DataLoader, DataLoaderIterator, MultiprocessingOptions, ReadOptions, load
from millstream.record import RecordMetadata
from millstream.samplers import IndexSampler, Sampler, SequentialSampler
from millstream.sharding import NoSharding, ShardByJaxProcess, ShardOptions
from millstream.sources import ArrayRecordDataSource, InMemoryDataSource, RandomAccessDataSource, RangeDataSource
from millstream.transforms import (
    Batch,
    DatasetSelectionMap,
    FilterTransform,
    MapTransform,
    MapWithIndexTransform,
    RandomMapTransform,
    Transformation,
    Transformations,
)

if TYPE_CHECKING:
    from millstream.checkpoint import CheckpointHandler as PyGrainCheckpointHandler
    from millstream.checkpoint import CheckpointRestore as PyGrainCheckpointRestore
    from millstream.checkpoint import CheckpointSave as PyGrainCheckpointSave

PyGrainDatasetIterator = DataLoaderIterator
BatchOperation = Batch

__all__ = [
    "DATASET_INDEX",
    "EPOCH",
    "INDEX",
    "META_FEATURES",
    "RECORD",
    "RECORD_KEY",
    "SEED",
    "ArrayRecordDataSource",
    "Batch",
    "BatchOperation",
    "DataLoader",
    "DatasetIterator",
    "DatasetSelectionMap",
    "FilterOperation",
    "FilterTransform",
    "InMemoryDataSource",
    "IndexSampler",
    "IterDataset",
    "MapDataset",
    "MapOperation",
    "MapTransform",
    "MapWithIndexTransform",
    "MultiprocessingOptions",
    "NoSharding",
    "PyGrainCheckpointHandler",
    "PyGrainCheckpointRestore",
    "PyGrainCheckpointSave",
    "PyGrainDatasetIterator",
    "RandomAccessDataSource",
    "RandomMapOperation",
    "RandomMapTransform",
    "RangeDataSource",
    "ReadOptions",
    "Record",
    "RecordMetadata",
    "Sampler",
    "SequentialSampler",
    "ShardByJaxProcess",
    "ShardOptions",
    "Transformation",
    "Transformations",
    "config",
    "experimental",
    "load",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # Orbax and JAX take seconds to import.
        if name in ("PyGrainCheckpointHandler", "PyGrainCheckpointRestore", "PyGrainCheckpointSave"):
            from importlib import import_module  # noqa: PLC0415  (lazy: only these names need it)

            return getattr(import_module("millstream.checkpoint"), name.removeprefix("PyGrain"))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
