"""Which record stands at which position: orders of records, as pure functions that any process can ask.

`IndexSampler` serves nearly everyone: in order or globally shuffled, for one epoch or endlessly. `SequentialSampler`
is one epoch in order. `HierarchicalSampler` is a shuffle for sources that are read in units. `MixtureSampler` mixes the
orders of several sources. `PackingSampler` makes rows of several documents. `BalancedSampler` deals the rows of each
global batch of another order so that its parts cost alike. An order of your own is a class with
`__getitem__(position) -> RecordMetadata` (`Sampler`), or, faster, one that answers for whole blocks
(`VectorisedSampler`).

    base.py             what the loader asks of a sampler, and the adapter for custom ones
    index.py            all records of one source: positions, epochs, offsets
    permutation.py      where an offset lands in a shuffled epoch
    rounds.py           what the rounds of that do to words
    hierarchical.py     a shuffle of units, and of the records in a few of them
    balanced.py         global batches dealt to parts of equal cost
    equal_parts.py      the rows of each part
    epochs.py           what samplers of epochs have in common
    packing.py          rows made of several documents
    packed_rows.py           what a row is made of
    packing_plan.py     which documents go into which rows
    mixture.py          several orders as one
    occurrences.py      at which positions records come
    protocols.py          what the loader asks of mixtures and of rows
    mixture_checks.py       what a mixture accepts
    mixture_lookup.py  what the components of a mixture have where
    joint_index_samplers.py      many orders of all records, asked at once
    mixture_fingerprint.py    what a mixture says of itself
    weights.py          weights as whole numbers
    proportions.py      which component stands at which position
    mixing_schedule.py  weights that change, and where a mixture ends
"""

from typing import TYPE_CHECKING

from millstream import lazy_imports
from millstream.samplers.base import Sampler, VectorisedSampler
from millstream.samplers.index import IndexSampler, SequentialSampler

if TYPE_CHECKING:
    from millstream.samplers.balanced import BalancedSampler
    from millstream.samplers.hierarchical import HierarchicalSampler
    from millstream.samplers.mixture import MixtureSampler
    from millstream.samplers.packed_rows import Pieces
    from millstream.samplers.packing import PackingSampler
else:
    __getattr__, __dir__ = lazy_imports.hooks(
        __name__,
        {
            "BalancedSampler": "millstream.samplers.balanced",
            "HierarchicalSampler": "millstream.samplers.hierarchical",
            "MixtureSampler": "millstream.samplers.mixture",
            "PackingSampler": "millstream.samplers.packing",
            "Pieces": "millstream.samplers.packed_rows",
        },
    )

__all__ = [
    "BalancedSampler",
    "HierarchicalSampler",
    "IndexSampler",
    "MixtureSampler",
    "PackingSampler",
    "Pieces",
    "Sampler",
    "SequentialSampler",
    "VectorisedSampler",
]
