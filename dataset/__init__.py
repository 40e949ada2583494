"""Pipelines written as method chains: `MapDataset.source(files).shuffle(seed=0).map(decode).batch(64)`.

A chain is a tree of steps, which are values: they know the steps before them, and nothing that runs them.

step.py              a step, and the fold over all steps before it
nodes/               the steps of a MapDataset, from positions to elements and, for lineage, back to the records
node_source.py       the half of a MapDataset that a loader reads
stream_steps.py      the steps of a stream; joins/: those that draw from other streams, with their iterators
map_dataset.py       MapDataset, and iter_dataset.py IterDataset: façades of a step; arguments.py: their arguments
chain_rendering.py   a chain as text and as HTML, and its fingerprint

chain.py             a straight chain: the operations after a leaf, which run together
opening.py           opens a stream: the only module that knows all iterators
iterators/           the iterators of chains; running.py: what the iterators of one dataset share
options.py           the options of an entire chain
splitting.py         disjoint parts of a source

grain_compat/        the other names of `millstream.experimental`: more datasets, and functions for a user's own

A new operation of a stream is a `StreamStep`; one that draws from several streams is a `Join`, a module in joins/ with
its iterator, a `RecoveringIterator`. A new step of a MapDataset is a `Node`, with an inverse if it moves positions. Its
method is one of the façade, and `tests/dataset/test_protocol.py` lists all iterators.
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
    from millstream.dataset.grain_compat.streams import BestFitPackIterDataset as BestFitPackIterDataset
    from millstream.dataset.grain_compat.streams import CacheIterDataset as CacheIterDataset
    from millstream.dataset.grain_compat.streams import ConcatThenSplitIterDataset as ConcatThenSplitIterDataset
    from millstream.dataset.grain_compat.streams import FirstFitPackIterDataset as FirstFitPackIterDataset
    from millstream.dataset.grain_compat.streams import FlatMapIterDataset as FlatMapIterDataset
    from millstream.dataset.grain_compat.streams import FlatMapMapDataset as FlatMapMapDataset
    from millstream.dataset.grain_compat.streams import InterleaveIterDataset as InterleaveIterDataset
    from millstream.dataset.grain_compat.streams import LimitIterDataset as LimitIterDataset
    from millstream.dataset.grain_compat.streams import RebatchIterDataset as RebatchIterDataset
    from millstream.dataset.grain_compat.streams import RepeatIterDataset as RepeatIterDataset
    from millstream.dataset.grain_compat.streams import ThreadPrefetchIterDataset as ThreadPrefetchIterDataset
    from millstream.dataset.grain_compat.streams import WindowShuffleIterDataset as WindowShuffleIterDataset
    from millstream.dataset.grain_compat.streams import WindowShuffleMapDataset as WindowShuffleMapDataset
    from millstream.dataset.grain_compat.streams import WithOptionsIterDataset as WithOptionsIterDataset
    from millstream.dataset.grain_compat.streams import ZipIterDataset as ZipIterDataset
    from millstream.dataset.grain_compat.streams import ZipMapDataset as ZipMapDataset
    from millstream.dataset.iter_dataset import IterDataset
    from millstream.dataset.iterators.dataset_iterator import DatasetIterator
    from millstream.dataset.map_dataset import MapDataset
    from millstream.dataset.options import DatasetOptions
    from millstream.dataset.splitting import split
    from millstream.transforms.batching.batch import batch_and_pad as batch_and_pad
else:
    __getattr__, __dir__ = lazy_imports.hooks(
        __name__,
        {
            "BestFitPackIterDataset": "millstream.dataset.grain_compat.streams",
            "CacheIterDataset": "millstream.dataset.grain_compat.streams",
            "ConcatThenSplitIterDataset": "millstream.dataset.grain_compat.streams",
            "DatasetIterator": "millstream.dataset.iterators.dataset_iterator",
            "DatasetOptions": "millstream.dataset.options",
            "ElasticIterator": "millstream.dataset.grain_compat.elastic",
            "FirstFitPackIterDataset": "millstream.dataset.grain_compat.streams",
            "FlatMapIterDataset": "millstream.dataset.grain_compat.streams",
            "FlatMapMapDataset": "millstream.dataset.grain_compat.streams",
            "HFIterDataset": "millstream.dataset.grain_compat.file_streams",
            "InterleaveIterDataset": "millstream.dataset.grain_compat.streams",
            "IterDataset": "millstream.dataset.iter_dataset",
            "LimitIterDataset": "millstream.dataset.grain_compat.streams",
            "MapDataset": "millstream.dataset.map_dataset",
            "ParquetIterDataset": "millstream.dataset.grain_compat.file_streams",
            "PerformanceConfig": "millstream.dataset.grain_compat.checking",
            "RebatchIterDataset": "millstream.dataset.grain_compat.streams",
            "RepeatIterDataset": "millstream.dataset.grain_compat.streams",
            "TFRecordIterDataset": "millstream.dataset.grain_compat.file_streams",
            "ThreadPrefetchIterDataset": "millstream.dataset.grain_compat.streams",
            "WindowShuffleIterDataset": "millstream.dataset.grain_compat.streams",
            "WindowShuffleMapDataset": "millstream.dataset.grain_compat.streams",
            "WithOptionsIterDataset": "millstream.dataset.grain_compat.streams",
            "ZipIterDataset": "millstream.dataset.grain_compat.streams",
            "ZipMapDataset": "millstream.dataset.grain_compat.streams",
            "assert_equal_output_after_checkpoint": "millstream.dataset.grain_compat.checking",
            "batch_and_pad": "millstream.transforms.batching.batch",
            "index_shuffle": "millstream.dataset.grain_compat.checking",
            "pick_performance_config": "millstream.dataset.grain_compat.checking",
            "split": "millstream.dataset.splitting",
        },
    )

__all__ = ["DatasetIterator", "DatasetOptions", "IterDataset", "MapDataset", "split"]
"""The names of the contract. The other attributes are those of `millstream.experimental`."""
