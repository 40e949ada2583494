"""A straight chain as it was when the first iterator of its end began, or when the loader that reads it was built.

It runs on copies of the operations and of the user's datasets with random access. So every place computes the same, and
an operation that changes itself changes its copy. See `loader/checkpoints/fingerprint.py`.
"""

import copy
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple, Self, final

import numpy as np

from millstream.dataset.nodes.lowering import lower, order_of
from millstream.dataset.nodes.node import Node, holds_nodes
from millstream.dataset.nodes.source_node import Own, Source, copied_with
from millstream.dataset.step import folded
from millstream.loader.checkpoints.fingerprint import Fingerprint, Origin, snapshot_of
from millstream.loader.checkpoints.state import fingerprint_of_pipeline
from millstream.loader.pipeline.pipeline import FilterLimits, Pipeline, Tolerance
from millstream.loader.pipeline.shards import first_dynamic
from millstream.samplers.mixtures.mixing import Mixing
from millstream.sharding import NoSharding
from millstream.transforms import Transformation
from millstream.transforms.of_chains import DropAbsent, KeepAll, Present

_UNCHANGEABLE = (int, float, str, tuple, range, np.ndarray, Mixing, NoneType)
"""The types of the values of nodes that no user code can reach."""
_SINCE = "the first iterator of this dataset: build another dataset"


@final
class FixedChain:
    """The operations of a chain and the `MapDataset` that it reads, described once for all iterators.

    Args:
        end: the node of `map_dataset`, if there is one.
        since: the time of the description and the remedy, for errors.

    Attributes:
        map_dataset: the dataset; None for the operations after another stream.
        node: its node.
        operations: the operations after it.
    """

    def __init__(
        self, map_dataset: Any, end: Node | None, operations: Sequence[Transformation], since: str = _SINCE
    ) -> None:
        nodes = [] if end is None else _nodes_of(end)
        held = {id(node): _values_of(node) for node in nodes}
        values = [value for fields in held.values() for value in fields.values()]
        of_nodes = [value for value in values if isinstance(value, Transformation)]
        named = functools.partial(_named, nodes)
        self._origin = Origin(_sources_of(nodes), None, [*of_nodes, *operations], named, since)
        copies = iter(snapshot_of([*values, *operations]))
        copied = {key: {name: next(copies) for name in fields} for key, fields in held.items()}
        self.operations = tuple(copies)
        self.node: Any = end and folded(end, functools.partial(_rebuilt, copied))
        self.map_dataset: Any = map_dataset
        if map_dataset is not None and self.node is not None and self.node is not end:
            self.map_dataset = _with_node(map_dataset, self.node)
        self._fingerprints: dict[bool, Fingerprint] = {}
        self._pipelines: dict[tuple[Any, ...], Pipelines] = {}

    def check_unchanged(self) -> None:
        """Raises ValueError if the program has changed a plain value of an operation or a dataset since then."""
        self._origin.check_unchanged()

    def pipelines(self, limits: FilterLimits, tolerance: Tolerance | None, *, allows_none: bool) -> "Pipelines":
        """Returns the pipelines over the elements of the `MapDataset`."""
        key = limits, tolerance, allows_none
        if key not in self._pipelines:
            self._pipelines[key] = Pipelines.of(self, limits, tolerance, allows_none=allows_none)
        return self._pipelines[key]

    def fingerprint(self, pipeline: Pipeline) -> Fingerprint:
        """Returns the fingerprint of the pipeline of this chain, which is described for its first iterator only."""
        skips_errors = pipeline.tolerance is not None
        if skips_errors not in self._fingerprints:
            self._fingerprints[skips_errors] = fingerprint_of_pipeline(pipeline)
        return self._fingerprints[skips_errors]


