"""Random chains of MapDatasets, each with its plain oracle. An element shows all that was done to it."""

import dataclasses
import zlib
from typing import Any

import numpy as np
from hypothesis import strategies as st

from millstream import Batch, FilterTransform, FlatMapTransform, MapTransform, PaddedBatch, RandomMapTransform
from millstream.core.randomness import Purpose, derive_seed
from millstream.dataset import MapDataset
from millstream.dataset.arguments import nearest_seed
from millstream.dataset.node_source import node_of
from support.oracle import chains as oracle
from support.oracle.blame import blame_part, blame_record, blaming
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

    @property
    def seed(self) -> int | None:
        """That of the nearest `.seed`; how those of several datasets combine, another test says."""
        return nearest_seed(node_of(self.dataset))

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


class DamagedSource(CountedSource):
    """The same, of which one record cannot be read, alone or with others."""

    def __init__(self, start: int, count: int, damaged: int) -> None:
        super().__init__(start, count)
        self.damaged = damaged

    def fingerprint(self) -> str:
        """Returns which numbers these are."""
        return f"{super().fingerprint()} damaged={self.damaged}"

    def __getitem__(self, key: int) -> int:
        if key % self.count == self.damaged:
            error = OSError(f"record {self.damaged} of {self.start} is damaged")
            blame_record(error, "DamagedSource", self.damaged)
            raise error
        return super().__getitem__(key)


class FailSome(MapTransform[Any, Any]):
    """Fails on some elements."""

    def map(self, element: Any) -> Any:
        if total(element) % 13 == 6:
            raise ArithmeticError(f"{element} is unlucky")
        return ("fine", element)


class MarkTogether(MapTransform[Any, Any]):
    """Shows that elements were mapped, many in one call; fails if one of them has some remainder.

    Args:
        fails_on: the remainder; none if it is above 12.
    """

    def __init__(self, fails_on: int) -> None:
        self.fails_on = fails_on

    def map_batch(self, elements: list[Any]) -> list[Any]:
        for element in elements:
            if total(element) % 13 == self.fails_on:
                raise ArithmeticError(f"{element} is unlucky")
        return [("together", element) for element in elements]

    def map_one(self, element: Any) -> Any:
        return self.map_batch([element])[0]


class AsNumber(MapTransform[Any, int]):
    """Turns any element into a number, so that elements can be stacked."""

    def map(self, element: Any) -> int:
        return zlib.crc32(repr(element).encode()) % 100_003


def from_batch(batch: Any) -> tuple[Any, ...]:
    """Returns what can be compared, mapped and filtered like any other element."""
    if isinstance(batch, PaddedBatch):
        return ("padded", *batch.batch.tolist(), int(batch.mask.sum()))
    return ("stacked", *batch.tolist())


def plain_batch(numbers: list[int], padded_to: int | None) -> tuple[Any, ...]:
    """Returns the same as `from_batch`, for the numbers of a batch."""
    if padded_to is None:
        return ("stacked", *numbers)
    return ("padded", *numbers, *[0] * (padded_to - len(numbers)), len(numbers))


@dataclasses.dataclass(frozen=True)
class InTurn:
    """A user's selection map: one element of each dataset after the other."""

    count: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> tuple[int, int]:
        return position % self.count, position // self.count


SEEDS = st.sampled_from([0, 1, 5, 2**32, 2**64 - 1])


def seeds_after(chain: Chain) -> st.SearchStrategy[int | None]:
    """Returns the seeds that an operation may be given."""
    return SEEDS if chain.seed is None else st.one_of(st.none(), SEEDS)


@st.composite
def sources(draw: st.DrawFn, *, fails: bool = False) -> Chain:
    """Draws a dataset that nothing was done to."""
    start, count = draw(st.integers(0, 100)), draw(st.integers(1, 12))
    if fails and draw(st.integers(0, 9)) == 7:
        damaged = DamagedSource(start, count, draw(st.integers(0, count - 1)))
        return Chain(MapDataset.source(damaged), oracle.source(damaged), is_dense=True)  # type: ignore[arg-type]
    numbers = list(range(start, start + count))
    kinds: list[Any] = [numbers, tuple(numbers), CountedSource(start, count), range(start, start + count)]
    given = draw(st.sampled_from(kinds))
    made = MapDataset.range(start, start + count) if isinstance(given, range) else MapDataset.source(given)
    return Chain(made, oracle.source(numbers), is_dense=True)


