"""The records at the end of a stream that a Batch drops: which are read, raise errors, or count, in every plan."""

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import millstream
from millstream import Batch, Filter, IterDataset, MapDataset, ReadOptions
from millstream.dataset.chain import Chain, fixed_chain
from millstream.loader.pipeline.calls import Position
from millstream.loader.pipeline.pipeline import UNLIMITED
from millstream.loader.pipeline.plan import Plan
from millstream.loader.scheduling.schedule import Schedule
from millstream.transforms import FlatMap


class Counted:
    """Numbers, of which some fail, are missing, or both, and the largest that was read."""

    def __init__(self, size: int, bad: Sequence[int] = (), missing: Sequence[int] = ()) -> None:
        self.size, self.bad, self.missing = size, frozenset(bad), frozenset(missing)
        self.largest = -1

    def __len__(self) -> int:
        return self.size

    def fingerprint(self) -> str:
        """Returns the same for all, however many were read."""
        return "numbers"

    def __getitem__(self, key: int) -> int | None:
        self.largest = max(self.largest, key)
        if key in self.bad:
            raise OSError(f"record {key}")
        return None if key in self.missing else key


def ran(plan: Plan, max_blocks: int = 1, start: Position | None = None) -> Iterator[tuple[Any, Position]]:
    """Yields each output of a plan and the position after it, with calls of up to `max_blocks`. Raises its error."""
    schedule = Schedule(plan, plan.beginning if start is None else start)
    while not schedule.exhausted:
        while (outputs := schedule.pop()) is not None:
            for row in range(outputs.first, len(outputs.values)):
                yield outputs.values[row], outputs.position_after(row)
            if outputs.error is not None:
                raise outputs.error
        stage = schedule.next_stage
        if stage is not None and (call := schedule.take(stage, max_blocks)) is not None:
            schedule.complete(call, plan.make(call.request, np.empty))


def outcome(outputs: Iterator[tuple[Any, Any]]) -> tuple[list[Any], str | None]:
    values: list[Any] = []
    try:
        values.extend(value for value, _ in outputs)
    except OSError as error:
        return values, str(error)
    return values, None


def batched(dataset: IterDataset[Any], size: int, *, drops: bool = True) -> IterDataset[Any]:
    return dataset.batch(size, drop_remainder=drops, batch_fn=list)


CHAINS: dict[str, Callable[[IterDataset[Any]], IterDataset[Any]]] = {
    "one": lambda dataset: batched(dataset, 4),
    "both drop": lambda dataset: batched(batched(dataset, 4), 3),
    "inner drops": lambda dataset: batched(batched(dataset, 4), 3, drops=False),
    "outer drops": lambda dataset: batched(batched(dataset, 4, drops=False), 3),
    "maps between": lambda dataset: batched(batched(dataset, 2).map(tuple), 2).map(tuple),
}


@pytest.mark.parametrize("name", CHAINS)
def test_every_plan_of_a_chain_reads_the_same_records_at_its_end(name: str) -> None:
    """The plan for missing elements reads and raises what the dense ones do, with calls of any size."""
    for size, bad in itertools.product((3, 13, 22, 24), (None, *range(10, 24, 3))):
        source = Counted(size, () if bad is None else [bad])
        step = CHAINS[name](MapDataset.source(source).to_iter_dataset(ReadOptions(0, 0)))._step
        plans = fixed_chain(step, Chain.of(step)).pipelines(UNLIMITED, None, allows_none=False)
        found: set[Any] = set()
        for pipeline, max_blocks in [(plans.dense, 1), (plans.checked, 2), (plans.sparse, 1), (plans.sparse, 3)]:
            assert pipeline is not None
            source.largest = -1
            made = outcome(ran(Plan(pipeline), max_blocks))
            # After a record that fails, calls may read further.
            found.add((repr(made), source.largest if made[1] is None else None))
        assert len(found) == 1, (size, bad, found)
        ((_, largest),) = found
        if name in {"one", "both drop"} and largest is not None:
            each = 4 if name == "one" else 12
            assert largest == size // each * each - 1


