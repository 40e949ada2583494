"""Storage is kept busy, and no busier than allowed, by every shape of pipeline and wherever records are read."""

import contextlib
import itertools
import os
import resource
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.loader.engine.policy import CALL_SECONDS
from millstream.loader.workers.call_runner import _idle_seconds
from millstream.transforms import Batch, Filter, FirstFitPack, FlatMap, Map, Transformation
from support.clocks.owned_clock import Spend
from support.stores.waiting_storage import Storage

NUM_THREADS = 4
"""The number of reads that may be in flight in each process."""

MAX_OUTPUTS = 3000
"""The number of outputs after which as many reads as allowed must have been in flight."""


class BatchedStorage(Storage):
    def __getitems__(self, keys: Sequence[int]) -> list[dict[str, Any]]:
        return self.read(keys)


def twice(element: Any) -> list[Any]:
    return [element, element]


SHAPES: dict[str, list[Transformation]] = {
    "Batch": [Batch(4)],
    "no Batch": [],
    "Map, Batch, Map": [Map(dict), Batch(4), Map(dict)],
    "Filter, Batch": [Filter(bool), Batch(4)],
    "FlatMap, Batch": [FlatMap(twice, max_fan_out=2), Batch(4)],
    "FirstFitPack": [FirstFitPack({"tokens": 12}, num_packing_bins=2)],
    "BestFitPack, Batch": [millstream.transforms.BestFitPack({"tokens": 12}, num_packing_bins=2), Batch(2)],
    "ConcatThenSplit, Batch": [millstream.transforms.ConcatThenSplit({"tokens": 12}), Batch(2)],
}


def loader_of(storage: Storage, shape: str, **settings: Any) -> millstream.DataLoader:
    sampler = millstream.SequentialSampler(len(storage))
    return millstream.DataLoader(data_source=storage, sampler=sampler, operations=SHAPES[shape], **settings)


def reads_in_flight(outputs: Iterable[Any], limit: int = NUM_THREADS) -> int:
    """Returns the largest number of reads that were in flight, having read until as many as allowed were."""
    peak = 0
    for _, output in zip(range(MAX_OUTPUTS), outputs, strict=False):
        peak = max(peak, int(output["tokens"].max()))
        if peak >= limit:
            break
    return peak


@pytest.mark.parametrize(
    ("kind", "worker_count", "shape"),
    [
        *((BatchedStorage, 0, shape) for shape in SHAPES),
        *((Storage, 0, shape) for shape in ("no Batch", "Filter, Batch", "FirstFitPack")),
        *((BatchedStorage, 1, shape) for shape in ("Batch", "Filter, Batch", "FlatMap, Batch", "FirstFitPack")),
    ],
)
def test_as_many_reads_are_in_flight_as_threads_allow(kind: type[Storage], worker_count: int, shape: str) -> None:
    """Exactly num_threads slow reads are in flight, in this process and in each worker."""
    reading = millstream.ReadOptions(num_threads=NUM_THREADS)
    with iter(loader_of(kind(NUM_THREADS), shape, worker_count=worker_count, read_options=reading)) as iterator:
        assert reads_in_flight(iterator) == NUM_THREADS


