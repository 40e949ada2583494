"""Mistakes in operations that show at the first elements: the log or an error names the operation."""

import dataclasses
import logging
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest

import millstream
from millstream.loader.pipeline.first_look import content
from millstream.transforms import Batch, Filter, FlatMap, Map, RandomMap

# Workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

EXECUTORS = pytest.mark.parametrize("threads", [0, 4])


@dataclasses.dataclass
class Image:
    """A record of the user's own class."""

    pixels: Any
    label: int


class Kept:
    """A source that keeps its records, and hands out the very objects."""

    def __init__(self, records: list[Any]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, key: int) -> Any:
        return self.records[key]


class Decoded(Kept):
    """A source that makes a record each time, as decoders do."""

    def __getitem__(self, key: int) -> Any:
        return cloudpickle.loads(cloudpickle.dumps(self.records[key]))


class Shy:
    """Cannot be looked at."""

    def __array__(self) -> Any:
        raise OSError("Not now.")


def replace_in_dict(element: Any) -> Any:
    """Puts another array into the dict that it got."""
    element["image"] = element["image"] / 255
    return element


def scale_array(element: Any) -> Any:
    """Changes the numbers of an array that is in the dict."""
    element["image"] /= 255
    return element


def scale_pixels(element: Any) -> Any:
    """Changes the numbers of an array that is in an object."""
    element.pixels[0] += 1
    return element


def append(element: Any) -> Any:
    """Makes a list longer."""
    element.append(0.0)
    return element


def pass_on(element: Any) -> Any:
    """Returns what it got."""
    return element


def copied(element: Any) -> Any:
    """Changes a copy."""
    return {**element, "image": element["image"] / 255}


def dicts() -> list[Any]:
    """Returns records as dicts of an array."""
    return [{"image": np.full(4, 100.0 + key)} for key in range(16)]


def images() -> list[Any]:
    """Returns records of a class."""
    return [Image(np.full(4, 100.0 + key), key) for key in range(16)]


def first_batch(source: Any, *operations: Any, batch_size: int | None = 4, **options: Any) -> Any:
    """Returns the first batch of a loader in the order of the source, and stops its threads."""
    with iter(
        millstream.load(source, num_epochs=1, transformations=operations, batch_size=batch_size, **options)
    ) as it:
        return next(it)


IN_PLACE: list[tuple[Callable[[], list[Any]], Callable[[Any], Any]]] = [
    (dicts, replace_in_dict),
    (dicts, scale_array),
    (images, scale_pixels),
    (lambda: [[1.0, 2.0] for _ in range(16)], append),
]


