"""Random IterDatasets, each with the elements that it should yield, said plainly."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st

from millstream import DatasetIterator, IterDataset, MultiprocessingOptions, ReadOptions
from millstream.core.randomness import generator
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
def extended(draw: st.DrawFn, most_nodes: int) -> Stream:  # noqa: C901  (one case a node)
    """Draws a stream and an operation after it."""
    stream = draw(streams(most_nodes - 1))
    dataset, elements = stream.dataset, stream.elements
    kinds = ["mark", "position", "random", "seed", "batch", "ahead", "keep", "split", "window", "pack", "rebatch"]
    kind = draw(st.sampled_from([*kinds, *["renumbered"] * 4]))
    changes: dict[str, Any] = {} if kind in kinds[:6] else {"is_one_to_one": False}
    match kind:
        case "renumbered":
            return limited(draw(renumbered(stream)), stream)
        case "mark":
            dataset, elements = dataset.map(Mark()), each(elements, Mark().map)
        case "position":
            dataset = dataset.map_with_index(mark_position)
            elements = tuple((p, index, mark_position(index, value)) for p, index, value in elements)
        case "random":
            own = draw(st.sampled_from([0, 5, 2**64 - 1])) if stream.seed is None else draw(st.sampled_from([None, 5]))
            seed = stream.seed if own is None else own
            assert seed is not None
            changes = {"draws": (*stream.draws, seed)}
            number, epoch_length = stream.draws.count(seed), stream.epoch_length or 2**63
            dataset = dataset.random_map(Draw(), seed=own)
            elements = tuple(
                (position, index, Draw().random_map(value, generator(seed, position // epoch_length, index, number)))
                for position, index, value in elements
            )
        case "seed":
            changes = {"seed": draw(st.sampled_from([0, 5, 7]))}
            dataset = dataset.seed(changes["seed"])
        case "batch":
            size, drops = draw(st.integers(1, 5)), draw(st.booleans())
            dataset = dataset.batch(size, drop_remainder=drops, batch_fn=list)
            groups = [elements[start : start + size] for start in range(0, len(elements), size)]
            elements = tuple(
                (*group[0][:2], [value for _, _, value in group]) for group in groups if len(group) == size or not drops
            )
        case "ahead":
            # Threads make what is below, which changes nothing.
            options: Any = draw(st.sampled_from([MultiprocessingOptions(), ReadOptions(2, 4), ReadOptions(0, 0)]))
            dataset = dataset.prefetch(options)
        case "keep":
            dataset = dataset.filter(KeepSome())
            elements = tuple(element for element in elements if KeepSome().filter(element[2]))
        case "split":
            operation = Split(draw(st.integers(1, 3)))
            dataset = dataset.apply(operation)
            elements = tuple(
                (position, part_index(index, operation.max_fan_out, number), child)
                for position, index, value in elements
                for number, child in enumerate(operation.flat_map(value))
            )
        case "window":
            shuffle = WindowShuffle(draw(st.integers(1, 6)), seed=3)
            dataset = dataset.window_shuffle(shuffle.window_size, seed=3)
            elements = tuple(PLAIN[WindowShuffle](shuffle, elements))
        case "pack" | "rebatch":
            # Each element becomes a document or a batch, and what is made of these becomes tuples.
            grouping = draw(packers() if kind == "pack" else st.builds(Rebatch, st.integers(1, 5), st.booleans()))
            dataset = dataset.map(as_document).apply(grouping).map(from_arrays)
            elements = each(tuple(PLAIN[type(grouping)](grouping, each(elements, as_document))), from_arrays)
    return limited(dataclasses.replace(stream, dataset=dataset, elements=elements, **changes), stream)


def limited(longer: Stream, stream: Stream) -> Stream:
    return longer if len(longer.elements) <= 100 else stream


@st.composite
def renumbered(draw: st.DrawFn, stream: Stream) -> Stream:
    """Draws a dataset that iterates over a stream: what comes after sees its elements by their numbers."""
    parent, values, count = stream.dataset, stream.values, draw(st.integers(1, 10))
    repeated = values * (1 + count % 3)
    choices = [
        (Halves(parent), values[::2]),
        (Doubled(parent), [value for value in values for _ in range(2)]),
        (parent.take(count), values[:count]),
        (parent.skip(count - 1), values[count - 1 :]),
        (parent.repeat(1 + count % 3), repeated),
        (parent.cache().repeat(1 + count % 3), repeated),
        (parent.take(count).concatenate(parent), values[:count] + values),
    ]
    return _numbered(stream, *draw(st.sampled_from(choices)))


def _numbered(stream: Stream, dataset: IterDataset[Any], values: Iterable[Any]) -> Stream:
    """Returns a stream of a new origin: what comes after sees its elements by their numbers."""
    elements = tuple((number, number, value) for number, value in enumerate(values))
    return dataclasses.replace(stream, dataset=dataset, elements=elements, epoch_length=None, is_one_to_one=False)


def each(elements: Iterable[Element], function: Callable[[Any], Any]) -> tuple[Element, ...]:
    return tuple((position, index, function(value)) for position, index, value in elements)


@st.composite
def packers(draw: st.DrawFn) -> Transformation:
    lengths, bins = {"x": 7}, draw(st.integers(1, 3))
    kinds = [
        FirstFitPack(lengths, num_packing_bins=bins, seed=draw(st.sampled_from([0, 9]))),
        BestFitPack(lengths, num_packing_bins=bins, shuffle_bins=False, max_sequences_per_bin=2),
        FirstFitPack({"x": 3}, num_packing_bins=bins, overflow="split"),
        ConcatThenSplit({"x": 5}),
    ]
    return draw(st.sampled_from(kinds))


def as_document(element: Any) -> dict[str, Any]:
    """Returns tokens that say which element they are of: one to six."""
    return {"x": np.arange(total(element) % 6 + 1) + total(element)}


def from_arrays(arrays: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what can be compared, mapped and filtered like any other element."""
    return tuple((name, *array.tolist()) for name, array in sorted(arrays.items()))


@st.composite
def combined(draw: st.DrawFn, most_nodes: int) -> Stream:
    """Draws a stream of several, without seeds: how these combine, another test says."""
    parts = draw(st.lists(streams(most_nodes // 2), min_size=1, max_size=3))
    datasets = [part.dataset for part in parts]
    # A random map has the number of those on the path with most draws from its seed.
    seeds = {seed for part in parts for seed in part.draws}
    draws = tuple(seed for seed in seeds for _ in range(max(part.draws.count(seed) for part in parts)))
    together = Stream(datasets[0], (), None, draws=draws)
    if any(part.seed is not None for part in parts):
        return parts[0]
    values = [part.values for part in parts]
    match draw(st.sampled_from(["zip", "mix", "interleave"])):
        case "zip":
            return _numbered(together, datasets[0].zip(*datasets[1:], strict=False), zip(*values, strict=False))
        case "mix":
            return _numbered(together, IterDataset.mix(datasets), _in_turn(values))
    cycle_length = draw(st.integers(1, 3))
    interleaved = IterDataset.interleave(datasets, cycle_length=cycle_length)
    return _numbered(together, interleaved, _interleaved(values, cycle_length))


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
