"""The names of `grain.experimental`. Nothing here is experimental: each keeps its name, parameters and meaning.

Most have a shorter spelling as a method, such as `dataset.take(n)` for `LimitIterDataset(dataset, n)`.
"""

from typing import TYPE_CHECKING

from millstream.core import lazy_imports
from millstream.grain_imports import REMEDIES

if TYPE_CHECKING:
    from millstream.dataset import (
        BestFitPackIterDataset,
        CacheIterDataset,
        ConcatThenSplitIterDataset,
        DatasetOptions,
        ElasticIterator,
        FirstFitPackIterDataset,
        FlatMapIterDataset,
        FlatMapMapDataset,
        HFIterDataset,
        InterleaveIterDataset,
        LimitIterDataset,
        ParquetIterDataset,
        PerformanceConfig,
        RebatchIterDataset,
        RepeatIterDataset,
        TFRecordIterDataset,
        ThreadPrefetchIterDataset,
        WindowShuffleIterDataset,
        WindowShuffleMapDataset,
        WithOptionsIterDataset,
        ZipIterDataset,
        ZipMapDataset,
        assert_equal_output_after_checkpoint,
        batch_and_pad,
        index_shuffle,
        pick_performance_config,
    )
    from millstream.dataset.grain_compat.file_streams import (  # noqa: F401  (programs derive from Grain's)
        _TFRecordDatasetIterator,
        _TFRecordReader,
    )
    from millstream.dataset.grain_compat.streams import device_put
    from millstream.transforms import BOSHandling, FlatMapTransform, MapWithIndexTransform, PackAndBatchOperation

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

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_imports.hooks(
        __name__,
        dict.fromkeys(__all__, "millstream.dataset")
        | {
            "BOSHandling": "millstream.transforms",
            "FlatMapTransform": "millstream.transforms",
            "MapWithIndexTransform": "millstream.transforms",
            "PackAndBatchOperation": "millstream.transforms",
            "_TFRecordDatasetIterator": "millstream.dataset.grain_compat.file_streams",
            "_TFRecordReader": "millstream.dataset.grain_compat.file_streams",
            "device_put": "millstream.dataset.grain_compat.streams",
        },
        REMEDIES,
    )