@pytest.mark.parametrize("name", CHAINS)
def test_states_are_the_same_in_every_plan(name: str) -> None:
    """The states after batches, the last one included, say nothing of the plan, and either plan resumes from them."""
    for size in (3, 13, 14, 22, 24):
        dataset = CHAINS[name](MapDataset.range(size).to_iter_dataset(ReadOptions(0, 0)))
        states: list[list[Any]] = []
        for is_dense in (True, False):
            with iter(dataset) as iterator:
                if not is_dense:
                    iterator._use_sparse(iterator._state())
                states.append([iterator.get_state()])
                for _ in iterator:
                    states[-1].append(iterator.get_state())
        assert states[0] == states[1], size
        for step, state in enumerate(states[0]):
            with iter(dataset) as resumed:
                resumed.set_state(state)
                assert len(list(resumed)) == len(states[0]) - 1 - step


@pytest.mark.parametrize(
    ("bad", "missing", "expected"),
    [
        # Of ten records, two are left for the third batch.
        ([8], [], ([[0, 1, 2, 3], [4, 5, 6, 7]], None)),
        ([8], [9], ([[0, 1, 2, 3], [4, 5, 6, 7]], None)),
        # The last batch needs one more of these.
        ([9], [1], ([[0, 2, 3, 4], [5, 6, 7, 8]], None)),
        ([8], [1], ([[0, 2, 3, 4]], "record 8")),
        ([8], [6, 7], ([[0, 1, 2, 3]], "record 8")),
        # It cannot be filled without the three that are missing.
        ([9], [5, 6, 7], ([[0, 1, 2, 3]], None)),
    ],
)
def test_an_error_is_one_if_a_batch_could_be_filled(
    bad: list[int], missing: list[int], expected: tuple[list[Any], str | None]
) -> None:
    """The same holds for elements that are missing or filtered out, known in advance or not, in calls of any size."""
    source = Counted(10, bad, missing)
    dataset = MapDataset.source(source)
    chains = [
        batched(dataset.to_iter_dataset(ReadOptions(0, 0)), 4),
        batched(dataset.filter(lambda _: True).to_iter_dataset(ReadOptions(0, 0)), 4),
        batched(dataset.to_iter_dataset(ReadOptions(2, 100), allow_nones=True).filter(lambda x: x is not None), 4),
    ]
    for chain in chains:
        with iter(chain) as iterator:
            assert outcome((value, None) for value in iterator) == expected
    loader = millstream.load(
        range(10),
        transformations=[Filter(lambda x: x not in missing), source.__getitem__, Batch(4, True, list)],
        num_epochs=1,
    )
    for max_blocks in (1, 2, 5):
        assert outcome(ran(Plan(loader._execution.pipeline), max_blocks)) == expected


class Each(FlatMap[Any, Any]):
    max_fan_out = 1

    def flat_map(self, element: Any) -> list[Any]:
        return [element]


def test_after_an_operation_that_splits_every_record_is_read() -> None:
    """A record that is split may fill any batch, so that its error is raised."""
    source = Counted(10, [9])
    dataset = MapDataset.source(source).to_iter_dataset(ReadOptions(0, 0))
    for split in (dataset.apply(Each()), dataset.window_shuffle(3, seed=1)):
        assert outcome((value, None) for value in batched(split, 4))[1] == "record 9"


def fail_from(first: int, batch: list[int]) -> list[int]:
    if batch[0] >= first:
        raise OSError(f"batch of {batch[0]}")
    return batch


def test_batches_of_a_dropped_remainder_are_not_mapped() -> None:
    """An operation between two Batches gets no batch that the second one drops, if none was filtered out before."""
    dataset = MapDataset.range(22).to_iter_dataset(ReadOptions(0, 0))
    mapped = batched(batched(dataset.filter(lambda _: True), 4).map(lambda batch: fail_from(12, batch)), 3)
    assert outcome((value, None) for value in mapped) == ([[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]], None)
    one_less = batched(dataset.filter(bool).map(lambda x: x - 1), 4).map(lambda batch: fail_from(12, batch))
    assert outcome((value, None) for value in batched(one_less, 3)) == outcome((value, None) for value in mapped)


