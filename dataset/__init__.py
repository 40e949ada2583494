"""A pipeline said as a chain: `MapDataset.source(files).shuffle(seed=0).map(decode).batch(64)`.

nodes/               what a MapDataset is made of: positions become elements
map_dataset.py       the class that users hold, with its methods
chain_picture.py     a chain as text and as a picture, and its fingerprint

iter_dataset.py      the class of streams that users hold, with its methods
dataset_iterator.py  the class of their iterators
stream_nodes.py      what a straight chain of them consists of; stream_seeds.py: where its random operations draw from
chain.py             such a chain becomes a loader's pipeline; running.py: with workers that stay warm
chain_iterator.py    which reads a MapDataset; absence.py: where elements are absent
fed_iterator.py      which is fed from another stream; drawing.py: many of its elements at once
stream_mixing.py     several streams in proportions: mixed_iterator.py draws from them, and mixed_reading.py reads
                     those that can be read at random as one dataset
streams.py           how streams are drawn from; counted_iterator.py: those without states
shown_chain.py       what an iterator shows of itself; options.py: what may be set for a whole chain

further/             what `millstream.experimental` names: further datasets, and functions for those of one's own
"""

from typing import TYPE_CHECKING

from millstream import late_names

if TYPE_CHECKING:
    from millstream.dataset.dataset_iterator import DatasetIterator
    from millstream.dataset.further.checking import (
        PerformanceConfig,
        apply_transformations,
        assert_equal_output_after_checkpoint,
        get_next_index,
        pick_performance_config,
        set_next_index,
    )
    from millstream.dataset.further.combinations import (
        CacheIterDataset,
        LimitIterDataset,
        RepeatIterDataset,
        ZipIterDataset,
    )
    from millstream.dataset.further.elastic import ElasticIterator
    from millstream.dataset.further.element_spec import (
        ShapeDtypeStruct,
        ShapeDtypeStructProtocol,
        get_element_spec,
    )
    from millstream.dataset.further.file_streams import ParquetIterDataset, TFRecordIterDataset
    from millstream.dataset.further.grouped_streams import (
        BestFitPackIterDataset,
        ConcatThenSplitIterDataset,
        FirstFitPackIterDataset,
        FlatMapIterDataset,
        RebatchIterDataset,
        WindowShuffleIterDataset,
    )
    from millstream.dataset.further.interleaving import InterleaveIterDataset
    from millstream.dataset.further.map_datasets import FlatMapMapDataset, WindowShuffleMapDataset, ZipMapDataset
    from millstream.dataset.further.padded_batches import batch_and_pad
    from millstream.dataset.further.random_numbers import RngPool, index_shuffle
    from millstream.dataset.further.working_ahead import (
        ThreadPrefetchIterDataset,
        WithOptionsIterDataset,
        multithread_prefetch,
    )
    from millstream.dataset.iter_dataset import IterDataset
    from millstream.dataset.map_dataset import MapDataset
    from millstream.dataset.options import DatasetOptions, ExecutionTrackingMode
else:
    __getattr__, __dir__ = late_names.hooks(
        __name__,
        {
            "BestFitPackIterDataset": "millstream.dataset.further.grouped_streams",
            "CacheIterDataset": "millstream.dataset.further.combinations",
            "ConcatThenSplitIterDataset": "millstream.dataset.further.grouped_streams",
            "DatasetIterator": "millstream.dataset.dataset_iterator",
            "DatasetOptions": "millstream.dataset.options",
            "ElasticIterator": "millstream.dataset.further.elastic",
            "ExecutionTrackingMode": "millstream.dataset.options",
            "FirstFitPackIterDataset": "millstream.dataset.further.grouped_streams",
            "FlatMapIterDataset": "millstream.dataset.further.grouped_streams",
            "FlatMapMapDataset": "millstream.dataset.further.map_datasets",
            "InterleaveIterDataset": "millstream.dataset.further.interleaving",
            "IterDataset": "millstream.dataset.iter_dataset",
            "LimitIterDataset": "millstream.dataset.further.combinations",
            "MapDataset": "millstream.dataset.map_dataset",
            "ParquetIterDataset": "millstream.dataset.further.file_streams",
            "PerformanceConfig": "millstream.dataset.further.checking",
            "RebatchIterDataset": "millstream.dataset.further.grouped_streams",
            "RepeatIterDataset": "millstream.dataset.further.combinations",
            "RngPool": "millstream.dataset.further.random_numbers",
            "TFRecordIterDataset": "millstream.dataset.further.file_streams",
            "ShapeDtypeStruct": "millstream.dataset.further.element_spec",
            "ShapeDtypeStructProtocol": "millstream.dataset.further.element_spec",
            "ThreadPrefetchIterDataset": "millstream.dataset.further.working_ahead",
            "WindowShuffleIterDataset": "millstream.dataset.further.grouped_streams",
            "WindowShuffleMapDataset": "millstream.dataset.further.map_datasets",
            "WithOptionsIterDataset": "millstream.dataset.further.working_ahead",
            "ZipIterDataset": "millstream.dataset.further.combinations",
            "ZipMapDataset": "millstream.dataset.further.map_datasets",
            "apply_transformations": "millstream.dataset.further.checking",
            "assert_equal_output_after_checkpoint": "millstream.dataset.further.checking",
            "batch_and_pad": "millstream.dataset.further.padded_batches",
            "get_element_spec": "millstream.dataset.further.element_spec",
            "get_next_index": "millstream.dataset.further.checking",
            "index_shuffle": "millstream.dataset.further.random_numbers",
            "multithread_prefetch": "millstream.dataset.further.working_ahead",
            "pick_performance_config": "millstream.dataset.further.checking",
            "set_next_index": "millstream.dataset.further.checking",
        },
    )

__all__ = [
    "BestFitPackIterDataset",
    "CacheIterDataset",
    "ConcatThenSplitIterDataset",
    "DatasetIterator",
    "DatasetOptions",
    "ElasticIterator",
    "ExecutionTrackingMode",
    "FirstFitPackIterDataset",
    "FlatMapIterDataset",
    "FlatMapMapDataset",
    "InterleaveIterDataset",
    "IterDataset",
    "LimitIterDataset",
    "MapDataset",
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
    "get_element_spec",
    "get_next_index",
    "index_shuffle",
    "multithread_prefetch",
    "pick_performance_config",
    "set_next_index",
]
