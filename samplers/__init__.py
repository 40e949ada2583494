"""Which record stands at which position: orders of records, as pure functions that any process can ask.

`IndexSampler` serves nearly everyone: in order or globally shuffled, for one epoch or endlessly. `SequentialSampler`
is one epoch in order. An order of your own is a class with `__getitem__(position) -> RecordMetadata` (`Sampler`), or,
faster, one that answers for whole blocks (`VectorisedSampler`).

    base.py          what the loader asks of a sampler, and the adapter for custom ones
    index.py         the samplers themselves: positions, epochs, offsets
    permutation.py   where an offset lands in a shuffled epoch
"""

from millstream.samplers.base import Sampler, VectorisedSampler
from millstream.samplers.index import IndexSampler, SequentialSampler

__all__ = ["IndexSampler", "Sampler", "SequentialSampler", "VectorisedSampler"]
