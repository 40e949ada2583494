"""Records with large arrays in memory are copied once, where their batch will be, and nobody can tell."""

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.core.direct_copies import DirectCopies
from millstream.loader.threads import shared_work
from millstream.loader.transport.shared_records import share
from millstream.transforms.batching.stack import stack

SHAPE = (96, 64, 3)
"""More than `MIN_DIRECT_BYTES`."""

NO_THREADS = millstream.ReadOptions(num_threads=0)
READING: dict[str, dict[str, Any]] = {"here": {"read_options": NO_THREADS}, "threads": {}}


def images(count: int = 24) -> list[Any]:
    return [np.full(SHAPE, number, np.uint8) for number in range(count)]


def records(count: int = 24) -> list[Any]:
    return [{"a": image, "b": image + 100, "n": number} for number, image in enumerate(images(count))]


def batches_of(source: Any, function: Callable[[Any], Any], *, num_epochs: int = 1, **options: Any) -> Iterator[Any]:
    options |= {"num_epochs": num_epochs, "transformations": [function], "batch_size": 8}
    return iter(millstream.load(source, shuffle=True, seed=0, **options))


def brighter(image: Any) -> Any:
    image += 1
    return image


def as_signed(image: Any) -> Any:
    image.dtype = np.dtype(np.int8)
    return image


def in_threes(image: Any) -> Any:
    return image if image[0, 0, 0] % 3 else image.copy()


def every_second(image: Any) -> Any:
    return image if image[0, 0, 0] % 2 else image[:, ::-1]


def swapped(record: Any) -> Any:
    return {"a": record["b"], "b": record["a"]}


def twice(record: Any) -> Any:
    return {"a": record["a"], "b": record["a"]}


def nested(record: Any) -> Any:
    return record, [record["b"]]


@pytest.mark.filterwarnings("ignore:Setting the dtype:DeprecationWarning")
@pytest.mark.parametrize("reading", READING)
@pytest.mark.parametrize(
    "function",
    [brighter, as_signed, in_threes, every_second, np.flipud, swapped, twice, nested],
    ids=lambda function: function.__name__,
)
def test_a_batch_is_the_stack_of_what_the_functions_return(function: Any, reading: str) -> None:
    """Whatever a function does with a copied array, each batch is the stack of its results, and the source stays."""
    make = records if function in (swapped, twice, nested) else images
    source, order = make(), millstream.IndexSampler(24, shuffle=True, seed=0, num_epochs=2)
    for step, batch in enumerate(batches_of(source, function, num_epochs=2, **READING[reading])):
        expected = [function(make()[order[8 * step + row].record_key]) for row in range(8)]
        _assert_equal(batch, _stacked(expected))
    _assert_equal(source, make())


def _stacked(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: _stacked([value[name] for value in values]) for name in values[0]}
    if isinstance(values[0], (list, tuple)):
        return type(values[0])(_stacked(list(members)) for members in zip(*values, strict=True))
    return np.stack(values)


def _assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        _assert_equal(list(found.values()), list(expected.values()))
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            _assert_equal(one, other)
    else:
        np.testing.assert_array_equal(found, expected, strict=isinstance(found, np.ndarray))


@pytest.mark.parametrize("reading", READING)
def test_unchanged_arrays_are_not_copied_again(reading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that functions return as they got it lies where its row of the batch is."""
    # On a busy machine, a quick function seems slow: its records are then shared by threads, and copied once more.
    monkeypatch.setattr(shared_work, "MIN_SHARED_COPIES_SECONDS", 60.0)
    addresses: dict[int, int] = {}

    def note(record: Any) -> Any:
        addresses[record["n"]] = _address(record["a"])
        return record

    for batch in batches_of(records(), note, **READING[reading]):
        assert [_address(row) for row in batch["a"]] == [addresses[number] for number in batch["n"].tolist()]


def test_workers_copy_arrays_once() -> None:
    """The list that all workers share copies its large arrays where the batch will be, too."""
    large: list[dict[str, Any]] = [{"n": number, "a": np.full((1 << 20,), number, np.uint8)} for number in range(16)]
    shared = pickle.loads(pickle.dumps(share(large)))
    assert shared.copies_large_arrays
    copies = DirectCopies(np.empty)
    copies.count = 3
    read = shared.copied_directly([5, 2, 9], copies)
    addresses = [_address(record["a"]) for record in read]
    batch = stack(read, copies)
    assert [_address(row) for row in batch["a"]] == addresses
    _assert_equal(batch, {"n": np.array([5, 2, 9]), "a": np.stack([large[key]["a"] for key in (5, 2, 9)])})


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("reading", READING)
@pytest.mark.parametrize("part", ["record", "array", "view", "memory"])
def test_what_functions_keep_is_theirs(part: str, reading: str) -> None:
    """A trainer that writes into a batch changes nothing that a function has kept of a record.

    Later batches are copied, because a kept row keeps the memory of the whole batch.
    """
    kept: dict[int, Any] = {}
    addresses: dict[int, int] = {}

    def keep(record: Any) -> Any:
        image = record["a"]
        addresses[record["n"]] = _address(image)
        parts = {"record": record, "array": image, "view": image[1:], "memory": memoryview(image)}
        kept[record["n"]] = parts[part]
        return dict(record)

    for batch in batches_of(records(), keep, **READING[reading]):
        numbers = batch["n"].tolist()
        batch["a"][...] = 255
        for number in numbers:
            value = kept[number]["a"] if part == "record" else kept[number]
            assert set(np.asarray(value).reshape(-1).tolist()) == {number}
        assert not {addresses[number] for number in numbers} & set(map(_address, batch["a"]))
