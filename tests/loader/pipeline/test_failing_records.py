"""Records that fail are skipped as the plain oracle skips them, wherever they are made, and never too many."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import millstream
from millstream.errors import CheckpointError
from millstream.loader.pipeline import failing_records
from support.draw.random_pipelines import UNEVEN_ENDS, Pipeline, dealt_pipelines, pipelines
from support.faults.user_faults import refuse_sevens
from support.laws import loader_of
from support.oracle.stream import Failing, oracle
from support.streams import drain


@UNEVEN_ENDS
@given(
    data=st.data(),
    pipeline=st.one_of(pipelines(), dealt_pipelines()),
    max_errors=st.sampled_from([None, None, 0, 1, 5]),
    num_threads=st.sampled_from([0, 2]),
)
@settings(deadline=None, max_examples=120)
def test_skipping_equals_the_oracle(
    data: st.DataObject, pipeline: Pipeline, max_errors: int | None, num_threads: int
) -> None:
    """Substitutes, dropped records, other errors and the limit, inline and in threads; without a limit, it resumes."""
    drops = any(getattr(operation, "drop_remainder", False) for operation in pipeline.operations)
    # Which of several logical shards reads further in a remainder that none of them delivers is not the oracle's.
    assume(not (drops and max_errors is not None and pipeline.shard.logical_shards))
    failing = Failing(max_errors)
    expected = drain(oracle(pipeline.source, pipeline.sampler, pipeline.operations, pipeline.shard, failing))
    options: dict[str, Any] = {"on_error": "skip", "max_errors": max_errors}
    loader = loader_of(pipeline, read_options=millstream.ReadOptions(num_threads), **options)
    with iter(loader) as iterator:
        assert expected == drain(iterator)
        # Those of a remainder that is dropped do not count.
        assert set(failing.keys[: failing.num_delivered] if drops else failing.keys) <= set(loader.errors)
        # The error of too many comes each time.
        assert expected[1] is None or expected[1] == drain(iterator)[1]
        if max_errors is None:
            step = data.draw(st.integers(0, len(expected[0])))
            iterator.seek(step)
            with iter(loader_of(pipeline, **options)) as resumed:
                resumed.set_state(iterator.get_state())
                assert drain(resumed) == drain(iterator) == (expected[0][step:], expected[1])


class Damaged:
    """A source of `size` numbers, of which some cannot be read, alone or with others."""

    def __init__(self, size: int, bad: Sequence[int]) -> None:
        self.size = size
        self.bad = frozenset(bad)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: int) -> int:
        if key in self.bad:
            raise OSError(f"record {key} is damaged")
        return key


class DamagedTogether(Damaged):
    def __getitems__(self, keys: Sequence[int]) -> list[int]:
        return [self[key] for key in keys]


def noisy(number: int, rng: Any) -> int:
    return number + 1000 * int(rng.integers(1000))


@pytest.mark.parametrize(
    ("kind", "dropping"),
    [(Damaged, []), (DamagedTogether, [millstream.Filter(lambda number: number % 5 > 0)])],
)
def test_workers_skip_the_same(kind: type[Damaged], dropping: list[Any]) -> None:
    """Batches, and the keys and texts of what failed, are those of one process; draws, too."""
    operations = [*dropping, refuse_sevens, millstream.RandomMap(noisy)]
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "num_epochs": 1, "batch_size": 4, "on_error": "skip"}
    here = millstream.load(kind(100, [13, 14, 99]), transformations=operations, **options)
    expected = [batch.tolist() for batch in here]
    with millstream.load(here.data_source, transformations=operations, worker_count=2, **options) as workers:
        assert [batch.tolist() for batch in workers] == expected
        assert workers.errors == here.errors
    assert here.errors[13] == "OSError: record 13 is damaged"
    assert here.errors[49] == "ValueError: 49 is a multiple of 7"


def test_a_substitute_is_of_the_sampler_and_of_the_component() -> None:
    """A training split gets no record of another one, nor a component of a mixture one of another source."""
    chosen = millstream.DataLoader(
        data_source=Damaged(10, [4, 8]),
        sampler=millstream.IndexSampler(4, keys=[8, 0, 4, 6], num_epochs=1),
        on_error="skip",
    )
    assert list(chosen) == [0, 0, 6, 6]

    sources: dict[str, Any] = {"a": Damaged(3, [2]), "b": [10, 11, 12]}
    mixed = millstream.load(sources, weights=[1, 1], num_epochs=1, on_error="skip", batch_size=6)
    assert sorted(next(iter(mixed)).tolist()) == [0, 0, 1, 10, 11, 12]


def test_each_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A failing record is logged once with key, position and error, over all passes."""
    loader = millstream.load(Damaged(4, [1]), num_epochs=2, on_error="skip")
    assert list(loader) == list(loader) == [0, 2, 2, 3] * 2
    assert caplog.messages == ["millstream: skipped record key 1 (position 1): OSError: record 1 is damaged"]


