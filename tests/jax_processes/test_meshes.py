"""Global batches under shardings over any mesh of real JAX processes are those of one process."""

from pathlib import Path

import numpy as np
import pytest

from millstream.samplers import IndexSampler
from millstream.sharding import ShardOptions
from millstream.transforms import Batch
from support.jax_processes.groups import run_group
from support.jax_processes.programs import GLOBAL_BATCH, SEED, SIZE, Row, loader
from support.oracle.stream import oracle

pytestmark = pytest.mark.third_party

MESHES = {
    "data": ((4,), ("data",), ("data",)),
    "data and model": ((2, 2), ("data", "model"), ("data",)),
    "model": ((1, 4), ("data", "model"), ("data",)),
    "rows and tokens": ((2, 2), ("data", "context"), ("data", "context")),
    "rows over two axes": ((2, 2), ("data", "fsdp"), (("data", "fsdp"),)),
    "tokens": ((4,), ("context",), (None, "context")),
}
GROUPS = {
    "data": [0, 1, 2, 3],
    "data and model": [0, 0, 1, 1],
    "model": [0, 0, 0, 0],
    "rows and tokens": [0, 0, 1, 1],
    "rows over two axes": [0, 1, 2, 3],
    "tokens": [0, 0, 0, 0],
}
"""The shard of each process."""


def test_the_global_array_is_that_of_one_process_on_any_mesh(tmp_path: Path) -> None:
    """On four processes, arrays and shards are as they should be, wrong shards are refused, and states resume."""
    sampler = IndexSampler(SIZE, shuffle=True, seed=SEED, num_epochs=1)
    stream = iter(oracle(range(SIZE), sampler, [Row(), Batch(GLOBAL_BATCH)]))
    expected = [next(stream), next(stream)]
    following = next(stream)

    for process, told in enumerate(run_group("fill_meshes", 4, tmp_path / "log", save_to=tmp_path, meshes=MESHES)):
        for name, outcome in told.items():
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
                batches.set_state((tmp_path / f"{name} {process}").read_bytes())
                np.testing.assert_array_equal(next(batches), following)
