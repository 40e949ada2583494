"""Streams and shardings on groups of real JAX processes of any size and mesh: one global stream.

A checkpoint that a group cannot resume from is refused by all of its processes, and changes nothing.
"""

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.samplers import IndexSampler
from millstream.sharding import ShardOptions
from millstream.transforms import Batch, Transformation
from support.jax_processes.groups import run_group
from support.jax_processes.programs import (
    DAMAGES,
    DEALT,
    EVALUATIONS,
    GLOBAL_BATCH,
    LOGICAL_SHARDS,
    SEED,
    SIZE,
    Noise,
    NotThird,
    Row,
    loader,
    restore_each,
    train_dealt,
)
from support.oracle.stream import oracle
from support.streams import equal_streams

pytestmark = [pytest.mark.third_party, pytest.mark.slow]

LIVES = [2, 4, 1]
"""The number of processes of each group. A group resumes where the previous one has saved. One is that of the tests."""

STEPS = 3

ENDED = [2, 4]
"""Of these groups, those that read finite streams to their ends."""


@functools.cache
def expected(name: str, num_epochs: int) -> list[Any]:
    """Returns the global batches as one process makes them, without any loader."""
    sampler = IndexSampler(SIZE, shuffle=True, seed=SEED, num_epochs=num_epochs)
    operations = [*DEALT[name], Batch(GLOBAL_BATCH, drop_remainder=True)]
    return list(oracle(range(SIZE), sampler, operations, ShardOptions(0, 1, logical_shards=LOGICAL_SHARDS)))


MESHES = {
    "data": ((4,), ("data",), ("data",)),
    "data and model": ((2, 2), ("data", "model"), ("data",)),
    "model": ((1, 4), ("data", "model"), ("data",)),
    "rows and tokens": ((2, 2), ("data", "context"), ("data", "context")),
    "rows over two axes": ((2, 2), ("data", "fsdp"), (("data", "fsdp"),)),
    "tokens": ((4,), ("context",), (None, "context")),
}
EACH, PAIRS, ONE = [0, 1, 2, 3], [0, 0, 1, 1], [0, 0, 0, 0]
GROUPS = dict(zip(MESHES, [EACH, PAIRS, ONE, PAIRS, EACH, ONE], strict=True))
"""The shard of each process."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ended")


STAGED_STEPS = 5
SAVED_STEP = 4


@pytest.fixture(scope="module")
def groups(folder: Path) -> dict[int, list[Any]]:
    """Returns the reports of the processes of each group of LIVES, by the number of processes.

    Those of four also save a 1:1 pipeline and a filtered one, damage copies, and restore all of them.
    """
    ends: dict[str, Any] = {"end_together": {}, "evaluate": {}}
    tasks = {
        2: ends
        | {"stage": {"steps": STAGED_STEPS}, "compare_hosts": {"bad": [[1, 2], [7]]}, "warn_or_shard": {}}
        | {"ask_jax": {}, "fit_together": {}},
        4: ends
        | {"fill_meshes": {"save_to": folder, "meshes": MESHES}}
        | {"agree_on_ends": {"batch_size": 3, "resumed_after": 5}}
        | {"save_and_restore": {"folder": folder, "step": SAVED_STEP}},
    }
    told = {}
    for number, count in enumerate(LIVES):
        dealt: dict[str, Any] = {"folder": folder, "step": number * STEPS, "steps": STEPS, "worker_count": number % 2}
        if count == 1:
            told[count] = [{"train_dealt": train_dealt(**dealt)}]
            continue
        devices, log = LOGICAL_SHARDS // count, folder / f"log of {count}"
        told[count] = run_group("run_each", count, log, devices=devices, tasks=tasks[count] | {"train_dealt": dealt})
    return told


def test_each_group_resumes_from_all_states_of_the_one_before(groups: dict[int, list[Any]]) -> None:
    """2 -> 4 -> 1 processes: byte for byte the global stream, with workers too, through both ways to restore."""
    for number, group in enumerate(groups.values()):
        step = number * STEPS
        for told in group:
            for name, batches in told["train_dealt"].items():
                assert equal_streams(expected(name, 9)[step : step + 2 * STEPS], batches), (number, name)


def test_operations_know_the_process_of_the_run(groups: dict[int, list[Any]]) -> None:
    """`jax.process_index()` and `jax.process_count()` in an operation are those of the trainer, in workers too."""
    assert [told["ask_jax"] for told in groups[2]] == [[[(index, 2)]] * 3 for index in (0, 1)]


def test_devices_of_several_processes(groups: dict[int, list[Any]]) -> None:
    """With a sharding over several processes, each gives its rows and gets the oracle's global batch."""
    sampler = IndexSampler(SIZE, shuffle=True, seed=SEED, num_epochs=2)
    operations = [Noise(), Batch(GLOBAL_BATCH, drop_remainder=True)]
    expected = list(itertools.islice(oracle(range(SIZE), sampler, operations), STAGED_STEPS))
    for told in groups[2]:
        staged = told["stage"]
        assert equal_streams(expected, staged["global"])
        assert staged["shapes"] == [(GLOBAL_BATCH,)] * STAGED_STEPS
        assert staged["step"] == STAGED_STEPS
        assert staged["refused"] == "device must belong to this process"


