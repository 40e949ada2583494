"""millstream.testing: what keeps the laws passes, and each broken law is found, in a sentence with a small example."""

import copy
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream
from millstream import sources, testing
from support.files.small_sources import SOURCES

ARRAYS = [np.full(3, number) for number in range(20)]


class Squares:
    """A source that keeps all laws. Each broken one changes a method."""

    unit_sizes = (15, 5)
    takes_key_arrays = True

    def __len__(self) -> int:
        return 20

    def __getitem__(self, key: int) -> Any:
        if not 0 <= key < 20:
            raise IndexError(f"record key must be 0 to 19, got {key}.")
        return key**2

    def __getitems__(self, keys: Any) -> list[Any]:
        return [self[int(key)] for key in keys]

    def fingerprint(self) -> str:
        return "squares"


class Counts(Squares):
    def __init__(self) -> None:
        self.reads = 0

    def __getitem__(self, key: int) -> Any:
        self.reads += 1
        return key, self.reads

    def __getitems__(self, keys: Any) -> list[Any]:
        return [self[key] for key in keys]


class Sorts(Squares):
    def __getitems__(self, keys: Any) -> list[Any]:
        return super().__getitems__(sorted(keys))


class DropsRepeats(Squares):
    def __getitems__(self, keys: Any) -> list[Any]:
        return super().__getitems__(list(dict.fromkeys(keys)))


class ListsOnly(Squares):
    def __getitems__(self, keys: Any) -> list[Any]:
        return super().__getitems__(keys) if isinstance(keys, list) else super().__getitems__(keys + 1)


class Endless(Squares):
    def __getitem__(self, key: int) -> Any:
        return key**2


class FirstIsLast(Squares):
    def __getitem__(self, key: int) -> Any:
        return super().__getitem__(max(key, 0))


class Keeps(Squares):
    def __getitem__(self, key: int) -> Any:
        super().__getitem__(key)
        return ARRAYS[key]


class Seeks(Squares):
    """It has one place for all threads, as a file has that is sought and read."""

    def __init__(self) -> None:
        self.place = 0
        self.barrier = threading.Event()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Seeks.__init__(self)

    def __getitem__(self, key: int) -> Any:
        super().__getitem__(key)
        self.place = key
        self.barrier.wait(0.0005)
        return self.place**2

    def __getitems__(self, keys: Any) -> list[Any]:
        return [int(key) ** 2 for key in keys]


class Locked(Squares):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Forgets(Squares):
    def __getstate__(self) -> dict[str, Any]:
        return {"is_copy": True}

    def __getitem__(self, key: int) -> Any:
        return super().__getitem__(key) + hasattr(self, "is_copy")


class OfProcess(Squares):
    def __getitem__(self, key: int) -> Any:
        return super().__getitem__(key) + ("pytest" not in __import__("sys").modules)


class RefusesForks(Squares):
    """It can be read in the process that made it or unpickled it."""

    def __init__(self) -> None:
        self.process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        RefusesForks.__init__(self)

    def __getitem__(self, key: int) -> Any:
        if os.getpid() != self.process:
            self.refuse()
        return super().__getitem__(key)

    def refuse(self) -> None:
        raise RuntimeError("made in another process")


class HangsInForks(RefusesForks):
    def refuse(self) -> None:
        threading.Event().wait()


class TwoLines(Squares):
    def fingerprint(self) -> str:
        return "two\nlines"


class NewWords(Squares):
    words = itertools.count()

    def fingerprint(self) -> str:
        return f"{next(NewWords.words)}"


class WrongUnits(Squares):
    unit_sizes = (15, 4)


BROKEN_SOURCES: dict[Any, str] = {
    Counts: r"again, of \[\d+\], read for key \d+ another \[1\] than source\[\d+\] at first",
    Sorts: r"__getitems__ of \[1, 0\], read for key 1 another element than source\[1\] at first",
    DropsRepeats: r"__getitems__ of \[0, 0\] returned 1 records",
    ListsOnly: r"given an int64 array, of \[\d+\], read for key \d+ another element",
    Endless: r"Endless\[20\] is a record, but len\(source\) is 20",
    FirstIsLast: r"FirstIsLast\[-1\] is neither an error nor the last record",
    Keeps: r"Keeps\[0\] returns the same memory each time",
    Seeks: r"in 8 threads, of .*, read for key \d+ another element",
    Locked: r"Locked\[key\] cannot be read in a worker process: .*lock",
    Forgets: r"Forgets\[key\] has another .* in a worker process",
    OfProcess: r"OfProcess\[key\] has another .* in a worker process",
    RefusesForks: r"RefusesForks\[key\] cannot be read in a forked process: made in another process",
    HangsInForks: r"HangsInForks\[key\] cannot be read in a forked process: it had no answer in 1 s",
    TwoLines: r"fingerprint\(\) must be one line, got 'two\\nlines'",
    NewWords: r"fingerprint\(\) is '0' at first, and then '1'",
    WrongUnits: r"WrongUnits.unit_sizes add up to 19, but len\(source\) is 20",
}


