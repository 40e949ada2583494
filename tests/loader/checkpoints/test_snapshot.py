"""A loader runs on what its operations and its sampler were when it was built, in every place alike."""

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import millstream
from millstream import Batch
from millstream.loader.checkpoints.fingerprint import snapshot_of
from millstream.record import RecordMetadata
from millstream.transforms import Map, OnlyFor
from support.laws import counted_constant

PLACES = {
    "inline": {"read_options": millstream.ReadOptions(num_threads=0)},
    "threads": {"read_options": millstream.ReadOptions(num_threads=3)},
    "worker": {"worker_count": 1},
}


class Plain:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.factor = 2

    def __call__(self, number: int) -> int:
        return number * self.factor


@dataclasses.dataclass
class Settings:
    factor: int = 2
    inner: Plain = dataclasses.field(default_factory=Plain)


class Scale(Map):
    """An operation with parameters of all kinds."""

    def __init__(self) -> None:
        self.factor = 2
        self.sizes = [1, 2]
        self.table = {"a": {"b": 1}}
        self.row = np.ones(3)
        self.settings = Settings()
        self.part = functools.partial(max, key=Plain())

    def map(self, number: int) -> int:
        sums = self.sizes[0] + self.table["a"]["b"] + self.settings.factor + self.settings.inner.factor
        return int(number * self.factor + sums + self.row.sum())


class Order:
    """A sampler of the user's own."""

    def __init__(self) -> None:
        self.stride = 3

    def __len__(self) -> int:
        return 8

    def __getitem__(self, position: int) -> RecordMetadata:
        return RecordMetadata(position, position * self.stride % 8)


@dataclasses.dataclass
class Pipeline:
    source: Any
    order: Order
    scale: Scale
    called: Plain

    @classmethod
    def new(cls) -> "Pipeline":
        return cls(list(range(8)), Order(), Scale(), Plain())

    def loader(self, **options: Any) -> millstream.DataLoader:
        operations = [self.scale, Map(self.called), Batch(2)]
        return millstream.DataLoader(data_source=self.source, sampler=self.order, operations=operations, **options)


def in_place(values: Any, key: Any, value: Any) -> None:
    values[key] = value


CHANGES: list[tuple[str, Callable[[Pipeline], object]]] = [
    (r"operations\[0\]\.factor changed from 2 to 7", lambda built: setattr(built.scale, "factor", 7)),
    (r"operations\[0\]\.sizes changed from \[1, 2\] to \[9, 2\]", lambda built: in_place(built.scale.sizes, 0, 9)),
    (r"operations\[0\]\.table changed from .*1.* to .*9", lambda built: in_place(built.scale.table["a"], "b", 9)),
    (r"operations\[0\]\.row changed from .*1.0.* to .*9.0", lambda built: in_place(built.scale.row, 0, 9)),
    (
        r"operations\[0\]\.settings\.factor changed from 2 to 7",
        lambda built: setattr(built.scale.settings, "factor", 7),
    ),
    (
        r"operations\[0\]\.settings\.inner\.factor changed from 2 to 7",
        lambda built: setattr(built.scale.settings.inner, "factor", 7),
    ),
    (
        r"operations\[0\]\.part\.key\.factor changed from 2 to 7",
        lambda built: setattr(built.scale.part.keywords["key"], "factor", 7),
    ),
    (r"operations\[0\]\.added changed from nothing to 7", lambda built: setattr(built.scale, "added", 7)),
    (r"operations\[1\]\.map\.factor changed from 2 to 7", lambda built: setattr(built.called, "factor", 7)),
    (r"sampler\.stride changed from 3 to 5", lambda built: setattr(built.order, "stride", 5)),
    (r"source changed from 8 records .* to 8 records", lambda built: in_place(built.source, 0, 9)),
    (r"source changed from 8 records .* to 9 records", lambda built: built.source.append(9)),
]


def each_pass(loader: millstream.DataLoader) -> Iterator[Any]:
    """Yields the batches of passes over a loader, each begun in another way."""
    yield [batch.tolist() for batch in loader]
    with iter(loader) as batches:
        yield [batch.tolist() for batch in batches]
    if hasattr(loader.sampler, "of_epoch"):
        for _, batches in loader.epochs(2):
            yield [batch.tolist() for batch in batches]


