"""A loop over epochs: each has an order and draws of its own, and can be resumed; a pass that repeats is reported."""

import logging
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.samplers import HierarchicalSampler, PackingSampler
from millstream.transforms import Pack, RandomMap

RECORDS = 10


class Noise(RandomMap):
    """Adds a random part below 1."""

    def random_map(self, element: Any, rng: np.random.Generator) -> float:
        """Returns the sum."""
        return float(element + rng.random())


def loader_of(**options: Any) -> millstream.DataLoader:
    """Returns a shuffled loader of numbers with noise."""
    arguments: dict[str, Any] = {"shuffle": True, "seed": 5, "batch_size": 4, "transformations": [Noise()]}
    return millstream.load(range(RECORDS), **(arguments | options))


def rows_of(batches: Any) -> list[float]:
    """Returns the rows of all batches."""
    return [row for batch in batches for row in batch.tolist()]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("num_epochs", [None, 1, 3])
def test_each_epoch_has_an_order_and_draws_of_its_own(workers: int, num_epochs: int | None) -> None:
    """All records come in each epoch, in another order, with other draws; the sampler's num_epochs does not count."""
    with loader_of(worker_count=workers, num_epochs=num_epochs) as loader:
        epochs = []
        for number, batches in loader.epochs(3):
            assert (len(batches), batches.epoch) == (3, number)
            epochs.append(rows_of(batches))
        assert loader.metrics()["loader/batches"] == 9
    assert all(sorted(map(int, rows)) == list(range(RECORDS)) for rows in epochs)
    orders = [list(map(int, rows)) for rows in epochs]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert len({round(row % 1, 9) for rows in epochs for row in rows}) == 3 * RECORDS
    assert epochs[0] == rows_of(loader_of(num_epochs=1))


def test_a_run_resumes_in_its_epoch() -> None:
    """The number of the epoch and a state: from there on, the batches are those of the run that was not stopped."""
    whole = [(number, rows_of([batch])) for number, batches in loader_of().epochs(3) for batch in batches]
    for number, batches in loader_of().epochs(3, start=1):
        assert rows_of([next(batches)]) == whole[3][1]
        saved, state = number, batches.get_state()
        break
    rest = []
    for number, batches in loader_of().epochs(3, start=saved):
        if number == saved:
            batches.set_state(state)
        rest += [(number, rows_of([batch])) for batch in batches]
    assert rest == whole[4:]
    for _, batches in loader_of().epochs(3, start=2):
        with pytest.raises(millstream.CheckpointError, match="first_epoch: saved 1, here 2"):
            batches.set_state(state)


def test_epochs_of_other_orders() -> None:
    """Windowed and packed orders have epochs, too; a shard reads its part of each."""
    windowed = millstream.DataLoader(
        data_source=range(12), sampler=HierarchicalSampler([4, 4, 4], window_units=2, seed=0)
    )
    orders = [list(batches) for _, batches in windowed.epochs(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(12))
    lengths = [3, 5, 2, 6, 4]
    packed = millstream.DataLoader(
        data_source=[{"t": np.full(length, length)} for length in lengths],
        sampler=PackingSampler(lengths, row_length=10, seed=0),
        operations=[Pack({"t": 10})],
    )
    assert [sum(int((row["t"] > 0).sum()) for row in batches) for _, batches in packed.epochs(2)] == [20, 20]
    parts = [
        [rows_of(batches) for _, batches in loader_of(batch_size=2, shard_options=shard, transformations=[]).epochs(2)]
        for shard in (millstream.ShardOptions(0, 2), millstream.ShardOptions(1, 2))
    ]
    whole = [rows_of(batches) for _, batches in loader_of(transformations=[]).epochs(2)]
    assert [sorted(first + second) for first, second in zip(*parts, strict=True)] == [sorted(rows) for rows in whole]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0,), ValueError, "num_epochs must be at least 1, got 0"),
        ((2, -1), ValueError, "start must be at least 0, got -1"),
        ((2, 3), ValueError, "start must be at most num_epochs, which is 2, got 3"),
        ((1.5,), TypeError, "num_epochs"),
    ],
)
def test_wrong_numbers_of_epochs(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    """Wrong numbers of epochs are errors of the call, not of the first epoch."""
    with pytest.raises(error, match=text):
        loader_of().epochs(arguments[0], **({"start": arguments[1]} if len(arguments) > 1 else {}))


def test_an_order_without_epochs_has_no_epochs() -> None:
    """A sampler of the user's, or a mixture, is read as a whole."""
    loader = millstream.load({"a": range(3), "b": range(3)}, weights=[1, 1], num_epochs=1)
    with pytest.raises(TypeError, match=r"got MixtureSampler, .* itertools\.islice\(batches, steps\)"):
        loader.epochs(2)
    with loader_of() as closed:
        pass
    with pytest.raises(ValueError, match="closed"):
        closed.epochs(2)


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_all_epochs_are_those_of_the_loader(workers: int) -> None:
    """Records that fail in an epoch are listed by the loader, and the limit counts those of all epochs."""
    options: dict[str, Any] = {"shuffle": True, "seed": 0, "batch_size": 3, "on_error": "skip", "worker_count": workers}
    with millstream.load(range(6), transformations=[refuse_four], **options) as loader:
        assert [len(list(batches)) for _, batches in loader.epochs(2)] == [2, 2]
        assert loader.errors == {4: "ValueError: 4 is refused"}
        assert loader.metrics()["loader/errors"] == 1.0


def refuse_four(number: int) -> int:
    """Returns a number other than 4."""
    if number == 4:
        raise ValueError("4 is refused")
    return number


@pytest.mark.parametrize(
    ("options", "is_reported"),
    [
        ({}, True),
        ({"transformations": []}, True),
        ({"shuffle": False}, True),
        ({"num_epochs": 2}, True),
        ({"shuffle": False, "transformations": []}, False),
    ],
)
def test_a_second_pass_that_repeats_the_first_is_reported_once(
    options: dict[str, Any], is_reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An order or draws that are random come again: a line in the log, once, which names the way out."""
    caplog.set_level(logging.WARNING, logger="millstream")
    loader = loader_of(**({"num_epochs": 1} | options))
    with iter(loader) as begun:
        next(begun)
    first = rows_of(loader)
    assert not caplog.messages
    assert rows_of(loader) == first
    list(loader)
    assert [("loader.epochs(" in message) for message in caplog.messages] == [True] * is_reported


def test_passes_that_do_not_repeat_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """After a move, and in a loop over epochs, nothing is said."""
    caplog.set_level(logging.WARNING, logger="millstream")
    loader = loader_of(num_epochs=1)
    list(loader)
    with iter(loader) as batches:
        batches.seek(0)
        list(batches)
    for _, batches in loader.epochs(3):
        list(batches)
    assert not caplog.messages
