"""Samplers: positions, epochs and keys; the errors; and how a custom sampler is adapted."""

import dataclasses
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from millstream import DataLoader
from millstream.record import RecordMetadata
from millstream.samplers import IndexSampler, SequentialSampler
from millstream.samplers.base import AdaptedSampler, checked_keys_at, largest_key, vectorised
from millstream.sharding import ShardOptions


def keys(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


class ByPosition:
    """A custom sampler with `__getitem__` only, endless: key 2p, and a generator at even positions."""

    seed = "not one of ours"

    def __getitem__(self, position: int) -> RecordMetadata:
        if position == 13:
            raise LookupError("thirteen")
        rng = np.random.default_rng(position) if position % 2 == 0 else None
        return RecordMetadata(position, 2 * position, rng)


class Finite(ByPosition):
    def __len__(self) -> int:
        return 5


@dataclasses.dataclass
class ByRun:
    """A custom sampler with `record_keys` only, which notes the runs it is asked for."""

    length: int | None = None
    seed: int = 9
    num_records: int = 10
    runs: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def record_keys(self, start: int, stop: int) -> list[int]:
        self.runs.append((start, stop))
        return [3 * position for position in range(start, stop)]


def test_each_epoch_is_a_shuffle_of_its_own() -> None:
    """Each run of num_records positions has every key once; no epoch is another one, or one of the next seed."""
    plain = IndexSampler(100, num_epochs=5)
    assert plain.record_keys(0, len(plain)).tolist() == list(range(100)) * 5
    several = [IndexSampler(100, shuffle=True, seed=seed).record_keys(0, 500).reshape(5, 100) for seed in range(5)]
    assert all(np.array_equal(np.sort(epochs, axis=1), [np.arange(100)] * 5) for epochs in several)
    assert len({tuple(epoch) for epochs in several for epoch in epochs.tolist()}) == 25


def test_the_sequential_sampler_is_one_epoch_in_order() -> None:
    """SequentialSampler takes num_records, shard_options, seed and keys, and ends after one epoch."""
    sampler = SequentialSampler(4, ShardOptions(1, 2), seed=3)
    assert [sampler[position].record_key for position in range(len(sampler))] == [0, 1, 2, 3]
    assert (sampler.shuffle, sampler.num_epochs, sampler.seed) == (False, 1, 3)
    assert sampler.shard_options == ShardOptions(1, 2)
    with pytest.raises(IndexError, match="position 4"):
        sampler[4]


def test_lengths() -> None:
    """The length is exact however large; `len` is refused for an endless sampler, as for a generator."""
    assert IndexSampler(7, num_epochs=3).length == len(IndexSampler(7, num_epochs=3)) == 21
    assert IndexSampler(2**63, num_epochs=2**40).length == 2**103
    assert IndexSampler(7).length is None
    with pytest.raises(TypeError, match="endless"):
        len(IndexSampler(7))
    with pytest.raises(OverflowError):
        len(IndexSampler(sys.maxsize, num_epochs=2))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        *((lambda n=n: IndexSampler(5, num_epochs=2)[n], f"position {n};") for n in (-1, 10, 2**63, 2**80)),
        *((lambda n=n: IndexSampler(5, num_epochs=2).record_keys_at(keys(3, n)), "0 to 10") for n in (-1, 10)),
        *(
            (lambda n=n: IndexSampler(5, num_epochs=2).record_keys(*n), r"0 to 10 \(")
            for n in ((0, 11), (11, 11), (4, 3))
        ),
        (lambda: IndexSampler(5)[2**63], "endless"),
    ],
)
def test_positions_outside_the_order_are_refused(ask: Any, message: str) -> None:
    """There are no negative positions and none beyond the end, the last int64 at most; the error names both."""
    with pytest.raises(IndexError, match=message):
        ask()
    assert IndexSampler(10).record_keys(2**63 - 2, 2**63).tolist() == [6, 7]
    for wrong in ([0.5], [True], [[0]]):
        with pytest.raises(TypeError, match=r"positions must be integers of shape \(m,\), got dtype"):
            IndexSampler(10).record_keys_at(wrong)  # type: ignore[arg-type]