class Sometimes(Damaged):
    """A source in which every tenth record below 200 is damaged, and one of the last ones."""

    def __init__(self) -> None:
        super().__init__(1000, [*range(0, 200, 10), 901])


def keep(number: int) -> bool:
    return number % 3 > 0


PLACES: dict[str, dict[str, Any]] = {
    "inline": {"read_options": millstream.ReadOptions(0)},
    "threads": {"read_options": millstream.ReadOptions(16)},
    "workers": {"worker_count": 2, "worker_buffer_size": 8},
}
SHARDS = millstream.ShardOptions(0, 1, logical_shards=4)


@pytest.mark.parametrize(
    ("operations", "options"),
    [
        ([], {"batch_size": 4}),
        ([], {}),
        ([millstream.Filter(keep)], {"batch_size": 4}),
        ([millstream.Filter(keep)], {"batch_size": 4, "shard_options": SHARDS}),
    ],
)
def test_what_was_only_prefetched_has_not_failed(operations: list[Any], options: dict[str, Any]) -> None:
    """Batches, error and `errors` depend on what was delivered: not on what was made in advance, wherever it was."""
    outcomes = []
    for place in PLACES.values():
        arguments: dict[str, Any] = {"transformations": operations, "num_epochs": 1, "on_error": "skip"}
        with millstream.load(Sometimes(), max_errors=9, **arguments, **options, **place) as loader:
            outcome: list[Any] = []
            iterator = iter(loader)
            for number in (3, 2, 4):
                # Threads and workers read further ahead the longer they are waited for.
                outcome += [np.asarray(next(iterator)).tolist() for _ in range(number)]
                executor: Any = iterator._executor
                executor.start()
                outcome += [sorted(loader.errors), loader.metrics()["loader/errors"]]
                iterator.set_state(iterator.get_state())
            # Another pass, which takes over what this one has delivered.
            with iter(loader) as other:
                outcome += [np.asarray(next(other)).tolist(), sorted(loader.errors)]
                found = drain(other)
            outcomes.append([outcome, found[0], repr(found[1]), loader.errors])
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert "OSError" in outcomes[0][2]
    assert len(outcomes[0][3]) == 9


def test_errors_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any number of records that fail, the last ones are kept, and all are counted."""
    monkeypatch.setattr(failing_records, "MAX_TEXTS", 5)
    loader = millstream.load(
        Damaged(60, range(0, 60, 2)), transformations=[millstream.Filter(keep)], on_error="skip",
        max_errors=None, num_epochs=1,
    )  # fmt: skip
    assert list(loader) == [number for number in range(1, 60, 2) if keep(number)]
    assert list(loader.errors) == [50, 52, 54, 56, 58]
    assert loader.metrics()["loader/errors"] == 30

    strict = millstream.load(Damaged(60, range(0, 60, 2)), on_error="skip", max_errors=30, num_epochs=1)
    assert len(list(strict)) == 60
    assert list(strict.errors) == list(range(0, 60, 2))


def test_above_the_limit_the_error_is_raised() -> None:
    """Above max_errors, the record's error is raised at its turn, at each try; other passes count the same keys."""
    loader = millstream.load(Damaged(20, [1, 5, 9]), num_epochs=1, on_error="skip", max_errors=2)
    for _ in range(2):
        with iter(loader) as numbers:
            assert [next(numbers) for _ in range(9)] == [0, 2, 2, 3, 4, 6, 6, 7, 8]
            for _ in range(2):
                with pytest.raises(OSError, match="record 9 is damaged") as caught:
                    next(numbers)
                assert "has skipped 2 records, and max_errors is 2" in caught.value.__notes__[-1]
    assert list(loader.errors) == [1, 5]


