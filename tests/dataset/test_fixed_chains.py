"""A chain runs on what its operations were when the first iterator of its end began, in every place alike."""

import dataclasses
import functools
import gc
import itertools
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import millstream
from millstream import IterDataset, MapDataset, ReadOptions
from millstream.dataset.chain import Chain, fixed_chain
from millstream.dataset.stream_steps import step_of
from millstream.experimental import InterleaveIterDataset
from millstream.loader.pipeline.pipeline import UNLIMITED
from millstream.transforms import Map
from support.laws import counted_constant


@dataclasses.dataclass
class Settings:
    """An object of the user's own."""

    factor: int = 2


class Scale(Map):
    """An operation with parameters of several kinds, which counts its calls."""

    def __init__(self, factor: int = 2) -> None:
        self.factor = factor
        self.settings = Settings()
        self.row = np.ones(2)
        self.calls = 0

    def map(self, number: Any) -> Any:
        self.calls += 1
        return number * self.factor * self.settings.factor * int(self.row[0])


class Shifted(MapDataset[int]):
    """A dataset of the user's own class, which counts its reads."""

    def __init__(self, parent: MapDataset[int]) -> None:
        super().__init__(parent)
        self.shift, self._hidden = 1, 0
        self.reads = 0

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, position: Any) -> Any:
        self.reads += 1
        return (
            self.slice(position) if isinstance(position, slice) else self._parent[position] + self.shift + self._hidden
        )


class Chosen:
    """A selection map of the user's own."""

    def __init__(self) -> None:
        self.stride = 3

    def __len__(self) -> int:
        return 8

    def __getitem__(self, position: int) -> tuple[int, int]:
        return position % 2, position * self.stride % 8


@dataclasses.dataclass
class Parts:
    """The objects that a program may change after it has built a chain."""

    records: list[int] = dataclasses.field(default_factory=lambda: list(range(8)))
    below: Scale = dataclasses.field(default_factory=Scale)
    after: Scale = dataclasses.field(default_factory=functools.partial(Scale, 3))
    chosen: Chosen = dataclasses.field(default_factory=Chosen)
    own: Any = None

    def map_dataset(self) -> MapDataset[Any]:
        source = MapDataset.source(self.records)
        self.own = Shifted(source.map(self.below))
        return MapDataset.select_from_datasets([self.own, source], self.chosen)

    def chain(self, reading: ReadOptions) -> IterDataset[Any]:
        return self.map_dataset().to_iter_dataset(reading).map(self.after).batch(2)

    def joined(self, reading: ReadOptions) -> IterDataset[Any]:
        one = self.map_dataset().to_iter_dataset(reading)
        return IterDataset.mix([one, MapDataset.range(20).to_iter_dataset()]).map(self.after).batch(2)

    def fed(self, reading: ReadOptions) -> IterDataset[Any]:
        one = self.map_dataset().to_iter_dataset(reading)
        return InterleaveIterDataset([one, MapDataset.range(9)], cycle_length=2).map(self.after).batch(2)


INLINE, THREADS = ReadOptions(0, 0), ReadOptions(3, 16)
PLACES: dict[str, Callable[[Callable[[ReadOptions], IterDataset[Any]]], IterDataset[Any]]] = {
    "inline": lambda build: build(INLINE),
    "threads": lambda build: build(THREADS),
    "worker": lambda build: build(INLINE).mp_prefetch(1),
}
CHANGES: dict[str, Callable[[Parts], object]] = {
    r"operations\[\d\]\.factor changed from 2 to 7": lambda parts: setattr(parts.below, "factor", 7),
    r"operations\[\d\]\.factor changed from 3 to 7": lambda parts: setattr(parts.after, "factor", 7),
    r"operations\[\d\]\.settings\.factor changed from 2 to 7": lambda parts: setattr(parts.after.settings, "factor", 7),
    r"operations\[\d\]\.row changed from .*1.0.* to .*9.0": lambda parts: parts.below.row.__setitem__(0, 9),
    r"Shifted\.shift changed from 1 to 5": lambda parts: setattr(parts.own, "shift", 5),
    r"selection\.stride changed from 3 to 5": lambda parts: setattr(parts.chosen, "stride", 5),
    r"source changed from 8 records .* to 9 records": lambda parts: parts.records.append(9),
}


