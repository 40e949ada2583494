"""Random streams: trees of all that an IterDataset can be built of, each with a plain oracle: generators, no schedule.

A stream is built for a place, and its elements are the same in all. Sources, functions and streams of users may fail.
"""

import collections
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from hypothesis import strategies as st

from millstream import DatasetIterator, IterDataset, MapDataset, MultiprocessingOptions, ReadOptions
from millstream.core.randomness import generator
from millstream.dataset.arguments import nearest_seed
from millstream.dataset.stream_steps import step_of
from millstream.transforms import (
    BestFitPack,
    BucketBatch,
    ConcatThenSplit,
    FirstFitPack,
    Rebatch,
    TokenBudgetBatch,
    Transformation,
    WindowShuffle,
)
from support.draw.chains import (
    AsNumber,
    Draw,
    FailSome,
    KeepSome,
    Mark,
    MarkTogether,
    Split,
    chains,
    from_batch,
    mark_position,
    plain_batch,
    total,
)
from support.oracle.blame import blame, blame_part, blamed_for, blaming
from support.oracle.chains import Oracle, mixed_in_order, repeated
from support.oracle.groupings import PLAIN, Element, part_index
from support.user_streams import Counted, Numbers

LONGEST = 100
"""Streams have at most this many elements."""

ENDLESS = 500
"""The number of positions that the oracle reads of an endless chain."""

SPOTS = 4
"""Each node of a stream has one of these numbers, at random."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The place in which the elements of a stream are computed.

    Attributes:
        reading: the threads of all chains; None for those that each was drawn with.
        workers: the number of worker processes, or "auto".
        buffer: the number of elements that each worker keeps ready; None for the default.
        spots: the nodes after which `mp_prefetch` stands; without them, it is the last step.
    """

    reading: ReadOptions | None = None
    workers: int | Literal["auto"] = 0
    spots: frozenset[int] = frozenset()
    buffer: int | None = None

    def after(self, dataset: IterDataset[Any], spot: int) -> IterDataset[Any]:
        return self.in_workers(dataset) if self.workers and spot in self.spots else dataset

    def in_workers(self, dataset: IterDataset[Any]) -> IterDataset[Any]:
        if self.buffer is None or isinstance(self.workers, str):
            return dataset.mp_prefetch(self.workers)
        return dataset.mp_prefetch(MultiprocessingOptions(self.workers, self.buffer))


HERE = Place(ReadOptions(0, 0))
"""The consumer's thread."""


@dataclasses.dataclass
class Failed:
    """Stands for an element that fails, and for each that may come after it, of which none is read."""

    error: Exception


class Errors(NamedTuple):
    """The options for elements that fail: whether they are skipped where the library may skip them, and how many."""

    skips: bool = False
    max_errors: int | None = None

    def of(self, dataset: IterDataset[Any]) -> IterDataset[Any]:
        return dataset.options(on_error="skip", max_errors=self.max_errors) if self.skips else dataset


RAISED, SKIPPED = Errors(), Errors(skips=True)
ERRORS = [RAISED, SKIPPED, SKIPPED, *(Errors(skips=True, max_errors=number) for number in (0, 1, 2, 5))]


@dataclasses.dataclass
class Pass:
    """One pass over a stream.

    Attributes:
        errors: the options for elements that fail.
        failure: what stands for the elements from the first failure on.
        failed: the positions of the elements that were skipped. A stream that begins again does not forget them.
        is_limited: False to skip any number of them, whatever the options.
    """

    errors: Errors = RAISED
    is_limited: bool = True
    failure: Failed | None = None
    failed: set[int] = dataclasses.field(default_factory=set)
    _below: "dict[int, Pass]" = dataclasses.field(default_factory=dict)

    def of(self, number: int = 0, own: Errors = RAISED) -> "Pass":
        """Returns the pass over one of the streams below, which has options of its own unless it gets some."""
        return self._below.setdefault(number, Pass(self.errors if self.errors.skips else own, self.is_limited))


Elements = Iterator[Element]
"""Position, index and value of each element; from a failure on, of those that there are at most."""

Step = Callable[[Pass, Elements], Elements]
"""An operation. If elements that fail are skipped, it gets one at a time."""


