"""Errors reach the consumer with type, operation and keys, through every path; a forgotten `return` is named."""

import copy
import itertools
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.errors import CheckpointError, DataSourceError, StackError
from millstream.transforms import Batch, Filter, FlatMap


def loader_of(reading: millstream.ReadOptions, source: Any, *operations: Any) -> millstream.DataLoader:
    """Returns a loader of shuffled records."""
    return millstream.DataLoader(
        data_source=source,
        sampler=millstream.IndexSampler(len(source), shuffle=True, num_epochs=1, seed=11),
        operations=operations,
        read_options=reading,
    )


MAX_FRAMES = 12
"""The number of frames of the library between `next` and the user's function, if the consumer's thread calls it."""

VAGUE_FRAMES = {"<lambda>", "<genexpr>", "_live", "_work_off", "job", "timed", "call", "step", "wrapper"}


def chain_of(reading: millstream.ReadOptions, source: Any, operation: Any) -> millstream.IterDataset[Any]:
    return millstream.MapDataset.source(source).seed(0).shuffle().to_iter_dataset(reading).apply(operation)


@pytest.mark.parametrize("build", [loader_of, chain_of])
@pytest.mark.parametrize("kind", [millstream.Map, millstream.RandomMap, millstream.Filter])
@pytest.mark.parametrize("num_threads", [0, 16])
def test_the_way_to_the_users_function_can_be_read(num_threads: int, kind: Any, build: Callable[..., Any]) -> None:
    """Between `next` and the user's function are few frames of the library, and each has a name that says what it does.

    So have the frames of the traceback of an error.
    """
    stacks: list[list[str]] = []
    numbers = itertools.count(1)

    def fail(element: int, *_: Any) -> int:
        frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
        names = [frame.f_code.co_name for frame in frames if frame.f_globals["__name__"].startswith("millstream.")]
        # Threads call it as well.
        if "__next__" in names:
            stacks.append(names)
        if next(numbers) == 100:
            raise ValueError(f"cannot process {element}")
        return element + 1

    loader = build(millstream.ReadOptions(num_threads), range(100), kind(fail))
    with pytest.raises(ValueError, match="cannot process") as raised, iter(loader) as batches:
        for _ in batches:
            pass

    shown = [frame.name for frame in traceback.extract_tb(raised.tb) if "/millstream/" in frame.filename]
    assert shown[0] == "__next__"
    assert max(map(len, [shown, *stacks])) <= MAX_FRAMES
    assert not VAGUE_FRAMES & {*shown, *itertools.chain(*stacks)}


def order_of(size: int) -> list[int]:
    return list(loader_of(millstream.ReadOptions(0), range(size)))


def first_error(loader: millstream.DataLoader, expected: type[Exception], step: int) -> Exception:
    """Returns the error that comes after exactly `step` batches."""
    with iter(loader) as iterator:
        for _ in range(step):
            next(iterator)
        with pytest.raises(expected) as caught:
            next(iterator)
        assert iterator.step == step
    return caught.value


@pytest.mark.parametrize("operations", [(Batch(4),), (Filter(lambda _: True), Batch(4))])
def test_elements_that_do_not_stack_are_named(operations: tuple[Any, ...], reading: millstream.ReadOptions) -> None:
    """A StackError says which leaf differs, shows both, and gives the keys of both records, shuffled as they are."""
    order = order_of(12)
    source = [{"x": np.zeros(3), "y": key} for key in range(12)]
    source[order[6]]["x"] = np.zeros(5)
    error = first_error(loader_of(reading, source, *operations), StackError, step=1)

    assert isinstance(error, StackError)
    assert (error.path, error.rows) == ("['x']", (0, 2))
    assert all(shape in str(error) for shape in ("shape (3,)", "shape (5,)"))
    assert error.__notes__[0] == f"millstream: the record keys of these elements: {order[4]}, {order[6]}."
    assert f"Batch(batch_size=4), at record key {order[4]} (position 4)" in error.__notes__[1]


def test_more_children_than_max_fan_out_are_refused(reading: millstream.ReadOptions) -> None:
    """A FlatMap that splits an element further than it said is a ValueError with the limit and the record.

    A generator that never ends is asked for one child more than it may give, and no further.
    """
    order, asked = order_of(10), itertools.count()
    split = FlatMap(
        lambda element: (next(asked) for _ in itertools.count()) if element == order[5] else [element] * 2,
        max_fan_out=2,
    )
    error = first_error(loader_of(reading, range(10), split), ValueError, step=10)

    assert "at most max_fan_out = 2 elements, got more" in str(error)
    assert error.__notes__[0].endswith(f"at record key {order[5]} (position 5).")
    assert next(asked) == 3


