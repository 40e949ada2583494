"""Random shares of chains: of an ElasticIterator, and of a DataLoader whose source is a chain, with logical shards."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from millstream import MapDataset, MultiprocessingOptions, ReadOptions, RecordMetadata, ShardOptions
from millstream.core.randomness import Purpose, derive_seed
from millstream.dataset.node_source import node_of
from millstream.experimental import ElasticIterator
from millstream.samplers import IndexSampler
from millstream.samplers.permutation import permute_one
from support.draw.chains import AsNumber, chains, sources
from support.draw.random_pipelines import Pipeline, dealt_pipelines, pipelines
from support.draw.streams import Place
from support.oracle.blame import blame
from support.oracle.chains import Oracle


@dataclasses.dataclass(frozen=True)
class NumberedChain:
    """A dense chain of numbers, and its oracle, which says at which position an element fails."""

    dataset: MapDataset[int]
    oracle: Oracle

    def __repr__(self) -> str:
        return repr(self.dataset)


@st.composite
def numbered_chains(draw: st.DrawFn, *, fails: bool) -> NumberedChain:
    chain = draw(chains(5, fails=fails))
    if not chain.is_dense:
        chain = draw(sources(fails=fails))

    def at(position: int) -> int:
        try:
            return AsNumber().map(chain.oracle.at(position))
        except Exception as error:
            # Of a mixture, whose rows are permuted, or of other chains.
            blame(error, place=f"(record key|position) {position}")
            raise

    return NumberedChain(chain.dataset.map(AsNumber()), dataclasses.replace(chain.oracle, at=at))


@dataclasses.dataclass(frozen=True)
class Elastic:
    """A chain whose global batches any number of shards read."""

    chain: NumberedChain
    global_batch: int

    def shard(self, index: int, count: int, place: Place) -> ElasticIterator:
        assert isinstance(place.workers, int)
        return ElasticIterator(
            self.chain.dataset,
            self.global_batch,
            ShardOptions(index, count),
            read_options=place.reading or ReadOptions(),
            multiprocessing_options=MultiprocessingOptions(place.workers),
        )

    def batches(self, index: int, count: int, begin: int) -> Iterator[list[int]]:
        """Yields the share of one shard of each complete global batch from some step on.

        In a mixture, rows are permuted within it.
        """
        size, share = self.global_batch, self.global_batch // count
        seed = derive_seed(0, Purpose.ROWS)
        is_mixed = node_of(self.chain.dataset).is_mixed
        for number in range(begin, self.chain.oracle.length // size):
            rows = range(index * share, (index + 1) * share)
            landed = [permute_one(row, size, seed, number) if is_mixed else row for row in rows]
            yield [self.chain.oracle.at(number * size + row) for row in landed]


@st.composite
def elastic(draw: st.DrawFn, *, fails: bool) -> Elastic:
    return Elastic(draw(numbered_chains(fails=fails)), draw(st.sampled_from([1, 2, 4, 4, 6, 12])))


class _ByEpoch:
    """The order of a sampler, with keys that continue over the epochs, as the positions of a chain do."""

    def __init__(self, sampler: IndexSampler) -> None:
        self._sampler = sampler
        self.num_records, self.seed, self.keys = sampler.num_records, sampler.seed, None

    def __len__(self) -> int:
        return len(self._sampler)

    def __getitem__(self, position: int) -> RecordMetadata:
        found = self._sampler[position]
        epoch = position // self.num_records
        return dataclasses.replace(found, record_key=found.record_key + epoch * self.num_records)


class _Records:
    """The elements of an oracle as a source."""

    def __init__(self, chain: Oracle) -> None:
        self._chain = chain

    def __getitem__(self, key: int) -> Any:
        return self._chain.at(key)


@st.composite
def loaders_of_chains(draw: st.DrawFn) -> Pipeline:
    """Draws any pipeline of a loader, of one of several shards or of some logical shards, whose source is a chain."""
    chain = draw(numbered_chains(fails=True))
    pipeline = draw(st.one_of(dealt_pipelines(), pipelines()))
    sampler = dataclasses.replace(pipeline.sampler, num_records=chain.oracle.length, keys=None)
    plain: Any = _Records(chain.oracle), _ByEpoch(sampler)
    return dataclasses.replace(pipeline, source=chain.dataset, sampler=sampler, plain=plain)
