"""millstream feeds JAX training: a data loader whose stream of batches is a pure function.

    import millstream

    loader = millstream.load(source, shuffle=True, seed=0, transformations=[decode, Augment()], batch_size=64)
    for batch in loader:
        ...

`__all__` has the public names, each of one object. `import millstream as grain` runs code written for Grain: its other
spellings, such as `millstream.Map` for `Map`, and its modules, such as `millstream.experimental`, are
attributes that `__all__` leaves out.

Most names are imported on first access: `DataLoader`, which worker processes do not need, the formats, the rarer
orders, and `millstream.checkpoint`, which needs Orbax (Orbax and JAX take seconds to import).
"""

from os import path as _path  # (pathlib takes longer than the rest)
from typing import TYPE_CHECKING

if not _path.isdir(_path.join(__path__[0], "loader")):  # noqa: PTH112, PTH118
    # A checkout, because Python was started in its root: the parts are next to this folder, not in it (see setup.cfg).
    __path__.append(_path.dirname(__path__[0]))  # noqa: PTH120

from millstream import loader as loader
from millstream import samplers, sharding, sources, transforms
from millstream.configuration import config
from millstream.core import lazy_imports
from millstream.errors import (
    CheckpointError,
    DataSourceError,
    StackError,
    WorkerDiedError,
    WorkerError,
    WorkerStalledError,
)
from millstream.record import RecordMetadata
from millstream.samplers import IndexSampler, SequentialSampler
from millstream.sharding import NoSharding, ShardByJaxProcess, ShardBySharding, ShardOptions
from millstream.sources import InMemoryDataSource, RandomAccessDataSource, RangeDataSource
from millstream.transforms import (
    Batch,
    Filter,
    FlatMap,
    Map,
    MapWithIndex,
    OnlyFor,
    Pack,
    PaddedBatch,
    RandomMap,
)
from millstream.transforms import FilterTransform as FilterTransform
from millstream.transforms import FlatMapTransform as FlatMapTransform
from millstream.transforms import MapTransform as MapTransform
from millstream.transforms import MapWithIndexTransform as MapWithIndexTransform
from millstream.transforms import RandomMapTransform as RandomMapTransform

if TYPE_CHECKING:
    from millstream import checkpoint as checkpoint
    from millstream import constants as constants
    from millstream import dataset as dataset
    from millstream import experimental as experimental
    from millstream import keras as keras
    from millstream import multiprocessing as multiprocessing
    from millstream import python as python
    from millstream import testing as testing
    from millstream.dataset import DatasetIterator, IterDataset, MapDataset, split
    from millstream.grain_imports import install_as_grain
    from millstream.loader import (
        DataLoader,
        DataLoaderIterator,
        DeviceIterator,
        MultiprocessingOptions,
        RayWorkers,
        ReadOptions,
        device_put,
        load,
        prometheus_text,
        surviving_keys,
    )
    from millstream.samplers import (
        BalancedSampler,
        BucketSampler,
        HierarchicalSampler,
        MixtureSampler,
        PackingSampler,
        WeightedSampler,
    )
    from millstream.sources import (
        ArrayRecordDataSource,
        BagzDataSource,
        ConcatenatedDataSource,
        CsvDataSource,
        FileCache,
        FileDataSource,
        FileFormat,
        Hdf5DataSource,
        HuggingFaceDataSource,
        ImageFolderDataSource,
        JsonLinesDataSource,
        LanceDataSource,
        MdsDataSource,
        MegatronDataSource,
        ParquetDataSource,
        SpanFormat,
        TextLineDataSource,
        TfdsDataSource,
        TFRecordDataSource,
        TokenDataSource,
        WebDatasetDataSource,
        WindowDataSource,
        ZarrDataSource,
    )
    from millstream.tools import CachedDataSource, Statistics, convert, lengths_of, statistics_of
    from millstream.transforms import (
        BestFitPack,
        BOSHandling,
        BucketBatch,
        ConcatThenSplit,
        FirstFitPack,
        FixedLengthFeature,
        PadTo,
        RaggedColumn,
        Rebatch,
        TokenBudgetBatch,
        VariableLengthFeature,
        WindowShuffle,
        decode_example,
        decode_examples,
        encode_example,
    )
else:
    __getattr__, __dir__ = lazy_imports.hooks(
        __name__,
        {
            "DatasetSelectionMap": "Write millstream.transforms.DatasetSelectionMap.",
            "shard_by_jax_process": "Write millstream.ShardByJaxProcess.",
        },
    )

__version__ = "0.2.0"

__all__ = [
    "ArrayRecordDataSource",
    "BOSHandling",
    "BagzDataSource",
    "BalancedSampler",
    "Batch",
    "BestFitPack",
    "BucketBatch",
    "BucketSampler",
    "CachedDataSource",
    "CheckpointError",
    "ConcatThenSplit",
    "ConcatenatedDataSource",
    "CsvDataSource",
    "DataLoader",
    "DataLoaderIterator",
    "DataSourceError",
    "DatasetIterator",
    "DeviceIterator",
    "FileCache",
    "FileDataSource",
    "FileFormat",
    "Filter",
    "FirstFitPack",
    "FixedLengthFeature",
    "FlatMap",
    "Hdf5DataSource",
    "HierarchicalSampler",
    "HuggingFaceDataSource",
    "ImageFolderDataSource",
    "InMemoryDataSource",
    "IndexSampler",
    "IterDataset",
    "JsonLinesDataSource",
    "LanceDataSource",
    "Map",
    "MapDataset",
    "MapWithIndex",
    "MdsDataSource",
    "MegatronDataSource",
    "MixtureSampler",
    "MultiprocessingOptions",
    "NoSharding",
    "OnlyFor",
    "Pack",
    "PackingSampler",
    "PadTo",
    "PaddedBatch",
    "ParquetDataSource",
    "RaggedColumn",
    "RandomAccessDataSource",
    "RandomMap",
    "RangeDataSource",
    "RayWorkers",
    "ReadOptions",
    "Rebatch",
    "RecordMetadata",
    "SequentialSampler",
    "ShardByJaxProcess",
    "ShardBySharding",
    "ShardOptions",
    "SpanFormat",
    "StackError",
    "Statistics",
    "TFRecordDataSource",
    "TextLineDataSource",
    "TfdsDataSource",
    "TokenBudgetBatch",
    "TokenDataSource",
    "VariableLengthFeature",
    "WebDatasetDataSource",
    "WeightedSampler",
    "WindowDataSource",
    "WindowShuffle",
    "WorkerDiedError",
    "WorkerError",
    "WorkerStalledError",
    "ZarrDataSource",
    "__version__",
    "checkpoint",
    "config",
    "convert",
    "dataset",
    "decode_example",
    "decode_examples",
    "device_put",
    "encode_example",
    "install_as_grain",
    "lengths_of",
    "load",
    "prometheus_text",
    "samplers",
    "sharding",
    "sources",
    "split",
    "statistics_of",
    "surviving_keys",
    "testing",
    "transforms",
]
