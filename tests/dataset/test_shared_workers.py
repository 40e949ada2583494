"""One set of worker processes does the work of all streams of a dataset, stays for the next pass, and ends with it."""

import copy
import gc
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream import IterDataset, MapDataset
from millstream.errors import WorkerDiedError
from millstream.experimental import InterleaveIterDataset, LimitIterDataset, RepeatIterDataset
from support.faults.user_faults import At, be_killed
from support.processes.moves import move_once
from support.processes.process_tree import settled_workers, worker_pids


def is_kept(number: Any) -> bool:
    return int(np.max(number)) % 3 > 0


def kept(first: int) -> IterDataset[int]:
    """Returns sixty numbers of which some are dropped."""
    return MapDataset.range(first, first + 60).seed(first).shuffle().to_iter_dataset().filter(is_kept)


def opened_in_turn(last: Callable[..., Any] = int) -> IterDataset[int]:
    """Returns nine streams, each of which is opened when its turn comes."""
    files = MapDataset.range(9).map(lambda file: MapDataset.range(5 * file, 5 * file + 5).map(last))
    return InterleaveIterDataset(files, cycle_length=3)


def mixed(last: Callable[..., Any] = int) -> IterDataset[int]:
    return IterDataset.mix([kept(0), kept(1000).map(last), kept(2000)])


JOINS: dict[str, tuple[Callable[[Any], IterDataset[int]], int]] = {
    "in a mixture": (mixed, 1025),
    "after a mixture": (lambda kill: mixed().map(kill), 1025),
    "in the first stream": (opened_in_turn, 2),
    "in a stream that is opened late": (opened_in_turn, 22),
    "in the last stream": (opened_in_turn, 42),
}


@pytest.mark.parametrize("place", JOINS)
def test_a_worker_that_dies_loses_nothing(tmp_path: Path, place: str) -> None:
    """Wherever a worker dies, others redo its work for all streams, and the elements are the same."""
    join, element = JOINS[place]
    killing, plain = join(At(element, be_killed, tmp_path / "killed")), join(int)
    found = list(killing.filter(is_kept).mp_prefetch(2))
    assert (tmp_path / "killed").exists()
    assert found == list(plain.filter(is_kept))


def test_an_element_that_kills_its_workers_is_named() -> None:
    """It is an error at its turn, and what comes before it of all streams is delivered."""
    mixture = IterDataset.mix([kept(0), kept(1000).map(At(1025, be_killed))])
    expected = list(itertools.takewhile(lambda number: number != 1025, IterDataset.mix([kept(0), kept(1000)])))
    with iter(mixture.mp_prefetch(2)) as spread:
        assert list(itertools.islice(spread, len(expected))) == expected
        with pytest.raises(WorkerDiedError, match=r"2 worker processes died .* from the record"):
            next(spread)


def numbers_below() -> IterDataset[Any]:
    """Returns a stream of 60 numbers."""
    return MapDataset.range(60).to_iter_dataset()


WITH_WORKERS: dict[str, Callable[[Any], IterDataset[Any]]] = {
    "read": lambda two: numbers_below().map(abs).mp_prefetch(two),
    "fed": lambda two: IterDataset.mix([numbers_below().filter(bool), numbers_below()]).map(abs).mp_prefetch(two),
    "mixture": lambda two: IterDataset.mix([numbers_below(), numbers_below()]).map(abs).mp_prefetch(two),
    "in the middle": lambda two: numbers_below().map(float).mp_prefetch(two).map(int),
    "interleave": lambda two: interleaved(1).map(abs).mp_prefetch(two),
    "interleave alone": lambda two: interleaved(2).mp_prefetch(two),
    "interleave before local": lambda two: interleaved(2).mp_prefetch(two).map(abs),
    "limit alone": lambda two: LimitIterDataset(numbers_below(), 40).mp_prefetch(two),
    "repeat alone": lambda two: RepeatIterDataset(numbers_below().map(abs), 2).mp_prefetch(two),
}


def interleaved(cycle_length: int) -> IterDataset[Any]:
    """Returns two streams in turn."""
    return InterleaveIterDataset([numbers_below(), numbers_below().map(abs)], cycle_length=cycle_length)


@pytest.mark.parametrize("two", [2, "auto"])
@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_the_next_pass_finds_the_workers(kind: str, two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes have the same processes, also after one that was left; two at once have their own, and the right elements.

    All end when an iterator is closed, after which the dataset can be read again, or with the dataset.
    """
    move_once(monkeypatch, 2)
    dataset = WITH_WORKERS[kind](two)
    expected = list(dataset)
    first = settled_workers(2)
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
