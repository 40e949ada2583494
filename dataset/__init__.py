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
"""

from typing import TYPE_CHECKING

from millstream import late_names

if TYPE_CHECKING:
    from millstream.dataset.further_datasets import WindowShuffleMapDataset, ZipMapDataset
    from millstream.dataset.map_dataset import MapDataset
else:
    __getattr__, __dir__ = late_names.hooks(
        __name__,
        {
            "MapDataset": "millstream.dataset.map_dataset",
            "WindowShuffleMapDataset": "millstream.dataset.further_datasets",
            "ZipMapDataset": "millstream.dataset.further_datasets",
        },
    )

__all__ = ["MapDataset", "WindowShuffleMapDataset", "ZipMapDataset"]
