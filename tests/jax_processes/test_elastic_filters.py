"""Filtered, split and packed streams on groups of real JAX processes of any size: the same global batches in all."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.samplers import IndexSampler
from millstream.sharding import ShardOptions
from millstream.transforms import Batch
from support.jax_processes.groups import run_group
from support.jax_processes.programs import DEALT, GLOBAL_BATCH, LOGICAL_SHARDS, SEED, SIZE
from support.oracle.stream import oracle
from support.streams import equal_streams

pytestmark = pytest.mark.third_party

LIVES = [2, 4, 1]
"""How many processes each group has; it resumes where the one before has saved."""

STEPS = 3


@functools.cache
def expected(name: str, num_epochs: int) -> list[Any]:
    """Returns the global batches as one process makes them, without any loader."""
    sampler = IndexSampler(SIZE, shuffle=True, seed=SEED, num_epochs=num_epochs)
    operations = [*DEALT[name], Batch(GLOBAL_BATCH, drop_remainder=True)]
    return list(oracle(range(SIZE), sampler, operations, ShardOptions(0, 1, logical_shards=LOGICAL_SHARDS)))


def test_each_group_resumes_from_all_states_of_the_one_before(tmp_path: Path) -> None:
    """2 -> 4 -> 1 processes: byte for byte the global stream, with workers too, through both ways to restore."""
    for number, processes in enumerate(LIVES):
        step = number * STEPS
        devices = LOGICAL_SHARDS // processes
        for told in run_group(
            "train_dealt",
            processes,
            tmp_path / f"life_{number}.log",
            devices=devices,
            folder=tmp_path,
            step=step,
            steps=STEPS,
            worker_count=number % 2,
        ):
            for name, batches in told.items():
                assert equal_streams(expected(name, 9)[step : step + 2 * STEPS], batches), (number, name)


def test_processes_that_agree_on_the_steps_end_together(tmp_path: Path) -> None:
    """The fewest steps of all processes are those of a single one, and none waits for another that has ended."""
    said = run_group("end_together", LOGICAL_SHARDS, tmp_path / "log")
    for name in DEALT:
        assert min(own for own, _ in (told[name] for told in said)) == len(expected(name, 1))
        for told in said:
            assert equal_streams(told[name][1], expected(name, 1))
    # Without that, some would go on alone.
    assert any(np.ptp([told[name][0] for told in said]) > 0 for name in DEALT)
