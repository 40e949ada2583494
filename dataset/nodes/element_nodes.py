"""Nodes that turn elements into others. An absent element, None, stays absent, and no operation sees it."""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from millstream.columnar import ColumnarRecords
from millstream.dataset.nodes.node import ENDLESS, Node, Positions, UnaryNode, words_of
from millstream.descriptions import described, function_name
from millstream.loader.pipeline.steps import annotated
from millstream.randomness import generators
from millstream.transforms import Filter, FlatMap, Map, MapWithIndex, RandomMap, Transformation
from millstream.transforms.base import METHODS
from millstream.transforms.batched import WholeCallError, results_of
from millstream.transforms.function_checks import valid_max_fan_out


def collected(results: Iterable[Any], expected: int, positions: Positions, node: Node) -> list[Any]:
    """Returns all results; an error that they raise gets a note of the node and the position.

    `list.extend` runs the iterator without a Python frame of ours and keeps what came before an exception: the length
    then says which element failed.
    """
    values: list[Any] = []
    try:
        values.extend(results)
        if len(values) < expected:
            # A StopIteration from the user's function ends the iterator quietly: data would be lost.
            raise StopIteration  # noqa: TRY301  (handled as one that arrives here)
    except BaseException as error:
        place = f" at position {positions[len(values)]}" if len(values) < expected else ""
        failure = annotated(error, f"{node.text} of a MapDataset{place}")
        if failure is error:
            raise
        raise failure from None
    return values


@dataclasses.dataclass(frozen=True, eq=False)
class ElementNode(UnaryNode):
    """A node that makes one element of one.

    Attributes:
        operation: what is done with each element.
    """

    operation: Transformation

    def locate(self, positions: Positions) -> Any:
        """Returns the positions, which operations may draw from, and what the parent needs."""
        return positions, self.parent.locate(positions)

    def elements(self, located: Any, start: int, stop: int) -> Sequence[Any]:
        """Returns what becomes of the parent's elements."""
        positions, of_parent = located[0][start:stop], located[1]
        values = self.parent.elements(of_parent, start, stop)
        if isinstance(values, ColumnarRecords):
            # Records are made each time that these are iterated over.
            values = list(values)
        if [value for value in values if value is None]:
            return self._with_holes(values, positions)
        return collected(self.results(values, positions), len(values), positions, self)

    def at(self, position: int) -> Any:
        """Returns what becomes of the parent's element."""
        value, positions = self.parent.at(position), np.array([position])
        return None if value is None else collected(self.results([value], positions), 1, positions, self)[0]

    def _with_holes(self, values: Sequence[Any], positions: Positions) -> list[Any]:
        """Returns the same where some elements are absent."""
        rows = [row for row, value in enumerate(values) if value is not None]
        present, results = positions[rows], [None] * len(values)
        made = collected(self.results([values[row] for row in rows], present), len(rows), present, self)
        for row, result in zip(rows, made, strict=True):
            results[row] = result
        return results

    @abc.abstractmethod
    def results(self, values: Sequence[Any], positions: Positions) -> Iterable[Any]:
        """Yields what becomes of elements, none of them absent."""

    @property
    def text(self) -> str:
        """The method, with the operation."""
        return _call_of(self.operation)

    def words(self) -> Iterator[str]:
        """Yields the operation."""
        yield words_of(self.operation)


def _call_of(operation: Transformation) -> str:
    """Returns the method that has made a node of an operation: `.map(decode)`."""
    for kind, method in METHODS.items():
        if isinstance(operation, kind):
            if isinstance(operation, Map) and operation.is_batched and type(operation) is Map:
                return f".map({function_name(operation.map_batch)}, batched=True)"
            own = function_name(getattr(operation, method)) if type(operation) is kind else described(operation)
            return f".{method}({own})"
    raise AssertionError(operation)


@dataclasses.dataclass(frozen=True, eq=False)
class Mapped(ElementNode):
    """Each element as a Map has it."""

    operation: Map

    def results(self, values: Sequence[Any], positions: Positions) -> Iterable[Any]:
        """Yields what the function returns."""
        del positions
        try:
            return results_of(self.operation, values)
        except WholeCallError as failure:
            raise failure.error from None


@dataclasses.dataclass(frozen=True, eq=False)
class MappedWithIndex(ElementNode):
    """Each element as a MapWithIndex has it. The index is the position, over all epochs."""

    operation: MapWithIndex

    def results(self, values: Sequence[Any], positions: Positions) -> Iterable[Any]:
        """Yields what the function returns."""
        return map(self.operation.map_with_index, positions.tolist(), values)