def raised(elements: Iterable[Element]) -> Iterator[Element]:
    """Yields elements up to the first that fails, whose error is raised."""
    for element in elements:
        if isinstance(element[2], Failed):
            raise element[2].error
        yield element


class UndecidedError(Exception):
    """An endless stream has no further element, perhaps: as many in a row were dropped as the oracle reads."""


@dataclasses.dataclass(frozen=True, repr=False)
class Stream:
    """A dataset and what it should yield.

    Attributes:
        built: returns the dataset for a place.
        records: the elements before the steps, each of which may be skipped with all that the steps make of it.
        steps: the operations since then.
        is_known: whether it is known at each element how many may follow, so that those that a batch drops at the end
            are no errors: not after operations that split or regroup, nor after other streams.
        in_a_row: how many records in a row may not fail, whatever the options; None for any number.
        epoch_length: how many positions have the same epoch; None where there are no epochs.
        seed: that of the nearest `.seed`; None where there is none.
        draws: the seeds that random maps have drawn from.
        is_grouped: whether errors are raised even if others are skipped, because an operation batches or packs.
        is_limited: whether only some elements of a stream below may fail.
        has_two_ends: whether there may be two states of its end, because a user's iterator below was moved there: the
            state that was loaded, until an element has followed, and that of the iterator.
    """

    built: Callable[[Place], IterDataset[Any]]
    records: Callable[[Pass], Elements]
    steps: tuple[Step, ...] = ()
    is_known: bool = False
    in_a_row: int | None = None
    epoch_length: int | None = None
    seed: int | None = None
    draws: tuple[int, ...] = ()
    is_grouped: bool = False
    is_limited: bool = False
    has_two_ends: bool = False

    def dataset(self, place: Place = Place(), errors: Errors = RAISED) -> IterDataset[Any]:
        """Returns the dataset for a place, with options for the elements that fail."""
        dataset = self.built(place)
        if place.workers and not place.spots:
            dataset = place.in_workers(dataset)
        return errors.of(dataset)

    def elements(self, one: Pass) -> Elements:
        """Yields the elements of a pass."""
        if one.errors.skips and not self.is_grouped:
            return self._working(one)
        return self._after_steps(one, self.records(one))

    def _after_steps(self, one: Pass, elements: Elements) -> Elements:
        for step in self.steps:
            elements = step(one, elements)
        return elements

    def _working(self, one: Pass) -> Elements:
        """Yields what the steps make of those records that do not fail."""
        in_a_row, most, records = 0, one.errors.max_errors if one.is_limited else sys.maxsize, self.records(one)
        for record in records:
            try:
                made = list(raised(self._after_steps(Pass(), iter([record]))))
            except Exception as error:
                in_a_row += 1
                have_all = most is None and in_a_row == self.in_a_row
                if have_all or (most is not None and len(one.failed | {record[0]}) > most):
                    if not self.is_known:
                        raise
                    # It stands for all that may have followed; if all have failed, for each of them.
                    for position, index, _ in [record] * (self.in_a_row or 1) if have_all else [record, *records]:
                        yield position, index, Failed(error)
                    return
                one.failed.add(record[0])
            else:
                in_a_row = 0 if made else in_a_row
                yield from made

    def values(self, one: Pass) -> Iterator[Any]:
        """Yields the values up to the first error, which it raises."""
        return (value for _, _, value in raised(self.elements(one)))

    def outcome(
        self, errors: Errors = RAISED, *, is_limited: bool = True
    ) -> tuple[list[Any], str | None, tuple[str, ...]]:
        """Returns the values, the error that ends them, if any, as text, and the words that must be in its notes."""
        values: list[Any] = []
        try:
            values.extend(itertools.islice(self.values(Pass(errors, is_limited)), 2 * LONGEST))
        except Exception as error:  # noqa: BLE001  (any: those before it were appended)
            return values, text_of(error), blamed_for(error)
        return values, None, ()

    def __repr__(self) -> str:
        return f"{self.dataset()!r}\n{self.outcome()}"


def text_of(error: BaseException) -> str:
    """Returns the type of an error, and its text if it was raised by what was drawn, not by the library."""
    return f"{type(error).__name__}: {error}" if isinstance(error, OSError | ArithmeticError) else type(error).__name__


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
            self._is_second = False
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