class Together:
    """A source of ten numbers that reads many at once, and one of them wrongly."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 10

    def __getitem__(self, key: int) -> int:
        return key

    def __getitems__(self, keys: Sequence[int]) -> list[int]:
        return [self[key] for key in keys]


class TooMany(Together):
    def __getitems__(self, keys: Sequence[int]) -> list[int]:
        return [*keys, 0] if self.bad in keys else list(keys)


class TooFew(Together):
    def __getitems__(self, keys: Sequence[int]) -> list[int]:
        return list(keys[1:] if self.bad in keys else keys)


@pytest.mark.parametrize(("kind", "count"), [(TooMany, 4), (TooFew, 2)])
def test_a_wrong_number_of_records_is_refused(
    kind: type[Together], count: int, reading: millstream.ReadOptions
) -> None:
    """`__getitems__` that gives more or fewer records than it was asked for is an error: no record slips in or out."""
    order = order_of(10)
    error = first_error(loader_of(reading, kind(order[7]), Batch(3)), ValueError, step=2)

    assert f"__getitems__ of {kind.__name__} got 3 keys and returned {count} records" in str(error)
    where = f"3 records in one call, the first at record key {order[6]} (position 6)."
    assert error.__notes__ == [f"millstream: in reading from {kind.__name__}, {where}"]


class FailsTogether(Together):
    """Each record can be read alone, and several cannot, as of a mock whose method lacks `self`."""

    def __getitems__(self, keys: Sequence[int], missing: object) -> list[int]:  # type: ignore[override]
        raise AssertionError(keys, missing)


def test_a_batched_read_that_fails_alone_is_a_warning_once(
    reading: millstream.ReadOptions, caplog: pytest.LogCaptureFixture
) -> None:
    """If each record can be read alone, records are read alone, and the log says so once."""
    with iter(loader_of(reading, FailsTogether(0), Batch(3))) as batches:
        assert [next(batches).tolist() for _ in range(2)] == [order_of(10)[:3], order_of(10)[3:6]]
    (message,) = caplog.messages
    said = "FailsTogether.__getitems__ failed for 3 records, and __getitem__ read each of them: TypeError"
    assert said in message


class Damaged(Together):
    def __getitem__(self, key: int) -> int:
        if key == self.bad:
            raise DataSourceError(f"record {key} is damaged")
        return key


@pytest.mark.parametrize(("operations", "step"), [((), 8), ((Filter(lambda _: True),), 8), ((Batch(3),), 2)])
def test_a_damaged_record_in_a_batched_read_is_found(
    operations: tuple[Any, ...], step: int, reading: millstream.ReadOptions
) -> None:
    """If a batched read fails, the elements before the damaged record are delivered, and the error names that one."""
    order = order_of(10)
    error = first_error(loader_of(reading, Damaged(order[8]), *operations), DataSourceError, step)

    assert str(error) == f"record {order[8]} is damaged"
    assert error.__notes__ == [f"millstream: in reading from Damaged, at record key {order[8]} (position 8)."]


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (StackError("arrays differ", "['x']", (0, 3)), ValueError),
        (CheckpointError("another stream"), ValueError),
        (DataSourceError("file.arrayrecord: record 3 is damaged"), OSError),
    ],
)
def test_our_errors_are_builtins_and_survive_pickling(error: Exception, builtin: type[Exception]) -> None:
    """Type, message, attributes and notes of each error come through a pickle and a copy; `except` catches it."""
    assert isinstance(error, builtin)
    error.add_note("millstream: in operation 1.")
    for again in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)
        assert again.__notes__ == ["millstream: in operation 1."]


DICTS: list[Any] = [{"image": np.full(4, 100.0 + key)} for key in range(16)]


def first_batch(source: Any, *operations: Any, batch_size: int | None = 4, **options: Any) -> Any:
    """Returns the first batch of a loader in the order of the source, and stops its threads."""
    loader = millstream.load(source, num_epochs=1, transformations=operations, batch_size=batch_size, **options)
    with iter(loader) as batches:
        return next(batches)


def forgetful(element: Any) -> None:
    _ = {**element, "label": 0}


@pytest.mark.parametrize(
    ("operations", "named", "workers"),
    [
        ([forgetful], "operations[0], Map(forgetful)", 1),
        ([dict.copy, forgetful], "operations[1], Map(forgetful)", 0),
        ([forgetful, Filter(lambda _: True)], "operations[0], Map(forgetful)", 0),
        ([FlatMap(lambda _: [None, None], max_fan_out=2)], "operations[0], FlatMap(<lambda>, max_fan_out=2)", 0),
    ],
)
def test_a_batch_of_nothing_is_an_error(operations: list[Any], named: str, workers: int) -> None:
    """If all elements of a batch are None, the error names the operation that returned them, and two record keys."""
    with pytest.raises(millstream.StackError) as caught:
        first_batch(DICTS, *operations, worker_count=workers)

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
        first_batch(DICTS, forgetful, stumbling)

    notes = "\n".join(caught.value.__notes__)
    assert "the element that it got is None: did operations[0], Map(forgetful), or one before it, forget" in notes
    # Errors at other elements have no such note.
    with pytest.raises(KeyError) as caught_key:
        first_batch(DICTS, dict.copy, lambda element: element["label"])
    assert len(caught_key.value.__notes__) == 1


def test_a_batch_that_is_none_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """An operation after Batch that returns None for the first batch is named in the log: it may be intended."""
    loader = millstream.load(DICTS, num_epochs=1, transformations=[Batch(4), forgetful])

    assert list(loader) == [None] * 4
    said = "operations[1], Map(forgetful), returned None for the first batch: did you forget `return`?"
    assert caplog.messages == [f"millstream: {said}"]


def test_none_stays_a_value() -> None:
    """Records that are None, None beside values in a batch of one, and leaves that are None stay what they were."""
    assert first_batch([None] * 4) is None
    assert first_batch([1, 2], lambda _: None, batch_size=1) is None
    assert first_batch([1, 2], lambda number: {"a": None, "b": number}, batch_size=2)["a"] is None
