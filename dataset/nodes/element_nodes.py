"""Nodes that compute elements, and batches of them. A missing element, None, stays missing: no operation sees it."""

import abc
import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from millstream.core.columnar import ColumnarRecords
from millstream.core.descriptions import described, function_name
from millstream.core.randomness import generators
from millstream.dataset.nodes.node import ENDLESS, Node, Positions, UnaryNode, Units, divided, joined
from millstream.errors import StackError
from millstream.loader.checkpoints.description import identity_of
from millstream.loader.measuring import observer
from millstream.loader.pipeline.steps import annotated
from millstream.samplers.order import Occurrences
from millstream.transforms import Batch, Filter, FlatMap, Map, MapWithIndex, RandomMap, Transformation
from millstream.transforms.base import METHODS, WholeCallError, children_of, results_of, valid_max_fan_out
from millstream.transforms.batching.batch import pad
from millstream.transforms.batching.stack import stack
from millstream.transforms.of_chains import SeededRandomMap


def collected(results: Iterable[Any], expected: int, positions: Positions, node: Node) -> list[Any]:
    """Returns all results. An error gets a note with the node and the position.

    `list.extend` runs the iterator without a Python frame of ours, and keeps the results before an exception, so that
    the length is the number of the failed element.
    """
    values: list[Any] = []
    observe, start = observer(), time.perf_counter()
    try:
        values.extend(results)
        if len(values) < expected:
            # A StopIteration from a user's function silently ends the iterator, and data would be lost.
            raise StopIteration  # noqa: TRY301  (handled like one raised by an iterator)
    except BaseException as error:
        where = f" at position {positions[len(values)]}" if len(values) < expected else ""
        failure = annotated(error, f"{node.text} of a MapDataset{where}")
        if failure is error:
            raise
        raise failure from None
    if observe is not None:
        seconds = time.perf_counter() - start
        made = itertools.chain.from_iterable(values) if isinstance(node, Split) else values
        observe((node.depth, node.text), seconds, [value for value in made if value is not None])
    return values


def _call_of(operation: Transformation) -> str:
    """Returns the method call for an operation: `.map(decode)`."""
    for kind, method in METHODS.items():
        if isinstance(operation, kind):
            if isinstance(operation, Map) and operation.is_batched and type(operation) is Map:
                return f".map({function_name(operation.map_batch)}, batched=True)"
            own = function_name(getattr(operation, method)) if type(operation) is kind else described(operation)
            return f".{method}({own})"
    raise AssertionError(operation)


@dataclasses.dataclass(frozen=True, eq=False)
class OperationNode(UnaryNode):
    """A node that computes elements from those of the parent, one after another."""

    operation: Transformation
    keeps_units = True

    @property
    def text(self) -> str:
        return _call_of(self.operation)

    def identities(self) -> Iterator[str]:
        yield identity_of(self.operation)


@dataclasses.dataclass(frozen=True, eq=False)
class ElementNode(OperationNode):
    """A node that computes one element from one."""

    is_of_one = True

    def locate(self, positions: Positions) -> Any:
        """Returns the positions, for operations that draw, and the located positions of the parent."""
        return positions, self.parent.locate(positions)

    def elements(self, located: Any, start: int, stop: int) -> Sequence[Any]:
        positions, of_parent = located[0][start:stop], located[1]
        values = self.parent.elements(of_parent, start, stop)
        if isinstance(values, ColumnarRecords):
            # Iterating over columns builds their records each time.
            values = list(values)
        if [value for value in values if value is None]:
            return self._skip_missing(values, positions)
        return collected(self.results(values, positions), len(values), positions, self)

    def at(self, position: int) -> Any:
        value, positions = self.parent.at(position), np.array([position])
        return None if value is None else collected(self.results([value], positions), 1, positions, self)[0]

    def _skip_missing(self, values: Sequence[Any], positions: Positions) -> list[Any]:
        rows = [row for row, value in enumerate(values) if value is not None]
        present, results = positions[rows], [None] * len(values)
        computed = collected(self.results([values[row] for row in rows], present), len(rows), present, self)
        for row, result in zip(rows, computed, strict=True):
            results[row] = result
        return results

    def taken_from(self, positions: Positions) -> Iterable[tuple[Node, Any, Positions]]:
        return [(self.parent, slice(None), positions)]

    def occurrences(self, keys: Positions, starts: Mapping[int, int], stop: int) -> Occurrences:
        return self.parent.occurrences(keys, starts, stop)

    @abc.abstractmethod
    def results(self, values: Sequence[Any], positions: Positions) -> Iterable[Any]:
        """Yields the results for elements, none of them missing."""


