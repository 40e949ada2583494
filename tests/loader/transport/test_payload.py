"""Messages from a worker arrive in its parent as they were: elements, errors, and the very classes of both."""

import collections
import dataclasses
import io
import json
import threading
import traceback
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import StackError
from millstream.loader.pipeline.recycled_memory import ALIGNMENT
from millstream.loader.transport.arena import INLINE_BYTES
from millstream.loader.transport.payload import (
    pack,
    pack_failure,
    unpack,
    unpack_failure,
    unpicklable_leaves,
)
from millstream.loader.transport.pickling import ClassTable, class_of_number
from millstream.loader.transport.pipeline_file import dump_with_classes
from support.draw.elements_of_all_kinds import Example, FrozenExample, Pair, arrays_in, elements
from support.faults.user_faults import NeedsTwoError
from support.processes.arena_pairs import address, arena_pair, run_of
from support.streams import comparable

NO_CLASSES = ClassTable()


@given(messages=st.lists(st.lists(elements, max_size=4), min_size=1, max_size=4), room=st.sampled_from([4096, 1 << 25]))
@settings(deadline=None, max_examples=80)
def test_elements_cross_unchanged(messages: list[list[Any]], room: int) -> None:
    """Elements of any kind keep structure, dtype, shape and bytes, with room in the arena or without.

    Arrays of some size are views of the arena, each at a multiple of 64 bytes, writable if they were so before.
    """
    with arena_pair(room) as (allocator, view):
        payloads = [pack(run_of(values), allocator, NO_CLASSES) for values in messages]
        received = [unpack(payload, view, NO_CLASSES) for payload in payloads]

    for values, payload, run in zip(messages, payloads, received, strict=True):
        arrived, origins = run.values, run.origins
        assert [comparable(value) for value in arrived] == [comparable(value) for value in values]
        assert comparable(origins.table) == comparable(run_of(values).origins.table)
        for array, original in zip(arrays_in(arrived), arrays_in(values), strict=True) if payload[2] else []:
            assert array.flags.writeable == original.flags.writeable
            if not array.dtype.hasobject and array.nbytes >= INLINE_BYTES and room > array.nbytes:
                assert address(array) % ALIGNMENT == 0


@pytest.mark.parametrize("count", [1, 3])
def test_small_arrays_beside_large_ones_are_copies(count: int) -> None:
    """Labels that are kept hold their own bytes alone: their chunk is free again at once. They are aligned, too."""
    with arena_pair() as (allocator, view):
        labels = [allocator.allocate((1000,), np.dtype(np.int64)) for _ in range(count)]
        images = allocator.allocate((300, 300), np.dtype(np.float32))
        payload = pack(run_of([{"label": label, "image": images} for label in labels]), allocator, NO_CLASSES)
        values = unpack(payload, view, NO_CLASSES).values
        kept = [value["label"] for value in values]
        del labels, images, values
        for offset in view.take_released():
            allocator.take_back(offset)
        # A finalizer's note is read when something is allocated.
        allocator.bytes_for(1)
        chunks = len(allocator._chunks)

    assert chunks == 1
    assert all(address(label) % ALIGNMENT == 0 and label.flags.writeable for label in kept)


def test_arrays_of_the_arena_are_not_copied() -> None:
    """An array stacked into the arena is sent as its offset: both sides see the same memory."""
    with arena_pair() as (allocator, view):
        batches = [
            allocator.allocate((300, 300), np.dtype(np.float32)),
            allocator.allocate((100, 64), np.dtype(np.int64)),
        ]
        for batch in batches:
            batch[...] = 7
        one, two = unpack(pack(run_of([*batches]), allocator, NO_CLASSES), view, NO_CLASSES).values
        batches[0][3, 5] = -1
        two[2, 1] = -2

    assert one[3, 5] == -1
    assert batches[1][2, 1] == -2


def test_long_pickles_travel_in_the_arena() -> None:
    """A message through the socket stays short, so that a worker need not wait for the parent to read it."""
    with arena_pair() as (allocator, view):
        payload = pack(run_of([f"text {number}" for number in range(20_000)]), allocator, NO_CLASSES)
        assert isinstance(payload[0], tuple)
        values = unpack(payload, view, NO_CLASSES).values

    assert values[19_999] == "text 19999"


@pytest.mark.parametrize("dtype", [np.dtype([]), np.dtype("V0")], ids=["no fields", "no bytes"])
def test_elements_without_bytes_cross(dtype: np.dtype[Any]) -> None:
    """An array without bytes is still an array: of a structured dtype without fields, for instance."""
    with arena_pair() as (allocator, view):
        payload = pack(run_of([np.zeros((2, 3), dtype)]), allocator, NO_CLASSES)
        (arrived,) = unpack(payload, view, NO_CLASSES).values

    assert (arrived.shape, arrived.dtype) == ((2, 3), dtype)


# ---------------------------------------------------------------------------------------------------------------------


def across(error: BaseException, classes: ClassTable = NO_CLASSES) -> BaseException:
    """Returns an exception as the parent raises it: having crossed as a message does."""
    return unpack_failure(pack_failure(error, classes), classes)


class ForgetfulError(Exception):
    """An exception that comes back from a pickle as another one."""

    def __reduce__(self) -> tuple[type[ValueError], tuple[str]]:
        return ValueError, ("something else",)


class HostileError(Exception):
    def __reduce__(self) -> NoReturn:
        raise RuntimeError("not me")