@pytest.mark.parametrize("kind", BROKEN_SOURCES)
def test_each_broken_law_of_a_source_is_found(kind: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence says which, and has an example."""
    if kind is HangsInForks:
        monkeypatch.setattr(testing, "SECONDS", 1.0)
    with pytest.raises(AssertionError, match=BROKEN_SOURCES[kind]) as caught:
        testing.check_source(kind())
    assert re.match(r"[A-Z]", str(caught.value)), caught.value


OWN_SOURCES = ["ArrayRecord", "HDF5", "JSONL", "Parquet", "tokens", "WebDataset"]


@pytest.mark.parametrize("name", OWN_SOURCES)
def test_sources_of_files_keep_the_laws(name: str, tmp_path: Path) -> None:
    """So do a user's own, lists and chains."""
    source = SOURCES[name](tmp_path)
    testing.check_source(source)
    source.close()


@pytest.mark.parametrize(
    "source",
    [
        Squares(),
        list(range(10)),
        [],
        np.arange(12).reshape(4, 3),
        sources.RangeDataSource(3, 50, 2),
        sources.InMemoryDataSource({"x": np.arange(10), "y": np.arange(10.0)}),
        millstream.MapDataset.range(10).shuffle(seed=1).map(float).repeat(3),
    ],
    ids=["squares", "list", "empty", "array", "range", "columns", "chain"],
)
def test_sources_in_memory_keep_the_laws(source: Any) -> None:
    """A list hands out what it holds, and a chain goes on after an epoch: neither is an error."""
    testing.check_source(source)


class Order:
    """A sampler that keeps all laws."""

    largest_key = 9

    def __len__(self) -> int:
        return 60

    def __getitem__(self, position: int) -> Any:
        rng = np.random.Generator(np.random.Philox(key=[0, position]))
        return millstream.RecordMetadata(index=position, record_key=position % 10, rng=rng)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "index": lambda: millstream.IndexSampler(1000, shuffle=True, seed=0),
    "index, epochs": lambda: millstream.IndexSampler(31, shuffle=True, seed=0, num_epochs=3),
    "a user's, with a generator for each position": Order,
    "sequential": lambda: millstream.SequentialSampler(40),
    "keys": lambda: millstream.IndexSampler(4, keys=[7, 7, 1, 2], shuffle=True, seed=1),
    "windows": lambda: millstream.HierarchicalSampler([10, 20, 3], seed=0, window_units=2),
    "mixture": lambda: millstream.MixtureSampler(
        [millstream.IndexSampler(size, shuffle=True, seed=1) for size in (10, 30)], weights=[1, 2]
    ),
    "weights": lambda: millstream.WeightedSampler(np.arange(40), seed=1),
    "buckets": lambda: millstream.BucketSampler(
        np.arange(1, 51), [25, 50], global_batch_size=[10, 5], seed=1, shuffle=True
    ),
    "batches of one component": lambda: millstream.MixtureSampler(
        [millstream.IndexSampler(size, shuffle=True, seed=1) for size in (10, 30)], weights=[1, 2], batches_of=4
    ),
    "balanced": lambda: millstream.BalancedSampler(
        millstream.IndexSampler(96, shuffle=True, seed=1), costs=np.arange(96), global_batch_size=12, parts=3
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_keep_the_laws(name: str) -> None:
    """A user's, and those of the library, which can be inverted and have epochs."""
    testing.check_sampler(SAMPLERS[name]())


class Random(Order):
    def __getitem__(self, position: int) -> Any:
        key = int(np.random.default_rng().integers(10))
        return millstream.RecordMetadata(index=position, record_key=key, rng=None)


class OneGenerator(Order):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __getitem__(self, position: int) -> Any:
        return millstream.RecordMetadata(index=position, record_key=position % 10, rng=self.rng)


class TooLarge(Order):
    largest_key = 8


class OtherRuns(Order):
    seed = 0

    def record_keys(self, start: int, stop: int) -> Any:
        return np.arange(start, stop) % 10 if stop == start + 1 else np.arange(start, stop)[::-1] % 10


class NotInverse(Order):
    def positions_of(self, keys: Any, _stop: int | None = None) -> Any:
        return np.array([[0]] * len(keys))


class EndlessEpochs(Order):
    def of_epoch(self, _number: int) -> Any:
        return millstream.IndexSampler(10, num_epochs=None)


BROKEN_SAMPLERS: dict[Any, str] = {
    Random: r"record key \d at position \d+ if asked for \[\d+\], and \d if asked for it alone|another|one by one",
    OneGenerator: r"The order of OneGenerator has another .* in a worker process",
    TooLarge: r"TooLarge has the record key 9 at position 9, and the largest is 8",
    OtherRuns: r"OtherRuns has the (record key|keys)",
    NotInverse: r"has the record key 1 at position 1, which is not among positions_of\(\[1\], 60\), \[0\]",
    EndlessEpochs: r"EndlessEpochs.of_epoch\(0\) has no len\(\)",
}


@pytest.mark.parametrize("kind", BROKEN_SAMPLERS)
def test_each_broken_law_of_a_sampler_is_found(kind: Callable[[], Any]) -> None:
    """One sentence says which, and has an example."""
    with pytest.raises(AssertionError, match=BROKEN_SAMPLERS[kind]):
        testing.check_sampler(kind())


class Jitter(millstream.RandomMap):
    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        return element + rng.normal()


LOCK = threading.Lock()

OPERATIONS = {
    "map": (lambda element: element + 1, range(10)),
    "random map": (Jitter(), range(10)),
    "filter": (millstream.Filter(lambda element: element % 3), range(10)),
    "flat map": (millstream.FlatMap(lambda element: [element] * 2, max_fan_out=2), range(10)),
    "batch": (millstream.Batch(4), range(10)),
    "unpicklable": (lambda element: (LOCK.locked(), element), range(4)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_keep_the_laws(name: str) -> None:
    """Those of all kinds, and those that cannot be pickled."""
    testing.check_operation(*OPERATIONS[name])


def counted(element: int, calls: Iterator[int] = itertools.count()) -> int:  # noqa: B008  (that is what is wrong)
    return element + next(calls)


def written(element: Any) -> Any:
    element += 1
    return element


BROKEN_OPERATIONS: dict[Any, tuple[str, Any]] = {
    counted: (r"is not pure", range(10)),
    written: (r"is not pure|changes its input in place", ARRAYS),
}


@pytest.mark.parametrize("function", BROKEN_OPERATIONS)
def test_each_broken_law_of_an_operation_is_found(function: Callable[[Any], Any]) -> None:
    """As debug=True says it."""
    message, elements = BROKEN_OPERATIONS[function]
    with pytest.raises(AssertionError, match=message):
        testing.check_operation(function, copy.deepcopy(elements))


class Numbers:
    """An iterator that keeps all laws."""

    def __init__(self) -> None:
        self.state = {"next": 0}

    def __iter__(self) -> "Numbers":
        return self

    def __next__(self) -> Any:
        if self.state["next"] == 10:
            raise StopIteration
        self.state["next"] += 1
        return self.state["next"] - 1

    def get_state(self) -> Any:
        return dict(self.state)

    def set_state(self, state: Any) -> None:
        self.state = dict(state)


class Live(Numbers):
    def get_state(self) -> Any:
        return self.state


class Late(Numbers):
    def set_state(self, state: Any) -> None:
        self.state = {"next": state["next"] + 1}


class Moves(Numbers):
    def get_state(self) -> Any:
        next(self, None)
        return super().get_state()


class Reborn(Numbers):
    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            self.state = {"next": 5}
            raise


BROKEN_ITERATORS: dict[Any, str] = {
    Live: r"A state of Live, taken after 0 elements, changed while the iterator moved on",
    Late: r"Element 0 of the stream is another element, resumed by a used iterator after 0 elements",
    Moves: r"made again, without taking states",
    Reborn: r"Reborn yields an element after its end",
}


@pytest.mark.parametrize("kind", BROKEN_ITERATORS)
def test_each_broken_law_of_an_iterator_is_found(kind: Callable[[], Any]) -> None:
    """One sentence says which."""
    with pytest.raises(AssertionError, match=BROKEN_ITERATORS[kind]):
        testing.check_iterator(kind)


def test_iterators_keep_the_laws() -> None:
    """A user's, and those of loaders and chains."""
    testing.check_iterator(Numbers)
    testing.check_iterator(lambda: iter(millstream.load(range(20), shuffle=True, seed=0, batch_size=3)))
    streams = [millstream.MapDataset.range(20).to_iter_dataset() for _ in range(2)]
    testing.check_iterator(lambda: iter(millstream.IterDataset.mix(streams).batch(2)))
