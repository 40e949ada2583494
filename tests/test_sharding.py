"""The shard of every global batch that a process reads: by the options, and by JAX."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import millstream
from millstream.sharding import NoSharding, RowGroup, ShardOptions
from support.processes.worker_pools import python


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((0, 0), ValueError, "shard_count must be at least 1, got 0"),
        ((0, 1 << 32), ValueError, "shard_count must be at most 2,147,483,648"),
        ((2, 2), ValueError, "shard_index must be between 0 and shard_count - 1 = 1, got 2"),
        ((-1, 2), ValueError, "shard_index must be between 0 and shard_count - 1 = 1, got -1"),
        (("0", 2), TypeError, "shard_index must be an integer, got '0' of type str"),
        ((0, 2.0), TypeError, "shard_count must be an integer, got 2.0 of type float"),
        ((0, None), TypeError, "shard_count must be an integer, got None of type NoneType"),
        ((False, 2), TypeError, "shard_index must be an integer, got False of type bool"),
        ((0, 2, 1), TypeError, "drop_remainder must be True or False, got 1"),
        ((0, 2, False, 3), ValueError, "logical_shards must be a multiple of shard_count = 2, got 3"),
        ((0, 2, False, 0), ValueError, "logical_shards must be at least 1, or None, got 0"),
        ((0, 2, False, 2.0), TypeError, "logical_shards must be an integer, got 2.0 of type float"),
    ],
)
def test_wrong_options_are_refused(arguments: tuple[Any, ...], kind: type[Exception], text: str) -> None:
    """Each wrong argument has an error that names it, the rule and what was given."""
    with pytest.raises(kind, match=text):
        ShardOptions(*arguments)


def test_options_are_plain_frozen_values() -> None:
    """Integers of numpy's become Python's, equal options are equal and hash alike, and nothing can be changed."""
    options = ShardOptions(np.int32(1), np.uint8(4), drop_remainder=True)  # type: ignore[arg-type]  # what users pass

    assert (type(options.shard_index), type(options.shard_count)) == (int, int)
    assert options == ShardOptions(1, 4, drop_remainder=True)
    assert hash(options) == hash(ShardOptions(1, 4, drop_remainder=True))
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.shard_index = 0  # type: ignore[misc]  # that is the point


def test_no_sharding_is_the_only_shard() -> None:
    """`NoSharding()` is shard 0 of 1, is picklable, and is a `ShardOptions`; it is that of a loader without another."""
    options = pickle.loads(pickle.dumps(NoSharding()))

    assert (options.shard_index, options.shard_count, options.drop_remainder) == (0, 1, False)
    assert isinstance(options, ShardOptions)
    assert millstream.load([1]).shard_options == NoSharding() == options
    assert millstream.load([1], shard_options=ShardOptions(1, 3)).shard_options == ShardOptions(1, 3)


def test_shards_divide_a_global_batch() -> None:
    """`local_batch_size` says how much each shard gets of a global batch; one that cannot be shared is an error."""
    for shard_count in (1, 2, 3, 4, 6, 12):
        assert ShardOptions(0, shard_count).local_batch_size(12) * shard_count == 12
    for shard_count, size in ((5, 12), (24, 12), (1, 0), (3, -3)):
        with pytest.raises(ValueError, match=f"a positive multiple of shard_count = {shard_count}, got {size}"):
            ShardOptions(0, shard_count).local_batch_size(size)


@pytest.mark.parametrize(
    ("variable", "value", "is_refused"),
    [
        ("OMPI_COMM_WORLD_SIZE", "4", True),
        ("SLURM_STEP_NUM_TASKS", "2", True),
        ("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1234", True),
        ("OMPI_COMM_WORLD_SIZE", "1", False),
        ("SLURM_STEP_NUM_TASKS", "", False),
    ],
)
def test_processes_that_jax_was_not_told_of_are_an_error(
    variable: str, value: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several processes in which JAX was not initialised would read everything: it is told what to call."""
    monkeypatch.setenv(variable, value)
    if is_refused:
        with pytest.raises(RuntimeError, match=rf"{variable}={value} announces .* jax\.distributed\.initialize\(\)"):
            millstream.ShardByJaxProcess()
    else:
        assert millstream.ShardByJaxProcess().shard_count == 1


def test_a_loader_without_jax_does_not_import_it_and_one_process_needs_no_shards(tmp_path: Path) -> None:
    """Building, iterating and describing a loader never imports JAX; with JAX in one process, there is no warning."""
    code = """
import sys, millstream, warnings; warnings.simplefilter("error", UserWarning)
loader = millstream.load([1, 2, 3], num_epochs=1, batch_size=2, shuffle=True, seed=0)
iterator = iter(loader)
next(iterator); iterator.get_state(); repr(loader); len(loader); loader.record_keys(0)
print("jax" in sys.modules)
import jax
from jax._src import xla_bridge
loader = millstream.load([1, 2, 3])
print(xla_bridge.backends_are_initialized(), loader.shard_options == millstream.NoSharding())
print(millstream.ShardByJaxProcess(True))
"""
    done = python("-c", code, cwd=tmp_path, check=True)

    assert done.stdout.splitlines() == [
        "False",
        "False True",
        "ShardByJaxProcess(shard_index=0, shard_count=1, drop_remainder=True, logical_shards=None)",
    ]


