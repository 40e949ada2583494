"""Random IterDatasets, each with the elements that it should yield, said plainly."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st

from millstream import DatasetIterator, IterDataset, ReadOptions
from millstream.dataset import (
    CacheIterDataset,
    InterleaveIterDataset,
    LimitIterDataset,
    RepeatIterDataset,
    ZipIterDataset,
)
from millstream.randomness import generator
from millstream.transforms import BestFitPack, ConcatThenSplit, FirstFitPack, Rebatch, Transformation, WindowShuffle
from support.draw.chains import Draw, KeepSome, Mark, Split, chains, mark_position, total
from support.oracle.groupings import PLAIN, Element, part_index


@dataclasses.dataclass(frozen=True)
class Stream:
    """A dataset and what it should yield.

    Attributes:
        dataset: the dataset.
        elements: position, index and value of each element.
        epoch_length: how many positions have the same epoch; None where there are no epochs.
        seed: that of the nearest `.seed`; None where there is none.
        draws: the seeds that random maps have drawn from.
        is_one_to_one: whether nothing but the MapDataset and 1:1 operations is in it.
    """

    dataset: IterDataset[Any]
    elements: tuple[Element, ...]
    epoch_length: int | None
    seed: int | None = None
    draws: tuple[int, ...] = ()
    is_one_to_one: bool = True

    @property
    def values(self) -> list[Any]:
        return [value for _, _, value in self.elements]

    def __repr__(self) -> str:
        return f"{self.dataset!r}\n{self.values}"


class Halves(IterDataset[Any]):
    """Every other element, as a user would write it."""

    def __init__(self, parent: IterDataset[Any]) -> None:
        super().__init__(parent)

    def __iter__(self) -> DatasetIterator[Any]:
        return HalvesIterator(self._parent.__iter__())


class HalvesIterator(DatasetIterator[Any]):
    """Leaves out every other element."""

    def __init__(self, parent: DatasetIterator[Any]) -> None:
        super().__init__(parent)
        self._is_second = False

    def __next__(self) -> Any:
        if self._is_second:
            next(self._parent)
        element = next(self._parent)
        self._is_second = True
        return element

    def get_state(self) -> dict[str, Any]:
        return {"parent": self._parent.get_state(), "is_second": self._is_second}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])
        self._is_second = state["is_second"]


class Doubled(IterDataset[Any]):
    """Every element twice, by a generator, which has no states."""

    def __iter__(self) -> Any:
        for element in self._parent:
            yield element
            yield element


@st.composite
def reads(draw: st.DrawFn) -> Stream:
    chain = draw(chains(4))
    read = draw(st.sampled_from([None, ReadOptions(0, 0), ReadOptions(2, 3)]))
    values = chain.oracle.first(chain.oracle.length)
    elements = tuple((i, i, value) for i, value in enumerate(values) if value is not None)
    return Stream(chain.dataset.to_iter_dataset(read), elements, chain.oracle.epoch_length, draws=chain.seeds)


def streams(most_nodes: int = 5) -> st.SearchStrategy[Stream]:
    if most_nodes <= 1:
        return reads()
    return st.one_of(reads(), extended(most_nodes), extended(most_nodes), combined(most_nodes))


@st.composite
def extended(draw: st.DrawFn, most_nodes: int) -> Stream:
    """Draws a stream and an operation after it."""
    stream = draw(streams(most_nodes - 1))
    steps = [mark, position, random, seed, keep, split, batch, window, pack, rebatch]
    steps += [ahead, halves, doubled, limit, repeat]
    longer = draw(st.sampled_from(steps))(draw, stream)
    return longer if len(longer.elements) <= 100 else stream


def _numbered(stream: Stream, dataset: IterDataset[Any], values: Iterator[Any] | list[Any]) -> Stream:
    """Returns a stream of a new origin: what comes after sees its elements by their numbers."""
    elements = tuple((number, number, value) for number, value in enumerate(values))
    return dataclasses.replace(stream, dataset=dataset, elements=elements, epoch_length=None, is_one_to_one=False)


def _each(stream: Stream, dataset: IterDataset[Any], values: list[Any], **changes: Any) -> Stream:
    """Returns a stream of other values."""
    elements = tuple((p, i, value) for (p, i, _), value in zip(stream.elements, values, strict=True))
    return dataclasses.replace(stream, dataset=dataset, elements=elements, **changes)


def mark(draw: st.DrawFn, stream: Stream) -> Stream:
    del draw
    return _each(stream, stream.dataset.map(Mark()), [Mark().map(value) for value in stream.values])


def position(draw: st.DrawFn, stream: Stream) -> Stream:
    del draw
    marked = [mark_position(index, value) for _, index, value in stream.elements]
    return _each(stream, stream.dataset.map_with_index(mark_position), marked)


def random(draw: st.DrawFn, stream: Stream) -> Stream:
    """Adds a random map, with a seed of its own or the nearest one."""
    own = draw(st.sampled_from([0, 5, 2**64 - 1])) if stream.seed is None else draw(st.sampled_from([None, 5]))
    seed = stream.seed if own is None else own
    assert seed is not None
    number = stream.draws.count(seed)
    drawn = [
        Draw().random_map(value, generator(seed, position // (stream.epoch_length or 2**63), index, number))
        for position, index, value in stream.elements
    ]
    return _each(stream, stream.dataset.random_map(Draw(), seed=own), drawn, draws=(*stream.draws, seed))


def seed(draw: st.DrawFn, stream: Stream) -> Stream:
    chosen = draw(st.sampled_from([0, 5, 7]))
    return dataclasses.replace(stream, dataset=stream.dataset.seed(chosen), seed=chosen)


def keep(draw: st.DrawFn, stream: Stream) -> Stream:
    del draw
    kept = tuple(element for element in stream.elements if KeepSome().filter(element[2]))
    return dataclasses.replace(stream, dataset=stream.dataset.filter(KeepSome()), elements=kept, is_one_to_one=False)


def split(draw: st.DrawFn, stream: Stream) -> Stream:
    operation = Split(draw(st.integers(1, 3)))
    children = tuple(
        (position, part_index(index, operation.max_fan_out, number), child)
        for position, index, value in stream.elements
        for number, child in enumerate(operation.flat_map(value))
    )
    return dataclasses.replace(stream, dataset=stream.dataset.apply(operation), elements=children, is_one_to_one=False)


def batch(draw: st.DrawFn, stream: Stream) -> Stream:
    size, drops = draw(st.integers(1, 5)), draw(st.booleans())
    batches = []
    remaining = iter(stream.elements)
    while (group := list(itertools.islice(remaining, size))) and not (drops and len(group) < size):
        batches.append((group[0][0], group[0][1], [value for _, _, value in group]))
    dataset = stream.dataset.batch(size, drop_remainder=drops, batch_fn=list)
    return dataclasses.replace(stream, dataset=dataset, elements=tuple(batches))


def window(draw: st.DrawFn, stream: Stream) -> Stream:
    operation = WindowShuffle(draw(st.integers(1, 6)), seed=3)
    shuffled = tuple(PLAIN[WindowShuffle](operation, stream.elements))
    return dataclasses.replace(stream, dataset=stream.dataset.apply(operation), elements=shuffled, is_one_to_one=False)


def pack(draw: st.DrawFn, stream: Stream) -> Stream:
    """Packs documents that tell which elements they are of into rows, and shows these as tuples."""
    lengths, bins = {"x": 7}, draw(st.integers(1, 3))
    packers = [
        FirstFitPack(lengths, num_packing_bins=bins, seed=draw(st.sampled_from([0, 9]))),
        BestFitPack(lengths, num_packing_bins=bins, shuffle_bins=False, max_sequences_per_bin=2),
        FirstFitPack({"x": 3}, num_packing_bins=bins, overflow="split"),
        ConcatThenSplit({"x": 5}),
    ]
    return _grouped(stream, draw(st.sampled_from(packers)), as_document, from_arrays)


def rebatch(draw: st.DrawFn, stream: Stream) -> Stream:
    """Makes batches of elements, each of which becomes a batch, and shows them as tuples."""
    operation = Rebatch(draw(st.integers(1, 5)), draw(st.booleans()))
    return _grouped(stream, operation, as_document, from_arrays)


def as_document(element: Any) -> dict[str, Any]:
    """Returns tokens that say which element they are of: one to six."""
    return {"x": np.arange(total(element) % 6 + 1) + total(element)}


def from_arrays(arrays: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what can be compared, mapped and filtered like any other element."""
    return tuple((name, *array.tolist()) for name, array in sorted(arrays.items()))