@dataclasses.dataclass(frozen=True, eq=False)
class MappedAtRandom(ElementNode):
    """Each element as a RandomMap has it, which draws what that of a DataLoader draws at the same position.

    Attributes:
        seed: what the generators derive from.
        number: how many random maps above draw from the same seed.
    """

    operation: RandomMap
    seed: int
    number: int

    def results(self, values: Sequence[Any], positions: Positions) -> Iterable[Any]:
        """Yields what the function returns."""
        epochs = positions // self.epoch_length
        return map(self.operation.random_map, values, generators(self.seed, epochs, positions, self.number))

    @property
    def text(self) -> str:
        """The method, with the seed."""
        return f"{super().text[:-1]}, seed={self.seed})"

    def words(self) -> Iterator[str]:
        """Yields the operation and its draws."""
        yield f"{words_of(self.operation)}(seed: {self.seed}, number: {self.number}, epoch: {self.epoch_length})"


@dataclasses.dataclass(frozen=True, eq=False)
class Filtered(ElementNode):
    """Each element that a Filter keeps; the others are absent."""

    operation: Filter

    @functools.cached_property
    def is_sparse(self) -> bool:
        """Elements may be absent."""
        return True

    def results(self, values: Sequence[Any], positions: Positions) -> Iterable[Any]:
        """Yields the elements, None for those that are dropped."""
        del positions
        values = list(values)
        return (value if keep else None for value, keep in zip(values, map(self.operation.filter, values), strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Split(UnaryNode):
    """`max_fan_out` positions for each element, of which its children have the first ones.

    Attributes:
        operation: splits elements.
    """

    operation: FlatMap

    def __post_init__(self) -> None:
        name = type(self.operation).__name__
        valid_max_fan_out(name, getattr(self.operation, "max_fan_out", None))

    @functools.cached_property
    def length(self) -> int:
        """As many as there can be children."""
        return min(ENDLESS, self.parent.length * self.operation.max_fan_out)

    @functools.cached_property
    def epoch_length(self) -> int:
        """The parent's, as positions."""
        return min(ENDLESS, self.parent.epoch_length * self.operation.max_fan_out)

    @functools.cached_property
    def is_sparse(self) -> bool:
        """An element may have fewer children."""
        return True

    def locate(self, positions: Positions) -> Any:
        """Returns which child of which family is at each position, where the families' elements are, and these."""
        parents, children = np.divmod(positions, self.operation.max_fan_out)
        begins = np.ones(len(positions), np.bool_)
        # Children in a row share one call of the user's function. The same child again has a family of its own: two
        # rows are never one object.
        begins[1:] = (parents[1:] != parents[:-1]) | (children[1:] <= children[:-1])
        whole = parents[begins]
        return children, np.cumsum(begins) - 1, whole, self.parent.locate(whole)

    def elements(self, located: Any, start: int, stop: int) -> Sequence[Any]:
        """Returns children; each element of the block is read and split once."""
        children, families, whole, of_parent = located
        if start == stop:
            return []
        first, last = int(families[start]), int(families[stop - 1]) + 1
        values = self.parent.elements(of_parent, first, last)
        split = collected(map(self._children, values), last - first, whole[first:last], self)
        rows = zip(children[start:stop].tolist(), (families[start:stop] - first).tolist(), strict=True)
        return [split[family][child] if child < len(split[family]) else None for child, family in rows]

    def at(self, position: int) -> Any:
        """Returns one child."""
        whole, child = divmod(position, self.operation.max_fan_out)
        value = self.parent.at(whole)
        (family,) = collected(map(self._children, [value]), 1, np.array([whole]), self)
        return family[child] if child < len(family) else None

    def _children(self, element: Any) -> Sequence[Any]:
        if element is None:
            return ()
        limit = self.operation.max_fan_out
        # No more than it takes to see that they are too many: a generator may have no end.
        children = list(itertools.islice(self.operation.flat_map(element), limit + 1))
        if len(children) > limit:
            raise ValueError(
                f"flat_map gave more than {limit} elements for one, and max_fan_out is {limit}. Set max_fan_out to the "
                "most that an element can split into."
            )
        return children

    @property
    def text(self) -> str:
        """The method, with the operation."""
        return _call_of(self.operation)

    def words(self) -> Iterator[str]:
        """Yields the operation."""
        yield words_of(self.operation)
