"""A pipeline said as a chain: `MapDataset.source(files).shuffle(seed=0).map(decode).batch(64)`.

map_dataset.py       the class that users hold, with its methods
further_datasets.py  datasets that have no method: zip, window shuffle
node.py              what a chain consists of: positions become elements in two passes
source_node.py       where chains begin
index_nodes.py       which element stands where
joining_nodes.py     several datasets as one
element_nodes.py     what happens to elements
batch_node.py        several elements as one
seeds.py             which seed a random operation draws from
blocks.py            reading blocks, located far ahead
dataset_text.py      a chain as text, and its fingerprint

iter_dataset.py      the class of streams that users hold, with its methods
dataset_iterator.py  the class of their iterators
combinations.py      streams made of others: zip, limit, repeat, cache
stream_mixing.py     several streams in proportions; interleaving.py: several in turn
chain.py             a chain of operations becomes a loader's pipeline
chain_iterator.py    which reads a MapDataset; absence.py: where elements are absent
fed_iterator.py      which is fed from another stream
streams.py           how streams are drawn from
stream_seeds.py      as seeds.py
"""

from typing import TYPE_CHECKING

from millstream import late_names

if TYPE_CHECKING:
    from millstream.dataset.combinations import CacheIterDataset, LimitIterDataset, RepeatIterDataset, ZipIterDataset
    from millstream.dataset.dataset_iterator import DatasetIterator
    from millstream.dataset.further_datasets import WindowShuffleMapDataset, ZipMapDataset
    from millstream.dataset.interleaving import InterleaveIterDataset
    from millstream.dataset.iter_dataset import IterDataset
    from millstream.dataset.map_dataset import MapDataset
else:
    __getattr__, __dir__ = late_names.hooks(
        __name__,
        {
            "CacheIterDataset": "millstream.dataset.combinations",
            "DatasetIterator": "millstream.dataset.dataset_iterator",
            "InterleaveIterDataset": "millstream.dataset.interleaving",
            "IterDataset": "millstream.dataset.iter_dataset",
            "LimitIterDataset": "millstream.dataset.combinations",
            "MapDataset": "millstream.dataset.map_dataset",
            "RepeatIterDataset": "millstream.dataset.combinations",
            "WindowShuffleMapDataset": "millstream.dataset.further_datasets",
            "ZipIterDataset": "millstream.dataset.combinations",
            "ZipMapDataset": "millstream.dataset.further_datasets",
        },
    )

__all__ = [
    "CacheIterDataset",
    "DatasetIterator",
    "InterleaveIterDataset",
    "IterDataset",
    "LimitIterDataset",
    "MapDataset",
    "RepeatIterDataset",
    "WindowShuffleMapDataset",
    "ZipIterDataset",
    "ZipMapDataset",
]
