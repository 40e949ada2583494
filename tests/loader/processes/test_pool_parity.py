"""Elements of every kind come from worker processes to the byte, and their classes are the consumer's own."""

import collections
import dataclasses
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import millstream
from millstream.errors import WorkerStalledError
from millstream.transforms import Batch
from support.draw import elements_of_all_kinds
from support.draw.elements_of_all_kinds import (
    BFLOAT16,
    SHAPES,
    Example,
    FrozenExample,
    Pair,
    filled,
    with_layout,
)
from support.faults.user_faults import At, Pipe, ReportThen
from support.processes.worker_pools import in_background, pool_of
from support.streams import comparable

# Workers need not import hypothesis to have the operations and classes of these modules.
for module in (elements_of_all_kinds, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)


def types_in(element: Any) -> Any:
    """Returns the exact types of everything in an element."""
    parts: list[Any] = []
    if isinstance(element, dict):
        parts = list(element.values())
    elif isinstance(element, (list, tuple)):
        parts = list(element)
    elif dataclasses.is_dataclass(element) and not isinstance(element, type):
        parts = [getattr(element, field.name) for field in dataclasses.fields(element)]
    return type(element), [types_in(part) for part in parts]


def stream_of(source: Any, operations: list[Any], worker_count: int, **options: Any) -> list[Any]:
    """Returns the elements that a source and operations give in order."""
    loader = millstream.DataLoader(
        data_source=source,
        sampler=millstream.IndexSampler(len(source), num_epochs=1),
        operations=operations,
        worker_count=worker_count,
        **options,
    )
    with iter(loader) as iterator:
        return list(iterator)


DTYPES = [np.uint8, np.int64, ">i4", np.float16, np.complex128, np.bool_, "<U5", "S3", "M8[s]", BFLOAT16]


def arrays_of_all_kinds(number: int) -> dict[str, Any]:
    """Returns an element with an array of each dtype and shape, in some memory layout."""
    return {
        f"{np.dtype(dtype)} {shape}": with_layout(filled(shape, np.dtype(dtype), number), number % 6)
        for dtype in DTYPES
        for shape in SHAPES
    }


def nested_leaves(number: int) -> Any:
    """Returns a nested element with a leaf of each kind that stacks."""
    return [
        collections.OrderedDict(number=number, real=number / 3, complex=number * 1j, none=None, truth=number % 2 == 0),
        Pair("text" * (number % 5), b"bytes\0" * (number % 3)),
        Example(np.float32(number), (np.int8(number % 100), np.datetime64(number, "s"))),
        FrozenExample({"a": [np.full(3, number), np.full((), number, dtype=BFLOAT16)]}),
    ]


def swapped(batch: Any) -> Any:
    return batch[::-1]


def large_element(number: int) -> Any:
    return np.full((300, 1000), number), [str(number)] * 5_000, bytes([number]) * 1_000_000


@pytest.mark.parametrize(
    ("size", "operations"),
    [
        (24, [arrays_of_all_kinds, Batch(3), Batch(2)]),
        (24, [nested_leaves, Batch(3), swapped]),
        (6, [large_element]),
    ],
    ids=["arrays twice", "nested and mapped", "large elements"],
)
def test_batches_of_all_kinds(size: int, operations: list[Any]) -> None:
    """Batches of arrays of every dtype, shape and layout, and of nested leaves, are the same bytes.

    So are elements much larger than a socket's buffer, in arrays and in objects that travel in the pickle.
    """
    inline = stream_of(range(size), operations, 0, read_options=millstream.ReadOptions(0))
    workers = stream_of(range(size), operations, 2)

    assert [comparable(batch) for batch in workers] == [comparable(batch) for batch in inline]
    assert [types_in(batch) for batch in workers] == [types_in(batch) for batch in inline]


def slowly(batch: Any) -> Any:
    """Computes for 6 ms, more than half of the longest call of several batches."""
    end = time.process_time() + 0.006
    while time.process_time() < end:
        pass
    return batch


@pytest.mark.parametrize("is_slow", [False, True])
def test_quick_batches_come_several_in_a_call(is_slow: bool) -> None:
    """A message serves several batches that are quick, and one that is not; the stream is the same."""
    size = 160 if is_slow else 4000
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "num_epochs": 1}
    operations: list[Any] = [Batch(4), slowly] if is_slow else [Batch(4)]
    with iter(millstream.load(range(size), transformations=operations, worker_count=2, **options)) as iterator:
        batches = [next(iterator).tolist() for _ in range(size // 4 - 1)]
        calls = next(pool_of(iterator).call_numbers)
    assert batches == [batch.tolist() for batch in millstream.load(range(size), batch_size=4, **options)][:-1]
    assert calls >= len(batches) if is_slow else calls < len(batches) / 4


def test_a_hang_in_a_call_of_several_batches_loses_none(tmp_path: Path) -> None:
    """Those before it may wait for it. The error names records, and the iterator stays after what it delivered."""
    with Pipe(tmp_path / "there") as there:
        operations = [At(2000, ReportThen(there.path)), Batch(4)]
        iterator = iter(millstream.load(range(4000), transformations=operations, worker_count=1))

        def give_up_soon() -> None:
            there.take()
            (worker,) = pool_of(iterator).workers
            worker.clock.timeout = 0.5

        delivered: list[Any] = []
        with in_background(give_up_soon), pytest.raises(WorkerStalledError, match=r"with the records \d+, "):
            delivered.extend(batch.tolist() for batch in itertools.islice(iterator, 501))
        assert delivered == [list(range(4 * step, 4 * step + 4)) for step in range(iterator.step)]
        assert len(delivered) <= 500
        iterator.seek(501)
        assert next(iterator).tolist() == [2004, 2005, 2006, 2007]
        iterator.close()
