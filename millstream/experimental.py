"""The names of `grain.experimental`. Their datasets and functions are not experimental here."""

from typing import TYPE_CHECKING

from millstream import lazy_imports

if TYPE_CHECKING:
    from millstream.dataset import (
        BestFitPackIterDataset,
        CacheIterDataset,
        ConcatThenSplitIterDataset,
        DatasetOptions,
        ElasticIterator,
        ExecutionTrackingMode,
        FirstFitPackIterDataset,
        FlatMapIterDataset,
        FlatMapMapDataset,
        InterleaveIterDataset,
        LimitIterDataset,
        ParquetIterDataset,
        PerformanceConfig,
        RebatchIterDataset,
        RepeatIterDataset,
        RngPool,
        ShapeDtypeStruct,
        ShapeDtypeStructProtocol,
        TFRecordIterDataset,
        ThreadPrefetchIterDataset,
        WindowShuffleIterDataset,
        WindowShuffleMapDataset,
        WithOptionsIterDataset,
        ZipIterDataset,
        ZipMapDataset,
        apply_transformations,
        assert_equal_output_after_checkpoint,
        batch_and_pad,
        get_element_spec,
        get_next_index,
        index_shuffle,
        multithread_prefetch,
        pick_performance_config,
        set_next_index,
    )
    from millstream.dataset.grain_compat.placed import device_put
    from millstream.transforms import BOSHandling, FlatMapTransform, MapWithIndexTransform, PackAndBatchOperation

__all__ = [
    "BOSHandling",
    "BestFitPackIterDataset",
    "CacheIterDataset",
    "ConcatThenSplitIterDataset",
    "DatasetOptions",
    "ElasticIterator",
    "ExecutionTrackingMode",
    "FirstFitPackIterDataset",
    "FlatMapIterDataset",
    "FlatMapMapDataset",
    "FlatMapTransform",
    "InterleaveIterDataset",
    "LimitIterDataset",
    "MapWithIndexTransform",
    "PackAndBatchOperation",
    "ParquetIterDataset",
    "PerformanceConfig",
    "RebatchIterDataset",
    "RepeatIterDataset",
    "RngPool",
    "ShapeDtypeStruct",
    "ShapeDtypeStructProtocol",
    "TFRecordIterDataset",
    "ThreadPrefetchIterDataset",
    "WindowShuffleIterDataset",
    "WindowShuffleMapDataset",
    "WithOptionsIterDataset",
    "ZipIterDataset",
    "ZipMapDataset",
    "apply_transformations",
    "assert_equal_output_after_checkpoint",
    "batch_and_pad",
    "device_put",
    "get_element_spec",
    "get_next_index",
    "index_shuffle",
    "multithread_prefetch",
    "pick_performance_config",
    "set_next_index",
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
            "device_put": "millstream.dataset.grain_compat.placed",
        },
    )
