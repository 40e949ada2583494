"""A checkpoint that a group of JAX processes cannot resume from is refused by all of them, and changes nothing."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from millstream.loader.checkpoints.state import LoaderState
from millstream.samplers import IndexSampler
from millstream.sharding import ShardOptions
from millstream.transforms import Batch, Transformation
from support.jax_processes.groups import run_group
from support.jax_processes.programs import GLOBAL_BATCH, SEED, SIZE, Noise, NotThird, restore_each
from support.oracle.stream import oracle
from support.streams import equal_streams

pytestmark = pytest.mark.third_party

STEP = 4
PROCESSES = 3


def cut_short(states: Path) -> None:
    file = states / "process_1-of-3.json"
    file.write_bytes(file.read_bytes()[:100])


def move(states: Path) -> None:
    """Moves one process's state a batch further than the others."""
    file = states / "process_2-of-3.json"
    state = LoaderState.decode(file.read_bytes())
    further = state.cursors[0]._replace(position=state.cursors[0].position + GLOBAL_BATCH)
    moved = state._replace(step=state.step + 1, cursors=(further,))
    file.write_bytes(moved.encode())


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "half-written": (cut_short, "Cannot read"),
    "one missing": (lambda states: (states / "process_1-of-3.json").unlink(), "process_1-of-3.json is missing"),
    "mixed": (
        lambda states: shutil.copy(states / "process_0-of-3.json", states / "process_0-of-4.json"),
        "states of 3 and 4 processes",
    ),
}
"""Mistakes in a checkpoint, and the text of each error."""


class Saved(NamedTuple):
    """The folders of checkpoints `whole` and `filtered`, and what each process of the latter yields after it."""

    folder: Path
    filtered: list[Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Returns checkpoints of a 1:1 pipeline and of a filtered one, saved by three processes."""
    folder = tmp_path_factory.mktemp("refused")
    return Saved(folder, run_group("save_both", PROCESSES, folder / "log", folder=folder, step=STEP))


def damaged(saved: Saved, folder: Path, damage: Callable[[Path], object]) -> Path:
    shutil.copytree(saved.folder / "whole", folder)
    damage(folder / str(STEP) / "loader")
    return folder


def attempts_at(saved: Saved, folder: Path) -> dict[str, tuple[Path, int, bool]]:
    """Returns ways to fail that do not depend on the number of processes, and two that do: `places` and `filtered`."""
    broken = {name: damaged(saved, folder / name, damage) for name, (damage, _) in DAMAGES.items()}
    return {
        **{name: (path, SEED, False) for name, path in broken.items()},
        "another seed": (saved.folder / "whole", SEED + 1, False),
        "another pipeline": (saved.folder / "whole", SEED, True),
        "places": (damaged(saved, folder / "places", move), SEED, False),
        "filtered": (saved.folder / "filtered", SEED, True),
    }


def assert_all_refused(told: dict[str, tuple[str, bool]]) -> None:
    """Asserts that every error gives the right reason, and that every iterator is where it was."""
    reasons = {name: text for name, (_, text) in DAMAGES.items()}
    for name, text in {**reasons, "another seed": "sampler.seed", "another pipeline": "operations[0]"}.items():
        why, is_where_it_was = told[name]
        assert text in why, name
        assert is_where_it_was, name
    assert "process_1-of-3.json" in told["half-written"][0]


def test_all_processes_refuse_what_one_of_them_cannot_read(saved: Saved, tmp_path: Path) -> None:
    """With as many processes as saved, one damaged or missing state makes all refuse, and none waits for another.

    Positions that differ are fine here: each process resumes from the one that it saved.
    """
    attempts = attempts_at(saved, tmp_path)
    for told in run_group("restore_each", PROCESSES, tmp_path / "log", attempts=attempts):
        assert_all_refused(told)
        assert [told["places"][0], told["filtered"][0]] == ["", ""]


def test_another_number_of_processes_refuses_the_same(saved: Saved, tmp_path: Path) -> None:
    """Files missing, damaged or at different positions: each is a CheckpointError here too, in a group of one."""
    told = restore_each(attempts_at(saved, tmp_path))
    assert_all_refused(told)
    assert "shard 1 at step 4, position 48, shard 2 at step 5, position 60" in told["places"][0]
    assert "logical_shards: saved 3, here 1" in told["filtered"][0]
    assert told["places"][1]
    assert told["filtered"][1]


def test_a_filtered_pipeline_goes_on_in_as_many_processes(saved: Saved) -> None:
    """Each process resumes from its own state and yields the rest of its own stream."""
    sampler = IndexSampler(SIZE, shuffle=True, seed=SEED, num_epochs=9)
    for index, batches in enumerate(saved.filtered):
        operations: list[Transformation] = [NotThird(), Noise(), Batch(GLOBAL_BATCH // PROCESSES, drop_remainder=True)]
        whole = list(oracle(range(SIZE), sampler, operations, ShardOptions(index, PROCESSES, drop_remainder=True)))
        assert equal_streams(whole[STEP : STEP + 3], batches)
