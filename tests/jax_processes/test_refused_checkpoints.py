"""A checkpoint that a group of JAX processes cannot resume from is refused by all of them, and changes nothing."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from millstream.samplers import IndexSampler
from millstream.sharding import ShardOptions
from millstream.transforms import Batch, Transformation
from support.jax_processes.groups import run_group
from support.jax_processes.programs import DAMAGES, GLOBAL_BATCH, SEED, SIZE, Noise, NotThird, restore_each
from support.oracle.stream import oracle
from support.streams import equal_streams

pytestmark = [pytest.mark.third_party, pytest.mark.slow]

STEP = 4
PROCESSES = 3


class Refused(NamedTuple):
    """The folder of the checkpoints, and the reports of each process of the group that saved them."""

    folder: Path
    filtered: list[Any]
    told: list[dict[str, tuple[str, bool]]]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Refused:
    """Three processes save a 1:1 pipeline and a filtered one, damage copies, and restore all of them."""
    folder = tmp_path_factory.mktemp("refused")
    reports = run_group("save_and_restore", PROCESSES, folder / "log", folder=folder, step=STEP)
    return Refused(folder, [filtered for filtered, _ in reports], [told for _, told in reports])


def assert_all_refused(told: dict[str, tuple[str, bool]]) -> None:
    """Asserts that every error gives the right reason, and that every iterator is where it was."""
    reasons = {name: text for name, (_, text) in DAMAGES.items()}
    for name, text in {**reasons, "another seed": "sampler.seed", "another pipeline": "operations[0]"}.items():
        why, is_where_it_was = told[name]
        assert text in why, name
        assert is_where_it_was, name
    assert "process_1-of-3.json" in told["half-written"][0]


def test_all_processes_refuse_what_one_of_them_cannot_read(refused: Refused) -> None:
    """With as many processes as saved, one damaged or missing state makes all refuse, and none waits for another.

    Positions that differ are fine here: each process resumes from the one that it saved.
    """
    for told in refused.told:
        assert_all_refused(told)
        assert [told["places"][0], told["filtered"][0]] == ["", ""]


def test_another_number_of_processes_refuses_the_same(refused: Refused) -> None:
    """Files missing, damaged or at different positions: each is a CheckpointError here too, in a group of one."""
    told = restore_each(refused.folder)
    assert_all_refused(told)
    assert "shard 1 at step 4, position 48, shard 2 at step 5, position 60" in told["places"][0]
    assert "logical_shards: saved 3, here 1" in told["filtered"][0]
    assert told["places"][1]
    assert told["filtered"][1]


def test_a_filtered_pipeline_goes_on_in_as_many_processes(refused: Refused) -> None:
    """Each process resumes from its own state and yields the rest of its own stream."""
    sampler = IndexSampler(SIZE, shuffle=True, seed=SEED, num_epochs=9)
    for index, batches in enumerate(refused.filtered):
        operations: list[Transformation] = [NotThird(), Noise(), Batch(GLOBAL_BATCH // PROCESSES, drop_remainder=True)]
        whole = list(oracle(range(SIZE), sampler, operations, ShardOptions(index, PROCESSES, drop_remainder=True)))
        assert equal_streams(whole[STEP : STEP + 3], batches)
