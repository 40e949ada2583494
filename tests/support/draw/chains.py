"""Random chains of MapDatasets, each with its plain oracle. An element shows all that was done to it."""

import dataclasses
import functools
from typing import Any

import numpy as np
from hypothesis import strategies as st

from millstream import Batch, FilterTransform, FlatMapTransform, MapTransform, RandomMapTransform
from millstream.dataset import MapDataset, WindowShuffleMapDataset, ZipMapDataset
from millstream.randomness import derive_seed
from support.oracle import chains as oracle
from support.oracle.chains import Oracle

LONGEST = 60
"""Chains have at most this many positions an epoch: the oracle is slow."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """A dataset and what it should be.

    Attributes:
        dataset: the dataset.
        oracle: the same, said plainly.
        is_dense: whether no element can be absent.
        seeds: what every random map above has drawn from, and whether it was on the only path.
    """

    dataset: MapDataset[Any]
    oracle: Oracle
    is_dense: bool
    seeds: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return repr(self.dataset)


def total(element: Any) -> int:
    if isinstance(element, (tuple, list)):
        return sum(map(total, element))
    return element if isinstance(element, int) else 0


class Mark(MapTransform[Any, Any]):
    """Shows that the element was mapped."""

    def map(self, element: Any) -> Any:
        return ("mapped", element)


def mark_some(element: Any) -> Any:
    return None if total(element) % 5 == 0 else ("hole", element)


def mark_position(position: int, element: Any) -> Any:
    return ("at", position, element)


class Draw(RandomMapTransform[Any, Any]):
    """Shows what was drawn."""

    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        return ("drew", int(rng.integers(1000)), element)


class KeepSome(FilterTransform[Any]):
    """Drops every third element or so."""

    def filter(self, element: Any) -> bool:
        return total(element) % 3 != 0


@dataclasses.dataclass(frozen=True)
class Split(FlatMapTransform[Any, Any]):
    """Splits an element into as many children as its numbers say."""

    max_fan_out: int

    def flat_map(self, element: Any) -> list[Any]:
        return [("child", number, element) for number in range(total(element) % (self.max_fan_out + 1))]


class Every(MapDataset[Any]):
    """Every n-th element of its parent, as a user would write it."""

    def __init__(self, parent: MapDataset[Any], stride: int) -> None:
        super().__init__(parent)
        self._stride = stride

    def __len__(self) -> int:
        return len(range(0, len(self._parent), self._stride))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        epoch, offset = divmod(index, len(self))
        return self._parent[epoch * len(self._parent) + offset * self._stride]


class CountedSource:
    """Numbers, with a batched read that counts its calls."""

    def __init__(self, start: int, count: int) -> None:
        self.start = start
        self.count = count
        self.calls: list[int] = []

    def __len__(self) -> int:
        return self.count

    def fingerprint(self) -> str:
        """Returns which numbers these are, however often they were read."""
        return f"CountedSource start={self.start} count={self.count}"

    def __getitem__(self, key: int) -> int:
        return self.start + range(self.count)[key]

    def __getitems__(self, keys: Any) -> list[int]:
        self.calls.append(len(keys))
        return [self[key] for key in keys]


SEEDS = st.sampled_from([0, 1, 5, 2**32, 2**64 - 1])


@st.composite
def sources(draw: st.DrawFn) -> Chain:
    """Draws a dataset that nothing was done to."""
    start, count = draw(st.integers(0, 100)), draw(st.integers(1, 12))
    numbers = list(range(start, start + count))
    kinds: list[Any] = [numbers, tuple(numbers), CountedSource(start, count), range(start, start + count)]
    given = draw(st.sampled_from(kinds))
    made = MapDataset.range(start, start + count) if isinstance(given, range) else MapDataset.source(given)
    return Chain(made, oracle.source(numbers), is_dense=True)


def chains(most_nodes: int = 6) -> st.SearchStrategy[Chain]:
    if most_nodes <= 1:
        return sources()
    return st.one_of(sources(), extended(most_nodes), extended(most_nodes), joined(most_nodes))


@st.composite
def extended(draw: st.DrawFn, most_nodes: int) -> Chain:
    """Draws a chain with one more node."""
    chain = draw(chains(most_nodes - 1))
    fitting = [
        extend
        for extend in (repeat, cut, shuffle, window, mark, hole, position, random, keep, split, batch, own)
        if not (extend is batch and not chain.is_dense)
    ]
    longer = draw(st.sampled_from(fitting))(draw, chain)
    return longer if 0 < longer.oracle.length <= LONGEST else chain


def _after(chain: Chain, dataset: MapDataset[Any], plain: Oracle, **changes: Any) -> Chain:
    return dataclasses.replace(chain, dataset=dataset, oracle=plain, **changes)


def repeat(draw: st.DrawFn, chain: Chain) -> Chain:
    number, reseed = draw(st.integers(1, 3)), draw(st.booleans())
    plain = oracle.repeated(chain.oracle, number, reseed_each_epoch=reseed)
    return _after(chain, chain.dataset.repeat(number, reseed_each_epoch=reseed), plain)


def cut(draw: st.DrawFn, chain: Chain) -> Chain:
    rows = draw(st.slices(chain.oracle.length))
    return _after(chain, chain.dataset[rows], oracle.sliced(chain.oracle, rows))


def shuffle(draw: st.DrawFn, chain: Chain) -> Chain:
    seed = draw(SEEDS)
    return _after(chain, chain.dataset.shuffle(seed=seed), oracle.shuffled(chain.oracle, seed))


def window(draw: st.DrawFn, chain: Chain) -> Chain:
    size, seed = draw(st.integers(1, 7)), draw(SEEDS)
    plain = oracle.window_shuffled(chain.oracle, size, derive_seed(seed, size))
    return _after(chain, WindowShuffleMapDataset(chain.dataset, window_size=size, seed=seed), plain)


def mark(draw: st.DrawFn, chain: Chain) -> Chain:
    del draw
    return _after(chain, chain.dataset.map(Mark()), oracle.mapped(chain.oracle, Mark().map))


def hole(draw: st.DrawFn, chain: Chain) -> Chain:
    del draw
    return _after(chain, chain.dataset.map(mark_some), oracle.mapped(chain.oracle, mark_some), is_dense=False)


def position(draw: st.DrawFn, chain: Chain) -> Chain:
    del draw
    plain = oracle.mapped_with_index(chain.oracle, mark_position)
    return _after(chain, chain.dataset.map_with_index(mark_position), plain)


def random(draw: st.DrawFn, chain: Chain) -> Chain:
    seed = draw(SEEDS)
    plain = oracle.mapped_at_random(chain.oracle, Draw().random_map, seed, chain.seeds.count(seed))
    longer = _after(chain, chain.dataset.random_map(Draw(), seed=seed), plain)
    return dataclasses.replace(longer, seeds=(*chain.seeds, seed))


def keep(draw: st.DrawFn, chain: Chain) -> Chain:
    del draw
    return _after(
        chain, chain.dataset.filter(KeepSome()), oracle.filtered(chain.oracle, KeepSome().filter), is_dense=False
    )


def split(draw: st.DrawFn, chain: Chain) -> Chain:
    operation = Split(draw(st.integers(1, 3)))
    plain = oracle.split(chain.oracle, operation.flat_map, operation.max_fan_out)
    return _after(chain, chain.dataset.flat_map(operation), plain, is_dense=False)


def batch(draw: st.DrawFn, chain: Chain) -> Chain:
    size, drops = draw(st.integers(1, 5)), draw(st.booleans())
    plain = oracle.batched(chain.oracle, size, drop_remainder=drops)
    return _after(chain, chain.dataset.apply(Batch(size, drop_remainder=drops, batch_fn=list)), plain)


def own(draw: st.DrawFn, chain: Chain) -> Chain:
    stride = draw(st.integers(1, 3))
    plain = oracle.sliced(chain.oracle, slice(None, None, stride))
    # A dataset of the user's is an epoch of its own, whatever it does.
    return _after(chain, Every(chain.dataset, stride), dataclasses.replace(plain, epoch_length=plain.length))


@st.composite
def joined(draw: st.DrawFn, most_nodes: int) -> Chain:
    """Draws a dataset of several."""
    parts = draw(st.lists(chains(most_nodes // 2), min_size=1, max_size=3))
    made = draw(st.sampled_from([concatenate, mix, select, zip_up]))(draw, parts)
    return made if made.oracle.length <= LONGEST else parts[0]


def _joined(parts: list[Chain], dataset: MapDataset[Any], plain: Oracle, *, is_dense: bool | None = None) -> Chain:
    dense = all(part.is_dense for part in parts) if is_dense is None else is_dense
    # A number is that on the path with most draws from a seed.
    seeds = {seed for part in parts for seed in part.seeds}
    most = tuple(seed for seed in seeds for _ in range(max(part.seeds.count(seed) for part in parts)))
    return Chain(dataset, plain, dense, most)


def concatenate(draw: st.DrawFn, parts: list[Chain]) -> Chain:
    del draw
    plain = oracle.concatenated([part.oracle for part in parts])
    return _joined(parts, MapDataset.concatenate([part.dataset for part in parts]), plain)


def mix(draw: st.DrawFn, parts: list[Chain]) -> Chain:
    weights = draw(st.lists(st.integers(1, 4), min_size=len(parts), max_size=len(parts)))
    divisor = functools.reduce(np.gcd, weights)
    plain = oracle.mixed([part.oracle for part in parts], [weight // int(divisor) for weight in weights])
    return _joined(parts, MapDataset.mix([part.dataset for part in parts], weights), plain)


def select(draw: st.DrawFn, parts: list[Chain]) -> Chain:
    some = st.integers(0, len(parts) - 1).flatmap(
        lambda number: st.tuples(st.just(number), st.integers(0, parts[number].oracle.length - 1))
    )
    pairs = draw(st.lists(some, min_size=1, max_size=8))
    plain = oracle.selected([part.oracle for part in parts], pairs)
    return _joined(parts, MapDataset.select_from_datasets([part.dataset for part in parts], pairs), plain)


def zip_up(draw: st.DrawFn, parts: list[Chain]) -> Chain:
    del draw
    shortest = min(part.oracle.length for part in parts)
    plain = oracle.zipped([oracle.sliced(part.oracle, slice(shortest)) for part in parts])
    return _joined(parts, ZipMapDataset([part.dataset[:shortest] for part in parts]), plain, is_dense=True)