def test_numpy_integers_are_integers() -> None:
    """Integers of numpy are accepted anywhere and become Python's."""
    sampler = IndexSampler(
        np.int64(5),  # type: ignore[arg-type]
        num_epochs=np.uint8(2),  # type: ignore[arg-type]
        seed=np.uint64(2**64 - 1),  # type: ignore[arg-type]
    )
    assert sampler == IndexSampler(5, num_epochs=2, seed=2**64 - 1)
    assert {type(sampler.num_records), type(sampler.num_epochs), type(sampler.seed)} == {int}
    assert sampler[np.int64(6)].record_key == 1  # type: ignore[index]
    assert sampler.record_keys(np.int64(4), np.int32(6)).tolist() == [4, 0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sampler",
    [
        IndexSampler(5, shuffle=True, num_epochs=2, seed=1),
        IndexSampler(3, seed=1, keys=[7, 0, 7]),
        SequentialSampler(5),
        SequentialSampler(2, keys=keys(3, 1)),
    ],
)
def test_samplers_are_values(sampler: IndexSampler) -> None:
    """A sampler shows all it is in its repr, cannot be changed, compares by value and survives pickling."""
    text = repr(sampler)
    assert all(f"{field.name}=" in text for field in dataclasses.fields(sampler))
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampler.seed = 4  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(sampler)) == sampler
    assert hash(sampler) == hash(dataclasses.replace(sampler))


def test_other_keys_are_another_sampler() -> None:
    """Samplers are equal if their keys are: as a list or as an array of any integers, but not without them."""
    sampler = IndexSampler(3, keys=[2, 0, 1])

    assert sampler == IndexSampler(3, keys=np.array([2, 0, 1], np.uint8))
    assert hash(sampler) == hash(IndexSampler(3, keys=np.array([2, 0, 1])))
    assert sampler not in (IndexSampler(3), IndexSampler(3, keys=[0, 1, 2]), SequentialSampler(3, keys=[2, 0, 1]))
    assert IndexSampler(3) not in (sampler, "sampler")


@settings(deadline=None, max_examples=100)
@given(data=st.data(), chosen=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=40), shuffle=st.booleans())
def test_keys_are_what_the_rows_stand_for(data: st.DataObject, chosen: list[int], shuffle: bool) -> None:
    """A sampler with keys gives keys[row] for each row of the sampler without them."""
    rows = IndexSampler(len(chosen), shuffle=shuffle, seed=6, num_epochs=3)
    sampler = dataclasses.replace(rows, keys=chosen)
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    expected = [chosen[row] for row in rows.record_keys(start, stop).tolist()]

    assert sampler.record_keys(start, stop).tolist() == expected
    assert sampler.record_keys(start, stop).dtype == np.int64
    assert (sampler.largest_key, rows.largest_key) == (max(chosen), len(chosen) - 1)


def test_keys_in_a_file_stay_there(tmp_path: Path) -> None:
    """Memory-mapped keys are neither copied nor loaded; what the sampler gives is memory of its own."""
    np.save(tmp_path / "keys.npy", np.arange(0, 1000, 5))
    mapped = np.load(tmp_path / "keys.npy", mmap_mode="r")
    sampler = IndexSampler(200, keys=mapped)
    given = sampler.record_keys(0, 3)

    assert isinstance(sampler.keys, np.ndarray)
    assert np.shares_memory(sampler.keys, mapped)
    assert given.flags.writeable
    assert given.tolist() == [0, 5, 10]


@pytest.mark.parametrize(
    ("custom", "length"), [(ByPosition(), None), (Finite(), 5), (ByRun(), None), (ByRun(length=5), 5)]
)
def test_adapted_samplers_answer_in_every_way(custom: Any, length: int | None) -> None:
    """A custom sampler's runs, scattered positions and single positions agree with what it says itself.

    The length is `length` or `len()`, else the order is endless; beyond it is an IndexError.
    """
    sampler = vectorised(custom)
    factor = 3 if isinstance(custom, ByRun) else 2
    assert sampler.record_keys(1, 4).tolist() == [factor, 2 * factor, 3 * factor]
    assert sampler.record_keys(2, 2).tolist() == []
    assert sampler.record_keys_at(keys(4, 0, 1, 2, 2)).tolist() == [4 * factor, 0, factor, 2 * factor, 2 * factor]
    assert sampler.record_keys_at(keys()).tolist() == []
    assert sampler[3] == RecordMetadata(3, 3 * factor, None)
    assert sampler.length == length
    for ask in (lambda: sampler[5], lambda: sampler.record_keys_at(keys(5))) if length else ():
        with pytest.raises(IndexError, match=r"0 to 5 \(exclusive\)"):
            ask()


