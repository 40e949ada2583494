"""The debug mode makes the same batches in one thread, and names what is wrong with operations, and nothing else."""

import dataclasses
import itertools
import random
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.loader.debugging import difference

RECORDS = 12


def findings(*operations: Any, source: Any = range(RECORDS), batch_size: int | None = 4) -> list[str]:
    """Returns the warnings of one pass in debug mode."""
    loader = millstream.load(
        source, shuffle=True, seed=0, num_epochs=1, transformations=operations, batch_size=batch_size, debug=True
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert list(loader)
    # Python's own: some of what is looked at here cannot be pickled in later versions.
    return [str(warning.message) for warning in caught if warning.category is not DeprecationWarning]


class Jitter(millstream.RandomMapTransform[Any, Any]):
    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        return element + rng.normal()


def held() -> list[dict[str, Any]]:
    return [{"x": np.arange(1, 3)} for _ in range(RECORDS)]


@pytest.mark.parametrize(
    "operations",
    [
        [abs, Jitter(), millstream.FilterTransform(bool)],
        [
            millstream.FlatMapTransform(lambda value: [value, value], 2),
            millstream.MapWithIndexTransform(lambda i, v: (i, v)),
        ],
        [lambda value: {"x": np.full(3, value), "nan": float("nan"), "text": str(value), "none": None}],
        [lambda _: object.__new__(object)],
    ],
    ids=["random", "fan-out", "dicts", "objects"],
)
def test_sound_operations_are_left_alone(operations: Sequence[Any]) -> None:
    """Maps, draws from the given rng, filters and fan-outs, and leaves of all kinds give no warning."""
    assert findings(*operations, batch_size=None) == []


def test_sound_batches_are_left_alone() -> None:
    """Views of the source that are stacked are copies; so are records that an operation may write to."""

    def write(record: dict[str, Any]) -> dict[str, Any]:
        record["y"] = record["x"] + 1
        return record

    assert findings(source=millstream.InMemoryDataSource({"x": np.ones((RECORDS, 2))})) == []
    assert findings(source=held()) == []
    assert findings(write, source=held()) == []


def test_an_operation_that_counts_is_named() -> None:
    """An operation that returns something else the second time is named once, with the record and the leaf."""
    count = itertools.count()

    def number(value: int) -> dict[str, int]:
        return {"value": value, "number": next(count)}

    (text,) = findings(abs, number)
    assert text.startswith("debug: operations[1], Map(number), is not pure: run twice, it returned another ['number']")
    assert "record key" in text
    assert "RandomMapTransform" in text


def test_a_filter_that_changes_its_mind_is_named() -> None:
    """A filter whose second verdict differs is named, although the number of elements differs."""
    turns = itertools.cycle([True] * RECORDS + [False])
    (text,) = findings(millstream.FilterTransform(lambda _: next(turns)))
    assert "Filter(<lambda>), is not pure: run twice, it returned another" in text


@pytest.mark.parametrize(
    ("draw", "library"),
    [(random.random, "Python"), (np.random.rand, "NumPy")],
    ids=["python", "numpy"],
)
def test_global_randomness_is_named(draw: Any, library: str) -> None:
    """Named as such, and not as impure besides."""
    (text,) = findings(lambda value: value + draw())
    assert text.startswith(f"debug: operations[0], Map(<lambda>), draws from the global generator of {library}")


class Kept:
    """A source that keeps its records, and returns the objects themselves."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.records = [make() for _ in range(RECORDS)]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, key: int) -> Any:
        return self.records[key]


@dataclasses.dataclass
class Image:
    pixels: Any


def double(record: dict[str, Any]) -> dict[str, Any]:
    record["x"] *= 2
    return record


def replace(record: dict[str, Any]) -> dict[str, Any]:
    record["x"] = record["x"] / 2
    return record


def brighten(record: Image) -> Image:
    record.pixels[0] += 1
    return record


def append(record: list[float]) -> list[float]:
    record.append(0.0)
    return record


@pytest.mark.parametrize(
    ("make", "operation"),
    [
        (lambda: {"x": np.arange(1, 3)}, double),
        (lambda: {"x": np.arange(1, 3)}, replace),
        (lambda: Image(np.zeros(2)), brighten),
        (lambda: [1.0], append),
    ],
)
def test_a_change_of_the_source_is_named(make: Callable[[], Any], operation: Callable[[Any], Any]) -> None:
    """The warning names the operation that changes a record which the source keeps, and the record."""
    texts = findings(lambda record: record, operation, source=Kept(make), batch_size=None)
    (text,) = [text for text in texts if "in place" in text]
    assert text.startswith(f"debug: operations[1], Map({operation.__name__}), changes its input in place")
    assert "record key" in text


class Buffered:
    """Writes each element to the same memory."""

    def __init__(self, element: Any) -> None:
        self.element = element

    def __call__(self, value: int) -> Any:
        array = self.element["x"] if isinstance(self.element, dict) else getattr(self.element, "pixels", self.element)
        array[:] = [value] * len(array)
        return self.element


@pytest.mark.parametrize("element", [np.zeros(4), [0.0] * 4, {"x": np.zeros(4)}, Image(np.zeros(4))])
def test_an_operation_that_returns_the_same_memory_again_is_named(element: Any) -> None:
    """All rows of a batch would be the last one: the warning names the operation, and not those after it."""
    texts = findings(abs, Buffered(element), lambda value: value)
    (text,) = [text for text in texts if "when it is called for the next one" in text]
    assert text.startswith("debug: operations[1], Map(Buffered(")


def test_elements_may_share_what_no_operation_changes() -> None:
    """Elements may have a mask in common."""
    mask = np.ones(4)
    assert findings(lambda value: {"value": value, "mask": mask}) == []


def test_differences_are_found_in_values_of_all_kinds() -> None:
    """Two values that were made alike do not differ, and any two of these do."""
    examples: list[Callable[[], Any]] = [
        *(lambda: None, lambda: 1, lambda: 1.0, lambda: True, lambda: "a", lambda: b"a", lambda: np.float32(1)),
        *(lambda: [1], lambda: (1,), lambda: {"a": 1}, lambda: {"b": 1}, lambda: {"a": [1, 2]}, lambda: [[1], 2]),
        *(lambda: np.arange(3), lambda: np.arange(3.0), lambda: np.array(["a", None], object), lambda: np.array(3)),
        *(lambda: Image(np.zeros(2)), lambda: Image(np.ones(2)), lambda: float("nan")),
    ]
    for number, make in enumerate(examples):
        assert difference(make(), make()) is None
        assert all(difference(make(), other()) is not None for other in examples[number + 1 :])


def test_views_of_the_source_that_are_given_out_are_named() -> None:
    """Views of the source's memory that reach the trainer without a copy are named."""
    (text,) = findings(lambda record: {"row": record["x"][:1]}, source=held(), batch_size=None)
    assert text.startswith("debug: The result of operations[0], Map(<lambda>), is the source's own memory")
    assert findings(lambda record: {"row": record["x"] + 0}, source=held(), batch_size=None) == []


def test_elements_that_cannot_be_pickled_are_named() -> None:
    """An element that must leave a worker and cannot be pickled is named with the leaf."""
    locks = [lambda value: {"value": value, "lock": threading.Lock()}]
    (text,) = findings(*locks, batch_size=None)
    assert text.startswith("debug: The result of operations[0], Map(<lambda>), cannot be pickled")
    assert "['lock']" in text
    assert findings(*locks, lambda element: element["value"]) == []


def test_a_source_that_changes_its_mind_is_named() -> None:
    """A record that is another one the second time."""
    count = itertools.count()

    class Moody(list[int]):
        def __getitem__(self, key: Any) -> Any:
            return next(count)

    texts = findings(source=Moody(range(RECORDS)))
    assert any(text.startswith("debug: reading from the source is not pure") for text in texts)


def test_batches_are_those_of_any_loader_and_made_in_this_thread() -> None:
    """A debug loader computes the usual batches in this thread and exchanges states with other loaders."""
    threads = set()

    def here(value: int) -> int:
        threads.add(threading.current_thread())
        return value

    def loader_of(debug: bool) -> millstream.DataLoader:
        return millstream.DataLoader(
            data_source=range(RECORDS),
            sampler=millstream.IndexSampler(RECORDS, shuffle=True, seed=0, num_epochs=1),
            operations=[here, Jitter(), millstream.Batch(4)],
            worker_count=3 if debug else 0,
            debug=debug,
        )

    with iter(loader_of(False)) as batches:
        first = next(batches)
        state = batches.get_state()
        rest = [batch.tobytes() for batch in batches]
    threads.clear()
    loader = loader_of(True)
    assert next(iter(loader)).tobytes() == first.tobytes()
    with iter(loader) as batches:
        batches.set_state(state)
        assert [batch.tobytes() for batch in batches] == rest
    assert threads == {threading.current_thread()}
    assert loader.multiprocessing_options.num_workers == 0
    assert not loader.read_options.reads_ahead


def test_errors_of_operations_are_raised_as_ever() -> None:
    """An error comes after the batches before it, and its record is not computed twice."""
    calls = []

    def invert(value: int) -> float:
        calls.append(value)
        return 1 / (value - 2)

    loader = millstream.load(range(1, 4), transformations=[invert], batch_size=None, debug=True)
    batches = iter(loader)
    assert next(batches) == -1.0
    with pytest.raises(ZeroDivisionError):
        next(batches)
    assert calls.count(2) == 1
