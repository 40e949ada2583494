"""Copies of records in memory, by functions that are compiled for the structure of the first one.

A general copy of a dict with an array and a nested dict takes five calls. A compiled function takes the tests that the
general one makes, and no call of Python: a third of the time. Records of another structure get the general copy.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.core import tree

MAX_COPIED_BYTES = 1 << 20
"""Larger arrays are not copied, because an operation may crop a part of a gigabyte."""

MAX_CHECKED_VALUES = 64
"""Longer lists and tuples are nearly always of one kind, so that a sample decides if their values are copied."""

SAMPLED_VALUES = 8
"""The number of values, spread evenly, of such a sample."""

IMMUTABLE = frozenset({int, float, complex, bool, str, bytes, NoneType})

_LEAVES = IMMUTABLE | {np.bool_, np.int32, np.int64, np.uint8, np.float32, np.float64}

MIN_DIRECT_BYTES = 1 << 14
"""Smaller arrays are not copied into the memory of a batch, because the bookkeeping takes as long as a second copy."""

_MAX_LINES = 64
"""The number of conditions beyond which a structure is not compiled."""

_chain = itertools.chain.from_iterable

Copy = Callable[[Any], Any]
CopyLarge = Callable[[int, NDArray[Any]], NDArray[Any]]
"""A function that copies an array, given its number among those of a record."""


class _NotCompiledError(Exception):
    """A structure with other values than numbers, texts, arrays, and dicts and lists of these."""


def has_large_arrays(record: Any) -> bool:
    """Returns True if a record has arrays that may be copied into the memory of a batch."""
    arrays = (leaf for _, leaf in tree.leaves(record) if type(leaf) is np.ndarray)
    return any(MIN_DIRECT_BYTES <= array.nbytes <= MAX_COPIED_BYTES and array.flags.writeable for array in arrays)


def copied(_: int, array: NDArray[Any]) -> NDArray[Any]:
    return array.copy()


def compiled_copies(example: Any, copy: Copy) -> Callable[..., list[Any]]:
    """Returns a function that returns the copies of records, which is fast for those with the structure of an example.

    `copy` copies any record: its results are those of the function. A second argument of it, a `CopyLarge`, replaces
    the function that copies large arrays.
    """
    code = _Code()
    try:
        result = code.add(example, "record")
    except _NotCompiledError:
        return lambda records, _=copied: list(map(copy, records))
    # What occurs twice in a record is copied once, by the general copy.
    if code.branches or code.lists:
        ids = [f"id({name})" for name in code.mutable] + [f"*map(id, {name})" for name in code.lists]
        count = " + ".join([str(len(code.mutable)), *(f"len({name})" for name in code.lists)])
        code.tests.append(f"len({{{', '.join(ids)}}}) == {count}")
    source = "\n".join(
        [
            "def copies_of(records, copy_large=copied):",
            "    copies = []",
            "    for record in records:",
            "        try:",
            f"            if {' and '.join(code.tests)}:",
            *[f"                {line}" for line in code.lines],
            f"                copies.append({result})",
            "                continue",
            "        except KeyError:",
            "            pass",
            "        copies.append(copy(record))",
            "    return copies",
        ]
    )
    names: dict[str, Any] = {"copy": copy, "copied": copied, "LEAVES": _LEAVES, "chain": _chain, "ndarray": np.ndarray}
    names |= code.names
    # The text has nothing of the record but its structure: names of keys and values are those of `code.names`.
    exec(compile(source, f"<copies of {type(example).__name__}>", "exec"), names)  # noqa: S102
    compiled: Callable[[Sequence[Any]], list[Any]] = names["copies_of"]
    return compiled


class _Code:
    """The tests that a record has a structure, and the lines that copy it.

    Attributes:
        tests: the conditions, in order. They define the names of values that the lines use.
        lines: the lines.
        names: the constants that both refer to.
        mutable: the names of the values that are copied.
        lists: the names of lists of dicts among them.
        branches: True if a dict has several values that are copied. Otherwise none occurs twice.
        num_large: the number of large arrays, which `copy_large` copies.
    """

    def __init__(self) -> None:
        self.tests: list[str] = []
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.mutable: list[str] = []
        self.lists: list[str] = []
        self.branches = False
        self.num_large = 0

    def add(self, value: Any, name: str, read: str | None = None) -> str:
        """Adds a value, which has a name, or is read by an expression. Returns the expression of its copy."""
        kind = type(value)
        if len(self.tests) > _MAX_LINES:
            raise _NotCompiledError
        found = name if read is None else f"({name} := {read})"
        if kind is dict:
            self.tests += [f"type({found}) is dict", f"len({name}) == {len(value)}"]
            return self._add_dict(value, name)
        self.mutable.append(name)
        if kind is list and value and set(map(type, value)) == {dict}:
            return self._add_list_of_dicts(value, name, found)
        if kind is list:
            if not _LEAVES.issuperset(map(type, value)):
                raise _NotCompiledError
            sample = f"{name} if len({name}) <= {MAX_CHECKED_VALUES} else {name}[::len({name}) // {SAMPLED_VALUES}]"
            self.tests += [f"type({found}) is list", f"LEAVES.issuperset(map(type, {sample}))"]
        elif kind is np.ndarray and value.flags.writeable and value.nbytes <= MAX_COPIED_BYTES:
            self.tests += [
                f"type({found}) is ndarray",
                f"{name}.flags.writeable",
                f"{name}.nbytes <= {MAX_COPIED_BYTES}",
                f"not {name}.dtype.hasobject",
            ]
            if value.nbytes >= MIN_DIRECT_BYTES:
                self.num_large += 1
                return f"copy_large({self.num_large}, {name})"
        else:
            raise _NotCompiledError
        return f"{name}.copy()"

    def _add_dict(self, value: Mapping[Any, Any], name: str) -> str:
        self.mutable.append(name)
        copied = f"copy_of_{name}"
        self.lines.append(f"{copied} = {name}.copy()")
        self.branches |= sum(type(member) not in _LEAVES for member in value.values()) > 1
        for key, member in value.items():
            constant = self._constant(key)
            if type(member) in _LEAVES:
                self.tests.append(f"type({name}[{constant}]) in LEAVES")
            else:
                result = self.add(member, f"{name}_{len(self.names)}", f"{name}[{constant}]")
                self.lines.append(f"{copied}[{constant}] = {result}")
        return copied

    def _add_list_of_dicts(self, value: list[Any], name: str, found: str) -> str:
        if not _LEAVES.issuperset(map(type, _chain(map(dict.values, value)))):
            raise _NotCompiledError
        self.lists.append(name)
        self.tests += [
            f"type({found}) is list",
            f"set(map(type, {name})) == {{dict}}",
            f"LEAVES.issuperset(map(type, chain(map(dict.values, {name}))))",
        ]
        return f"list(map(dict.copy, {name}))"

    def _constant(self, key: Any) -> str:
        name = f"key{len(self.names)}"
        self.names[name] = key
        return name
