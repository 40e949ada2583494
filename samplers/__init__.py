"""Which record stands at which position: orders of records, as pure functions that any process can ask.

`IndexSampler` serves nearly everyone: in order or globally shuffled, for one epoch or endlessly. `SequentialSampler`
is one epoch in order. `HierarchicalSampler` is a shuffle for sources that are read in units. `MixtureSampler` mixes the
orders of several sources. `PackingSampler` makes rows of several documents. An order of your own is a class with
`__getitem__(position) -> RecordMetadata` (`Sampler`), or, faster, one that answers for whole blocks
(`VectorisedSampler`).

    base.py             what the loader asks of a sampler, and the adapter for custom ones
    index.py            all records of one source: positions, epochs, offsets
    permutation.py      where an offset lands in a shuffled epoch
    rounds.py           what the rounds of that do to words
    hierarchical.py     a shuffle of units, and of the records in a few of them
    epochs.py           what samplers of epochs have in common
    packing.py          rows made of several documents
    pieces.py           what a row is made of
    packing_plan.py     which documents go into which rows
    mixture.py          several orders as one
    occurrences.py      at which positions records come
    kinds.py            what the loader asks of mixtures and of rows
    components.py       what a mixture accepts
    component_orders.py  what the components of a mixture have where
    many_orders.py      many orders of all records, asked at once
    mixture_words.py    what a mixture says of itself
    weights.py          weights as whole numbers
    proportions.py      which component stands at which position
    mixing_schedule.py  weights that change, and where a mixture ends
"""

from typing import TYPE_CHECKING

from millstream import late_names
from millstream.samplers.base import Sampler, VectorisedSampler
from millstream.samplers.index import IndexSampler, SequentialSampler

if TYPE_CHECKING:
    from millstream.samplers.hierarchical import HierarchicalSampler
    from millstream.samplers.mixture import MixtureSampler
    from millstream.samplers.packing import PackingSampler
    from millstream.samplers.pieces import Pieces
else:
    __getattr__, __dir__ = late_names.hooks(
        __name__,
        {
            "HierarchicalSampler": "millstream.samplers.hierarchical",
            "MixtureSampler": "millstream.samplers.mixture",
            "PackingSampler": "millstream.samplers.packing",
            "Pieces": "millstream.samplers.pieces",
        },
    )

__all__ = [
    "HierarchicalSampler",
    "IndexSampler",
    "MixtureSampler",
    "PackingSampler",
    "Pieces",
    "Sampler",
    "SequentialSampler",
    "VectorisedSampler",
]
