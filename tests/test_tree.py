"""Nested structures: one meaning of what a part is, and all that walks them agrees on it."""

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream.core import tree
from millstream.loader.debugging import difference
from millstream.loader.device_placement import Placement
from millstream.loader.transport.payload import unpicklable_leaves
from millstream.transforms.batching.batch import pad
from millstream.transforms.batching.stack import stack
from support.draw.elements_of_all_kinds import Pair


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """A dataclass without a `__dict__`, whose class refuses what is not an original."""

    value: Any
    other: Any

    def __post_init__(self) -> None:
        if isinstance(self.value, Built):
            raise TypeError("must not be called")


class Built(str):
    """A leaf of a structure that was built, which no constructor may see."""

    __slots__ = ()


class Names(list[Any]):
    """A subclass of list."""


class Size(tuple[Any, ...]):
    """A subclass of tuple, with a constructor of its own."""

    __slots__ = ()

    def __new__(cls, *items: Any) -> Self:
        return super().__new__(cls, items)


class Table(collections.UserDict[Any, Any]):
    """A mapping that is not a dict."""


KINDS: dict[str, tuple[Callable[[Any, Any], Any], type]] = {
    "dict": (lambda a, b: {"a": a, "b": b}, dict),
    "ordered": (lambda a, b: collections.OrderedDict(a=a, b=b), dict),
    "proxy": (lambda a, b: types.MappingProxyType({"a": a, "b": b}), dict),
    "mapping": (lambda a, b: Table(a=a, b=b), dict),
    "list": (lambda a, b: [a, b], list),
    "its subclass": (lambda a, b: Names([a, b]), list),
    "tuple": (lambda a, b: (a, b), tuple),
    "subclass of it": (Size, tuple),
    "named tuple": (Pair, Pair),
    "dataclass": (Frozen, Frozen),
}
"""Each kind of structure: built from two parts, and the kind that it is rebuilt as."""

BOTH = pytest.mark.parametrize(("make", "kind"), KINDS.values(), ids=list(KINDS))

LEAVES = st.one_of(
    st.none(), st.integers(), st.text(max_size=2), st.binary(max_size=2), st.just(Frozen), st.just(Ellipsis)
) | st.integers(0, 3).map(np.arange)


def _structures(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    of_two = [st.builds(make, inner, inner) for make, _ in KINDS.values()]
    keys = st.integers() | st.text(max_size=3)
    return st.one_of(*of_two, st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3), st.just(()))


VALUES = st.recursive(LEAVES, _structures, max_leaves=8)


@settings(deadline=None)
@given(VALUES)
def test_a_leaf_is_where_its_path_says(value: Any) -> None:
    """The paths are Python: written after a value, each gives the very leaf; and every leaf has one of its own."""
    found = list(tree.leaves(value))
    for path, leaf in found:
        assert eval(f"value{path}", {"value": value}) is leaf
        assert tree.children(leaf) is None
    assert len({path for path, _ in found}) == len(found)


@settings(deadline=None)
@given(VALUES)
def test_a_structure_is_built_again_from_other_parts(value: Any) -> None:
    """A rebuilt structure has the new leaves, in order, at the same paths, and the same kinds if rebuilt again."""
    numbered = iter(range(1000))
    built = tree.map_leaves(lambda _: Built(next(numbered)), value)
    expected = [(path, Built(number)) for number, (path, _) in enumerate(tree.leaves(value))]
    assert list(tree.leaves(built)) == expected
    again = tree.map_leaves(lambda leaf: leaf, built)
    assert type(again) is type(built)
    assert repr(again) == repr(built)


@BOTH
def test_each_kind_is_built_as_the_documents_say(make: Callable[[Any, Any], Any], kind: type) -> None:
    """Mappings become dicts, subclasses list or tuple, and classes with fields stay what they are."""
    assert type(tree.map_leaves(lambda leaf: leaf, make(1, 2))) is kind


def test_what_is_a_number_is_a_leaf() -> None:
    """A class that is a number, a text or an array first, and a dataclass too, is one value."""

    @dataclasses.dataclass(init=False)
    class Metres(float):
        unit: str = "m"

    assert tree.children(Metres(2.0)) is None


def test_a_field_that_is_not_set_is_an_error() -> None:
    """A field that is not set is an error: there is no part to give."""
    with pytest.raises(AttributeError):
        tree.children(object.__new__(Frozen))


@BOTH
def test_all_that_walks_structures_knows_each_kind(make: Callable[[Any, Any], Any], kind: type) -> None:
    """Stacked, filled up, held as columns, put on a device, searched and watched: each kind is a structure."""
    one = make(np.arange(2), np.float32(1))
    paths = [path for path, _ in tree.leaves(one)]

    def shapes(value: Any) -> dict[str, Any]:
        assert type(value) is kind
        return {path: leaf.shape for path, leaf in tree.leaves(value)}

    batch = stack([one, one, one])
    assert shapes(batch) == dict(zip(paths, [(3, 2), (3,)], strict=True))
    padded = pad(batch, 3, 4).batch
    assert shapes(padded) == dict(zip(paths, [(4, 2), (4,)], strict=True))
    assert [type(leaf) for _, leaf in tree.leaves(padded)] == [np.ndarray, np.ndarray]

    columns = {"x": make(np.arange(6).reshape(3, 2), np.arange(3))}
    source = millstream.InMemoryDataSource(columns)
    records = source.__getitems__([0, 2])
    for record in (source[1], records[0], list(records)[1]):
        assert shapes(record["x"]) == dict(zip(paths, [(2,), ()], strict=True))

    # JAX knows some kinds itself, and may keep a subclass.
    put = Placement(None).put(make(np.arange(2), np.arange(3)))
    assert [(path, leaf.shape) for path, leaf in tree.leaves(put)] == list(zip(paths, [(2,), (3,)], strict=True))

    (refused,) = unpicklable_leaves(make(1, (number for number in "2")), "here")
    assert refused.startswith(f"here{paths[1]} of type generator: ")
    assert difference(make(1, 2), make(1, 2)) is None
    assert difference(make(1, [2]), make(1, [3])) is not None