def chains(most_nodes: int = 6, *, fails: bool = False) -> st.SearchStrategy[Chain]:
    """Returns chains, of which some have elements that fail, if they may."""
    if most_nodes <= 1:
        return sources(fails=fails)
    longer = extended(most_nodes, fails=fails)
    return st.one_of(sources(fails=fails), longer, longer, joined(most_nodes, fails=fails))


@st.composite
def extended(draw: st.DrawFn, most_nodes: int, *, fails: bool) -> Chain:  # noqa: C901, PLR0912, PLR0915  (one case a node)
    """Draws a chain with one more node."""
    chain = draw(chains(most_nodes - 1, fails=fails))
    dataset, plain, is_dense, seeds = chain.dataset, chain.oracle, chain.is_dense, chain.seeds
    kinds = [
        "repeat",
        "cut",
        "shuffle",
        "window",
        "mark",
        "hole",
        "position",
        "random",
        "keep",
        "split",
        "own",
        "shard",
        "together",
        "seed",
        "take",
        *["fail"] * 3 * fails,
    ]
    match draw(st.sampled_from([*kinds, "batch", "stack"] if is_dense else kinds)):
        case "repeat":
            number, reseed = draw(st.integers(1, 3)), draw(st.booleans())
            dataset = dataset.repeat(number, reseed_each_epoch=reseed)
            plain = oracle.repeated(plain, number, reseed_each_epoch=reseed)
        case "cut":
            cut = draw(st.slices(plain.length))
            dataset, plain = dataset[cut], oracle.taken(plain, range(plain.length)[cut])
        case "shuffle":
            dataset = dataset.shuffle(seed=draw(seeds_after(chain)))
            plain = oracle.shuffled(plain, seed_of(dataset))
        case "window":
            size = draw(st.integers(1, 7))
            dataset = dataset.window_shuffle(size, seed=draw(seeds_after(chain)))
            plain = oracle.window_shuffled(plain, size, derive_seed(seed_of(dataset), Purpose.WINDOWS, size))
        case "seed":
            dataset = dataset.seed(draw(SEEDS))
        case "take":
            rows = draw(st.lists(st.integers(0, plain.length - 1), min_size=1, max_size=12))
            dataset, plain = dataset.slice(np.array(rows) if draw(st.booleans()) else rows), oracle.taken(plain, rows)
        case "shard":
            count = draw(st.integers(1, 4))
            index = draw(st.integers(0, count - 1))
            dataset = dataset.shard(index, count)
            plain = oracle.sharded(plain, index, count, seed_of(dataset))
        case "mark":
            dataset, plain = dataset.pipe(MapDataset.map, Mark()), oracle.mapped(plain, Mark().map)
        case "hole":
            dataset, plain, is_dense = dataset.map(mark_some), oracle.mapped(plain, mark_some), False
        case "together":
            together = MarkTogether(draw(st.sampled_from([6, 99])) if fails else 99)
            is_function = draw(st.booleans())
            dataset = dataset.map(together.map_batch, batched=True) if is_function else dataset.map(together)
            plain = oracle.mapped(plain, blaming(together.map_one))
        case "fail":
            dataset, plain = dataset.map(FailSome()), oracle.mapped(plain, blaming(FailSome().map))
        case "position":
            dataset, plain = dataset.map_with_index(mark_position), oracle.mapped_with_index(plain, mark_position)
        case "random":
            given = draw(seeds_after(chain))
            seed = chain.seed if given is None else given
            assert seed is not None
            dataset = dataset.random_map(Draw(), seed=given)
            plain = oracle.mapped_at_random(plain, Draw().random_map, seed, seeds.count(seed))
            seeds = (*seeds, seed)
        case "keep":
            dataset, plain, is_dense = dataset.filter(KeepSome()), oracle.filtered(plain, KeepSome().filter), False
        case "split":
            operation = Split(draw(st.integers(1, 3)))
            plain = oracle.split(plain, operation.flat_map, operation.max_fan_out)
            dataset, is_dense = dataset.flat_map(operation), False
        case "batch":
            size, drops = draw(st.integers(1, 5)), draw(st.booleans())
            batch = Batch(size, drop_remainder=drops, batch_fn=list)
            is_applied = draw(st.booleans())
            dataset = dataset.apply(batch) if is_applied else dataset.batch(size, drop_remainder=drops, batch_fn=list)
            plain = oracle.batched(plain, size, drop_remainder=drops)
        case "stack":
            size, pads = draw(st.integers(1, 5)), draw(st.booleans())
            drops = not pads and draw(st.booleans())
            dataset = dataset.map(AsNumber()).batch(size, drop_remainder=drops, pad_remainder=pads).map(from_batch)
            plain = oracle.batched(oracle.mapped(plain, AsNumber().map), size, drop_remainder=drops)
            plain = oracle.mapped(plain, lambda numbers: plain_batch(numbers, size if pads else None))
        case "own":
            # A dataset of the user's is an epoch of its own, whatever it does.
            stride = draw(st.integers(1, 3))
            plain = oracle.taken(plain, range(0, plain.length, stride))
            dataset, plain = Every(dataset, stride), dataclasses.replace(plain, epoch_length=plain.length)
    return Chain(dataset, plain, is_dense, seeds) if 0 < plain.length <= LONGEST else chain


