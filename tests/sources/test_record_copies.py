"""Copies of records in memory, by functions that are compiled for the structure of the first one."""

import gc
import sys
from typing import Any

import numpy as np
import pytest

from millstream.sources.base import HeldRecords, own
from millstream.sources.record_copies import MAX_CHECKED_VALUES, MAX_COPIED_BYTES, compiled_copies

SHARED = np.arange(3)
TURN = {"role": "user", "text": "a"}
LOOP: dict[str, Any] = {"id": 1}
LOOP["inner"] = LOOP


def read_only() -> Any:
    array = np.arange(3)
    array.flags.writeable = False
    return array


RECORDS: list[Any] = [
    {"id": 1, "x": np.arange(3)},
    {"id": 2, "x": np.arange(4.0), "more": 1},
    {"id": 3},
    {"id": [1], "x": np.arange(3)},
    {"id": 4, "x": read_only()},
    {"id": 5, "x": np.zeros(MAX_COPIED_BYTES + 1, np.uint8)},
    {"id": 6, "x": np.array([[1], "a"], object)},
    {"id": 7, "inner": {"a": 1, "tokens": [1, 2]}},
    {"id": 8, "inner": {"a": 1, "tokens": [[1], 2]}},
    {"id": 9, "inner": {"b": 1, "tokens": [1, 2]}},
    {"id": 10, "inner": {"a": 1, "tokens": [0] * (MAX_CHECKED_VALUES + 1)}},
    {"one": SHARED, "two": SHARED},
    {"one": np.arange(3), "two": np.arange(3)},
    {"chat": [{"role": "user", "text": "a"}, {"role": "model", "text": "b"}], "last": {"role": "none"}},
    {"chat": [LOOP, LOOP], "last": LOOP},
    {"chat": [TURN, TURN], "last": {"role": "none"}},
    {"chat": [TURN, {"role": "model"}], "last": TURN},
    {"chat": [{"role": "user", "tools": [1]}], "last": {"role": "none"}},
    {"chat": [], "last": {}},
    LOOP,
    {"point": (1, [2])},
    {},
    [1, 2],
    [{"a": 1}, {"a": 2}],
    [SHARED, SHARED],
    np.arange(3),
    "text",
    None,
    (1, [2]),
    {1, 2},
    bytearray(b"a"),
]


def parts(value: Any, found: dict[int, Any]) -> dict[int, Any]:
    """Returns all that can be changed in a value, by its identity, in order."""
    if isinstance(value, dict | list | set | bytearray | np.ndarray) and id(value) not in found:
        found[id(value)] = value
    elif not isinstance(value, tuple):
        return found
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for member in members:
        parts(member, found)
    return found


def pattern(value: Any) -> list[Any]:
    """Returns which parts of a value are the same object, and what each holds besides other parts."""
    numbers: dict[int, int] = {}

    def shown(value: Any) -> Any:
        if not isinstance(value, dict | list | set | bytearray | np.ndarray | tuple):
            return value
        if id(value) in numbers and not isinstance(value, tuple):
            return ("as", numbers[id(value)])
        numbers[id(value)] = len(numbers)
        if isinstance(value, dict):
            return {name: shown(member) for name, member in value.items()}
        if isinstance(value, list | tuple):
            return [type(value).__name__, *map(shown, value)]
        return repr(value)

    return [shown(value)]


@pytest.mark.parametrize("example", RECORDS, ids=lambda record: repr(type(record).__name__))
def test_compiled_copies_are_the_general_ones(example: Any) -> None:
    """Each record has the copy that `own` makes, whatever the example.

    It has the same values, shared within it alike, and shares with the record what `own` shares.
    """
    copies = compiled_copies(example, own)(RECORDS)
    for record, copied, expected in zip(RECORDS, copies, map(own, RECORDS), strict=True):
        assert pattern(copied) == pattern(expected)
        kept = parts(record, {}).keys()
        assert [key in kept for key in parts(copied, {})] == [key in kept for key in parts(expected, {})]


@pytest.mark.parametrize(
    "record",
    [{"id": 1, "x": np.arange(3)}, {"inner": {"a": 1, "tokens": [1]}}, np.arange(3)],
    ids=["dict", "deep", "array"],
)
def test_a_batch_of_records_is_copied_without_a_call_each(record: Any) -> None:
    """The copies of usual records take a few calls of Python for the whole batch."""
    held = HeldRecords([own(record) for _ in range(1000)])
    held.__getitems__([0])
    calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    # Others' callbacks of the garbage collector are calls, too.
    gc.disable()
    sys.setprofile(count)
    try:
        held.__getitems__(range(1000))
    finally:
        sys.setprofile(None)
        gc.enable()
    assert calls < 10
