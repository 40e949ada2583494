"""The worker processes of a dataset: they stay for the next pass, and end with it."""

import copy
import gc
import pickle
from typing import Any

import psutil
import pytest

from millstream import IterDataset, MapDataset


def worker_pids() -> set[int]:
    """Returns the processes of all workers."""
    return {worker.pid for server in psutil.Process().children() for worker in server.children()}


def chain(kind: str) -> IterDataset[Any]:
    """Returns a dataset of numbers with two workers."""
    numbers = MapDataset.range(60).to_iter_dataset()
    made: dict[str, IterDataset[Any]] = {
        "read": numbers,
        "fed": IterDataset.mix([numbers.filter(bool), numbers]),
        "mixture": IterDataset.mix([numbers, numbers]),
        "in the middle": numbers.map(float).mp_prefetch(2).map(int),
    }
    return made[kind].map(abs).mp_prefetch(0 if kind == "in the middle" else 2)


@pytest.mark.parametrize("kind", ["read", "fed", "mixture", "in the middle"])
def test_the_next_pass_finds_the_workers(kind: str) -> None:
    """Passes have the same processes; two at once have their own, and the right elements; all end with the dataset."""
    dataset = chain(kind)
    expected = list(dataset)
    first = worker_pids()
    assert len(first) == 2
    assert list(dataset) == expected
    assert worker_pids() == first
    one, other = iter(dataset), iter(dataset)
    pairs = list(zip(one, other, strict=True))
    assert pairs == [(element, element) for element in expected]
    for copied in (copy.copy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert "_warm" not in vars(copied)
    del dataset, one, other
    gc.collect()
    assert worker_pids() == set()


def test_closing_an_iterator_ends_the_workers() -> None:
    """Those of other passes, too, as in a loader; the dataset can be read again."""
    dataset = chain("read")
    expected = list(dataset)
    with iter(dataset) as iterator:
        next(iterator)
    assert worker_pids() == set()
    assert list(dataset) == expected


def test_an_iterator_says_what_it_does() -> None:
    """Its repr has the position, who works, and the operations; of one that draws from others, from which."""
    numbers = MapDataset.range(20).map(float).to_iter_dataset()
    mixture = IterDataset.mix([numbers, numbers])
    with iter(numbers.batch(4).mp_prefetch(2)) as read, iter(mixture.map(abs)) as mixed, iter(mixture) as drawn:
        assert repr(read) == "<ReadIterator at step 0, idle, 2 workers: Map(float), Batch(batch_size=4)>"
        next(read)
        next(mixed)
        assert repr(read).startswith("<ReadIterator at step 1, running, 2 workers: ")
        assert repr(mixed) == (
            "<MixtureIterator at step 1, running, up to 16 threads, reads a mixture of 2: Map(float), Map(abs)>"
        )
        assert repr(drawn) == "<MixedIterator, open, draws from 2 iterators>"
    assert repr(read).startswith("<ReadIterator at step 1, closed, ")
    assert repr(drawn) == "<MixedIterator, closed, draws from 2 iterators>"
    with iter(IterDataset.mix([numbers.filter(bool)]).map(abs)) as fed:
        assert repr(fed) == "<FedIterator at step 0, idle, in this thread, draws from MixedIterator: Map(abs)>"
