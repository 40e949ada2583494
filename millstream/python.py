"""The names of `grain.python`, the older interface, for code with `import grain.python as grain`."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from millstream import experimental
from millstream.configuration import config
from millstream.constants import DATASET_INDEX, EPOCH, INDEX, META_FEATURES, RECORD, RECORD_KEY, SEED
from millstream.core import lazy_imports
from millstream.dataset import DatasetIterator, IterDataset, MapDataset
from millstream.grain_imports import REMEDIES
from millstream.loader import DataLoader, DataLoaderIterator, MultiprocessingOptions, ReadOptions, load
from millstream.record import RecordMetadata
from millstream.samplers import IndexSampler, Sampler, SequentialSampler
from millstream.sharding import NoSharding, ShardByJaxProcess, ShardOptions
from millstream.sources import ArrayRecordDataSource, InMemoryDataSource, RandomAccessDataSource, RangeDataSource
from millstream.transforms import (
    Batch,
    DatasetSelectionMap,
    Filter,
    FilterTransform,
    Map,
    MapTransform,
    MapWithIndexTransform,
    RandomMap,
    RandomMapTransform,
    Transformation,
    Transformations,
)

T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class Record(Generic[T]):
    """A record with its position. Operations get the data alone.

    Attributes:
        metadata: the position, the key and the randomness.
        data: the record.

    Examples:
        >>> millstream.python.Record(millstream.RecordMetadata(index=0, record_key=3), "text").data
        'text'
    """

    metadata: RecordMetadata
    data: T


def MapOperation(map_function: Callable[[Any], Any]) -> "Map[Any, Any]":  # noqa: N802  (Grain's name)
    """Returns `Map(map_function)`."""
    return Map(map_function)


def RandomMapOperation(random_map_function: Callable[..., Any]) -> "RandomMap[Any, Any]":  # noqa: N802  (as above)
    """Returns `RandomMap(random_map_function)`."""
    return RandomMap(random_map_function)


def FilterOperation(condition_function: Callable[[Any], object]) -> "Filter[Any]":  # noqa: N802  (as above)
    """Returns `Filter(condition_function)`."""
    return Filter(condition_function)


if TYPE_CHECKING:
    # Orbax and JAX take seconds to import.
    from millstream.checkpoint import CheckpointHandler as PyGrainCheckpointHandler
    from millstream.checkpoint import CheckpointRestore as PyGrainCheckpointRestore
    from millstream.checkpoint import CheckpointSave as PyGrainCheckpointSave
else:
    __getattr__, __dir__ = lazy_imports.hooks(__name__, REMEDIES)

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