class Component:
    """Four documents of a storage that others share."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __len__(self) -> int:
        return 4

    def __getitem__(self, key: int) -> dict[str, Any]:
        return self._storage.read([key])[0]


class BatchedComponent(Component):
    """The same, read in one call."""

    def __getitems__(self, keys: Sequence[int]) -> list[dict[str, Any]]:
        return self._storage.read(keys)


@pytest.mark.parametrize("kind", [Component, BatchedComponent])
@pytest.mark.parametrize("worker_count", [0, 1])
def test_the_components_of_one_batch_are_read_together(kind: type[Component], worker_count: int) -> None:
    """Exactly num_threads reads of 16 slow sources are in flight for a single batch, in each process."""
    storage = Storage(16)
    mixture = millstream.ConcatenatedDataSource([kind(storage) for _ in range(16)])
    reading = millstream.ReadOptions(num_threads=NUM_THREADS)
    loader = millstream.DataLoader(
        data_source=mixture,
        sampler=millstream.SequentialSampler(len(mixture)),
        operations=[Batch(len(mixture))],
        worker_count=worker_count,
        read_options=reading,
    )
    (batch,) = loader
    assert batch["tokens"].max() == NUM_THREADS


@pytest.mark.parametrize("worker_count", [0, 1])
def test_sixteen_reads_are_in_flight_by_default(worker_count: int) -> None:
    """Without `read_options`, 16 threads read in each process, as the documents say."""
    with iter(loader_of(Storage(16), "Batch", worker_count=worker_count)) as iterator:
        assert reads_in_flight(iterator, 16) == 16


def test_with_auto_more_reads_are_in_flight_if_all_wait() -> None:
    """The threads of this process become as many as those of four workers, and `summary` says so."""
    with loader_of(Storage(64), "Batch", worker_count="auto") as loader:
        with iter(loader) as iterator:
            assert reads_in_flight(iterator, 64) == 64
        assert "up to 64 threads" in str(loader.summary())


@pytest.mark.parametrize("kind", [Storage, BatchedStorage])
@pytest.mark.parametrize("worker_count", [0, 1])
def test_without_threads_one_read_is_in_flight(kind: type[Storage], worker_count: int) -> None:
    """Each process reads one call after another with num_threads=0."""
    reading = millstream.ReadOptions(num_threads=0)
    with iter(loader_of(kind(NUM_THREADS), "Batch", worker_count=worker_count, read_options=reading)) as iterator:
        peaks = [int(next(iterator)["tokens"].max()) for _ in range(12)]
    assert set(peaks) == {1}


class Deadly(BatchedStorage):
    """The same; a process that reads one of the documents dies, every time or only if a file can be created."""

    def __init__(self, key: int, once: str = "") -> None:
        super().__init__(NUM_THREADS)
        self._key = key
        self._once = once

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._key, self._once)

    def read(self, keys: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the documents at some keys."""
        documents = super().read(keys)
        if self._key in keys:
            with contextlib.suppress(FileExistsError):
                if self._once:
                    Path(self._once).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return [{**document, "key": key} for document, key in zip(documents, keys, strict=True)]


@pytest.mark.parametrize("kills_once", [True, False])
def test_a_death_with_several_reads_in_flight_is_blamed_on_the_right_one(kills_once: bool, tmp_path: Path) -> None:
    """Reads that were in flight beside a deadly one come exactly; it alone is an error, if it kills again."""
    source = Deadly(202, str(tmp_path / "killed") if kills_once else "")
    reading = millstream.ReadOptions(num_threads=NUM_THREADS)
    keys: list[int] = []
    with iter(loader_of(source, "Batch", worker_count=1, read_options=reading)) as iterator:
        expected = pytest.raises(millstream.WorkerDiedError, match="the records 200, 201, 202, 203 ")
        with contextlib.nullcontext() if kills_once else expected:
            for batch in itertools.islice(iterator, 80):
                keys.extend(batch["key"].tolist())
    assert keys == list(range(320 if kills_once else 200))


class Priced:
    """Numbers of which each takes a while to read: how many were read with it."""

    def __init__(self, spend: Spend) -> None:
        self._spend = spend

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, key: int) -> int:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[int]) -> list[int]:
        return [len(keys) for _ in map(self._spend, keys)]


@pytest.mark.usefixtures("owned_clock")
def test_reads_in_advance_count_for_the_size_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls whose records another thread reads stay as short as if they read themselves."""
    monkeypatch.setattr("millstream.loader.engine.workers.IDLE_CALLS", 0)
    sampler, reading = millstream.SequentialSampler(1_000_000), millstream.ReadOptions(num_threads=NUM_THREADS)
    loader = millstream.DataLoader(
        data_source=Priced(Spend(CALL_SECONDS / 5)), sampler=sampler, worker_count=1, read_options=reading
    )
    with iter(loader) as iterator:
        sizes = list(itertools.islice(iterator, 1000))
    assert 1 < max(sizes) <= 5


@pytest.mark.parametrize(("switches", "idle"), [(0, 0.0), (3, 0.75)])
def test_a_call_that_is_kept_from_a_core_does_not_look_like_one_that_waits(switches: int, idle: float) -> None:
    """A call that lost its core to another process does not count as waiting for storage."""
    start, end = resource.struct_rusage([0] * 16), resource.struct_rusage([0.125, 0.125, *[0] * 12, switches, 9])
    assert _idle_seconds(1.0, start, end) == idle