@pytest.mark.parametrize(
    ("operations", "shard_count", "logical_shards", "is_told"),
    [
        ([millstream.transforms.Filter(bool)], 2, None, True),
        ([abs, millstream.transforms.FlatMap(lambda number: [number], max_fan_out=1)], 4, None, True),
        ([millstream.transforms.Filter(bool)], 1, None, False),
        ([millstream.transforms.Filter(bool)], 2, 2, False),
        ([abs], 2, None, False),
    ],
)
def test_checkpoints_that_bind_to_the_shards_are_told_of(
    operations: list[Any], shard_count: int, logical_shards: int | None, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever builds a loader whose checkpoints need the same number of shards learns it then, and not at a restore.

    Whoever has said how many logical shards there are knows.
    """
    shard = ShardOptions(0, shard_count, drop_remainder=True, logical_shards=logical_shards)
    millstream.load(range(10), transformations=operations, shard_options=shard)

    said = [record.getMessage() for record in caplog.records]
    assert [f"can be resumed with exactly {shard_count} shards only, because operations[" in text for text in said] == [
        True
    ] * is_told


@pytest.mark.parametrize(
    ("parts", "groups"),
    [
        ({0: {0}, 1: {1}, 2: {2}, 3: {3}}, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ({0: {0}, 1: {0}, 2: {1}, 3: {1}}, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ({0: {2, 3}, 1: {0, 1}}, [(1, 2), (0, 2)]),
        ({0: {0, 1, 2, 3}, 1: {0, 1, 2, 3}}, [(0, 1), (0, 1)]),
    ],
)
def test_processes_that_need_the_same_rows_are_one_group(
    parts: dict[int, set[int]], groups: list[tuple[int, int]]
) -> None:
    """The groups are numbered in the order of their rows, wherever their processes stand in the mesh."""
    num_parts = max(map(max, parts.values())) + 1

    found = [RowGroup.among(parts, process, num_parts) for process in parts]

    assert [(group.index, group.count) for group in found] == groups
    assert [group.num_processes for group in found] == [groups.count(group) for group in groups]


@pytest.mark.parametrize(
    "parts",
    [
        {0: {0, 2}, 1: {1, 3}},
        {0: {0, 1}, 1: {1, 2}, 2: {2, 3}},
        {0: {0, 1, 2}, 1: {3}},
        {0: {0, 1}, 1: {0, 1, 2, 3}},
        {0: {0, 1}},
    ],
)
def test_rows_that_overlap_in_part_are_refused(parts: dict[int, set[int]]) -> None:
    """Rows that are no runs of one length, the same or apart, are an error that lists them."""
    with pytest.raises(ValueError, match=r"one run of rows.* process 0: \[0, .*Order the devices"):
        RowGroup.among(parts, 0, 4)


def test_wrong_shardings_are_refused() -> None:
    """A mesh without a device of this process, no NamedSharding and rows that cannot be split are errors."""
    device = jax.devices()[0]
    rows = jax.sharding.NamedSharding(jax.sharding.Mesh([device], ("data",)), jax.sharding.PartitionSpec("data"))

    with pytest.raises(ValueError, match="must include a device of this process, number 3"):
        RowGroup.among({0: {0}}, 3, 1)
    with pytest.raises(TypeError, match=r"sharding must be a jax\.sharding\.NamedSharding.* got SingleDeviceSharding"):
        millstream.ShardBySharding(jax.sharding.SingleDeviceSharding(device), 8)  # type: ignore[arg-type]  # what is refused
    unconstrained = jax.sharding.PartitionSpec(jax.sharding.PartitionSpec.UNCONSTRAINED)
    any_rows = jax.sharding.NamedSharding(rows.mesh, unconstrained)
    with pytest.raises(
        ValueError, match=r"sharding must specify how the first dimension is split, got .*UNCONSTRAINED"
    ):
        millstream.ShardBySharding(any_rows, 8)
    with pytest.raises(ValueError, match="global_batch_size must be at least 1, got 0"):
        millstream.ShardBySharding(rows, 0)
    with pytest.raises(ValueError, match="logical_shards must be at least 1"):
        millstream.ShardBySharding(rows, 8, logical_shards=0)
    assert vars(millstream.ShardBySharding(rows, 8, share_on_host=True)) == vars(ShardOptions(0, 1))
