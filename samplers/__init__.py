"""Orders of records: pure functions from a position to a record key, the same in every process.

`IndexSampler` serves nearly everyone: in order or globally shuffled, for one epoch or endlessly. `SequentialSampler`
is one epoch in order. `HierarchicalSampler` is a shuffle for sources that are read in units. `WeightedSampler` draws
records in proportion to weights. `MixtureSampler` mixes the orders of several sources. `PackingSampler` makes rows of
several documents, `BucketSampler` global batches of records of similar length. `BalancedSampler` deals the rows of each
global batch of another order so that its parts cost alike. An order of your own is a class with
`__getitem__(position) -> RecordMetadata` (`Sampler`), or, faster, one that answers for whole blocks
(`VectorisedSampler`).
"""

from typing import TYPE_CHECKING

from millstream.core import lazy_imports
from millstream.samplers.base import Sampler, VectorisedSampler
from millstream.samplers.index import IndexSampler, SequentialSampler

if TYPE_CHECKING:
    from millstream.samplers.balanced import BalancedSampler
    from millstream.samplers.buckets import BucketSampler
    from millstream.samplers.hierarchical import HierarchicalSampler
    from millstream.samplers.mixtures.mixture import MixtureSampler
    from millstream.samplers.rows.packing import PackingSampler
    from millstream.samplers.weighted import WeightedSampler
else:
    __getattr__, __dir__ = lazy_imports.hooks(__name__)

__all__ = [
    "BalancedSampler",
    "BucketSampler",
    "HierarchicalSampler",
    "IndexSampler",
    "MixtureSampler",
    "PackingSampler",
    "Sampler",
    "SequentialSampler",
    "VectorisedSampler",
    "WeightedSampler",
]