@EXECUTORS
@pytest.mark.parametrize(("records", "operation"), IN_PLACE)
def test_an_operation_that_changes_the_source_is_named(
    records: Callable[[], list[Any]], operation: Any, threads: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Where an operation changes a record that the source keeps, one line of the log names operation and record key."""
    first_batch(Kept(records()), pass_on, operation, pass_on, read_options=millstream.ReadOptions(threads))

    (message,) = [record.getMessage() for record in caplog.records if record.name == "millstream"]
    assert f"operations[1], Map({operation.__name__}), changes its input in place" in message
    assert "(record key 0)" in message


@EXECUTORS
@pytest.mark.parametrize(
    ("source", "operations"),
    [
        (Kept(dicts()), [copied, replace_in_dict]),
        (Kept(dicts()), [copied, scale_array]),
        (Decoded(dicts()), [replace_in_dict]),
        (Decoded(images()), [scale_pixels]),
        (millstream.InMemoryDataSource({"image": np.ones((16, 4))}), [replace_in_dict, scale_array]),
        (Kept(dicts()), [Filter(lambda element: element["image"][0] > 0), RandomMap(lambda element, _rng: element)]),
    ],
)
def test_what_changes_only_its_own_is_fine(
    source: Any, operations: list[Any], threads: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An operation may change in place what no source keeps: its own arrays, and records that are made anew."""
    first_batch(source, *operations, seed=0, read_options=millstream.ReadOptions(threads))

    assert caplog.records == []


def test_a_record_is_looked_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """One loader warns once over all its passes, and reads nothing extra for it but the one record changed."""

    class Counted(Kept):
        reads = 0

        def __getitem__(self, key: int) -> Any:
            self.reads += 1
            return self.records[key]

    impure, pure = Counted(dicts()), Counted(dicts())
    loader = millstream.load(impure, num_epochs=1, transformations=[scale_array], batch_size=4)
    assert len([*loader, *loader]) == 8
    assert len(list(millstream.load(pure, num_epochs=1, transformations=[copied], batch_size=4))) == 4

    assert len(caplog.records) == 1
    assert (impure.reads, pure.reads) == (33, 16)


def test_workers_look_too(capfd: pytest.CaptureFixture[str]) -> None:
    """A worker process prints the warning on the trainer's standard error."""
    first_batch(Kept(dicts()), scale_array, worker_count=1)

    assert "operations[0], Map(scale_array), changes its input in place" in capfd.readouterr().err


class Buffered:
    """Writes each element that it makes to the same memory."""

    def __init__(self, made: Callable[[], Any]) -> None:
        self.made = made()

    def __call__(self, element: Any) -> Any:
        """Returns what it returned before, with other numbers."""
        array = self.made["image"] if isinstance(self.made, dict) else getattr(self.made, "pixels", self.made)
        array[:] = element["image"]
        return self.made


REUSED: list[Callable[[], Any]] = [
    lambda: np.zeros(4),
    lambda: [0.0] * 4,
    lambda: {"image": np.zeros(4)},
    lambda: Image(np.zeros(4), 0),
]


@EXECUTORS
@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("made", REUSED)
def test_an_operation_that_returns_the_same_memory_again_is_named(
    made: Callable[[], Any], batch_size: int | None, threads: int, caplog: pytest.LogCaptureFixture
) -> None:
    """All rows of a batch would be the last one: one line of the log names the operation, and those after it do not."""
    operations: list[Any] = [pass_on, Buffered(made), pass_on]
    reading = millstream.ReadOptions(threads)
    loader = millstream.load(
        Kept(dicts()), num_epochs=9, transformations=operations, batch_size=batch_size, read_options=reading
    )
    assert len(list(loader)) == 9 * 16 // (batch_size or 1)

    (message,) = [record.getMessage() for record in caplog.records if record.name == "millstream"]
    assert message.startswith("millstream: operations[1], Map(Buffered(")
    assert "returns an element, and changes it when it is called for the next one" in message


def test_what_operations_share_and_leave_alone_is_fine(caplog: pytest.LogCaptureFixture) -> None:
    """Elements may have parts in common, such as a mask, and be of classes that cannot be looked at."""
    mask, shy = np.ones(4), Shy()
    operations: list[Any] = [
        lambda element: {**element, "mask": mask},
        FlatMap(lambda element: [element, element], max_fan_out=2),
        lambda element: {**element, "other": shy},
        Filter(lambda element: element["mask"].all()),
        lambda element: element["image"],
    ]
    batch = first_batch(Kept(dicts()), *operations)

    np.testing.assert_array_equal(batch[:, 0], [100, 100, 101, 101])
    assert caplog.records == []


def test_a_first_look_changes_no_element_and_no_error() -> None:
    """The first element is made alone, and all is as without that: draws, indices, an error at it and one later."""
    operations: list[Any] = [millstream.transforms.MapWithIndex(lambda index, key: key + index), RandomMap(draw)]
    loader = millstream.load(range(16), num_epochs=1, seed=0, transformations=operations, batch_size=4)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in loader]

    for bad in (0, 2):
        failing = millstream.load(range(16), num_epochs=1, transformations=[fail_at(bad)], batch_size=None)
        got: list[Any] = []
        with pytest.raises(LookupError) as caught, iter(failing) as elements:
            got.extend(elements)
        assert got == [*range(bad)]
        assert caught.value.__notes__ == [
            f"millstream: in operation 0, Map(fail), at record key {bad} (position {bad})."
        ]


def draw(element: int, rng: np.random.Generator) -> int:
    """Adds a random number."""
    return element + int(rng.integers(1 << 40))


def fail_at(bad: int) -> Callable[[int], int]:
    """Returns an operation that fails at one record."""

    def fail(element: int) -> int:
        if element == bad:
            raise LookupError(element)
        return element

    return fail


