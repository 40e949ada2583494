"""A loop over epochs: each has an order and draws of its own, and can be resumed; a pass that repeats is reported."""

import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import millstream
from millstream import CheckpointError, ConcatenatedDataSource, RecordMetadata
from millstream.samplers import BalancedSampler, HierarchicalSampler, IndexSampler, MixtureSampler, PackingSampler
from millstream.transforms import Batch, Pack, RandomMap
from support.processes.worker_pools import pids_of, still_there

RECORDS = 10


class Noise(RandomMap):
    def random_map(self, element: Any, rng: np.random.Generator) -> float:
        return float(element + rng.random())


def loader_of(**options: Any) -> millstream.DataLoader:
    arguments: dict[str, Any] = {"shuffle": True, "seed": 5, "batch_size": 4, "transformations": [Noise()]}
    return millstream.load(range(RECORDS), **(arguments | options))


def rows_of(batches: Any) -> list[float]:
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


def assert_resumes(one: millstream.DataLoader, other: millstream.DataLoader, epoch: int, rest: list[float]) -> None:
    """Asserts that a state after a batch of an epoch leads to the rest of it in another loader, and nowhere else."""
    for number, batches in one.epochs(3, start=epoch):
        assert number == batches.epoch == epoch
        next(batches)
        state = batches.get_state()
        break
    for number, batches in other.epochs(3, start=epoch):
        if number == epoch:
            batches.set_state(state)
            assert rows_of(batches) == rest
        else:
            with pytest.raises(millstream.CheckpointError, match=r"epoch: saved 1, here 2"):
                batches.set_state(state)


def test_a_run_resumes_in_its_epoch() -> None:
    """The number of the epoch and a state: from there on, the batches are those of the run that was not stopped."""
    whole = [rows_of(batches) for _, batches in loader_of().epochs(3)]
    assert_resumes(loader_of(), loader_of(), 1, whole[1][4:])
    assert [rows_of(batches) for _, batches in loader_of().epochs(3, start=1)] == whole[1:]


def mixed(num_epochs: int | None) -> MixtureSampler:
    parts = {
        name: IndexSampler(size, shuffle=True, seed=size, num_epochs=num_epochs) for name, size in (("a", 4), ("b", 9))
    }
    return MixtureSampler(parts, [1, 1], stop="all_exhausted")


ORDERS: dict[str, Callable[[int | None], Any]] = {
    "shuffled": lambda num_epochs: IndexSampler(13, shuffle=True, seed=3, num_epochs=num_epochs),
    "in order": lambda num_epochs: IndexSampler(13, num_epochs=num_epochs),
    "mixture": mixed,
}