def _grouped(
    stream: Stream,
    operation: Transformation,
    before: Callable[[Any], dict[str, Any]],
    after: Callable[[dict[str, Any]], Any],
) -> Stream:
    """Returns a stream of what a grouping makes of elements, which other maps prepare and show."""
    dataset = stream.dataset.map(before).apply(operation).map(after)
    groups = PLAIN[type(operation)](operation, [(p, i, before(value)) for p, i, value in stream.elements])
    made = tuple((p, i, after(value)) for p, i, value in groups)
    return dataclasses.replace(stream, dataset=dataset, elements=made, is_one_to_one=False)


def ahead(draw: st.DrawFn, stream: Stream) -> Stream:
    """Has threads make what is below; which changes nothing."""
    options: Any = draw(st.sampled_from([0, ReadOptions(2, 4), ReadOptions(0, 0)]))
    return dataclasses.replace(stream, dataset=stream.dataset.prefetch(options))


def halves(draw: st.DrawFn, stream: Stream) -> Stream:
    del draw
    return _numbered(stream, Halves(stream.dataset), stream.values[::2])


def doubled(draw: st.DrawFn, stream: Stream) -> Stream:
    del draw
    return _numbered(stream, Doubled(stream.dataset), [value for value in stream.values for _ in range(2)])


