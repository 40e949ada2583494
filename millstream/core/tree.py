"""Nested structures: their children, their leaves, and copies of a structure with other values.

    kind                        children                     path of a child     built as
    list, subclasses of it      its items                    [3]                 list
    tuple, subclasses of it     its items                    [3]                 tuple
    named tuple                 its fields                   .name               the same class
    dict, every other Mapping   its values                   ['name']            dict
    instance of a dataclass     its fields                   .name               the same class
    anything else               none: it is a leaf

No class is called to build a structure. Checks in `__new__` and `__post_init__` apply to the original values, and other
attributes of an instance, such as cached properties, do not apply to the copy.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np

from millstream.core.signals import is_from_signal_handler

_SEQUENCES = (list, tuple)
_LEAVES = (np.ndarray, np.generic, str, bytes, int, float, complex, NoneType)
"""Leaves, even if their class is also a structure."""

FLAT = frozenset({*_LEAVES, bool, np.int64, np.int32, np.uint8, np.float32, np.float64, np.str_, np.bytes_, np.bool_})
"""Classes whose instances are leaves, whatever they contain."""

MAX_DEPTH = 100
"""The maximum number of nested levels of an element, because each takes several frames of Python's stack."""

SAMPLE = 8
"""The number of items of a list that stand for all of them."""

_MAPPINGS = (dict, Mapping)
"""A dict first, because a check against the abstract class takes ten times as long."""


def children(value: Any) -> Sequence[Any] | None:
    """Returns the children of a structure, in its order; None for a leaf.

    Raises:
        AttributeError: a field of a dataclass is not set.
    """
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, _SEQUENCES):
        return value
    if isinstance(value, _LEAVES):
        return None
    if isinstance(value, Mapping):
        return list(value.values())
    names = _field_names(value)
    return None if names is None else [getattr(value, name) for name in names]


def are_flat(values: Sequence[Any]) -> bool:
    """Returns True if values are of the most frequent kinds: all leaves, or all dicts of leaves.

    It runs for each block, and makes no call of Python per value.
    """
    kinds = set(map(type, values))
    if kinds == {dict}:
        kinds = set(map(type, itertools.chain.from_iterable(map(dict.values, values))))
    return FLAT.issuperset(kinds)


def num_levels_exceed(value: Any) -> bool:
    """Returns True if a value has more than MAX_DEPTH nested levels, or contains itself.

    It looks at SAMPLE evenly spread items of each list, and at each structure once per level, however often it occurs.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = list(inner_structures(level))
        if not level:
            return False
    return True


def inner_structures(level: Iterable[Any]) -> Iterable[Any]:
    """Returns the structures among the children of values, each once: lists, dicts, dataclasses and their like."""
    found: dict[int, Any] = {}
    for value in level:
        for child in sampled(children_if_any(value)):
            if type(child) not in FLAT:
                found[id(child)] = child
    return found.values()


def children_if_any(value: Any) -> Sequence[Any]:
    """Returns the children of a structure; () for a leaf, and for an instance of a class that cannot list its own."""
    try:
        return children(value) or ()
    except Exception as error:
        if is_from_signal_handler(error):
            raise
        return ()


def sampled(items: Sequence[Any]) -> Sequence[Any]:
    """Returns up to SAMPLE evenly spread items. The last is one of them, because a long document may be anywhere."""
    count = len(items)
    if count <= SAMPLE:
        return items
    return [items[number * (count - 1) // (SAMPLE - 1)] for number in range(SAMPLE)]


def paths(structure: Any) -> Iterator[str]:
    """Yields the path of each of `children(structure)`, as written in Python: `['image']`, `[3]`, `.label`."""
    if isinstance(structure, _MAPPINGS):
        return (f"[{key!r}]" for key in structure)
    names = _field_names(structure)
    if names is None:
        return (f"[{number}]" for number in range(len(structure)))
    return (f".{name}" for name in names)


def rebuilt(structure: Any, new_children: Iterable[Any]) -> Any:
    """Returns a copy of the structure with other children, in the order of `children(structure)`."""
    return all_rebuilt(structure, [new_children])[0]


def all_rebuilt(structure: Any, rows: Iterable[Iterable[Any]]) -> list[Any]:
    """Returns `[rebuilt(structure, row) for row in rows]`, but inspects the structure only once."""
    if isinstance(structure, _MAPPINGS):
        keys = tuple(structure)
        return [dict(zip(keys, row, strict=True)) for row in rows]
    kind, names = type(structure), _field_names(structure)
    if isinstance(structure, tuple):
        return list(map(tuple if names is None else functools.partial(tuple.__new__, kind), rows))
    return list(map(list if names is None else functools.partial(_rebuilt_dataclass, kind, names), rows))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns a copy of the structure with the results of `function` for its leaves, in their order."""
    # The usual columns and batches: arrays, and dicts of them.
    if type(value) in FLAT:
        return function(value)
    if type(value) is dict:
        return {name: map_leaves(function, child) for name, child in value.items()}
    found = children(value)
    return function(value) if found is None else rebuilt(value, [map_leaves(function, child) for child in found])


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the path and the value of each leaf; paths begin with `path`."""
    found = children(value)
    if found is None:
        yield path, value
        return
    for step, child in zip(paths(value), found, strict=True):
        yield from leaves(child, path + step)


def _field_names(value: Any) -> Sequence[str] | None:
    """Returns the names of the fields of a named tuple or a dataclass, None for other values."""
    if isinstance(value, tuple):
        return getattr(value, "_fields", None)
    if isinstance(value, list) or not dataclasses.is_dataclass(type(value)):
        return None
    return [field.name for field in dataclasses.fields(type(value))]


def _rebuilt_dataclass(kind: type, names: Iterable[str], children: Iterable[Any]) -> Any:
    built: Any = object.__new__(kind)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(built, name, child)
    return built
