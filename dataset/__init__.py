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
its `JoinedInput`. A new step of a MapDataset is a `Node`, with an inverse if it moves positions. Its
method is one of the façade, and `tests/dataset/test_protocol.py` lists all iterators.
"""

from typing import TYPE_CHECKING

from millstream.core import lazy_imports

if TYPE_CHECKING:
    from millstream.dataset.iter_dataset import IterDataset
    from millstream.dataset.iterators.dataset_iterator import DatasetIterator
    from millstream.dataset.map_dataset import MapDataset
    from millstream.dataset.options import DatasetOptions
    from millstream.dataset.splitting import split
else:
    __getattr__, __dir__ = lazy_imports.hooks(__name__)

__all__ = ["DatasetIterator", "DatasetOptions", "IterDataset", "MapDataset", "split"]
