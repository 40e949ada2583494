"""`worker_init_fn=f` of loaders and `mp_prefetch`: f(index, count) runs once in each worker, in replacements too."""

import functools
import itertools
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import millstream


def note(folder: Path, index: int, count: int) -> None:
    (folder / f"{os.getpid()}-{index}-{count}").touch()


def notes(folder: Path) -> list[tuple[int, int, int]]:
    return sorted(tuple(map(int, path.name.split("-"))) for path in folder.iterdir())  # type: ignore[misc]  # three


def process_after_init(number: int) -> tuple[int, int]:
    return number, os.getpid()


def numbers(count: int) -> millstream.IterDataset[tuple[int, int]]:
    return millstream.MapDataset.range(count).map(process_after_init).to_iter_dataset()


def test_each_worker_calls_it_once_with_its_index(tmp_path: Path) -> None:
    """There is one call per worker, before its first element; without workers there is none."""
    init = functools.partial(note, tmp_path)
    assert [number for number, _ in numbers(8).mp_prefetch(0, worker_init_fn=init)] == list(range(8))
    assert notes(tmp_path) == []

    with iter(numbers(5000).mp_prefetch(2, worker_init_fn=init)) as iterator:
        elements = list(iterator)

    assert [number for number, _ in elements] == list(range(5000))
    calls = notes(tmp_path)
    assert {process for _, process in elements} <= {process for process, _, _ in calls}
    assert sorted((index, count) for _, index, count in calls) == [(0, 2), (1, 2)]


def loaded(count: int, **options: Any) -> Any:
    return millstream.load(range(count), transformations=[process_after_init], num_epochs=1, **options)


def built(count: int, **options: Any) -> Any:
    sampler = millstream.SequentialSampler(count)
    return millstream.DataLoader(data_source=range(count), sampler=sampler, operations=[process_after_init], **options)


@pytest.mark.parametrize("make", [loaded, built])
def test_loaders_call_it_as_chains_do(make: Any, tmp_path: Path) -> None:
    """It runs once per worker, also in epochs, never without workers, and is no part of the stream's identity."""
    init = functools.partial(note, tmp_path)
    with make(4, worker_init_fn=init) as loader:
        assert len(list(loader)) == 4
    assert notes(tmp_path) == []
    with make(3000, worker_init_fn=init, worker_count=2) as loader:
        with iter(loader) as iterator:
            start = [number for number, _ in itertools.islice(iterator, 1000)]
            state = iterator.get_state()
        assert len(list(loader)) == 3000
    assert start == list(range(1000))
    calls = notes(tmp_path)
    assert sorted((index, count) for _, index, count in calls) in ([(0, 2), (1, 2)], [(0, 2), (0, 2), (1, 2), (1, 2)])
    with iter(make(3000)) as iterator:
        iterator.set_state(state)
        assert [number for number, _ in iterator] == list(range(1000, 3000))
    with pytest.raises(TypeError, match="worker_init_fn must be a function of index and count"):
        make(3, worker_init_fn=3)


def test_a_replacement_calls_it_with_the_index_of_the_dead_worker(tmp_path: Path) -> None:
    """After a worker is killed, the stream is unchanged, and its index is initialised a second time."""
    stream = numbers(20_000).mp_prefetch(
        millstream.MultiprocessingOptions(num_workers=2), worker_init_fn=functools.partial(note, tmp_path)
    )
    with iter(stream.batch(1, batch_fn=lambda rows: rows[0])) as iterator:
        first, victim = next(iterator)
        dead = {process: index for process, index, _ in notes(tmp_path)}[victim]
        os.kill(victim, signal.SIGKILL)
        rest = [number for number, _ in iterator]

    assert [first, *rest] == list(range(20_000))
    calls = notes(tmp_path)
    assert len({process for process, _, _ in calls}) == len(calls) == 3
    assert Counter(index for _, index, _ in calls) == {dead: 2, 1 - dead: 1}


def test_an_error_reaches_the_consumer() -> None:
    """An error of the function is raised where the first element is expected."""

    def broken(index: int, count: int) -> None:
        raise RuntimeError(f"worker {index} of {count}")

    with (
        iter(numbers(4).mp_prefetch(1, worker_init_fn=broken)) as iterator,
        pytest.raises(RuntimeError, match="0 of 1") as caught,
    ):
        next(iterator)
    assert caught.value.__notes__ == ["millstream: a worker process raised this while it called worker_init_fn."]
    with pytest.raises(TypeError, match="worker_init_fn must be a function of index and count"):
        numbers(4).mp_prefetch(1, worker_init_fn=3)  # type: ignore[arg-type]