class Resumable:
    """Numbers from 0, which resume as those of Hugging Face do."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.next = self.begin = 0

    def __iter__(self) -> Iterator[int]:
        self.next, self.begin = self.begin, 0
        while self.next < self.count:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, int]:
        """Returns the number of the next one."""
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begins there, once."""
        self.next = self.begin = state["next"]


def numbers_until(count: int, fails: bool) -> Iterator[int]:
    """Yields numbers, and then fails if it is to."""
    yield from range(count)
    if fails:
        raise OSError(f"the stream fails at {count}")


def streams(most_nodes: int = 5, *, fails: bool = False) -> st.SearchStrategy[Stream]:
    """Returns streams, some of which fail at an element, if they may."""
    if most_nodes <= 1:
        return reads(fails=fails)
    longer = extended(most_nodes, fails=fails)
    return st.one_of(reads(fails=fails), longer, longer, combined(most_nodes, fails=fails))


READINGS = [None, ReadOptions(0, 0), ReadOptions(2, 3), ReadOptions(4, 500, max_buffer_bytes=200)]


@st.composite
def reads(draw: st.DrawFn, *, fails: bool) -> Stream:
    if draw(st.integers(0, 7)) == 0:
        return draw(streams_of_users(fails=fails))
    if draw(st.integers(0, 9)) == 9:
        return draw(endless_reads(fails=fails))
    chain = draw(chains(4, fails=fails))
    own, spot = draw(st.sampled_from(READINGS)), draw(st.integers(0, SPOTS - 1))
    allows_nones = draw(st.integers(0, 3)) == 3

    def built(place: Place) -> IterDataset[Any]:
        stream = chain.dataset.to_iter_dataset(place.reading or own, allow_nones=allows_nones)
        return place.after(stream, spot)

    length = chain.oracle.length
    return Stream(
        built,
        lambda _: ((position, position, position) for position in range(length)),
        (reading(chain.oracle, allows_nones=allows_nones),),
        is_known=True,
        in_a_row=length,
        epoch_length=chain.oracle.epoch_length,
        seed=chain.seed,
        draws=chain.seeds,
    )


def reading(plain: Oracle, *, allows_nones: bool) -> Step:
    """Returns the step from positions to elements, of which none is read after a failure."""

    def step(one: Pass, positions: Elements) -> Elements:
        for position in positions:
            if one.failure is not None:
                yield *position[:2], one.failure
            else:
                yield from (found for found in each(one, [position], plain.at) if allows_nones or found[2] is not None)

    return step


@st.composite
def endless_reads(draw: st.DrawFn, *, fails: bool) -> Stream:
    """Draws the first elements of an endless chain: each epoch in another order, or the first one forever."""
    chain = draw(chains(3, fails=fails).filter(lambda chain: chain.is_dense))
    reseeds, count, own = draw(st.booleans()), draw(st.integers(1, 30)), draw(st.sampled_from(READINGS))
    plain = repeated(chain.oracle, ENDLESS, reseed_each_epoch=reseeds)

    def positions(_: Pass) -> Elements:
        yield from ((position, position, position) for position in range(ENDLESS))
        raise UndecidedError

    stream = Stream(
        lambda place: chain.dataset.repeat(reseed_each_epoch=reseeds).to_iter_dataset(place.reading or own),
        positions,
        (reading(plain, allows_nones=False),),
        is_known=True,
        # One that works may be the first of an epoch and the last of the next one.
        in_a_row=2 * chain.oracle.epoch_length - 1,
        epoch_length=chain.oracle.epoch_length,
        seed=chain.seed,
        draws=chain.seeds,
    )
    for _ in range(draw(st.integers(0, 2))):
        stream = draw(followed(stream, fails=fails))
    return followed_by(
        stream,
        lambda dataset: dataset.take(count),
        lambda one: itertools.islice(stream.values(one.of()), count),
        draw(st.integers(0, SPOTS - 1)),
    )


