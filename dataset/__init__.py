"""Pipelines written as method chains: `MapDataset.source(files).shuffle(seed=0).map(decode).batch(64)`.

step.py              a step of a chain, as a value, and the fold over all steps before it
nodes/               the steps of a MapDataset: from positions to elements; node_source.py: what a loader reads of one
stream_steps.py      the steps of a stream; joins/: those that draw from other streams, with their iterators
map_dataset.py       MapDataset, and iter_dataset.py IterDataset: façades of a step; arguments.py: their arguments
chain_rendering.py   a chain as text and as HTML, and its fingerprint

chain.py             a straight chain; fixed_chain.py: as it was when its first iterator began
opening.py           opens a stream: the only module that knows all iterators
iterators/           the iterators of chains
options.py           the options of an entire chain
splitting.py         disjoint parts of a source

grain_compat/        the other names of `millstream.experimental`: more datasets, and functions for a user's own
"""

from typing import TYPE_CHECKING

from millstream.core import lazy_imports

if TYPE_CHECKING:
    from millstream.dataset.grain_compat.checking import PerformanceConfig as PerformanceConfig
    from millstream.dataset.grain_compat.checking import (
        assert_equal_output_after_checkpoint as assert_equal_output_after_checkpoint,
    )
    from millstream.dataset.grain_compat.checking import index_shuffle as index_shuffle
    from millstream.dataset.grain_compat.checking import pick_performance_config as pick_performance_config
    from millstream.dataset.grain_compat.elastic import ElasticIterator as ElasticIterator
    from millstream.dataset.grain_compat.file_streams import HFIterDataset as HFIterDataset
    from millstream.dataset.grain_compat.file_streams import ParquetIterDataset as ParquetIterDataset
    from millstream.dataset.grain_compat.file_streams import TFRecordIterDataset as TFRecordIterDataset
    from millstream.dataset.grain_compat.grouped_streams import BestFitPackIterDataset as BestFitPackIterDataset
    from millstream.dataset.grain_compat.grouped_streams import ConcatThenSplitIterDataset as ConcatThenSplitIterDataset
    from millstream.dataset.grain_compat.grouped_streams import FirstFitPackIterDataset as FirstFitPackIterDataset
    from millstream.dataset.grain_compat.grouped_streams import FlatMapIterDataset as FlatMapIterDataset
    from millstream.dataset.grain_compat.grouped_streams import FlatMapMapDataset as FlatMapMapDataset
    from millstream.dataset.grain_compat.grouped_streams import RebatchIterDataset as RebatchIterDataset
    from millstream.dataset.grain_compat.grouped_streams import WindowShuffleIterDataset as WindowShuffleIterDataset
    from millstream.dataset.grain_compat.grouped_streams import WindowShuffleMapDataset as WindowShuffleMapDataset
    from millstream.dataset.grain_compat.joined_streams import CacheIterDataset as CacheIterDataset
    from millstream.dataset.grain_compat.joined_streams import InterleaveIterDataset as InterleaveIterDataset
    from millstream.dataset.grain_compat.joined_streams import LimitIterDataset as LimitIterDataset
    from millstream.dataset.grain_compat.joined_streams import RepeatIterDataset as RepeatIterDataset
    from millstream.dataset.grain_compat.joined_streams import ZipIterDataset as ZipIterDataset
    from millstream.dataset.grain_compat.joined_streams import ZipMapDataset as ZipMapDataset
    from millstream.dataset.grain_compat.prefetching import ThreadPrefetchIterDataset as ThreadPrefetchIterDataset
    from millstream.dataset.grain_compat.prefetching import WithOptionsIterDataset as WithOptionsIterDataset
    from millstream.dataset.iter_dataset import IterDataset
    from millstream.dataset.iterators.dataset_iterator import DatasetIterator
    from millstream.dataset.map_dataset import MapDataset
    from millstream.dataset.options import DatasetOptions
    from millstream.dataset.splitting import split
    from millstream.transforms.batching.pad import batch_and_pad as batch_and_pad
else:
    __getattr__, __dir__ = lazy_imports.hooks(
        __name__,
        {
            "BestFitPackIterDataset": "millstream.dataset.grain_compat.grouped_streams",
            "CacheIterDataset": "millstream.dataset.grain_compat.joined_streams",
            "ConcatThenSplitIterDataset": "millstream.dataset.grain_compat.grouped_streams",
            "DatasetIterator": "millstream.dataset.iterators.dataset_iterator",
            "DatasetOptions": "millstream.dataset.options",
            "ElasticIterator": "millstream.dataset.grain_compat.elastic",
            "FirstFitPackIterDataset": "millstream.dataset.grain_compat.grouped_streams",
            "FlatMapIterDataset": "millstream.dataset.grain_compat.grouped_streams",
            "FlatMapMapDataset": "millstream.dataset.grain_compat.grouped_streams",
            "HFIterDataset": "millstream.dataset.grain_compat.file_streams",
            "InterleaveIterDataset": "millstream.dataset.grain_compat.joined_streams",
            "IterDataset": "millstream.dataset.iter_dataset",
            "LimitIterDataset": "millstream.dataset.grain_compat.joined_streams",
            "MapDataset": "millstream.dataset.map_dataset",
            "ParquetIterDataset": "millstream.dataset.grain_compat.file_streams",
            "PerformanceConfig": "millstream.dataset.grain_compat.checking",
            "RebatchIterDataset": "millstream.dataset.grain_compat.grouped_streams",
            "RepeatIterDataset": "millstream.dataset.grain_compat.joined_streams",
            "TFRecordIterDataset": "millstream.dataset.grain_compat.file_streams",
            "ThreadPrefetchIterDataset": "millstream.dataset.grain_compat.prefetching",
            "WindowShuffleIterDataset": "millstream.dataset.grain_compat.grouped_streams",
            "WindowShuffleMapDataset": "millstream.dataset.grain_compat.grouped_streams",
            "WithOptionsIterDataset": "millstream.dataset.grain_compat.prefetching",
            "ZipIterDataset": "millstream.dataset.grain_compat.joined_streams",
            "ZipMapDataset": "millstream.dataset.grain_compat.joined_streams",
            "assert_equal_output_after_checkpoint": "millstream.dataset.grain_compat.checking",
            "batch_and_pad": "millstream.transforms.batching.pad",
            "index_shuffle": "millstream.dataset.grain_compat.checking",
            "pick_performance_config": "millstream.dataset.grain_compat.checking",
            "split": "millstream.dataset.splitting",
        },
    )

__all__ = ["DatasetIterator", "DatasetOptions", "IterDataset", "MapDataset", "split"]
"""The names of the contract. The other attributes are those of `millstream.experimental`."""