def test_records_of_a_dropped_remainder_do_not_count_as_failed() -> None:
    """With on_error="skip", those that fail there are not in `errors`, nor too many; those between batches are."""
    options: dict[str, Any] = {"num_epochs": 1, "on_error": "skip", "max_errors": 1, "batch_size": 4}
    source = Counted(11, [1, 9, 10])
    keep = Filter(lambda _: True)
    dropping = millstream.load(source, transformations=[keep], drop_remainder=True, **options)
    assert [batch.tolist() for batch in dropping] == [[0, 2, 3, 4], [5, 6, 7, 8]]
    assert list(dropping.errors) == [1]
    keeping = millstream.load(source, transformations=[keep], **options)
    with pytest.raises(OSError, match="record 9"):
        collections.deque(keeping, maxlen=0)


def test_that_all_records_fail_is_an_error_in_a_dropped_remainder() -> None:
    """A stream without a batch because each record was skipped does not end as if it had been too short for one."""
    for size, error in ((5, "record 4"), (3, None)):
        dataset = MapDataset.source(Counted(size, range(size))).to_iter_dataset(ReadOptions(0, 0))
        with iter(batched(dataset, 4).options(on_error="skip", max_errors=None)) as batches:
            assert outcome((value, None) for value in batches) == ([], error)


@pytest.mark.filterwarnings("ignore:.*so shards may end at different steps:UserWarning")
@pytest.mark.parametrize(("bad", "host"), [(13, 0), (15, 1)])
def test_an_error_of_a_logical_shard_comes_at_its_step_on_any_host(bad: int, host: int) -> None:
    """A step that one logical shard cannot fill and in which another one fails is an error, wherever they run."""

    def steps(index: int, count: int) -> tuple[int, bool]:
        loader = millstream.DataLoader(
            data_source=Counted(16, [bad]),
            sampler=millstream.IndexSampler(16, num_epochs=1),
            # The other logical shard has no element left for the fourth batch.
            operations=[Filter(lambda x: x < 12 or x == bad - 1), Batch(4 // count, drop_remainder=True)],
            shard_options=millstream.ShardOptions(index, count, logical_shards=2),
        )
        with iter(loader) as batches:
            _, error = outcome((value, None) for value in batches)
            return batches.step, error is not None

    assert steps(0, 1) == steps(host, 2) == (3, True)
    assert steps(1 - host, 2) == (3, False)


@pytest.mark.parametrize("size", [1, 4])
def test_failures_in_a_row_depend_on_no_call_and_no_resume(size: int) -> None:
    """That all records fail is an error at the same record, whatever the sizes of calls, and wherever it resumes."""
    # Each epoch begins with a record that can be read. Of blocks of four records, one has no element.
    bad = [1, 2, 3, 4, 5, 6, 7]
    for num_records in (4, 5, 7, 8):
        loader = millstream.load(
            Counted(8, bad),
            transformations=[Filter(lambda _: True)],
            batch_size=size,
            num_epochs=4,
            on_error="skip",
            max_errors=None,
        )
        plan = Plan(loader._execution.pipeline)
        plan.num_in_a_row = num_records
        whole = outcome(ran(plan, 1))
        assert (whole[1] is None) == (num_records > (7 if size == 1 else 4))
        for max_blocks in (2, 3, 16):
            assert repr(outcome(ran(plan, max_blocks))) == repr(whole)
        positions = [position for _, position in itertools.islice(ran(plan, 1), len(whole[0]))]
        for number, start in enumerate(positions, 1):
            rest = whole[0][number:], whole[1]
            assert repr(outcome(ran(plan, 3, start))) == repr(rest)