@st.composite
def streams_of_users(draw: st.DrawFn, *, fails: bool) -> Stream:
    """Draws numbers from 0 in a stream of a user, with states or without."""
    count = draw(st.integers(1, 12))
    kinds = ["function", "with states", "without", "list", "with a state_dict"]
    kind = draw(st.sampled_from([*kinds, "failing"] if fails else kinds))
    datasets: dict[str, Callable[[], IterDataset[Any]]] = {
        "function": lambda: IterDataset.source(functools.partial(numbers_until, count, False)),
        "failing": lambda: IterDataset.source(functools.partial(numbers_until, count, True)),
        "list": lambda: IterDataset.source([*range(count)]),
        "with a state_dict": lambda: IterDataset.source(Resumable(count)),
        "with states": lambda: Numbers(count),
        "without": lambda: Counted(count),
    }

    def values(_: Pass) -> Iterator[Any]:
        try:
            yield from numbers_until(count, kind == "failing")
        except OSError as error:
            blame(error, "numbers_until", f"element {count}")
            raise

    return Stream(lambda _: datasets[kind](), numbered(values))


def numbered(values: Callable[[Pass], Iterable[Any]]) -> Callable[[Pass], Elements]:
    """Returns values as elements whose positions are their numbers."""
    return lambda one: ((number, number, value) for number, value in enumerate(values(one)))


def each(one: Pass, elements: Iterable[Element], function: Callable[[Any], Any]) -> Elements:
    """Yields the elements with other values."""
    for position, index, value in elements:
        changed = value
        if not isinstance(value, Failed):
            try:
                changed = function(value)
            except Exception as error:  # noqa: BLE001  (any)
                blame(error, place=f"position {position}")
                one.failure = changed = Failed(error)
        yield position, index, changed


def groups(elements: Iterator[Element], size: int, *, drops: bool) -> Iterator[Element]:
    """Yields lists of the values of some elements in a row, where the first of them was."""
    while group := list(itertools.islice(elements, size)):
        if len(group) == size or not drops:
            values = [value for _, _, value in group]
            yield *group[0][:2], next((value for value in values if isinstance(value, Failed)), values)


def children(elements: Iterable[Element], operation: Split) -> Iterator[Element]:
    for position, index, value in elements:
        for number, child in enumerate(operation.flat_map(value)):
            yield position, part_index(index, operation.max_fan_out, number), child


def extended(most_nodes: int, *, fails: bool) -> st.SearchStrategy[Stream]:
    """Returns streams, each with an operation after it."""
    shorter = streams(most_nodes - 1, fails=fails)
    after = [functools.partial(followed, fails=fails)] * 4 + [renumbered]
    return st.tuples(shorter, st.sampled_from(after)).flatmap(
        lambda drawn: drawn[1](drawn[0]).map(lambda longer: limited(longer, drawn[0]))
    )