@pytest.mark.parametrize("place", PLACES)
def test_a_pass_after_a_change_is_an_error_that_names_it(place: str) -> None:
    """By path, with both values, wherever the operations run. A pass that has begun does not see the change."""
    for text, change in CHANGES if place != "worker" else CHANGES[:1]:
        built = Pipeline.new()
        with built.loader(**PLACES[place]) as loader:  # type: ignore[arg-type]
            expected = next(each_pass(loader))
            with iter(loader) as begun:
                first = next(begun).tolist()
                if "source" not in text:  # The records of a list are its own.
                    change(built)
                assert [first, *(batch.tolist() for batch in begun)] == expected
            if "source" in text:
                change(built)
            for begin in (iter, lambda loader: next(each_pass(loader))):
                with pytest.raises(ValueError, match=f"{text}.* since the loader was built: build another loader"):
                    begin(loader)


class Counting(Map):
    """An operation that changes itself with each call: what it computes depends on nothing else."""

    calls_of_all = 0

    def __init__(self) -> None:
        self.calls = 0
        self.cache: dict[int, int] = {}
        self.seen: list[int] = []
        self.counts: collections.Counter[int] = collections.Counter()
        self.settings = Settings()

    def map(self, number: int) -> int:
        self.calls += 1
        type(self).calls_of_all += 1
        self.settings.factor += 1
        self.settings.inner.factor += 1
        self.seen.append(number)
        self.counts[number] += 1
        return self.cache.setdefault(number, number * 2)


@pytest.mark.parametrize("place", PLACES)
def test_an_operation_that_changes_itself_is_the_same_stream(place: str) -> None:
    """In each pass and each epoch, and for a program that begins with the state of a later epoch."""

    def loader(operation: Any, **options: Any) -> millstream.DataLoader:
        return millstream.load(range(8), shuffle=True, seed=0, transformations=[operation], batch_size=2, **options)

    expected = [list(batches) for _, batches in loader(lambda number: 2 * number).epochs(3)]
    own = Counting()
    with loader(own, **PLACES[place]) as used:  # type: ignore[arg-type]
        for epoch, batches in used.epochs(3):
            assert np.array_equal(next(batches), expected[epoch][0])
            state = batches.get_state()
            assert np.array_equal(list(batches), expected[epoch][1:])
        assert used.operations[0] is own
    for fresh_operation in (Counting(), own):
        with loader(fresh_operation) as fresh:
            for _, batches in fresh.epochs(3, start=2):
                batches.set_state(state, strict=True, allow={"operations[0].calls_of_all"})
                assert np.array_equal(list(batches), expected[2][1:])


def test_a_copy_shares_what_is_large_or_cannot_be_copied_and_nothing_else() -> None:
    """References between operations are kept, and loops; functions, locks and large values stay the same objects."""

    class Cyclic(Map):
        def __init__(self) -> None:
            self.me = [self]
            self.bound = self.map
            self.large, self.small = np.zeros(1 << 17), np.zeros(3)
            self.many = list(range(20_000))
            self.lock, self.function = threading.Lock(), len

        def map(self, element: Any) -> Any:
            return element

    class Owning(Map):
        def map(self, element: Any) -> Any:
            return element

        def __del__(self) -> None:
            pass

    cyclic, owning = Cyclic(), Owning()
    one, both, kept = snapshot_of([cyclic, OnlyFor("a", [cyclic]), owning])
    assert type(one) is Cyclic
    assert one is not cyclic
    assert one.me[0] is one
    assert one.bound.__self__ is one  # type: ignore[attr-defined]
    assert both.operations[0] is one  # type: ignore[attr-defined]
    assert kept is owning
    for name in ("large", "many", "lock", "function"):
        assert getattr(one, name) is getattr(cyclic, name)
    assert one.small is not cyclic.small


def test_a_loader_is_described_once() -> None:
    """At its construction, and not again in epochs and passes: of a large constant, nothing more is read."""
    asked, same = counted_constant()

    class Same(Map):
        (constant,) = same.__defaults__

        def map(self, element: Any) -> Any:
            return same(element)

    loader = millstream.load(range(4), transformations=[same, Same()], num_epochs=1)
    num_asked = len(asked)
    assert num_asked
    for _, batches in loader.epochs(4):
        batches.get_state()
    for _ in range(3):
        iter(loader).get_state()
    assert len(asked) == num_asked
