"""Datasets and functions under the names that Grain has in `grain.experimental`. They are no experiments here."""

from typing import TYPE_CHECKING

from millstream import late_names

if TYPE_CHECKING:
    from millstream.dataset.checking import (
        PerformanceConfig,
        apply_transformations,
        assert_equal_output_after_checkpoint,
        get_next_index,
        pick_performance_config,
        set_next_index,
    )
    from millstream.dataset.combinations import CacheIterDataset, LimitIterDataset, RepeatIterDataset, ZipIterDataset
    from millstream.dataset.elastic import ElasticIterator
    from millstream.dataset.file_streams import ParquetIterDataset, TFRecordIterDataset
    from millstream.dataset.further_datasets import FlatMapMapDataset, WindowShuffleMapDataset, ZipMapDataset
    from millstream.dataset.grouped_streams import (
        BestFitPackIterDataset,
        ConcatThenSplitIterDataset,
        FirstFitPackIterDataset,
        FlatMapIterDataset,
        RebatchIterDataset,
        WindowShuffleIterDataset,
    )
    from millstream.dataset.interleaving import InterleaveIterDataset
    from millstream.dataset.padded_batches import batch_and_pad
    from millstream.dataset.placed import device_put
    from millstream.dataset.random_numbers import RngPool, index_shuffle
    from millstream.dataset.working_ahead import (
        DatasetOptions,
        ExecutionTrackingMode,
        ThreadPrefetchIterDataset,
        WithOptionsIterDataset,
        multithread_prefetch,
    )
    from millstream.transforms import BOSHandling, FlatMapTransform, MapWithIndexTransform, PackAndBatchOperation
else:
    __getattr__, __dir__ = late_names.hooks(
        __name__,
        {
            "BOSHandling": "millstream.transforms",
            "BestFitPackIterDataset": "millstream.dataset.grouped_streams",
            "CacheIterDataset": "millstream.dataset.combinations",
            "ConcatThenSplitIterDataset": "millstream.dataset.grouped_streams",
            "DatasetOptions": "millstream.dataset.working_ahead",
            "ElasticIterator": "millstream.dataset.elastic",
            "ExecutionTrackingMode": "millstream.dataset.working_ahead",
            "FirstFitPackIterDataset": "millstream.dataset.grouped_streams",
            "FlatMapIterDataset": "millstream.dataset.grouped_streams",
            "FlatMapMapDataset": "millstream.dataset.further_datasets",
            "FlatMapTransform": "millstream.transforms",
            "InterleaveIterDataset": "millstream.dataset.interleaving",
            "LimitIterDataset": "millstream.dataset.combinations",
            "MapWithIndexTransform": "millstream.transforms",
            "PackAndBatchOperation": "millstream.transforms",
            "ParquetIterDataset": "millstream.dataset.file_streams",
            "PerformanceConfig": "millstream.dataset.checking",
            "RebatchIterDataset": "millstream.dataset.grouped_streams",
            "RepeatIterDataset": "millstream.dataset.combinations",
            "RngPool": "millstream.dataset.random_numbers",
            "TFRecordIterDataset": "millstream.dataset.file_streams",
            "ThreadPrefetchIterDataset": "millstream.dataset.working_ahead",
            "WindowShuffleIterDataset": "millstream.dataset.grouped_streams",
            "WindowShuffleMapDataset": "millstream.dataset.further_datasets",
            "WithOptionsIterDataset": "millstream.dataset.working_ahead",
            "ZipIterDataset": "millstream.dataset.combinations",
            "ZipMapDataset": "millstream.dataset.further_datasets",
            "apply_transformations": "millstream.dataset.checking",
            "assert_equal_output_after_checkpoint": "millstream.dataset.checking",
            "batch_and_pad": "millstream.dataset.padded_batches",
            "device_put": "millstream.dataset.placed",
            "get_next_index": "millstream.dataset.checking",
            "index_shuffle": "millstream.dataset.random_numbers",
            "multithread_prefetch": "millstream.dataset.working_ahead",
            "pick_performance_config": "millstream.dataset.checking",
            "set_next_index": "millstream.dataset.checking",
        },
    )

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
    "get_next_index",
    "index_shuffle",
    "multithread_prefetch",
    "pick_performance_config",
    "set_next_index",
]