def test_runs_are_asked_for_whole() -> None:
    """Strided runs, as sharding deals them, cost the custom sampler one question each."""
    custom = ByRun()
    vectorised(custom).record_keys_at(keys(0, 1, 2, 8, 9, 10, 16))
    assert custom.runs == [(0, 3), (8, 11), (16, 17)]


def test_adapted_samplers_randomness() -> None:
    """`rng` of a custom `__getitem__` is handed on, its `seed` is not read; one with `record_keys` may have a seed."""
    by_position, by_run = vectorised(ByPosition()), vectorised(ByRun())
    assert isinstance(by_position, AdaptedSampler)
    assert isinstance(by_run, AdaptedSampler)
    even, odd = by_position.rngs_at(keys(4, 5))
    assert even is not None
    assert even.random() == np.random.default_rng(4).random()
    assert odd is None
    assert by_run.rngs_at([1, 2]) == [None, None]
    assert (by_position.seed, by_position.num_records) == (None, None)
    assert (by_run.seed, by_run.num_records) == (9, 10)
    for wrong in (-1, 1.5, 2**64):
        by_run.sampler.seed = wrong
        with pytest.raises((TypeError, ValueError), match="The seed of ByRun must be"):
            vectorised(by_run.sampler)


def test_an_error_of_a_custom_sampler_keeps_its_type() -> None:
    """An exception of a custom sampler keeps its type and gets a note with the position."""
    with pytest.raises(LookupError, match="thirteen") as caught:
        vectorised(ByPosition()).record_keys(10, 20)
    assert caught.value.__notes__ == ["The sampler ByPosition raised this at position 13."]


class Answering:
    """A custom sampler that gives one fixed answer to a question: for a position, a run, or any positions."""

    seed = num_records = length = None

    def __init__(self, method: str, answer: Any) -> None:
        self.answer = answer
        if method == "record_keys_at":
            self.record_keys_at = self.record_keys = self._answer
        elif method == "record_keys":
            self.record_keys = self._answer

    def _answer(self, *_: Any) -> Any:
        return self.answer

    def __getitem__(self, position: int) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("method", "answer", "error", "text"),
    [
        ("record", RecordMetadata(0, None), TypeError, "integer record_key; at position 9"),  # type: ignore[arg-type]
        ("record", RecordMetadata(0, 1.5), TypeError, "record_key=1.5"),  # type: ignore[arg-type]
        ("record", 7, TypeError, "must return RecordMetadata .* at position 9 it returned 7"),
        ("record", RecordMetadata(0, -1), ValueError, r"between 0 and 2\*\*63 - 1; at position 9 it is -1"),
        ("record", RecordMetadata(0, 2**63), ValueError, "at position 9"),
        ("record_keys", [1, 2], TypeError, r"Answering.record_keys\(9, 10\) must return integers of shape \(1,\)"),
        ("record_keys", [1.0], TypeError, "got dtype float64"),
        ("record_keys", [-2], ValueError, "got -2 at position 9"),
        ("record_keys_at", [1, 2, 3], TypeError, r"\(positions\) must .* shape \(2,\).* for the positions 6 to 9\."),
        ("record_keys_at", [[1, 2]], TypeError, r"shape \(1, 2\) for the positions 6 to 9"),
        ("record_keys_at", [1.0, 2.0], TypeError, "got dtype float64"),
        ("record_keys_at", [True, False], TypeError, "got dtype bool"),
        ("record_keys_at", None, TypeError, "got dtype object"),
        ("record_keys_at", [1, -2], ValueError, r"between 0 and 2\*\*63 - 1, got -2 at position 6\."),
        ("record_keys_at", np.array([2**63, 5], np.uint64), ValueError, "got 9223372036854775808 at position 9"),
    ],
)
def test_wrong_answers_of_custom_samplers_are_named(
    method: str, answer: Any, error: type[Exception], text: str
) -> None:
    """A key that is not an integer, or out of range, is an error that names the position and what was returned."""
    with pytest.raises(error, match=text):
        checked_keys_at(vectorised(Answering(method, answer)), keys(9, 6))


