"""Shapes and dtypes of the elements of a chain, derived from its sources and operations without computing any."""

from collections.abc import Sequence
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from millstream.core import tree
from millstream.core.descriptions import described
from millstream.dataset.grain_compat.combinations import CacheIterDataset, LimitIterDataset, RepeatIterDataset
from millstream.dataset.grain_compat.zipping import ZipIterDataset
from millstream.dataset.iter_dataset import IterDataset
from millstream.dataset.map_dataset import MapDataset
from millstream.dataset.node_source import node_of
from millstream.dataset.nodes.element_nodes import Batched, ElementNode, Filtered
from millstream.dataset.nodes.index_nodes import IndexNode
from millstream.dataset.nodes.joining_nodes import JoiningNode, Zipped
from millstream.dataset.nodes.node import ENDLESS, Node, folded
from millstream.dataset.nodes.source_node import Source
from millstream.dataset.stream_mixing import MixedIterDataset
from millstream.dataset.stream_nodes import Ahead, Operated, ReadIterDataset, Seeded
from millstream.sources import InMemoryDataSource, RangeDataSource
from millstream.transforms import Batch, Filter, Transformation

_SAME: Final = (Ahead, Seeded, LimitIterDataset, RepeatIterDataset, CacheIterDataset)
"""Streams whose elements are those of their parent."""


@runtime_checkable
class ShapeDtypeStructProtocol(Protocol):
    """Anything with a shape and a dtype: a `ShapeDtypeStruct` of JAX's or of this module, or an array.

    Examples:
        >>> isinstance(np.zeros(3), millstream.experimental.ShapeDtypeStructProtocol)
        True
    """

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The length of each axis; None if it differs between elements."""
        ...

    @property
    def dtype(self) -> Any:
        """The type of the items."""
        ...


class ShapeDtypeStruct:
    """The shape and dtype of an array. No dataclass: it stands for a leaf, and dataclasses are structures.

    Args:
        shape: the length of each axis; None if it differs between elements.
        dtype: the type of the items.

    Examples:
        >>> millstream.experimental.ShapeDtypeStruct((None, 3), np.dtype("float32"))
        ShapeDtypeStruct(shape=(None, 3), dtype=dtype('float32'))
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: Sequence[int | None], dtype: Any) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShapeDtypeStruct):
            return NotImplemented
        return (self.shape, self.dtype) == (other.shape, other.dtype)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))

    def __repr__(self) -> str:
        return f"ShapeDtypeStruct(shape={self.shape}, dtype={self.dtype!r})"


def get_element_spec(dataset: MapDataset[Any] | IterDataset[Any]) -> Any:
    """Returns the structure of the elements of a dataset, with a `ShapeDtypeStruct` in place of each leaf.

    Nothing is read or computed, so sources and operations must declare their elements. Ranges, NumPy arrays and
    `InMemoryDataSource` with columns of numbers do; any other source needs an attribute `element_spec`. An operation
    that changes elements needs a method `output_spec(input_spec)`. The first axis of a batch is None if the last batch
    may be shorter.

    `iter(dataset).trace()` computes one element instead, for any chain.

    Args:
        dataset: a `MapDataset` or an `IterDataset`.

    Raises:
        TypeError: it is neither.
        ValueError: a source or an operation does not declare its elements.

    Examples:
        >>> columns = {"x": np.zeros((10, 3), np.float32), "y": np.arange(10)}
        >>> dataset = millstream.MapDataset.source(millstream.InMemoryDataSource(columns)).shuffle(seed=0).batch(5)
        >>> millstream.experimental.get_element_spec(dataset)["x"]
        ShapeDtypeStruct(shape=(5, 3), dtype=dtype('float32'))
    """
    if isinstance(dataset, MapDataset):
        return _of_node(node_of(dataset))
    if isinstance(dataset, IterDataset):
        return _of_stream(dataset)
    raise TypeError(f"dataset must be a MapDataset or an IterDataset, got {type(dataset).__name__}.")


def _of_stream(dataset: IterDataset[Any]) -> Any:
    if hasattr(dataset, "element_spec"):
        return dataset.element_spec
    match dataset:
        case ReadIterDataset():
            return _of_node(node_of(dataset.map_dataset))
        case Operated():
            return _after(dataset.operation, _of_stream(dataset.parents[0]), num_elements=None)
        case ZipIterDataset():
            return tuple(map(_of_stream, dataset.parents))
        case MixedIterDataset():
            return _shared([_of_stream(parent) for parent in dataset.parents], "the datasets of a mixture")
    if isinstance(dataset, _SAME):
        return _of_stream(dataset.parents[0])
    raise _unknown(type(dataset).__name__, "an attribute element_spec")


def _of_node(end: Node) -> Any:
    return folded(end, _after_parents)


def _after_parents(node: Node, above: list[Any]) -> Any:
    match node:
        case Source():
            return _of_source(node.source, node.text)
        case Filtered() | IndexNode():
            return above[0]
        case Batched():
            return _after(node.operation, above[0], node.parent.length)
        case ElementNode():
            return _after(node.operation, above[0], num_elements=None)
        case Zipped():
            return tuple(above)
        case JoiningNode():
            return _shared(above, f"the datasets of {node.text}")
    raise _unknown(node.text, "a Map with output_spec(input_spec) in its place")


def _of_source(source: Any, name: str) -> Any:
    if hasattr(source, "element_spec"):
        return source.element_spec
    if type(source) in {range, RangeDataSource}:
        return ShapeDtypeStruct((), np.dtype(np.int64))
    columns = source.stackable_columns if type(source) is InMemoryDataSource else None
    if isinstance(source, np.ndarray) and not source.dtype.hasobject:
        columns = source
    if columns is None:
        raise _unknown(name, "an attribute element_spec")
    return tree.map_leaves(lambda column: ShapeDtypeStruct(column.shape[1:], column.dtype), columns)


def _after(operation: Transformation, spec: Any, num_elements: int | None) -> Any:
    """Returns the spec after an operation."""
    if isinstance(operation, Filter):
        return spec
    if callable(output_spec := getattr(operation, "output_spec", None)):
        return output_spec(spec)
    if isinstance(operation, Batch) and operation.batch_fn is None and not operation.pad_remainder:
        is_whole = num_elements is not None and num_elements != ENDLESS and num_elements % operation.batch_size == 0
        size = operation.batch_size if operation.drop_remainder or is_whole else None
        return tree.map_leaves(lambda leaf: ShapeDtypeStruct((size, *leaf.shape), leaf.dtype), spec)
    raise _unknown(described(operation), "a method output_spec(input_spec)")


def _shared(specs: list[Any], what: str) -> Any:
    """Returns the spec that all datasets share. Raises ValueError if two differ."""
    if any(spec != specs[0] for spec in specs):
        raise ValueError(f"The elements of {what} differ: {', '.join(map(repr, specs))}.")
    return specs[0]


def _unknown(what: str, remedy: str) -> ValueError:
    return ValueError(
        f"Cannot determine the elements of {what} without computing one. Give it {remedy}, or compute one with "
        "iter(dataset).trace()."
    )
