"""A pipeline said as a chain: `MapDataset.source(files).shuffle(seed=0).map(decode).batch(64)`.

map_dataset.py       the class that users hold, with its methods
further_datasets.py  datasets that have no method: zip, window shuffle, children
node.py              what a chain consists of: positions become elements in two passes
source_node.py       where chains begin
index_nodes.py       which element stands where
joining_nodes.py     several datasets as one
element_nodes.py     what happens to elements
batch_node.py        several elements as one
seeds.py             which seed a random operation draws from
blocks.py            reading blocks, located far ahead
chain_picture.py      a chain as text and as a picture, and its fingerprint

iter_dataset.py      the class of streams that users hold, with its methods
dataset_iterator.py  the class of their iterators
combinations.py      streams made of others: zip, limit, repeat, cache
stream_mixing.py     several streams in proportions; interleaving.py: several in turn
chain.py             a chain of operations becomes a loader's pipeline
chain_iterator.py    which reads a MapDataset; absence.py: where elements are absent
mixed_iterator.py    which draws from several; mixed_reading.py: which reads a mixture of straight chains at random
fed_iterator.py      which is fed from another stream; drawing.py: many of its elements at once
running.py           where it runs, and the workers that are left for the next iterator
shown_chain.py       what an iterator shows of itself
grouped_streams.py   operations under the names that Grain gives them as datasets: packers and others
file_streams.py      files as streams; in_turn.py: the order of several
working_ahead.py     threads, under Grain's names; options.py: options of a chain
elastic.py           an iterator for any number of shards
placed.py            elements on a device
element_spec.py      what elements are, told without making one
padded_batches.py    a batch function; random_numbers.py, checking.py: functions for datasets of one's own
streams.py           how streams are drawn from
stream_seeds.py      as seeds.py
"""

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
    from millstream.dataset.dataset_iterator import DatasetIterator
    from millstream.dataset.elastic import ElasticIterator
    from millstream.dataset.element_spec import ShapeDtypeStruct, ShapeDtypeStructProtocol, get_element_spec
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
    from millstream.dataset.iter_dataset import IterDataset
    from millstream.dataset.map_dataset import MapDataset
    from millstream.dataset.options import DatasetOptions, ExecutionTrackingMode
    from millstream.dataset.padded_batches import batch_and_pad
    from millstream.dataset.random_numbers import RngPool, index_shuffle
    from millstream.dataset.working_ahead import (
        ThreadPrefetchIterDataset,
        WithOptionsIterDataset,
        multithread_prefetch,
    )
else:
    __getattr__, __dir__ = late_names.hooks(
        __name__,
        {
            "BestFitPackIterDataset": "millstream.dataset.grouped_streams",
            "CacheIterDataset": "millstream.dataset.combinations",
            "ConcatThenSplitIterDataset": "millstream.dataset.grouped_streams",
            "DatasetIterator": "millstream.dataset.dataset_iterator",
            "DatasetOptions": "millstream.dataset.options",
            "ElasticIterator": "millstream.dataset.elastic",
            "ExecutionTrackingMode": "millstream.dataset.options",
            "FirstFitPackIterDataset": "millstream.dataset.grouped_streams",
            "FlatMapIterDataset": "millstream.dataset.grouped_streams",
            "FlatMapMapDataset": "millstream.dataset.further_datasets",
            "InterleaveIterDataset": "millstream.dataset.interleaving",
            "IterDataset": "millstream.dataset.iter_dataset",
            "LimitIterDataset": "millstream.dataset.combinations",
            "MapDataset": "millstream.dataset.map_dataset",
            "ParquetIterDataset": "millstream.dataset.file_streams",
            "PerformanceConfig": "millstream.dataset.checking",
            "RebatchIterDataset": "millstream.dataset.grouped_streams",
            "RepeatIterDataset": "millstream.dataset.combinations",
            "RngPool": "millstream.dataset.random_numbers",
            "TFRecordIterDataset": "millstream.dataset.file_streams",
            "ShapeDtypeStruct": "millstream.dataset.element_spec",
            "ShapeDtypeStructProtocol": "millstream.dataset.element_spec",
            "ThreadPrefetchIterDataset": "millstream.dataset.working_ahead",
            "WindowShuffleIterDataset": "millstream.dataset.grouped_streams",
            "WindowShuffleMapDataset": "millstream.dataset.further_datasets",
            "WithOptionsIterDataset": "millstream.dataset.working_ahead",
            "ZipIterDataset": "millstream.dataset.combinations",
            "ZipMapDataset": "millstream.dataset.further_datasets",
            "apply_transformations": "millstream.dataset.checking",
            "assert_equal_output_after_checkpoint": "millstream.dataset.checking",
            "batch_and_pad": "millstream.dataset.padded_batches",
            "get_element_spec": "millstream.dataset.element_spec",
            "get_next_index": "millstream.dataset.checking",
            "index_shuffle": "millstream.dataset.random_numbers",
            "multithread_prefetch": "millstream.dataset.working_ahead",
            "pick_performance_config": "millstream.dataset.checking",
            "set_next_index": "millstream.dataset.checking",
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