def listed(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("form", ["chain", "joined", "fed"])
@pytest.mark.parametrize("place", PLACES)
def test_a_pass_after_a_change_is_an_error_that_names_it(place: str, form: str) -> None:
    """By path, with both values, wherever the operations run. A pass that has begun does not see the change."""
    for text, change in list(CHANGES.items())[: 1 if place == "worker" else None]:
        parts = Parts()
        dataset = PLACES[place](getattr(parts, form))
        expected = listed(dataset)
        with iter(dataset) as begun:
            first = next(begun).tolist()
            if "source" not in text:  # The records of a list are its own.
                change(parts)
                assert [first, *listed(begun)] == expected
        if "source" in text:
            change(parts)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"{text}.* since the first iterator of this dataset: build another"):
                iter(dataset)


@pytest.mark.parametrize("form", ["chain", "joined", "fed"])
@pytest.mark.parametrize("place", PLACES)
def test_what_changes_itself_is_the_same_stream(place: str, form: str) -> None:
    """It changes its copy; the objects of the program stay as they were, so that states are accepted."""
    parts = Parts()
    dataset = PLACES[place](getattr(parts, form))
    expected = listed(dataset)
    assert (parts.below.calls, parts.after.calls, parts.own.reads) == (0, 0, 0)
    with iter(dataset) as batches:
        first = next(batches).tolist()
        state = batches.get_state()
    with iter(PLACES["inline"](getattr(Parts(), form))) as fresh:
        fresh.set_state(state, strict=True)
        assert [first, *listed(fresh)] == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_of_a_chain_is_fixed_when_it_is_built(workers: int) -> None:
    """Alone and in a mixture, also if the loader is pickled: a change is an error, and a pass does not see it."""
    for text, change in list(CHANGES.items())[: 1 if workers else None]:
        for in_mixture in (False, True):
            parts = Parts()
            chain: Any = parts.map_dataset().map(parts.after)
            source = {"a": chain, "b": MapDataset.range(20).map(parts.below)} if in_mixture else chain
            weights = [1, 1] if in_mixture else None
            loader = millstream.load(source, weights=weights, batch_size=2, num_epochs=1, worker_count=workers)
            expected = listed(loader)
            assert (parts.below.calls, parts.after.calls, parts.own.reads) == (0, 0, 0)
            assert listed(pickle.loads(pickle.dumps(loader))) == expected
            with iter(loader) as begun:
                first = next(begun).tolist()
                change(parts)
                if "source" not in text:  # The records of a list are its own.
                    assert [first, *listed(begun)] == expected
            with pytest.raises(ValueError, match=f"{text}.* since the loader of this chain was built: build another"):
                iter(loader)


def test_a_second_iterator_describes_nothing() -> None:
    """However large the constants of a chain are, `iter` of a chain reads them once; its states stay the same."""
    asked, same = counted_constant()
    positions = MapDataset.range(8).shuffle(seed=0).map(same)
    chain = positions.to_iter_dataset(INLINE).map(same)
    datasets: Sequence[Any] = [positions, chain.batch(2), IterDataset.mix([chain, chain.map(str)]).map(str)]
    for dataset in datasets:
        state = iter(dataset).get_state()
        num_asked = len(asked)
        assert num_asked
        assert iter(dataset).get_state() == state
        assert len(asked) == num_asked