class Pipelines(NamedTuple):
    """The pipelines of a chain over the elements of a `MapDataset`.

    Attributes:
        described: the pipeline whose fingerprint states have.
        sparse: drops missing elements first.
        dense: requires an element at each position, so that it is 1:1; None if operations drop, split or regroup.
        checked: the dense one, with a check after each operation; None without a dense one.
        shown: the pipeline to display: with the operations of the MapDataset one by one, if possible.
    """

    described: Pipeline
    sparse: Pipeline
    dense: Pipeline | None
    checked: Pipeline | None
    shown: Pipeline

    @classmethod
    def of(cls, chain: FixedChain, limits: FilterLimits, tolerance: Tolerance | None, *, allows_none: bool) -> Self:
        node, dataset, operations = chain.node, chain.map_dataset, chain.operations
        order = order_of(node)
        dropping = operations if allows_none else (DropAbsent(), *operations)
        described = sparse = shown = Pipeline(dataset, order, order, dropping, NoSharding(), limits, tolerance)
        if tolerance is not None:
            # Elements that fail are dropped, whether or not others may be missing.
            sparse = shown = dataclasses.replace(described, operations=(KeepAll(), *dropping))
        if node.is_sparse or allows_none:
            return cls(described, sparse, None, None, shown)
        source, own_order, maps = lower(dataset, node)
        mapped = (*checked_maps(maps), *operations)
        whole = Pipeline(source, own_order, own_order, mapped, NoSharding(), limits, tolerance)
        # If the dense plan were not 1:1, the sparse one would cost no more.
        is_dense = first_dynamic(operations) is None
        if is_dense:
            described = whole
        if tolerance is not None:
            return cls(described, sparse, None, None, shown)
        checked = dataclasses.replace(whole, operations=tuple(checked_maps((*maps, *operations))))
        return cls(described, sparse, whole if is_dense else None, checked if is_dense else None, whole)


def checked_maps(maps: Sequence[Transformation]) -> list[Transformation]:
    """Returns the operations of a MapDataset with checks, so that none of them sees a missing element."""
    return [Present(), *(step for operation in maps for step in (operation, Present()))]


def _values_of(node: Node) -> dict[str, Any]:
    """Returns the values of a node that user code may change. Sources are shared, as by loaders."""
    if isinstance(node, Own):
        return node.attributes if _is_copied(node.dataset) else {}
    if isinstance(node, Source):
        return {}
    values = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    values = {name: value for name, value in values.items() if not isinstance(value, _UNCHANGEABLE)}
    return {name: value for name, value in values.items() if not holds_nodes(value)}


def _is_copied(dataset: Any) -> bool:
    """Returns False for a user's dataset with a `__del__`: that of a copy would close what the original reads."""
    return not hasattr(type(dataset), "__del__")


def _nodes_of(end: Node) -> list[Node]:
    """Returns each node up to the sources once, sources first."""
    found: list[Node] = []
    folded(end, lambda one, _: found.append(one))
    return found


def _sources_of(nodes: Iterable[Node]) -> dict[str, Any]:
    """Returns the sources, by the names that errors give them."""
    found = {id(node.source): node.source for node in nodes if isinstance(node, Source)}
    names = [f"source {number}" for number in range(1, len(found) + 1)] if len(found) > 1 else ["source"]
    return dict(zip(names, found.values(), strict=False))


def _named(nodes: Iterable[Node]) -> dict[str, Any]:
    """Returns the values that are not operations, by the names that errors give them.

    Private attributes of the user's datasets are left out, because reading an element may change them.
    """
    named: dict[str, Any] = {}
    for node in nodes:
        values = {name: value for name, value in _values_of(node).items() if not isinstance(value, Transformation)}
        if isinstance(node, Own):
            kind = type(node.dataset).__name__
            values = {f"{kind}.{name}": value for name, value in values.items() if not name.startswith("_")}
        named |= values
    return named


def _rebuilt(copied: Mapping[int, Mapping[str, Any]], one: Node, above: list[Node]) -> Node:
    """Returns a node with copies of its values over other parents; the node itself if nothing has changed."""
    values = copied.get(id(one), {})
    is_same_above = all(new is old for new, old in zip(above, one.parents, strict=True))
    if isinstance(one, Own):
        if not _is_copied(one.dataset):
            return one
        return Own(_own_copy(one.dataset, values, above), tuple(above))
    if is_same_above and all(value is getattr(one, name) for name, value in values.items()):
        return one
    rebuilt = copy.copy(one)
    for field in dataclasses.fields(one):
        value = getattr(one, field.name)
        if holds_nodes(value):
            vars(rebuilt)[field.name] = above[0] if isinstance(value, Node) else tuple(above)
    vars(rebuilt).update(values)
    return rebuilt


def _own_copy(dataset: Any, values: Mapping[str, Any], above: Sequence[Node]) -> Any:
    """Returns a dataset of the user's class with other attributes and parents."""
    parents = {id(old): _with_node(old, node) for old, node in zip(dataset.parents, above, strict=True)}
    own = {name: parents.get(id(value), value) for name, value in values.items()}
    return copied_with(dataset, {"_parents": tuple(parents.values()), "_blocks": None, **own})


def _with_node(dataset: Any, node: Node) -> Any:
    """Returns a dataset of the same class with another node; that of a user's own class belongs to the node."""
    if isinstance(node, Own):
        return node.dataset
    return copied_with(dataset, {"_node": node, "_blocks": None})
