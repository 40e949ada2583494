"""Real JAX processes evaluate each record exactly once, and end together, however many there are."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.samplers import IndexSampler
from millstream.transforms import Batch
from support.jax_processes.groups import run_group
from support.jax_processes.programs import EVALUATIONS, GLOBAL_BATCH, SEED, SIZE, Row
from support.oracle.stream import oracle
from support.streams import equal_streams

pytestmark = pytest.mark.third_party


@functools.cache
def expected(name: str) -> list[Any]:
    """Returns the padded global batches as one process makes them, without any loader."""
    keys = millstream.surviving_keys(range(SIZE), EVALUATIONS[name])
    sampler = IndexSampler(len(keys), keys=keys, num_epochs=1, shuffle=True, seed=SEED)
    return list(oracle(range(SIZE), sampler, [Row(), Batch(GLOBAL_BATCH, pad_remainder=True)]))


@pytest.mark.parametrize("processes", [2, 4])
def test_every_record_is_evaluated_once_on_any_number_of_processes(processes: int, tmp_path: Path) -> None:
    """Global batches and masks are those of one process; shards without a real row in the last one still take part."""
    for told in run_group("evaluate", processes, tmp_path / "log"):
        for name, batches in told.items():
            assert equal_streams(batches, expected(name))
            numbers = np.concatenate([batch[mask] for batch, mask in batches])[:, 0]
            assert sorted(numbers.tolist()) == [k for k in range(SIZE) if name == "all" or k % 3 != 0]
            assert not batches[-1].mask[-GLOBAL_BATCH // processes :].any()