@st.composite
def followed(draw: st.DrawFn, stream: Stream, *, fails: bool) -> Stream:  # noqa: C901, PLR0912, PLR0915  (one case a node)
    """Draws an operation after a stream."""
    spot = draw(st.integers(0, SPOTS - 1))
    known = ["mark", "together", "position", "random", "seed", "ahead", "options", *["fail"] * fails, "keep"]
    grouping = ["batch", "stack", "window", "pack", "rebatch"]
    kind = draw(st.sampled_from([*known, "split", *grouping]))
    changes: dict[str, Any] = {"is_known": stream.is_known and kind in {*known, "batch", "stack"}}

    def before(elements: Elements) -> Elements:
        return elements if changes["is_known"] else raised(elements)

    apply: Callable[[IterDataset[Any]], IterDataset[Any]]
    step: Step = lambda _, elements: elements  # noqa: E731
    match kind:
        case "mark":
            apply = lambda dataset: dataset.pipe(IterDataset.map, Mark())  # noqa: E731
            step = lambda one, elements: each(one, elements, Mark().map)  # noqa: E731
        case "together":
            together = MarkTogether(draw(st.sampled_from([6, 99])) if fails else 99)
            is_function = draw(st.booleans())

            def apply(dataset: IterDataset[Any]) -> IterDataset[Any]:
                return dataset.map(together.map_batch, batched=True) if is_function else dataset.map(together)

            step = lambda one, elements: each(one, elements, blaming(together.map_one))  # noqa: E731
        case "fail":
            apply = lambda dataset: dataset.map(FailSome())  # noqa: E731
            step = lambda one, elements: each(one, elements, blaming(FailSome().map))  # noqa: E731
        case "position":
            apply = lambda dataset: dataset.map_with_index(mark_position)  # noqa: E731

            def step(_: Pass, elements: Elements) -> Elements:
                for position, index, value in elements:
                    yield position, index, value if isinstance(value, Failed) else mark_position(index, value)

        case "random":
            own = draw(st.sampled_from([0, 5, 2**64 - 1])) if stream.seed is None else draw(st.sampled_from([None, 5]))
            seed = stream.seed if own is None else own
            assert seed is not None
            changes["draws"] = (*stream.draws, seed)
            number, epoch_length = stream.draws.count(seed), stream.epoch_length or 2**63
            apply = lambda dataset: dataset.random_map(Draw(), seed=own)  # noqa: E731

            def step(_: Pass, elements: Elements) -> Elements:
                for position, index, value in elements:
                    rng = generator(seed, position // epoch_length, index, number)
                    yield position, index, value if isinstance(value, Failed) else Draw().random_map(value, rng)

        case "seed":
            chosen = draw(st.sampled_from([0, 5, 7]))
            changes["seed"], apply = chosen, lambda dataset: dataset.seed(chosen)
        case "options":
            ratio = draw(st.sampled_from([None, 0.5, 1.0]))
            # For runs of 1,000 records, which are never read here.
            apply = lambda dataset: dataset.options(filter_raise_threshold_ratio=ratio)  # noqa: E731
        case "ahead":
            # Threads make what is below, which changes nothing.
            options: Any = draw(st.sampled_from([MultiprocessingOptions(), ReadOptions(2, 4), ReadOptions(0, 0)]))
            apply = lambda dataset: dataset.prefetch(options)  # noqa: E731
        case "keep":
            apply = lambda dataset: dataset.filter(KeepSome())  # noqa: E731

            def step(_: Pass, elements: Elements) -> Elements:
                for element in elements:
                    # One that has failed may have been kept.
                    if isinstance(element[2], Failed) or KeepSome().filter(element[2]):
                        yield element

        case "split":
            operation = Split(draw(st.integers(1, 3)))
            apply = lambda dataset: dataset.flat_map(operation)  # noqa: E731
            step = lambda _, elements: children(elements, operation)  # noqa: E731
        case "batch":
            size, drops = draw(st.integers(1, 5)), draw(st.booleans())
            apply = lambda dataset: dataset.batch(size, drop_remainder=drops, batch_fn=list)  # noqa: E731
            step = lambda _, elements: groups(elements, size, drops=drops)  # noqa: E731
        case "stack":
            # Arrays, which cross between processes in memory that both map.
            size, pads = draw(st.integers(1, 5)), draw(st.booleans())
            apply = lambda dataset: dataset.map(AsNumber()).batch(size, pad_remainder=pads).map(from_batch)  # noqa: E731
            step = lambda one, elements: each(  # noqa: E731
                one,
                groups(each(one, elements, AsNumber().map), size, drops=False),
                lambda numbers: plain_batch(numbers, size if pads else None),
            )
        case "window":
            size, own = draw(st.integers(1, 6)), draw(st.sampled_from([None, 3]))
            apply = lambda dataset: dataset.window_shuffle(size, seed=own)  # noqa: E731
            # With the seed that it has derived from the nearest one, if it was given none.
            shuffle: Any = vars(step_of(apply(stream.built(HERE))))["operation"]
            step = lambda _, elements: PLAIN[WindowShuffle](shuffle, elements)  # noqa: E731
        case _:
            # Each element becomes a document or a batch, and what is made of these becomes tuples.
            packer = draw(packers() if kind == "pack" else st.builds(Rebatch, st.integers(1, 5), st.booleans()))
            packed: Any = (
                (lambda documents: documents.rebatch(packer.batch_size, drop_remainder=packer.drop_remainder))
                if isinstance(packer, Rebatch)
                else lambda documents: documents.apply(packer)
            )
            apply = lambda dataset: packed(dataset.map(as_document)).map(from_arrays)  # noqa: E731
            step = lambda one, elements: each(  # noqa: E731
                one, PLAIN[type(packer)](packer, each(one, elements, as_document)), from_arrays
            )
    if kind in grouping:
        # What fails from here on is of no single record.
        changes |= {"is_grouped": True, "records": lambda one: step(one, before(stream.elements(one))), "steps": ()}
    else:
        changes["steps"] = (*stream.steps, lambda one, elements: step(one, before(elements)))
    return dataclasses.replace(stream, built=lambda place: place.after(apply(stream.built(place)), spot), **changes)


def limited(longer: Stream, stream: Stream) -> Stream:
    """Returns a stream, unless it is too long: then the other one."""
    return longer if all(len(longer.outcome(errors)[0]) <= LONGEST for errors in (RAISED, SKIPPED)) else stream


@st.composite
def renumbered(draw: st.DrawFn, stream: Stream) -> Stream:
    """Draws a dataset that iterates over a stream: what comes after sees its elements by their numbers."""
    count, spot = draw(st.integers(1, 10)), draw(st.integers(0, SPOTS - 1))
    times = 1 + count % 3

    def values(one: Pass, number: int = 0) -> Iterator[Any]:
        return stream.values(one.of(number))

    def again(num_epochs: int | None, one: Pass) -> Iterator[Any]:
        for _ in itertools.count() if num_epochs is None else range(num_epochs):
            is_empty = True
            for value in values(one):
                is_empty = False
                yield value
            if is_empty:
                return

    choices: list[tuple[Callable[[IterDataset[Any]], IterDataset[Any]], Callable[[Pass], Iterable[Any]]]] = [
        (Halves, lambda one: itertools.islice(values(one), 0, None, 2)),
        (Doubled, lambda one: (value for value in values(one) for _ in range(2))),
        (lambda parent: parent.take(count), lambda one: itertools.islice(values(one), count)),
        (lambda parent: parent.skip(count - 1), lambda one: itertools.islice(values(one), count - 1, None)),
        (lambda parent: parent.repeat(times), functools.partial(again, times)),
        (lambda parent: parent.cache().repeat(times), functools.partial(again, times)),
        (
            lambda parent: parent.repeat().take(2 * count),
            lambda one: itertools.islice(again(None, one), 2 * count),
        ),
        (lambda parent: parent.cache(), values),
        (
            lambda parent: parent.take(count).concatenate(parent),
            lambda one: itertools.chain(itertools.islice(values(one), count), values(one, 1)),
        ),
    ]
    apply, after = draw(st.sampled_from(choices))
    longer = followed_by(stream, apply, after, spot)
    return dataclasses.replace(longer, has_two_ends=stream.has_two_ends or apply is Halves)


def followed_by(
    stream: Stream,
    apply: Callable[[IterDataset[Any]], IterDataset[Any]],
    values: Callable[[Pass], Iterable[Any]],
    spot: int,
) -> Stream:
    """Returns a dataset that iterates over a stream."""
    return Stream(
        lambda place: place.after(apply(stream.built(place)), spot),
        numbered(values),
        seed=stream.seed,
        draws=stream.draws,
        is_limited=stream.is_limited,
        has_two_ends=stream.has_two_ends,
    )


@st.composite
def packers(draw: st.DrawFn) -> Transformation:
    lengths, bins = {"x": 7}, draw(st.integers(1, 3))
    kinds = [
        FirstFitPack(lengths, num_packing_bins=bins, seed=draw(st.sampled_from([0, 9]))),
        BestFitPack(lengths, num_packing_bins=bins, shuffle_bins=False, max_sequences_per_bin=2),
        FirstFitPack({"x": 3}, num_packing_bins=bins, overflow="split"),
        ConcatThenSplit({"x": 5}),
        TokenBudgetBatch(12, ["x"], max_batch_size=draw(st.sampled_from([None, 3])), padding_struct={"x": -1}),
        BucketBatch([2, 4, 6], [3, 2, bins], ["x"], window_size=7),
    ]
    return draw(st.sampled_from(kinds))


def as_document(element: Any) -> dict[str, Any]:
    """Returns tokens that say which element they are of: one to six."""
    return {"x": np.arange(total(element) % 6 + 1) + total(element)}


def from_arrays(arrays: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what can be compared, mapped and filtered like any other element."""
    return tuple((name, *array.tolist()) for name, array in sorted(arrays.items()))


Parts = list[Callable[[], Iterator[Any]]]


@st.composite
def combined(draw: st.DrawFn, most_nodes: int, *, fails: bool) -> Stream:
    """Draws a stream of several. How their seeds combine, another test says."""
    parts = draw(st.lists(streams(most_nodes // 2, fails=fails), min_size=1, max_size=3))
    spot = draw(st.integers(0, SPOTS - 1))
    own = draw(st.sampled_from(ERRORS)) if fails and len(parts) > 1 else RAISED
    kind = draw(st.sampled_from(["zip", "strict zip", "concatenate", "mix", "mix", "interleave", "late interleave"]))
    join, plain = draw(joins(kind, len(parts)))
    # A random map has the number of those on the path with most draws from its seed, as far as it is known before any
    # element is read.
    seeds = {seed for part in parts for seed in part.draws if kind != "late interleave"}
    draws = tuple(seed for seed in seeds for _ in range(max(part.draws.count(seed) for part in parts)))

    def built(place: Place) -> IterDataset[Any]:
        datasets = [part.built(place) for part in parts]
        datasets[0] = own.of(datasets[0])
        return place.after(join(datasets), spot)

    def values(one: Pass) -> Iterator[Any]:
        def of(number: int) -> Iterator[Any]:
            try:
                yield from parts[number].values(one.of(number, RAISED if number else own))
            except Exception as error:
                blame_part(error, number)
                raise

        some: Parts = [functools.partial(of, number) for number in range(len(parts))]
        return iter(plain(some))

    joined = Stream(
        built,
        numbered(values),
        seed=nearest_seed(step_of(built(HERE))),
        draws=draws,
        is_limited=own.max_errors is not None or any(part.is_limited for part in parts),
        has_two_ends=any(part.has_two_ends for part in parts),
    )
    return limited(joined, parts[0])


@st.composite
def joins(
    draw: st.DrawFn, kind: str, count: int
) -> tuple[Callable[[list[Any]], IterDataset[Any]], Callable[[Parts], Any]]:
    """Draws how some datasets are combined, and the same for iterators."""
    match kind:
        case "zip":
            return lambda datasets: datasets[0].zip(*datasets[1:], strict=False), lambda parts: zipped(
                parts, strict=False
            )
        case "strict zip":
            return lambda datasets: datasets[0].zip(*datasets[1:]), lambda parts: zipped(parts, strict=True)
        case "concatenate":
            return lambda datasets: datasets[0].concatenate(*datasets[1:]), lambda parts: interleaved(parts, 1)
        case "mix":
            weights = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
            stop: Any = draw(st.sampled_from(["first_exhausted", "all_exhausted", "drop_exhausted"]))
            others = draw(st.permutations(weights))
            changes = [(draw(st.integers(1, 9)), others)] if others != weights and draw(st.booleans()) else []
            is_named = draw(st.booleans())

            def mixed(datasets: list[Any]) -> IterDataset[Any]:
                names = [f"part {number}" for number in range(count)]
                given: Any = dict(zip(names, datasets, strict=True)) if is_named else datasets
                of_names: Any = dict(zip(names, weights, strict=True)) if is_named else weights
                mixture = IterDataset.mix(given, of_names, stop=stop)
                for position, new in changes:
                    mixture = mixture.reweighted(position, dict(zip(names, new, strict=True)) if is_named else new)
                return mixture

            return mixed, lambda parts: mixed_in_order(parts, [(0, weights), *changes], stop)
    length = draw(st.integers(1, 3))
    if kind == "late interleave":
        return (
            lambda datasets: IterDataset.interleave(MapDataset.source(datasets), cycle_length=length),
            lambda parts: interleaved(parts, length),
        )
    return lambda datasets: IterDataset.interleave(datasets, cycle_length=length), lambda parts: interleaved(
        parts, length
    )


def zipped(parts: Parts, *, strict: bool) -> Iterator[Any]:
    return zip(*(part() for part in parts), strict=strict)


def interleaved(parts: Parts, cycle_length: int) -> Iterator[Any]:
    """Yields one element of each open part, one after another; one that has ended is replaced for its next turn."""
    waiting = collections.deque(part() for part in parts)
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