@pytest.mark.parametrize("order", ORDERS)
def test_states_of_epochs_and_of_one_iterator_do_not_fit_each_other(order: str) -> None:
    """Each is an error that names the epoch, at any step: an epoch ends where the other stream goes on."""

    def loader(num_epochs: int | None) -> millstream.DataLoader:
        source = ConcatenatedDataSource({"a": list(range(4)), "b": list(range(4, 13))})
        return millstream.DataLoader(data_source=source, sampler=ORDERS[order](num_epochs), operations=[Batch(2)])

    of_epochs, others = loader(1), [loader(None), loader(2)]
    for epoch, batches in of_epochs.epochs(2):
        for other in map(iter, others):
            for step in (0, 2):
                for one, resumed, text in (
                    (batches, other, rf"first_epoch: saved {epoch}, here nothing"),
                    (other, batches, rf"first_epoch: saved nothing, here {epoch}"),
                ):
                    one.seek(step)
                    with pytest.raises(CheckpointError, match=text):
                        resumed.set_state(one.get_state())


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
        sampler=PackingSampler(lengths, row_length=10, seed=0, shuffle=True, num_epochs=1),
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
        ((2**64,), ValueError, "num_epochs must be at most 9,223,372,036,854,775,808"),
    ],
)
def test_wrong_numbers_of_epochs(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    """Wrong numbers of epochs are errors of the call, not of the first epoch."""
    with pytest.raises(error, match=text):
        loader_of().epochs(arguments[0], **({"start": arguments[1]} if len(arguments) > 1 else {}))


def test_an_order_without_epochs_has_no_epochs() -> None:
    """A sampler of the user's without `of_epoch`, alone or in a mixture, is an error of the call, as is no end."""
    plain = Backwards(4)
    for sampler, error, text in (
        (Plain(), TypeError, r"got Plain. Give it that method, .* itertools\.islice\(batches, steps\)"),
        (Endless(4), ValueError, r"of_epoch\(1\) of Endless must return a sampler that ends"),
        (MixtureSampler([plain, Plain()], [1, 1]), TypeError, "the sampler of component 1, a Plain, has no of_epoch"),
        (balanced(Plain()), TypeError, "in the BalancedSampler, got Plain"),
    ):
        records = range(4) if sampler.num_records is not None else ConcatenatedDataSource([range(4), range(4)])
        loader = millstream.DataLoader(data_source=records, sampler=sampler, operations=[Batch(4)])
        with pytest.raises(error, match=text):
            loader.epochs(2, start=1)
    with loader_of() as closed:
        pass
    with pytest.raises(ValueError, match="closed"):
        closed.epochs(2)


class Plain:
    """A sampler of four records, without epochs."""

    num_records = 4

    def __len__(self) -> int:
        return self.num_records

    def __getitem__(self, position: int) -> RecordMetadata:
        return RecordMetadata(position, position, None)


class Backwards:
    """A sampler of the user's: odd epochs run backwards."""

    def __init__(self, num_records: int, epoch: int = 0) -> None:
        self.num_records, self._epoch = num_records, epoch

    def __len__(self) -> int:
        return self.num_records

    def __getitem__(self, position: int) -> RecordMetadata:
        offset = self.num_records - 1 - position if self._epoch % 2 else position
        return RecordMetadata(position, offset, np.random.default_rng([self._epoch, position]))

    def of_epoch(self, number: int) -> "Backwards":
        return type(self)(self.num_records, number)


class Endless(Backwards):
    length = None


def balanced(order: Any) -> BalancedSampler:
    """Returns an order of records in global batches of four, dealt to two parts."""
    return BalancedSampler(order, costs=range(1, 9), global_batch_size=4, parts=2)


def test_epochs_of_a_balanced_order_are_those_of_its_order() -> None:
    """Each epoch has the global batches of the order's own epoch, dealt to parts of equal cost."""
    for order in (millstream.IndexSampler(8, shuffle=True, seed=0), Backwards(8)):
        loader = millstream.DataLoader(data_source=range(8), sampler=balanced(order), operations=[Batch(4)])
        epochs = [rows_of(batches) for _, batches in loader.epochs(4)]
        assert epochs == [[*balanced(order.of_epoch(number)).record_keys(0, 8)] for number in range(4)]
        assert len(set(map(tuple, epochs))) > 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_with_of_epoch_has_epochs(workers: int) -> None:
    """A user's sampler decides the order of each epoch, resumes in it, and refuses the state of another."""
    options: dict[str, Any] = {"operations": [Noise(), Batch(2)], "worker_count": workers}
    one, other = (millstream.DataLoader(data_source=range(4), sampler=Backwards(4), **options) for _ in range(2))
    with one, other:
        whole = {number: rows_of(batches) for number, batches in one.epochs(3)}
        assert [list(map(int, rows)) for rows in whole.values()] == [[0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3]]
        assert len({row % 1 for rows in whole.values() for row in rows}) == 12
        assert_resumes(one, other, 1, whole[1][2:])


@pytest.mark.parametrize("stop", ["first_exhausted", "drop_exhausted"])
def test_epochs_of_a_mixture_whose_weights_change(stop: str) -> None:
    """Positions of changes are counted over all epochs; an epoch ends by `stop`, and the weights there hold on."""
    changes: list[tuple[int, dict[str, int]]] = [(0, {"a": 1, "b": 1}), (3, {"a": 1, "b": 3}), (20, {"a": 2, "b": 1})]
    parts = {"a": Backwards(6), "b": Backwards(9)}
    begin, expected = 0, []
    for number in range(4):
        first = [weights for position, weights in changes if position <= begin][-1]
        own = {name: part.of_epoch(number) for name, part in parts.items()}
        epoch = MixtureSampler(own, first, stop=stop)
        for position, weights in changes:
            if begin < position < begin + len(epoch):
                epoch = epoch.reweighted(position - begin, weights)
        keys = epoch.record_keys(0, len(epoch)).tolist()
        expected.append(keys)
        begin += len(keys)
    assert begin > 40 if stop == "drop_exhausted" else begin > 30
    sampler = MixtureSampler({name: Forever(part) for name, part in parts.items()}, changes[0][1], stop=stop)
    for position, weights in changes[1:]:
        sampler = sampler.reweighted(position, weights)
    source = ConcatenatedDataSource({"a": range(6), "b": range(6, 15)})

    with millstream.DataLoader(data_source=source, sampler=sampler) as loader:
        assert [list(batches) for _, batches in loader.epochs(4)] == expected
        states = [[batches.get_state(), *(batches.get_state() for _ in batches)] for _, batches in loader.epochs(4)]
        for number, batches in loader.epochs(4, start=2):
            batches.set_state(states[number][2])
            assert list(batches) == expected[number][2:]


class Forever(Backwards):
    """The order of another sampler, endless: its epochs one after another."""

    length = None

    def __init__(self, epochs: Backwards) -> None:
        super().__init__(epochs.num_records)

    def of_epoch(self, number: int) -> Backwards:
        """Returns the sampler of an epoch."""
        return Backwards(self.num_records, number)


def process_of(number: int) -> int:
    del number
    return os.getpid()


@pytest.mark.parametrize("is_left_early", [False, True])
def test_worker_processes_stay_over_epochs(is_left_early: bool) -> None:
    """The same processes serve all epochs, also after one that was left before its end; none is left at the end."""
    with loader_of(worker_count=2, transformations=[process_of], batch_size=1) as loader:
        pids = []
        for _, batches in loader.epochs(4):
            next(batches)
            own = set(pids_of(batches))
            computed = {int(batch[0]) for batch in itertools.islice(batches, 2 if is_left_early else None)}
            assert computed <= own
            pids.append(own)
        assert len(pids[0]) == 2
        assert pids == [pids[0]] * 4
        assert not still_there(pids[0])


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


REPEATED: list[dict[str, Any]] = [{}, {"transformations": []}, {"shuffle": False}, {"num_epochs": 2}]


@pytest.mark.parametrize(
    ("options", "is_reported"),
    [
        *((options, True) for options in REPEATED),
        ({"shuffle": False, "transformations": []}, False),
    ],
)
def test_a_second_pass_that_repeats_the_first_is_reported_once(
    options: dict[str, Any], is_reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An order or draws that are random come again: a line in the log, once, which names the way out."""
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
    loader = loader_of(num_epochs=1)
    list(loader)
    with iter(loader) as batches:
        batches.seek(0)
        list(batches)
    for _, batches in loader.epochs(3):
        list(batches)
    assert not caplog.messages
