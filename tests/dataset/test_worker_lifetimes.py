"""The worker processes of a dataset: they stay for the next pass, and end with it."""

import copy
import gc
import pickle
from typing import Any

import pytest

from millstream import IterDataset, MapDataset
from support.processes.process_tree import worker_pids


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
    """Passes have the same processes, also after one that was left; two at once have their own, and the right elements.

    All end when an iterator is closed, after which the dataset can be read again, or with the dataset.
    """
    dataset = chain(kind)
    expected = list(dataset)
    first = worker_pids()
    assert len(first) == 2
    for element in dataset:
        assert element == expected[0]
        break
    assert list(dataset) == expected
    assert worker_pids() == first
    with iter(dataset) as iterator:
        next(iterator)
    assert worker_pids() == set()
    one, other = iter(dataset), iter(dataset)
    pairs = list(zip(one, other, strict=True))
    assert pairs == [(element, element) for element in expected]
    for copied in (copy.copy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert "_warm" not in vars(copied)
    del dataset, iterator, one, other
    gc.collect()
    assert worker_pids() == set()