@st.composite
def joined(draw: st.DrawFn, most_nodes: int, *, fails: bool) -> Chain:
    """Draws a dataset of several."""
    parts = draw(st.lists(chains(most_nodes // 2, fails=fails), min_size=1, max_size=3))
    datasets, plains = [part.dataset for part in parts], [numbered(*part) for part in enumerate(parts)]
    is_dense = all(part.is_dense for part in parts)
    match draw(st.sampled_from(["concatenate", "mix", "select", "zip"])):
        case "concatenate":
            dataset, plain = MapDataset.concatenate(datasets), oracle.concatenated(plains)
        case "mix":
            dataset, plain = draw(mixtures(datasets, plains))
        case "select" if draw(st.booleans()):
            turns = InTurn(len(parts), draw(st.integers(1, 8)))
            dataset = MapDataset.select_from_datasets(datasets, turns)
            plain = oracle.selected_by(plains, turns)
        case "select":
            some = st.integers(0, len(parts) - 1).flatmap(
                lambda number: st.tuples(st.just(number), st.integers(0, plains[number].length - 1))
            )
            pairs = draw(st.lists(some, min_size=1, max_size=8))
            dataset, plain = MapDataset.select_from_datasets(datasets, pairs), oracle.selected(plains, pairs)
        case _:
            shortest = min(plain.length for plain in plains)
            first, *others = [one[:shortest] for one in datasets]
            dataset, is_dense = first.zip(*others), True
            plain = oracle.zipped([oracle.taken(one, range(shortest)) for one in plains])
    # A random map has the number of those on the path with most draws from its seed.
    seeds = {seed for part in parts for seed in part.seeds}
    most = tuple(seed for seed in seeds for _ in range(max(part.seeds.count(seed) for part in parts)))
    return Chain(dataset, plain, is_dense, most) if plain.length <= LONGEST else parts[0]


@st.composite
def mixtures(draw: st.DrawFn, datasets: list[MapDataset[Any]], plains: list[Oracle]) -> tuple[MapDataset[Any], Oracle]:
    """Draws a mixture with any end, with names or without, whose weights may change at a position."""
    weights = draw(st.lists(st.integers(1, 4), min_size=len(plains), max_size=len(plains)))
    stop = draw(st.sampled_from(["first_exhausted", "all_exhausted", "drop_exhausted"]))
    names = [f"part {number}" for number in range(len(plains))] if draw(st.booleans()) else None

    def named(values: Any) -> Any:
        return values if names is None else dict(zip(names, values, strict=True))

    dataset, changes = MapDataset.mix(named(datasets), named(weights), stop=stop), [(0, weights)]
    others, position = draw(st.permutations(weights)), draw(st.integers(1, 9))
    if others != weights and position < len(dataset) and draw(st.booleans()):
        dataset = dataset.reweighted(position, named(others))
        changes.append((position, others))
    return dataset, oracle.mixed(plains, changes, stop)


def seed_of(dataset: MapDataset[Any]) -> int:
    """Returns the seed of the last node, which it has derived from the nearest one if it was given none."""
    seed: int = vars(node_of(dataset))["seed"]
    return seed


def numbered(number: int, chain: Chain) -> Oracle:
    """Returns the oracle of one of several chains, whose errors must say which one it is."""

    def at(position: int) -> Any:
        try:
            return chain.oracle.at(position)
        except Exception as error:
            blame_part(error, number)
            raise

    return dataclasses.replace(chain.oracle, at=at)