@dataclasses.dataclass(frozen=True, eq=False)
class Mapped(ElementNode):
    """The results of a Map."""

    operation: Map

    @property
    def loader_operation(self) -> Transformation:
        return self.operation

    def results(self, values: Sequence[Any], positions: Positions) -> Iterable[Any]:
        del positions
        try:
            return results_of(self.operation, values)
        except WholeCallError as failure:
            raise failure.error from None


@dataclasses.dataclass(frozen=True, eq=False)
class MappedWithIndex(ElementNode):
    """The results of a MapWithIndex. The index is the position, continued across epochs."""

    operation: MapWithIndex
    differs_by_epoch = sees_positions = True

    @property
    def loader_operation(self) -> Transformation:
        return self.operation

    def results(self, values: Sequence[Any], positions: Positions) -> Iterable[Any]:
        return map(self.operation.map_with_index, positions.tolist(), values)


@dataclasses.dataclass(frozen=True, eq=False)
class MappedAtRandom(ElementNode):
    """The results of a RandomMap, which draws the same numbers as in a DataLoader at the same position."""

    operation: RandomMap
    seed: int
    number: int
    """The number of random maps before it that draw from the same seed."""
    differs_by_epoch = sees_positions = True

    @property
    def loader_operation(self) -> Transformation:
        return SeededRandomMap(self.operation, self.seed, self.number)

    @property
    def drawing_seed(self) -> int:  # type: ignore[override]  # a constant of each step
        return self.seed

    def results(self, values: Sequence[Any], positions: Positions) -> Iterable[Any]:
        epochs = positions // self.epoch_length
        return map(self.operation.random_map, values, generators(self.seed, epochs, positions, self.number))

    @property
    def text(self) -> str:
        return f"{super().text[:-1]}, seed={self.seed})"

    def identities(self) -> Iterator[str]:
        yield f"{identity_of(self.operation)}(seed: {self.seed}, number: {self.number}, epoch: {self.epoch_length})"


@dataclasses.dataclass(frozen=True, eq=False)
class Filtered(ElementNode):
    """The elements that a Filter keeps; the others are missing."""

    operation: Filter
    is_sparse = True

    def results(self, values: Sequence[Any], positions: Positions) -> Iterable[Any]:
        del positions
        values = list(values)
        return (value if keep else None for value, keep in zip(values, map(self.operation.filter, values), strict=True))


class _LocatedChildren(NamedTuple):
    """The children at positions, by their families: runs of consecutive children of one element.

    Attributes:
        children: the number of each child in its family, shape (n,).
        families: the number of its family, shape (n,).
        parents: the position of the element of each family, shape (families,).
        of_parent: these positions, located by the parent.
    """

    children: Positions
    families: Positions
    parents: Positions
    of_parent: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Split(OperationNode):
    """The children of elements: `max_fan_out` positions per element, of which its children occupy the first ones."""

    operation: FlatMap
    # An element may have fewer children.
    is_sparse = True

    def __post_init__(self) -> None:
        name = type(self.operation).__name__
        valid_max_fan_out(name, getattr(self.operation, "max_fan_out", None))

    @functools.cached_property
    def length(self) -> int:
        return min(ENDLESS, self.parent.length * self.operation.max_fan_out)

    @functools.cached_property
    def epoch_length(self) -> int:
        return min(ENDLESS, self.parent.epoch_length * self.operation.max_fan_out)

    def units(self) -> Units:
        units = self.parent.units()
        return units._replace(sizes=units.sizes * self.operation.max_fan_out)

    def locate(self, positions: Positions) -> _LocatedChildren:
        parents, children = np.divmod(positions, self.operation.max_fan_out)
        begins = np.ones(len(positions), np.bool_)
        # Consecutive children share one call of the user's function. If a child repeats, it gets a new family, because
        # two rows must never be the same object.
        begins[1:] = (parents[1:] != parents[:-1]) | (children[1:] <= children[:-1])
        of_families = parents[begins]
        return _LocatedChildren(children, np.cumsum(begins) - 1, of_families, self.parent.locate(of_families))

    def elements(self, located: _LocatedChildren, start: int, stop: int) -> Sequence[Any]:
        """Returns children. Each element of the block is read and split once."""
        if start == stop:
            return []
        families = located.families[start:stop]
        first, last = int(families[0]), int(families[-1]) + 1
        values = self.parent.elements(located.of_parent, first, last)
        split = collected(map(self._children, values), last - first, located.parents[first:last], self)
        rows = zip(located.children[start:stop].tolist(), (families - first).tolist(), strict=True)
        return [split[family][child] if child < len(split[family]) else None for child, family in rows]

    def at(self, position: int) -> Any:
        whole, child = divmod(position, self.operation.max_fan_out)
        value = self.parent.at(whole)
        (family,) = collected(map(self._children, [value]), 1, np.array([whole]), self)
        return family[child] if child < len(family) else None

    def _children(self, element: Any) -> Sequence[Any]:
        return () if element is None else children_of(self.operation, self.operation.max_fan_out, element)