def test_a_pass_over_positions_sees_what_the_program_has_changed() -> None:
    """As `dataset[position]` does: in operations, lists, the user's own datasets, and private attributes of these."""
    parts = Parts()
    datasets = [MapDataset.source(parts.records).map(parts.below), parts.map_dataset().map(parts.after)]
    for text, change in CHANGES.items():
        for dataset in datasets:
            assert list(dataset) == [dataset[position] for position in range(8)], text
        change(parts)
    parts.own._hidden = 1
    for dataset in datasets:
        assert list(dataset) == [dataset[position] for position in range(8)]


def test_a_dataset_that_was_iterated_is_freed_when_it_is_dropped() -> None:
    """The stream that it keeps for later passes does not refer to it."""
    dataset = MapDataset.range(4).map(str)
    assert list(dataset) == ["0", "1", "2", "3"]
    found = weakref.ref(dataset)
    gc.disable()
    try:
        del dataset
        assert found() is None
    finally:
        gc.enable()


def test_a_stream_that_is_opened_later_is_fixed_then() -> None:
    """In an interleave, a change before the turn of a stream counts, and one after it is an error of the next pass."""
    later = Scale()
    both = MapDataset.range(2).to_iter_dataset().concatenate(MapDataset.range(1, 3).to_iter_dataset().map(later))
    with iter(both) as iterator:
        assert next(iterator) == 0
        later.factor = 5
        assert list(iterator) == [1, 10, 20]
    later.factor = 7
    with pytest.raises(ValueError, match="factor changed from 5 to 7"):
        list(both)


class Slotted(Shifted):
    """A dataset with an attribute in a slot."""

    __slots__ = ("factor",)

    def __init__(self, parent: MapDataset[int]) -> None:
        super().__init__(parent)
        self.factor = 3

    def __getitem__(self, position: Any) -> Any:
        return super().__getitem__(position) * self.factor


class Owning(Shifted):
    """A dataset that closes what it holds when it is collected."""

    def __init__(self, parent: MapDataset[int]) -> None:
        super().__init__(parent)
        self.held = [1]

    def __getitem__(self, position: Any) -> Any:
        return super().__getitem__(position) * self.held[0]

    def __del__(self) -> None:
        self.held.clear()


class Stream(IterDataset[int]):
    """A stream with an attribute in a slot."""

    __slots__ = ("count",)

    def __init__(self, parent: IterDataset[int]) -> None:
        super().__init__(parent)
        self.count = 2

    def __iter__(self) -> Any:
        return itertools.islice(iter(self._parent), self.count)


def test_datasets_with_slots_and_finalizers_are_read() -> None:
    """A copy has the attributes in slots, which are checked, too; one that would end twice is not copied."""
    slotted, owning = Slotted(MapDataset.range(3)), Owning(MapDataset.range(3))
    stream = slotted.to_iter_dataset(INLINE)
    assert list(stream) == [3, 6, 9]
    slotted.factor = 5
    with pytest.raises(ValueError, match=r"Slotted\.factor changed from 3 to 5"):
        iter(stream)
    for _ in range(2):
        assert list(owning.to_iter_dataset(INLINE)) == [1, 2, 3]
        gc.collect()
    assert list(Stream(owning.to_iter_dataset(INLINE)).options(on_error="skip")) == [1, 2]


def test_threads_that_begin_together_get_the_same_pipelines() -> None:
    """The plans of a chain are found by the `id` of a pipeline, so each of its pipelines is kept, whoever made it."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            step = step_of(MapDataset.range(10).map(str).map(len).to_iter_dataset(INLINE))
            fixed, barrier = fixed_chain(step, Chain.of(step)), threading.Barrier(4)
            found: list[Any] = []

            def begin(fixed: Any = fixed, barrier: Any = barrier, found: Any = found) -> None:
                barrier.wait()
                found.append(fixed.pipelines(UNLIMITED, None, allows_none=False))

            threads = [threading.Thread(target=begin) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(set(map(id, found))) == 1
    finally:
        sys.setswitchinterval(interval)
