"""The names of `grain.experimental`. Nothing here is experimental: each keeps its name, parameters and meaning.

Most have a shorter spelling as a method, such as `dataset.take(n)` for `LimitIterDataset(dataset, n)`.
"""

from typing import TYPE_CHECKING

from millstream.core import lazy_imports
from millstream.grain_imports import REMEDIES

if TYPE_CHECKING:
    from millstream.dataset import DatasetOptions
    from millstream.dataset.grain_compat.checking import (
        PerformanceConfig,
        assert_equal_output_after_checkpoint,
        index_shuffle,
        pick_performance_config,
    )
    from millstream.dataset.grain_compat.elastic import ElasticIterator
    from millstream.dataset.grain_compat.file_streams import (  # noqa: F401  (programs derive from the private classes)
        HFIterDataset,
        ParquetIterDataset,
        TFRecordIterDataset,
        _TFRecordDatasetIterator,
        _TFRecordReader,
    )
    from millstream.dataset.grain_compat.streams import (
        BestFitPackIterDataset,
        CacheIterDataset,
        ConcatThenSplitIterDataset,
        FirstFitPackIterDataset,
        FlatMapIterDataset,
        FlatMapMapDataset,
        InterleaveIterDataset,
        LimitIterDataset,
        RebatchIterDataset,
        RepeatIterDataset,
        ThreadPrefetchIterDataset,
        WindowShuffleIterDataset,
        WindowShuffleMapDataset,
        WithOptionsIterDataset,
        ZipIterDataset,
        ZipMapDataset,
        device_put,
    )
    from millstream.transforms import BOSHandling, FlatMapTransform, MapWithIndexTransform, PackAndBatchOperation
    from millstream.transforms.batching.batch import batch_and_pad
else:
    __getattr__, __dir__ = lazy_imports.hooks(__name__, REMEDIES)

__all__ = [
    "BOSHandling",
    "BestFitPackIterDataset",
    "CacheIterDataset",
    "ConcatThenSplitIterDataset",
    "DatasetOptions",
    "ElasticIterator",
    "FirstFitPackIterDataset",
    "FlatMapIterDataset",
    "FlatMapMapDataset",
    "FlatMapTransform",
    "HFIterDataset",
    "InterleaveIterDataset",
    "LimitIterDataset",
    "MapWithIndexTransform",
    "PackAndBatchOperation",
    "ParquetIterDataset",
    "PerformanceConfig",
    "RebatchIterDataset",
    "RepeatIterDataset",
    "TFRecordIterDataset",
    "ThreadPrefetchIterDataset",
    "WindowShuffleIterDataset",
    "WindowShuffleMapDataset",
    "WithOptionsIterDataset",
    "ZipIterDataset",
    "ZipMapDataset",
    "assert_equal_output_after_checkpoint",
    "batch_and_pad",
    "device_put",
    "index_shuffle",
    "pick_performance_config",
]
