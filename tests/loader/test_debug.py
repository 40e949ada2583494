"""The debug mode makes the same batches in one thread, and names what is wrong with operations, and nothing else."""

import dataclasses
import itertools
import os
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
MAIN_PROCESS = os.environ.setdefault("MAIN_PROCESS_OF_TEST_DEBUG", str(os.getpid()))


def findings(*operations: Any, source: Any = range(RECORDS), batch_size: int | None = None) -> list[str]:
    """Returns the warnings of one pass in debug mode."""
    loader = millstream.load(
        source, shuffle=True, seed=0, num_epochs=1, transformations=operations, batch_size=batch_size, debug=True
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert list(loader)
    # Python's own: some of what is looked at here cannot be pickled in later versions.
    return [str(warning.message) for warning in caught if warning.category is not DeprecationWarning]


class Jitter(millstream.RandomMap[Any, Any]):
    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        return element + rng.normal()


class Kept:
    """A source that keeps its records, and returns the objects themselves."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.records = [make() for _ in range(RECORDS)]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, key: int) -> Any:
        return self.records[key]


def held() -> Kept:
    return Kept(lambda: {"x": np.arange(1, 3)})


@dataclasses.dataclass
class Image:
    pixels: Any


MASK = np.ones(4)


def write(record: dict[str, Any]) -> dict[str, Any]:
    record["y"] = record["x"] + 1
    return record


@pytest.mark.parametrize(
    ("operations", "options"),
    [
        ([abs, Jitter(), millstream.Filter(bool)], {}),
        ([millstream.FlatMap(lambda value: [value, value], 2)], {}),
        ([millstream.MapWithIndex(lambda i, v: (i, v))], {}),
        ([lambda value: {"x": np.full(3, value), "nan": float("nan"), "text": str(value), "none": None}], {}),
        ([lambda _: object.__new__(object)], {}),
        ([lambda record: {"row": record["x"] + 0}], {"source": held()}),
        # Elements may share what no operation changes.
        ([lambda value: {"value": value, "mask": MASK}], {"batch_size": 4}),
        # What is pickled is the result of the last operation.
        (
            [lambda value: {"value": value, "lock": threading.Lock()}, lambda element: element["value"]],
            {"batch_size": 4},
        ),
        # Views of the source that are stacked are copies; so are the records of a plain list.
        ([], {"source": millstream.InMemoryDataSource({"x": np.ones((RECORDS, 2))}), "batch_size": 4}),
        ([], {"source": held(), "batch_size": 4}),
        ([write], {"source": held().records, "batch_size": 4}),
        # A class of a script is the same in a worker, which cannot import it.
        ([lambda image: Image(image.pixels + 1)], {"source": [Image(np.ones(2)) for _ in range(RECORDS)]}),
    ],
)
def test_sound_operations_are_left_alone(operations: Sequence[Any], options: dict[str, Any]) -> None:
    """Maps, draws from the given rng, filters and fan-outs, leaves of all kinds, and copies give no warning."""
    assert findings(*operations, **options) == []


def number(value: int, count: Any = itertools.count()) -> dict[str, int]:  # noqa: B008  (it counts all calls)
    return {"value": value, "number": next(count)}


class Moody(list[int]):
    """A source whose records are others the second time."""

    counter = itertools.count()

    def __getitem__(self, key: Any) -> Any:
        return next(self.counter)


def in_main_process(value: int) -> bool:
    return value % 2 == 1 or str(os.getpid()) == MAIN_PROCESS


def fail_in_workers(value: int) -> int:
    if str(os.getpid()) != MAIN_PROCESS:
        raise RuntimeError("a worker")
    return value


TURNS = itertools.cycle([True] * RECORDS + [False])
WRONG: dict[str, list[Any]] = {
    "operations[1], Map(number), is not pure: run twice, it returned another ['number']": [abs, number],
    "operations[0], Filter(<lambda>), is not pure: run": [millstream.Filter(lambda _: next(TURNS))],
    "operations[0], Map(<lambda>), draws from the global generator of Python": [lambda value: value + random.random()],
    "operations[0], Map(<lambda>), draws from the global generator of NumPy": [lambda value: value + np.random.rand()],  # noqa: NPY002
    "The result of operations[0], Map(<lambda>), cannot be pickled": [lambda _: {"lock": threading.Lock()}],
    "The result of operations[0], Map(<lambda>), is the source's own": [lambda record: {"row": record["x"][:1]}],
    "reading from the source is not pure": [abs],
    # A worker is another process: what only this one has does not reach it.
    "In a worker process, operations[1], Map(<lambda>) returns another ['process'], at record key": [
        abs,
        lambda value: {"value": value, "process": os.getpid()},
    ],
    "In a worker process, operations[0], Filter(in_main_process) returns the element of record key": [
        millstream.Filter(in_main_process)
    ],
    "In a worker process, operations[0], Map(fail_in_workers) raises RuntimeError": [fail_in_workers],
}
"""Operations, by the beginning of the only warning about them."""


@pytest.mark.parametrize("said", WRONG)
def test_what_is_wrong_is_named_once(said: str) -> None:
    """One warning names the operation or the source, with the record, the leaf or the remedy, and nothing besides."""
    source = held() if "own" in said else Moody(range(RECORDS)) if "the source is" in said else range(RECORDS)
    (text,) = findings(*WRONG[said], source=source)
    assert text.startswith(f"debug: {said}")
    assert any(words in text for words in ("record key", "['lock']", "RandomMap", "worker_init_fn"))


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
    texts = findings(lambda record: record, operation, source=Kept(make))
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
    texts = findings(abs, Buffered(element), lambda value: value, batch_size=4)
    (text,) = [text for text in texts if "when it is called for the next one" in text]
    assert text.startswith("debug: operations[1], Map(Buffered(")


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


def test_batches_are_those_of_any_loader_and_made_in_this_thread() -> None:
    """A debug loader computes the usual batches in this thread and exchanges states with other loaders."""
    threads = set()

    def here(value: int) -> int:
        threads.add(threading.current_thread())
        return value

    def loader_of(debug: bool) -> millstream.DataLoader:
        options: dict[str, Any] = {"shuffle": True, "seed": 0, "num_epochs": 1, "batch_size": 4, "debug": debug}
        return millstream.load(range(RECORDS), transformations=[here, Jitter()], worker_count=3 * debug, **options)

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