def forgetful(element: Any) -> None:
    """Forgets to return."""
    _ = {**element, "label": 0}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("operations", "named"),
    [
        ([forgetful], "operations[0], Map(forgetful)"),
        ([pass_on, forgetful], "operations[1], Map(forgetful)"),
        ([forgetful, Filter(lambda _: True)], "operations[0], Map(forgetful)"),
        ([FlatMap(lambda _: [None, None], max_fan_out=2)], "operations[0], FlatMap(<lambda>, max_fan_out=2)"),
    ],
)
def test_a_batch_of_nothing_is_an_error(operations: list[Any], named: str, workers: int) -> None:
    """Where all elements of a batch are None, the error names the operation that made them, and two record keys."""
    with pytest.raises(millstream.StackError) as caught:
        first_batch(dicts(), *operations, worker_count=workers)

    assert f"Every element of this batch is None: did {named}, or one before it, forget `return`?" in str(caught.value)
    assert any("the record keys of these elements: 0, " in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    "stumbling",
    [
        lambda element: element["image"],
        Filter(lambda element: element["image"][0] > 0),
        FlatMap(lambda element: list(element["image"]), max_fan_out=9),
    ],
)
def test_an_operation_that_fails_at_none_tells_who_made_it(stumbling: Any) -> None:
    """The operation after the one that forgot to return raises its own error, with a note of the likely reason."""
    with pytest.raises(TypeError, match="NoneType") as caught:
        first_batch(dicts(), forgetful, stumbling)

    notes = "\n".join(caught.value.__notes__)
    assert "the element that it got is None: did operations[0], Map(forgetful), or one before it, forget" in notes


def test_errors_at_other_elements_have_no_such_note() -> None:
    """An error at an element that is not None is left as it was."""
    with pytest.raises(KeyError) as caught:
        first_batch(dicts(), pass_on, lambda element: element["label"])

    assert len(caught.value.__notes__) == 1


def test_a_batch_that_is_none_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """An operation after Batch that returns None for the first batch is named in the log: it may be intended."""
    loader = millstream.load(dicts(), num_epochs=1, transformations=[Batch(4), forgetful])

    assert list(loader) == [None] * 4
    assert [record.getMessage() for record in caplog.records] == [
        "millstream: operations[1], Map(forgetful), returned None for the first batch: did you forget `return`?"
    ]


def test_none_stays_a_value() -> None:
    """Records that are None, None beside values in a batch of one, and leaves that are None stay what they were."""
    assert first_batch([None] * 4) is None
    assert first_batch([1, 2], lambda _: None, batch_size=1) is None
    assert first_batch([1, 2], lambda number: {"a": None, "b": number}, batch_size=2)["a"] is None


def test_contents_tell_records_apart() -> None:
    """The checksum of a record changes with anything in it, and not with its identity."""
    examples: list[Callable[[], Any]] = [
        *(lambda: None, lambda: 1, lambda: 1.0, lambda: True, lambda: "a", lambda: b"a", lambda: np.float32(1)),
        *(lambda: [1], lambda: (1,), lambda: {"a": 1}, lambda: {"b": 1}, lambda: {"a": [1, 2]}, lambda: [[1], 2]),
        *(lambda: np.arange(3), lambda: np.arange(3.0), lambda: np.array(["a", None], object), lambda: np.array(3)),
        *(lambda: Image(np.zeros(2), 0), lambda: Image(np.ones(2), 0), lambda: np.zeros((3 << 20, 2), np.uint8)),
    ]
    contents = [content(make()) for make in examples]

    assert contents == [content(make()) for make in examples]
    assert len(set(contents)) == len(contents)


def test_records_that_cannot_be_looked_at_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A record of a class that raises when it is looked at is an element like any other."""
    assert first_batch([Shy(), Shy()], lambda _: 1, batch_size=2).tolist() == [1, 1]
    assert caplog.records == []


def test_the_log_is_of_millstream(caplog: pytest.LogCaptureFixture) -> None:
    """Raising the level of the `millstream` logger silences these warnings."""
    with caplog.at_level(logging.ERROR, logger="millstream"):
        first_batch(Kept(dicts()), Map(scale_array))

    assert caplog.records == []