class SlottedError(Exception):
    __slots__ = ("place",)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("key"),
        ValueError(),
        OSError(2, "No such file", "name"),
        UnicodeDecodeError("utf-8", b"abc", 0, 1, "reason"),
        json.JSONDecodeError("message", "document", 3),
        StackError("differ", "['image']", (0, 3)),
        StopIteration(7),
        ExceptionGroup("several", [ValueError(1), KeyError(2)]),
        NeedsTwoError("text", 2),
        ForgetfulError("text"),
        HostileError("text"),
        SlottedError("text"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_keep_their_type(error: BaseException) -> None:
    """An exception of a known class arrives as what it was: type, arguments, attributes and text."""
    arrived = across(error)

    assert type(arrived) is type(error)
    assert vars(arrived) == vars(error)
    assert repr(arrived.args) == repr(error.args)
    assert str(arrived) == str(error)


def test_notes_cross_once() -> None:
    """The notes of an exception arrive in order and none of them twice."""
    error = KeyError("key")
    error.add_note("first")
    error.add_note("second")

    assert across(error).__notes__ == ["first", "second"]
    assert across(across(error)).__notes__ == ["first", "second"]


def fail_at_the_bottom() -> NoReturn:
    reason = KeyError("the reason")
    raise ValueError("what was raised") from reason


def test_the_workers_traceback_and_causes_arrive_as_text() -> None:
    """The traceback that the parent prints has the worker's frames and the causes."""
    try:
        fail_at_the_bottom()
    except ValueError as error:
        arrived = across(error)
    text = "".join(traceback.format_exception(arrived))

    assert "in fail_at_the_bottom" in text
    assert "KeyError: 'the reason'" in text
    assert "direct cause" in text
    assert text.rstrip().endswith("ValueError: what was raised")


def test_an_exception_class_that_is_missing_here_arrives_in_words() -> None:
    """An exception that the worker could unpickle and the parent cannot arrives as text."""
    failure = pack_failure(KeyError("key"), NO_CLASSES)._replace(pickled=b"not a pickle")

    assert str(unpack_failure(failure, NO_CLASSES)) == "builtins.KeyError: 'key'"


# ---------------------------------------------------------------------------------------------------------------------

LOCK = threading.Lock()
RING: list[Any] = [1]
RING.append(RING)
RING_WITH_LOCK: list[Any] = [LOCK]
RING_WITH_LOCK.append(RING_WITH_LOCK)


@pytest.mark.parametrize(
    ("element", "paths"),
    [
        (LOCK, ["the element of type lock"]),
        ({"image": np.zeros(3), "handle": LOCK}, ["['handle'] of type lock"]),
        ({"a": [1, (2, LOCK)], "b": LOCK}, ["['a'][1][1] of type lock", "['b'] of type lock"]),
        (Pair(1, {"x": LOCK}), [".second['x'] of type lock"]),
        (Example(LOCK, FrozenExample(LOCK)), [".image of type lock", ".label.image of type lock"]),
        (np.array([LOCK], dtype=object), ["the element of type ndarray"]),
        (collections.deque([LOCK]), ["the element of type deque"]),
        ((number for number in [1]), ["the element of type generator"]),
        # The key cannot be shown, so that there is no path.
        ({type("Shy", (), {"__repr__": lambda _: str(1 / 0)})(): LOCK}, ["the element of type dict"]),
        (RING, []),
        (RING_WITH_LOCK, ["[0] of type lock"]),
        ({"fine": 1}, []),
    ],
    ids=lambda value: "" if isinstance(value, list) and value and value[0] is LOCK else None,
)
def test_leaves_that_cannot_be_pickled_are_named(element: Any, paths: list[str]) -> None:
    """The path, type and cause of each leaf that cannot be pickled are found."""
    found = unpicklable_leaves(element)

    assert [text.split(":")[0] for text in found] == paths
    assert all("pickle" in text for text in found)


def test_a_structure_too_deep_to_pickle_is_named() -> None:
    """A structure nested deeper than pickle can follow is an error as any other, not the end of the worker."""
    outermost: list[Any] = []
    for _ in range(100_000):
        outermost = [outermost]
    (text,) = unpicklable_leaves(outermost)

    assert text.startswith("[0][0]")
    assert len(text) < 500


# ---------------------------------------------------------------------------------------------------------------------


def local_classes() -> tuple[type[Any], type[Any]]:
    """Returns classes that no module defines: cloudpickle sends their code along."""

    @dataclasses.dataclass
    class Sample:
        value: int
        seen = 0

        def double(self) -> int:
            return 2 * self.value

    class LocalError(Exception):
        pass

    return Sample, LocalError


def table_of(*classes: type) -> ClassTable:
    """Returns the table that comes of pickling a pipeline which uses some classes."""
    file = io.BytesIO()
    return dump_with_classes([lambda: classes], file, lambda _: True)


def test_classes_of_the_pipeline_cross_as_numbers() -> None:
    """Classes of the pipeline arrive as the parent's own, with the changes made to them since."""
    sample, local_error = local_classes()
    classes = table_of(sample, local_error)
    double = sample.double
    pickled = classes.dumps([sample(3), sample(4)])
    sample.seen = 5
    values = classes.loads(pickled)

    assert [type(value) is sample for value in values] == [True, True]
    assert [value.value for value in values] == [3, 4]
    assert sample.seen == 5
    assert sample.double is double
    assert len(pickled) < 200
    assert type(across(local_error("text"), classes)) is local_error


def test_the_numbers_of_classes_mean_something_in_their_table_only() -> None:
    """A pickle with numbered classes fails to load elsewhere, instead of loading as something else."""
    sample, _ = local_classes()
    pickled = table_of(sample).dumps(sample(3))

    with pytest.raises(LookupError):
        NO_CLASSES.loads(pickled)
    with pytest.raises(Exception, match="Class 0 of the pipeline"):
        class_of_number(0)