def test_checked_keys_are_not_the_samplers_own() -> None:
    """Integers of any width are welcome, and come as a new int64 array: what the sampler keeps may change later."""
    for answer in (keys(7, 8), keys(7, 8).astype(np.uint8)):
        given = checked_keys_at(vectorised(Answering("record_keys_at", answer)), keys(0, 1))
        answer[:] = 0
        assert (str(given.dtype), given.tolist()) == ("int64", [7, 8])


class Backwards(IndexSampler):
    """A user's subclass with another order."""


@dataclasses.dataclass(frozen=True, eq=False)
class Strided(IndexSampler):
    """A user's subclass with another order and a parameter of its own."""

    stride: int = 1


def test_fingerprints_name_the_class_and_what_decides_the_order() -> None:
    """Class, records, shuffle, seed and keys are in it, and what a subclass adds; epochs and shards are not."""
    sampler = IndexSampler(3, shuffle=True, seed=5)
    assert sampler.fingerprint() == "IndexSampler num_records=3 shuffle=True seed=5"
    same = IndexSampler(3, ShardOptions(1, 2), shuffle=True, num_epochs=7, seed=5)
    assert same.fingerprint() == pickle.loads(pickle.dumps(sampler)).fingerprint() == sampler.fingerprint()
    assert SequentialSampler(3).fingerprint() == IndexSampler(3).fingerprint()
    others = [
        IndexSampler(4, shuffle=True, seed=5),
        IndexSampler(3, seed=5),
        IndexSampler(3, shuffle=True, seed=6),
        IndexSampler(3, shuffle=True, seed=5, keys=[0, 1, 2]),
        IndexSampler(3, shuffle=True, seed=5, keys=[0, 2, 1]),
        Backwards(3, shuffle=True, seed=5),
        Strided(3, shuffle=True, seed=5),
        Strided(3, shuffle=True, seed=5, stride=2),
    ]
    assert len({other.fingerprint() for other in [sampler, *others]}) == len(others) + 1
    assert Strided(3, stride=2).fingerprint() == "Strided num_records=3 shuffle=False seed=None stride=2"
    # Their `repr` leaves out what is in the middle.
    tables: list[Any] = [np.arange(9000), np.where(np.arange(9000) == 4500, 0, np.arange(9000)), np.arange(9000.0)]
    assert len({Strided(3, stride=table).fingerprint() for table in [*tables, tables[0].copy()]}) == 3


def test_the_largest_key_is_asked_of_any_sampler() -> None:
    """The largest key is `largest_key`, else the last of `num_records`, else unknown."""
    assert largest_key(types.SimpleNamespace(largest_key=np.int64(41), num_records=1000)) == 41
    assert largest_key(ByRun()) == 9
    assert largest_key(ByPosition()) is None
    assert largest_key(IndexSampler(5, keys=[3, 9, 2, 3, 3])) == 9


def test_objects_that_are_no_samplers_are_refused() -> None:
    """`vectorised` says what a sampler needs, and what of it is missing; a whole one is used as it is."""
    half = Answering("record_keys_at", None)
    del half.record_keys
    sampler = IndexSampler(5)

    assert vectorised(sampler) is sampler
    with pytest.raises(TypeError, match=r"__getitem__\(position\) -> RecordMetadata"):
        vectorised(5)
    with pytest.raises(TypeError, match="Answering lacks record_keys"):
        vectorised(half)


class OfTorch:
    """A sampler of PyTorch's: an iterable of keys."""

    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 2])

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize("sampler", [[3, 1, 2], (3, 1), range(3), np.array([3, 1, 2]), [], OfTorch()])
def test_keys_in_place_of_a_sampler_are_sent_to_an_index_sampler(sampler: Any) -> None:
    """A list of keys, or PyTorch's iterable of them, is refused at construction; a list of metadata is a sampler."""
    with pytest.raises(TypeError, match=r"IndexSampler\(len\(keys\), keys=keys\)"):
        DataLoader(data_source=range(5), sampler=sampler)
    metadata: Any = [RecordMetadata(0, 4, None), RecordMetadata(1, 2, None)]
    assert list(DataLoader(data_source=range(5), sampler=metadata)) == [4, 2]
