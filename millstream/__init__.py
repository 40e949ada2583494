"""millstream feeds JAX training: a data loader whose stream of batches is a pure function.

    import millstream

    loader = millstream.load(source, shuffle=True, seed=0, transformations=[decode, Augment()], batch_size=64)
    for batch in loader:
        ...

The names follow Grain's, so `import millstream as grain` runs DataLoader code written for it. The parts have their
own short names: `millstream.transforms.Map` is `millstream.MapTransform`.

`millstream.checkpoint`, which needs Orbax, is imported when first used: Orbax and JAX take seconds to import.
"""

from os import path as _path  # (pathlib takes longer than the rest)
from typing import TYPE_CHECKING

if not _path.isdir(_path.join(__path__[0], "loader")):  # noqa: PTH112, PTH118
    # A checkout, entered by running Python in its root: the parts are beside this folder, not in it (see setup.cfg).
    __path__.append(_path.dirname(__path__[0]))  # noqa: PTH120

from millstream import samplers, sharding, sources, transforms
from millstream.errors import (
    CheckpointError,
    DataSourceError,
    StackError,
    WorkerDiedError,
    WorkerError,
    WorkerStalledError,
)
from millstream.loader import (
    DataLoader,
    DataLoaderIterator,
    DeviceIterator,
    MultiprocessingOptions,
    ReadOptions,
    device_put,
    load,
    surviving_keys,
)
from millstream.record import RecordMetadata
from millstream.samplers import HierarchicalSampler, IndexSampler, MixtureSampler, PackingSampler, SequentialSampler
from millstream.sharding import NoSharding, ShardByJaxProcess, ShardOptions, shard_by_jax_process
from millstream.sources import (
    ArrayRecordDataSource,
    BagzDataSource,
    ConcatenatedDataSource,
    CsvDataSource,
    FileCache,
    InMemoryDataSource,
    JsonLinesDataSource,
    MegatronDataSource,
    RangeDataSource,
    TextLineDataSource,
    TFRecordDataSource,
    WebDatasetDataSource,
)
from millstream.transforms import (
    Batch,
    FilterTransform,
    FixedLengthFeature,
    FlatMapTransform,
    MapTransform,
    MapWithIndexTransform,
    OnlyFor,
    Pack,
    PaddedBatch,
    RaggedColumn,
    RandomMapTransform,
    VariableLengthFeature,
    decode_examples,
)

__version__ = "0.1.0"

__all__ = [
    "ArrayRecordDataSource",
    "BagzDataSource",
    "Batch",
    "CheckpointError",
    "ConcatenatedDataSource",
    "CsvDataSource",
    "DataLoader",
    "DataLoaderIterator",
    "DataSourceError",
    "DeviceIterator",
    "FileCache",
    "FilterTransform",
    "FixedLengthFeature",
    "FlatMapTransform",
    "HierarchicalSampler",
    "InMemoryDataSource",
    "IndexSampler",
    "JsonLinesDataSource",
    "MapTransform",
    "MapWithIndexTransform",
    "MegatronDataSource",
    "MixtureSampler",
    "MultiprocessingOptions",
    "NoSharding",
    "OnlyFor",
    "Pack",
    "PackingSampler",
    "PaddedBatch",
    "RaggedColumn",
    "RandomMapTransform",
    "RangeDataSource",
    "ReadOptions",
    "RecordMetadata",
    "SequentialSampler",
    "ShardByJaxProcess",
    "ShardOptions",
    "StackError",
    "TFRecordDataSource",
    "TextLineDataSource",
    "VariableLengthFeature",
    "WebDatasetDataSource",
    "WorkerDiedError",
    "WorkerError",
    "WorkerStalledError",
    "__version__",
    "checkpoint",
    "decode_examples",
    "device_put",
    "load",
    "samplers",
    "shard_by_jax_process",
    "sharding",
    "sources",
    "surviving_keys",
    "transforms",
]


if TYPE_CHECKING:
    from millstream import checkpoint as checkpoint
else:

    def __getattr__(name: str) -> object:
        if name == "checkpoint":
            from importlib import import_module  # noqa: PLC0415  (as late as what it imports)

            return import_module("millstream.checkpoint")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the public names: what completion in a notebook offers."""
    return list(__all__)
