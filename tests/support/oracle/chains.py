"""The elements of a chain, computed plainly: every element is found by itself, by recursion, in Python's integers."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from millstream import IndexSampler
from millstream.core.randomness import generator
from millstream.samplers.permutation import permute_one

Element = Any


@dataclasses.dataclass(frozen=True)
class Oracle:
    """A dataset, element by element.

    Attributes:
        length: how many elements an epoch has.
        at: gives the element at a position, None where there is none.
        epoch_length: how many positions share an epoch for random maps.
    """

    length: int
    at: Callable[[int], Element]
    epoch_length: int

    def first(self, count: int) -> list[Element]:
        return [self.at(position) for position in range(count)]


def source(records: Sequence[Any]) -> Oracle:
    return Oracle(len(records), lambda i: records[i % len(records)], len(records))


def shuffled(parent: Oracle, seed: int) -> Oracle:
    """Returns each epoch in the order of an IndexSampler."""
    sampler = IndexSampler(parent.length, shuffle=True, seed=seed)
    return Oracle(
        parent.length, lambda i: parent.at(sampler[i].record_key + i // parent.length * parent.length), parent.length
    )


def repeated(parent: Oracle, num_epochs: int, *, reseed_each_epoch: bool) -> Oracle:
    """Returns several epochs as one, or the first one several times."""
    at = parent.at if reseed_each_epoch else lambda i: parent.at(i % parent.length)
    return Oracle(parent.length * num_epochs, at, parent.epoch_length)


def taken(parent: Oracle, rows: Sequence[int]) -> Oracle:
    """Returns some positions of each epoch."""

    def at(i: int) -> Element:
        epoch, offset = divmod(i, len(rows))
        return parent.at(epoch * parent.length + rows[offset])

    return Oracle(len(rows), at, parent.epoch_length if len(rows) == parent.length else len(rows))


def mapped(parent: Oracle, function: Callable[[Element], Element]) -> Oracle:
    return mapped_with_index(parent, lambda _, element: function(element))


def mapped_with_index(parent: Oracle, function: Callable[[int, Element], Element]) -> Oracle:
    def at(i: int) -> Element:
        element = parent.at(i)
        return None if element is None else function(i, element)

    return Oracle(parent.length, at, parent.epoch_length)


def mapped_at_random(
    parent: Oracle, function: Callable[[Element, np.random.Generator], Element], seed: int, number: int
) -> Oracle:
    """Returns what a function makes of elements and the generator of a DataLoader's RandomMap at that position."""
    return mapped_with_index(
        parent, lambda i, element: function(element, generator(seed, i // parent.epoch_length, i, number))
    )


def filtered(parent: Oracle, keeps: Callable[[Element], bool]) -> Oracle:
    return mapped(parent, lambda element: element if keeps(element) else None)


def split(parent: Oracle, function: Callable[[Element], Sequence[Element]], max_fan_out: int) -> Oracle:
    """Returns the children of elements, each with as many positions as there can be children."""

    def at(i: int) -> Element:
        element = parent.at(i // max_fan_out)
        children = [] if element is None else function(element)
        return children[i % max_fan_out] if i % max_fan_out < len(children) else None

    return Oracle(parent.length * max_fan_out, at, parent.epoch_length * max_fan_out)


def batched(parent: Oracle, size: int, *, drop_remainder: bool) -> Oracle:
    length = parent.length // size + (parent.length % size > 0 and not drop_remainder)

    def at(i: int) -> Element:
        epoch, number = divmod(i, length)
        rows = range(parent.length)[number * size : (number + 1) * size]
        return [parent.at(epoch * parent.length + row) for row in rows]

    return Oracle(length, at, length)


def window_shuffled(parent: Oracle, size: int, seed: int) -> Oracle:
    """Returns each window of each epoch in an order of its own, which `seed` (as derived) selects."""
    windows = -(-parent.length // size)

    def at(i: int) -> Element:
        epoch, offset = divmod(i, parent.length)
        window, row = divmod(offset, size)
        length = min(size, parent.length - window * size)
        landed = permute_one(row, length, seed, epoch * windows + window)
        return parent.at(epoch * parent.length + window * size + landed)

    return Oracle(parent.length, at, parent.epoch_length)


def sharded(parent: Oracle, index: int, count: int, seed: int) -> Oracle:
    """Returns one of each `count` neighbours of an epoch: that which `index` lands on in a permutation of the group."""
    length, groups = len(range(index, parent.length, count)), -(-parent.length // count)

    def at(i: int) -> Element:
        epoch, group = divmod(i, length)
        landed = permute_one(index, min(count, parent.length - group * count), seed, epoch * groups + group)
        return parent.at(epoch * parent.length + group * count + landed)

    return Oracle(length, at, parent.epoch_length if length == parent.length else length)


def concatenated(parts: Sequence[Oracle]) -> Oracle:
    """Returns datasets end to end, epoch by epoch."""
    order = [(part, row) for part in parts for row in range(part.length)]

    def at(i: int) -> Element:
        epoch, offset = divmod(i, len(order))
        part, row = order[offset]
        return part.at(epoch * part.length + row)

    return Oracle(len(order), at, len(order))


def selected(parts: Sequence[Oracle], pairs: Sequence[tuple[int, int]]) -> Oracle:
    """Returns what pairs of a dataset and a position in it pick, epoch by epoch."""

    def at(i: int) -> Element:
        epoch, row = divmod(i, len(pairs))
        part, position = pairs[row]
        return parts[part].at(epoch * parts[part].length + position)

    return Oracle(len(pairs), at, len(pairs))


def selected_by(parts: Sequence[Oracle], selection: Any) -> Oracle:
    """Returns what a map picks, which is asked for each position of each epoch."""

    def at(i: int) -> Element:
        part, position = selection[i]
        return parts[part].at(position)

    return Oracle(len(selection), at, len(selection))


def zipped(parts: Sequence[Oracle]) -> Oracle:
    return Oracle(parts[0].length, lambda i: tuple(part.at(i) for part in parts), parts[0].epoch_length)


def next_owner(drawn: Sequence[int], weights: Sequence[int]) -> int:
    """Returns the part that comes next: the one with the earliest deadline among those due."""
    position, total = sum(drawn), sum(weights)
    due = [
        (-(-(count + 1) * total // weight), part)
        for part, (count, weight) in enumerate(zip(drawn, weights, strict=True))
        if weight and count * total // weight <= position
    ]
    return min(due)[1]


def mixed(parts: Sequence[Oracle], changes: Sequence[tuple[int, Sequence[int]]], stop: str) -> Oracle:
    """Returns the elements of datasets in turn, with other weights from some positions on.

    It ends when a dataset that is due has no more, or when all have ended; then those that end earlier go on, or are
    left out. Beyond the end, each goes on, or all begin their next epoch together.
    """
    lengths = [part.length for part in parts]

    def order() -> Iterator[tuple[int, int] | None]:
        """Yields the part and the position in it, and None before the end."""
        drawn, counts, weights, has_ended = [0] * len(parts), [0] * len(parts), [0] * len(parts), False
        for position in itertools.count():
            over = [count >= length for count, length in zip(counts, lengths, strict=True)]
            if stop != "first_exhausted" and all(over) and not has_ended:
                has_ended = True
                yield None
            new = [weights for start, weights in changes if start == position]
            just_over = stop == "drop_exhausted" and any(
                is_over and weight for is_over, weight in zip(over, weights, strict=True)
            )
            if new or just_over:
                weights = list([weights for start, weights in changes if start <= position][-1])
                if stop == "drop_exhausted":
                    weights = [0 if is_over else weight for weight, is_over in zip(weights, over, strict=True)]
                drawn = [0] * len(parts)
            part = next_owner(drawn, weights)
            if stop == "first_exhausted" and over[part] and not has_ended:
                has_ended = True
                yield None
            yield part, counts[part]
            drawn[part] += 1
            counts[part] += 1

    length = sum(1 for _ in itertools.takewhile(lambda one: one is not None, order()))

    def at(i: int) -> Element:
        # All begin again together if they have all ended.
        epoch, offset = divmod(i, length) if stop == "drop_exhausted" else (0, i)
        turns = (turn for turn in order() if turn is not None)
        part, position = next(itertools.islice(turns, offset, None))
        return parts[part].at(epoch * lengths[part] + position)

    return Oracle(length, at, length)


def mixed_in_order(
    parts: Sequence[Callable[[], Iterator[Element]]], changes: Sequence[tuple[int, Sequence[int]]], stop: str
) -> Iterator[Element]:
    """Yields the elements of streams in turn, with other weights from some positions on, until `stop`."""
    to_the_end = stop != "first_exhausted"
    inputs = [_Ahead(part, 1 if to_the_end else 0) for part in parts]
    over = [one.is_empty for one in inputs] if to_the_end else []
    if stop == "all_exhausted" and any(over):
        raise ValueError(over)
    weights: list[int] = []
    drawn = [0] * len(parts)
    begins = True
    for position in itertools.count():
        if begins or any(start == position for start, _ in changes):
            weights = list([weights for start, weights in changes if start <= position][-1])
            if stop == "drop_exhausted":
                weights = [0 if is_over else weight for weight, is_over in zip(weights, over, strict=True)]
            drawn, begins = [0] * len(parts), False
        if to_the_end and all(over):
            return
        part = next_owner(drawn, weights)
        drawn[part] += 1
        try:
            element = inputs[part].take()
        except StopIteration:
            return
        if to_the_end and inputs[part].is_empty:
            over[part] = True
            begins = stop == "drop_exhausted"
            inputs[part] = _Ahead(parts[part], 1)
        yield element


class _Ahead:
    """An iterator that is read some elements ahead. An error is raised in place of its element."""

    def __init__(self, part: Callable[[], Iterator[Element]], count: int) -> None:
        self._iterator = part()
        self._count = count
        self._values: list[Element] = []
        self._error: Exception | None = None
        self._fill(count)

    def _fill(self, count: int) -> None:
        try:
            while len(self._values) < count and self._error is None:
                self._values.append(next(self._iterator))
        except Exception as error:  # noqa: BLE001  (any, StopIteration included)
            self._error = error

    @property
    def is_empty(self) -> bool:
        return not self._values and isinstance(self._error, StopIteration)

    def take(self) -> Element:
        self._fill(1)
        if not self._values:
            assert self._error is not None
            raise self._error
        element = self._values.pop(0)
        self._fill(self._count)
        return element