@pytest.mark.parametrize("operations", [[], [millstream.Filter(bool)]])
def test_where_every_record_fails_the_error_is_raised(operations: list[Any]) -> None:
    """If every record fails, the error is raised, for any limit and number of epochs."""
    loader = millstream.load(Damaged(5, range(5)), transformations=operations, on_error="skip", max_errors=None)
    # The last of the nine among which are all five of any two epochs.
    with pytest.raises(OSError, match=r"record [03] is damaged"):
        next(iter(loader))


@pytest.mark.parametrize("kind", [lambda dataset: dataset.repeat(), lambda dataset: dataset.shuffle(seed=1).repeat()])
def test_an_endless_chain_of_which_every_element_fails_is_an_error(kind: Any) -> None:
    """The length of an endless chain is no bound: one epoch is."""
    chain = kind(millstream.MapDataset.source(Damaged(5, range(5)))).to_iter_dataset()
    with iter(chain.options(on_error="skip", max_errors=None)) as elements, pytest.raises(OSError, match="is damaged"):
        next(elements)


def test_an_epoch_alone_of_which_every_record_fails_is_an_error() -> None:
    """An epoch of `epochs` is a stream of its own: its last record is the last that fails."""
    loader = millstream.load(
        Damaged(3, range(3)), transformations=[millstream.Filter(bool)], on_error="skip", max_errors=None
    )
    records = (record for _, epoch in loader.epochs(1) for record in epoch)
    with pytest.raises(OSError, match="record 2 is damaged"):
        next(records)


def test_a_record_that_works_in_each_epoch_is_enough() -> None:
    """Records that fail at the end of one epoch and at the beginning of the next one are not all."""
    order = millstream.IndexSampler(2, shuffle=True, seed=0, num_epochs=20)
    keys = [order[position].record_key for position in range(40)]
    assert [1, 1] in [keys[position : position + 2] for position in range(40)]
    loader = millstream.DataLoader(
        data_source=Damaged(2, [1]),
        sampler=order,
        operations=[millstream.Filter(lambda _: True)],
        on_error="skip",
        max_errors=None,
    )
    assert list(loader) == [0] * 20


def test_substitutes_are_looked_for_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """If very many keys in a row fail, the first one's error is raised."""
    monkeypatch.setattr(failing_records, "MAX_SUBSTITUTES", 3)
    numbers = iter(millstream.load(Damaged(20, [*range(5, 9), *range(12, 15)]), on_error="skip"))
    assert [next(numbers) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(OSError, match="record 5 is damaged") as caught:
        next(numbers)
    assert caught.value.__notes__[-1] == "millstream: cannot replace the record: the next 3 keys also fail."
    numbers.seek(12)
    assert next(numbers) == 15


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_what_is_not_a_records_failure_is_raised(error: type[BaseException]) -> None:
    """MemoryError, Ctrl-C and errors of a Batch are raised, and skip no record."""

    def fail(number: int) -> int:
        if number == 1:
            raise error(number)
        return number

    with pytest.raises(error):
        list(millstream.load(range(4), num_epochs=1, transformations=[fail], on_error="skip"))
    with pytest.raises(millstream.errors.StackError):
        next(iter(millstream.load([[1], [1, 2]], batch_size=2, on_error="skip")))


def test_skipping_is_part_of_what_a_stream_is() -> None:
    """A state is refused where errors are raised instead; another limit is the same stream."""
    state = iter(millstream.load(range(4), on_error="skip")).get_state()
    iter(millstream.load(range(4), on_error="skip", max_errors=5)).set_state(state)
    with pytest.raises(CheckpointError, match="on_error"):
        iter(millstream.load(range(4))).set_state(state)


PLANNED = {
    "sampler": millstream.PackingSampler([2, 3], row_length=4, num_epochs=1, shuffle=True, seed=0),
    "operations": [millstream.Pack({"tokens": 4})],
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "ignore"}, "on_error must be 'raise' or 'skip', got 'ignore'"),
        ({"on_error": "skip", "max_errors": -1}, "max_errors must be at least 0, got -1"),
        ({"max_errors": 3}, "max_errors=3 needs on_error='skip'"),
        # Rows that are planned from lengths have no room for another document.
        ({"on_error": "skip", **PLANNED}, "on_error must be 'raise' with a PackingSampler"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    """Wrong options are errors at construction with the rule."""
    with pytest.raises(ValueError, match=message):
        millstream.DataLoader(**{"data_source": [[1, 2]] * 2, "sampler": millstream.IndexSampler(2), **options})
