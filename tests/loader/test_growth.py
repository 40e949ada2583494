"""Costs grow in proportion at most to what is built, and what has a limit says so at construction."""

import cProfile
import itertools
import pstats
from collections.abc import Callable
from typing import Any

import pytest

import millstream
from millstream.core import tree
from millstream.loader.pipeline.calls import num_bytes
from millstream.loader.pipeline.pipeline import MAX_GROUPINGS, MAX_LOGICAL_SHARDS
from millstream.transforms import Batch, Filter, Map


def num_calls(function: Callable[[], Any]) -> int:
    """Returns the number of calls of functions, also of C, that a call makes in this thread."""
    profile = cProfile.Profile()
    profile.runcall(function)
    calls: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return calls


def operations_of(count: int) -> None:
    loader = millstream.load(range(8), transformations=[Map(abs) for _ in range(count)], batch_size=4, num_epochs=1)
    assert len(list(loader)) == 2
    str(loader.summary())
    repr(loader)
    loader.metrics()


def logical_shards_of(count: int, num_threads: int) -> None:
    loader = millstream.DataLoader(
        data_source=range(1_000_000),
        sampler=millstream.IndexSampler(1_000_000, shuffle=True, seed=0),
        operations=[Filter(lambda number: number % 2 == 0), Batch(8 * count)],
        shard_options=millstream.ShardOptions(0, 1, logical_shards=count),
        read_options=millstream.ReadOptions(num_threads),
    )
    with iter(loader) as iterator:
        next(iterator)
        next(iterator)


@pytest.mark.parametrize(
    ("build", "sizes"),
    [
        (operations_of, (1, 10, 100, 1000)),
        (lambda count: logical_shards_of(count, 0), (1, 8, 64, 512)),
        (lambda count: logical_shards_of(count, 2), (1, 6, 40, 256)),
    ],
)
def test_calls_grow_no_faster_than_what_is_built(build: Callable[[int], None], sizes: tuple[int, ...]) -> None:
    """Over three decades, ten times as many make at most twenty times as many calls, of Python or C.

    How often the consumer waits for threads is not the same each time.
    """
    build(sizes[0])  # Late imports.
    counts = [num_calls(lambda size=size: build(size)) for size in sizes]  # type: ignore[misc]
    for (few, before), (many, after) in itertools.pairwise(zip(sizes, counts, strict=True)):
        assert after <= 2 * many / few * before, counts


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


MAX_FUNCTIONS = 145
"""The number of functions of the library that the trainer's thread runs for the batches of a worker."""


def test_a_batch_of_a_worker_takes_few_functions_of_the_trainer() -> None:
    """The way between `next` and a worker process is short: it is read, and paid for, with each batch."""
    loader = millstream.load(range(10**6), transformations=[Map(abs)], batch_size=2048, worker_count=1)
    profile = cProfile.Profile()
    with iter(loader) as batches:
        list(itertools.islice(batches, 50))
        profile.runcall(lambda: list(itertools.islice(batches, 200)))
    functions = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    assert sum("/millstream/" in file for file, _, _ in functions) <= MAX_FUNCTIONS


def test_limits_are_errors_at_construction() -> None:
    """Numbers of groupings and logical shards, and levels of records: each has a rule in its error."""
    with pytest.raises(ValueError, match=f"at most {MAX_GROUPINGS} operations that group .*, got {MAX_GROUPINGS + 1}"):
        millstream.load([1] * 8, transformations=[Batch(1)] * MAX_GROUPINGS, batch_size=1)
    batches = millstream.load([1] * 8, transformations=[Batch(1)] * (MAX_GROUPINGS - 1), batch_size=1)
    assert next(iter(batches)).ndim == MAX_GROUPINGS

    shards = millstream.ShardOptions(0, 1, logical_shards=2 * MAX_LOGICAL_SHARDS)
    with pytest.raises(ValueError, match=r"at most 4,096 logical shards, got 8,192"):
        millstream.load(range(9), transformations=[Filter(bool)], batch_size=8192, shard_options=shards)

    with pytest.raises(ValueError, match=r"at most 100 nested levels, got data_source\[2\] with more"):
        millstream.load([nested(100), 1, nested(101)], transformations=[repr])
    with pytest.raises(ValueError, match=r"at most 100 nested levels"):
        millstream.load([nested(2000)], batch_size=1)


def deep(number: int) -> Any:
    return nested(600 if number == 2 else 99)


def cyclic(number: int) -> Any:
    element: dict[str, Any] = {"number": number}
    if number == 2:
        element["self"] = [element, element]
    return element


def shared(number: int) -> Any:
    """Returns a structure with 2**90 leaves, and 90 lists."""
    element: Any = number
    for _ in range(90):
        element = (element, element)
    return element


PLACES: list[dict[str, Any]] = [
    {"read_options": millstream.ReadOptions(0)},
    {"read_options": millstream.ReadOptions(4)},
    {"worker_count": 1},
]


@pytest.mark.parametrize("function", [deep, cyclic])
def test_elements_nested_too_deeply_are_errors_in_their_turn(function: Callable[[int], Any]) -> None:
    """The error names record and operation, the elements before it are delivered, and it can be skipped, everywhere."""
    outcomes = []
    for place in PLACES:
        options: dict[str, Any] = {"transformations": [function], "num_epochs": 1, **place}
        with millstream.load(range(4), **options) as loader, iter(loader) as iterator:
            got: list[Any] = [next(iterator), next(iterator)]
            with pytest.raises(ValueError, match="An element must have at most 100 nested levels") as caught:
                next(iterator)
            got.append(caught.value.__notes__)
        with millstream.load(range(4), on_error="skip", **options) as loader:
            got.append(list(loader))
            got.append(loader.errors)
        outcomes.append(got)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][2] == [f"millstream: in operation 0, Map({function.__name__}), at record key 2 (position 2)."]
    assert len(outcomes[0][3]) == 4
    assert list(outcomes[0][4]) == [2]


def test_elements_that_batches_cannot_hold_are_skipped_before_the_batch() -> None:
    """A record whose element contains itself is replaced, and does not fail its batch."""
    loader = millstream.load(range(4), transformations=[cyclic], batch_size=4, num_epochs=1, on_error="skip")
    assert next(iter(loader))["number"].tolist() == [0, 1, 3, 3]
    assert list(loader.errors) == [2]


def test_sizes_of_elements_are_estimated_in_bounded_time() -> None:
    """Whatever an element shares or contains, its size takes few calls, and is at least that of the data seen."""
    endless: list[Any] = []
    endless += [endless] * 9
    for value in (shared(1), endless, nested(5000), cyclic(2)):
        assert num_calls(lambda value=value: num_bytes([value])) < 100_000  # type: ignore[misc]
        assert num_calls(lambda value=value: tree.num_levels_exceed(value)) < 100_000  # type: ignore[misc]
    assert not tree.num_levels_exceed(shared(1))
    assert tree.num_levels_exceed(endless)
    assert num_bytes([shared(1)]) > 0