def limit(draw: st.DrawFn, stream: Stream) -> Stream:
    count = draw(st.integers(1, 10))
    return _numbered(stream, LimitIterDataset(stream.dataset, count), stream.values[:count])


def repeat(draw: st.DrawFn, stream: Stream) -> Stream:
    number, is_cached = draw(st.integers(1, 3)), draw(st.booleans())
    parent = CacheIterDataset(stream.dataset) if is_cached else stream.dataset
    return _numbered(stream, RepeatIterDataset(parent, number), stream.values * number)


@st.composite
def combined(draw: st.DrawFn, most_nodes: int) -> Stream:
    """Draws a stream of several, without seeds: how these combine, another test says."""
    parts = draw(st.lists(streams(most_nodes // 2), min_size=1, max_size=3))
    datasets = [part.dataset for part in parts]
    together = Stream(datasets[0], (), None, draws=_most(parts))
    if any(part.seed is not None for part in parts):
        return parts[0]
    values = [part.values for part in parts]
    match draw(st.sampled_from(["zip", "mix", "interleave"])):
        case "zip":
            return _numbered(together, ZipIterDataset(datasets, strict=False), list(zip(*values, strict=False)))
        case "mix":
            return _numbered(together, IterDataset.mix(datasets), list(_in_turn(values)))
    cycle_length = draw(st.integers(1, 3))
    interleaved = InterleaveIterDataset(datasets, cycle_length=cycle_length)
    return _numbered(together, interleaved, list(_interleaved(values, cycle_length)))


def _most(parts: list[Stream]) -> tuple[int, ...]:
    """Returns the draws of the path that has most of them, seed by seed."""
    seeds = {seed for part in parts for seed in part.draws}
    return tuple(seed for seed in seeds for _ in range(max(part.draws.count(seed) for part in parts)))


def _in_turn(parts: list[list[Any]]) -> Iterator[Any]:
    """Yields one element of each in turn, until one has no more."""
    iterators = [iter(part) for part in parts]
    for iterator in itertools.cycle(iterators):
        try:
            yield next(iterator)
        except StopIteration:
            return


def _interleaved(parts: list[list[Any]], cycle_length: int) -> Iterator[Any]:
    """Yields one element of each open part, one after another; one that has ended is replaced for its next turn."""
    waiting = collections.deque(map(iter, parts))
    slots: list[Iterator[Any] | None] = [waiting.popleft() for _ in range(min(cycle_length, len(parts)))]
    for turn in itertools.cycle(range(len(slots))):
        if not any(slots):
            return
        if (current := slots[turn]) is None:
            continue
        for element in itertools.islice(current, 1):
            yield element
            break
        else:
            slots[turn] = waiting.popleft() if waiting else None