def test_two_jax_processes_are_warned_or_sharded(groups: dict[int, list[Any]]) -> None:
    """A loader without shards warns, `NoSharding()` says that it is intended, and shards of JAX deal the batches."""
    everything = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    for told, share in zip(groups[2], ([[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]), strict=True):
        (batches, (warning,)), *others = told["warn_or_shard"]
        assert (batches, *others) == (everything, (everything, []), (share, []))
        assert warning.startswith("JAX runs 2 processes, and this DataLoader is not sharded")


def test_streams_that_end_apart_end_together(groups: dict[int, list[Any]]) -> None:
    """Each element of each host comes once, in rows that are valid, until the last host of four has ended.

    A host that has no element at all fills every batch. Hosts that resume do so whether they have ended or not, and
    count the same steps; those that begin at different steps are told. Errors are raised where they are, and named on
    the others; the number of batches left is never negative.
    """
    counts = []
    for process, told in enumerate(groups[4]):
        ended = told["agree_on_ends"]
        batches = ended["kept"]
        assert batches == ended["resumed"]
        assert ended["kept: steps"] == ended["resumed: steps"] == len(batches)
        assert "differ: step is 1 on hosts 2 and 3, 0 on hosts 0 and 1" in ended["apart"]
        assert (ended["kept: again"], ended["nothing"], ended["nothing: again"]) == ([], [], [])
        assert all(kinds == ((12, 2), "int8", "bfloat16") and any(valid) for _, valid, kinds, _ in batches)
        rows = [[(number, is_valid) for number, is_valid in zip(*batch[:2], strict=True)] for batch in batches]
        hosts = [[pair for batch in rows for pair in batch[3 * host : 3 * host + 3]] for host in range(4)]
        kept = [[number for number, is_valid in pairs if is_valid] for pairs in hosts]
        assert all(not number for pairs in hosts for number, is_valid in pairs if not is_valid)
        assert sum(total for *_, total in batches) == sum(map(sum, kept))
        counts.append(kept)
        assert "KeyError" in ended["failed"] or "host 3 has an error at this step" in ended["failed"]
        assert ended["failed first"].startswith(
            "KeyError: 9 " if process == 3 else "ValueError: Cannot build a global "
        )
        assert "first batch is an error, KeyError on host 3, no error on hosts 0, 1 and 2" in ended["failed first"]
        assert "Cannot build a global batch" in ended["structure"]
        assert ended["at the end"] == (9, 0, 25 - process // 2)
    assert counts == [counts[0]] * 4
    # The eight whole global batches of twelve numbers, and one of the last four for each host.
    dealt = [[12 * block + 3 * host + row for block in range(8) for row in range(3)] + [96 + host] for host in range(4)]
    assert counts[0] == [[number for number in numbers if number % 4 < host] for host, numbers in enumerate(dealt)]


DIFFERENT = ["sampler.seed", "source", "operations[0]", "global batch", "records", "step"]
SHORT = "other hosts may have another number of rows"


def test_hosts_that_read_different_streams_are_told_before_the_first_batch(groups: dict[int, list[Any]]) -> None:
    """Each difference is an error on all hosts that names the host and the difference; one of code is a warning.

    The error of one host's first batch is its own there, and named on the others.
    """
    hosts = [told["fit_together"] for told in groups[2]]
    for told in hosts:
        assert told["the same"] == [[(8,)] * 4, "", ""]
        for name in DIFFERENT:
            shapes, error, _ = told[name]
            assert shapes == []
            assert error.startswith("ValueError: Cannot build a global batch: host 1 and host 0 differ: "), error
            assert f"{name} is " in error
        assert told["code"][:2] == [[(8,)] * 4, ""]
        assert "host 1 and host 0 differ: operations[0].map()" in told["code"][2]
    assert "first batch is an error, KeyError on host 1, a batch on host 0" in hosts[0]["first batch"][1]
    assert hosts[1]["first batch"][1].startswith("KeyError")


def test_no_global_batch_is_made_of_parts_of_different_sizes(groups: dict[int, list[Any]]) -> None:
    """A short last batch comes if all hosts have as many rows. Otherwise it is an error on each host that has one."""
    for process, told in enumerate(of_process["fit_together"] for of_process in groups[2]):
        for name in ("even", "even by sharding"):
            assert told[name] == [[(8,), (8,), (4,)], "", ""]
        assert told["even at its end"][:2] == [[(4,)], ""]
        assert told["window"][:2] == [[(8,)] * 3, ""]
        assert told["even chain"][:2] == [[(8,), (8,)], ""]
        for name, shapes in (("uneven rows", [(8,), (8,)]), ("uneven at its end", [])):
            assert told[name][0] == shapes
            assert SHORT in told[name][1]
            assert "the last batch has 2 rows on host 0, 1 on host 1" in told[name][2]
        assert told["uneven steps"][0] == [(8,), (8,)]
        assert (SHORT in told["uneven steps"][1]) == (process == 0)
        assert "host 0 has 3 batches, host 1 has 2" in told["uneven steps"][2]
        assert told["uneven by sharding"][1].startswith("ValueError: Cannot build a global array of the last step")
        assert SHORT in told["chain"][1]
        assert "3 batches, the last one of 1 on host 1, 3 batches, the last one of 2 on host 0" in told["chain"][2]


def test_hosts_are_compared(groups: dict[int, list[Any]]) -> None:
    """Each process learns which of them waits most, how much, and how many records all of them have skipped."""
    results = [told["compare_hosts"] for told in groups[2]]
    assert [metrics["loader/errors"] for metrics in results] == [2.0, 1.0]
    slowest = max(range(2), key=lambda process: results[process]["loader/wait_share"])
    for metrics in results:
        assert metrics["loader/slowest_host"] == slowest
        assert metrics["loader/slowest_host_wait_share"] == results[slowest]["loader/wait_share"]
        assert metrics["loader/slowest_host_batches_per_second"] == results[slowest]["loader/batches_per_second"]
        assert (metrics["loader/all_hosts_errors"], metrics["loader/all_hosts_worker_deaths"]) == (3.0, 0.0)


def test_processes_that_agree_on_the_steps_end_together(groups: dict[int, list[Any]]) -> None:
    """The fewest steps of all processes are those of a single one, and none waits for another that has ended."""
    for count in ENDED:
        dealt = [told["end_together"] for told in groups[count]]
        for name in DEALT:
            assert min(told[name][0] for told in dealt) == len(expected(name, 1))
            for told in dealt:
                assert equal_streams(told[name][1], expected(name, 1))
    # Without that, some would go on alone.
    assert any(np.ptp([told["end_together"][name][0] for told in groups[LOGICAL_SHARDS]]) > 0 for name in DEALT)


@functools.cache
def expected_evaluation(name: str) -> list[Any]:
    """Returns the padded global batches as one process makes them, without any loader."""
    keys = millstream.surviving_keys(range(SIZE), EVALUATIONS[name])
    sampler = IndexSampler(len(keys), keys=keys, num_epochs=1, shuffle=True, seed=SEED)
    return list(oracle(range(SIZE), sampler, [Row(), Batch(GLOBAL_BATCH, pad_remainder=True)]))


def test_every_record_is_evaluated_once_on_any_number_of_processes(groups: dict[int, list[Any]]) -> None:
    """Global batches and masks are those of one process; shards without a real row in the last one still take part."""
    for told in itertools.chain.from_iterable(groups[count] for count in ENDED):
        for name, batches in told["evaluate"].items():
            assert equal_streams(batches, expected_evaluation(name))
            numbers = np.concatenate([batch[mask] for batch, mask in batches])[:, 0]
            assert sorted(numbers.tolist()) == [k for k in range(SIZE) if name == "all" or k % 3 != 0]
    for count in ENDED:
        last = [batches[-1] for told in groups[count] for batches in told["evaluate"].values()]
        assert not any(batch.mask[-GLOBAL_BATCH // count :].any() for batch in last)


def test_the_global_array_is_that_of_one_process_on_any_mesh(groups: dict[int, list[Any]], folder: Path) -> None:
    """On four processes, arrays and shards are as they should be, wrong shards are refused, and states resume."""
    sampler = IndexSampler(SIZE, shuffle=True, seed=SEED, num_epochs=1)
    stream = iter(oracle(range(SIZE), sampler, [Row(), Batch(GLOBAL_BATCH)]))
    expected = [next(stream), next(stream)]
    following = next(stream)

    for name, shards in GROUPS.items():
        # Of the processes that need the same rows, one reads.
        assert sum(told["fill_meshes"][name]["reads"] for told in groups[LOGICAL_SHARDS]) == len(set(shards)), name
    for process, told in enumerate(groups[LOGICAL_SHARDS]):
        assert told["fill_meshes"].keys() == MESHES.keys()
        for name, outcome in told["fill_meshes"].items():
            count = max(GROUPS[name]) + 1
            assert outcome["shard"] == (GROUPS[name][process], count), name
            for (shape, batch, parts), whole in zip(outcome["taken"], expected, strict=True):
                assert shape == whole.shape
                np.testing.assert_array_equal(batch, whole)
                for index, part in parts.items():
                    np.testing.assert_array_equal(part, whole[eval(index)])
            is_refused = "Use shard_options=ShardBySharding(sharding" in outcome["refused"]
            assert is_refused == (GROUPS[name] != [0, 1, 2, 3]), outcome["refused"]
            # Whatever the mesh was, the state is a position in the one stream of global batches.
            with iter(loader(ShardOptions(0, 1, drop_remainder=True), Row())) as batches:
                batches.set_state((folder / f"{name} {process}").read_bytes())
                np.testing.assert_array_equal(next(batches), following)


def assert_all_refused(told: dict[str, tuple[str, bool]]) -> None:
    """Asserts that every error gives the right reason, and that every iterator is where it was."""
    reasons = {name: text for name, (_, text) in DAMAGES.items()}
    for name, text in {**reasons, "another seed": "sampler.seed", "another pipeline": "operations[0]"}.items():
        why, is_where_it_was = told[name]
        assert text in why, name
        assert is_where_it_was, name
    assert "process_1-of-4.json" in told["half-written"][0]


def test_all_processes_refuse_what_one_of_them_cannot_read(groups: dict[int, list[Any]]) -> None:
    """With as many processes as saved, one damaged or missing state makes all refuse, and none waits for another.

    Positions that differ are fine here: each process resumes from the one that it saved.
    """
    for _, told in (of_process["save_and_restore"] for of_process in groups[4]):
        assert_all_refused(told)
        assert [told["places"][0], told["filtered"][0]] == ["", ""]


@pytest.mark.usefixtures("groups")
def test_another_number_of_processes_refuses_the_same(folder: Path) -> None:
    """Files missing, damaged or at different positions: each is a CheckpointError here too, in a group of one."""
    told = restore_each(folder)
    assert_all_refused(told)
    assert "shard 1 at step 4, position 48, shard 2 at step 5, position 60" in told["places"][0]
    assert "logical_shards: saved 4, here 1" in told["filtered"][0]
    assert told["places"][1]
    assert told["filtered"][1]


def test_a_filtered_pipeline_goes_on_in_as_many_processes(groups: dict[int, list[Any]]) -> None:
    """Each process resumes from its own state and yields the rest of its own stream."""
    sampler = IndexSampler(SIZE, shuffle=True, seed=SEED, num_epochs=9)
    for index, (batches, _) in enumerate(of_process["save_and_restore"] for of_process in groups[4]):
        operations: list[Transformation] = [NotThird(), Noise(), Batch(GLOBAL_BATCH // 4, drop_remainder=True)]
        whole = list(oracle(range(SIZE), sampler, operations, ShardOptions(index, 4, drop_remainder=True)))
        assert equal_streams(whole[SAVED_STEP : SAVED_STEP + 3], batches)