class _LocatedBatches(NamedTuple):
    """The batches at positions.

    Attributes:
        positions: the positions, shape (n,).
        bounds: the first row of each batch in `rows`, and the end of the last one, shape (n + 1,).
        rows: the positions of the elements of all batches in the parent.
        of_parent: these positions, located by the parent.
    """

    positions: Positions
    bounds: Positions
    rows: Positions
    of_parent: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Batched(UnaryNode):
    """Batches of consecutive elements, none of which span two epochs."""

    operation: Batch
    makes_batches = True

    @functools.cached_property
    def length(self) -> int:
        if self.parent.length == ENDLESS:
            return ENDLESS
        whole, rest = divmod(self.parent.length, self.operation.batch_size)
        return whole + (rest > 0 and self.operation.keeps_remainder)

    @functools.cached_property
    def epoch_length(self) -> int:
        return self.length

    @functools.cached_property
    def width(self) -> int:
        return self.parent.width * self.operation.batch_size

    def locate(self, positions: Positions) -> _LocatedBatches:
        size = self.operation.batch_size
        epochs, numbers = divided(positions, self.length)
        if numbers.size and int(numbers.max()) > ENDLESS // size - 1:
            raise IndexError(f"A batch at position {positions.max()} would have elements at or above position 2**63.")
        starts = numbers * size
        sizes = np.minimum(size, self.parent.length - starts)
        ends = np.cumsum(sizes)
        offsets = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)
        of_each = epochs if isinstance(epochs, int) else np.repeat(epochs, sizes)
        rows = joined(of_each, self.parent.length, offsets)
        return _LocatedBatches(positions, np.concatenate([[0], ends]), rows, self.parent.locate(rows))

    def elements(self, located: _LocatedBatches, start: int, stop: int) -> Sequence[Any]:
        first, *ends = located.bounds[start : stop + 1].tolist()
        values = self.parent.elements(located.of_parent, first, ends[-1] if ends else first)

        def batches() -> Iterator[Any]:
            begin = first
            for end in ends:
                own = values if len(ends) == 1 else values[begin - first : end - first]
                yield self._batch(own, located.rows[begin:end])
                begin = end

        return collected(batches(), stop - start, located.positions[start:stop], self)

    def _batch(self, values: Sequence[Any], rows: Positions) -> Any:
        operation = self.operation
        if (
            type(values) in (list, tuple)
            and (missing := next((i for i, v in enumerate(values) if v is None), None)) is not None
        ):
            raise ValueError(
                f"Cannot batch the missing element at position {rows[missing]}: a map before .batch returned None, or "
                "the source contains None. Use .to_iter_dataset().batch(...), which skips missing elements."
            )
        if operation.batch_fn is not None:
            return operation.batch_fn(list(values))
        try:
            batch = stack(values)
        except StackError as error:
            if error.rows:
                positions = ", ".join(str(rows[row]) for row in error.rows)
                error.add_note(f"millstream: the positions of these elements before .batch: {positions}.")
            raise
        return pad(batch, len(values), operation.batch_size) if operation.pad_remainder else batch

    @property
    def text(self) -> str:
        return f".batch({described(self.operation).removeprefix('Batch(')}"

    def identities(self) -> Iterator[str]:
        """Yields the operation, and the length of the epochs that it batches."""
        yield f"{identity_of(self.operation)}(of: {self.parent.length})"
