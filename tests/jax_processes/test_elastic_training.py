"""Groups of real JAX processes of any size train on the same global batches, and resume where another one stopped."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from millstream.samplers import IndexSampler
from millstream.transforms import Batch
from support.faults.user_faults import Pipe
from support.jax_processes.groups import run_group
from support.jax_processes.programs import GLOBAL_BATCH, SEED, SIZE, Noise
from support.oracle.stream import oracle
from support.streams import equal_streams

pytestmark = pytest.mark.third_party

STEPS_PER_LIFE = 5
STEPS_TOO_FAR = 2
"""How far training goes after saving: the next group has to go back."""


@dataclasses.dataclass(frozen=True)
class Life:
    """One group: how many processes, with how many devices and loader workers each, and whether one is killed."""

    processes: int
    devices: int
    workers: int
    killed: int | None = None


LIVES = [Life(3, 1, 1, killed=1), Life(1, 4, 2), Life(2, 2, 0)]
each_life = pytest.mark.parametrize(
    "number", range(len(LIVES)), ids=lambda number: f"{number}-{LIVES[number].processes}"
)


@functools.cache
def expected() -> list[Any]:
    """Returns the global batches as one process makes them, without any loader."""
    steps = STEPS_PER_LIFE * len(LIVES) + STEPS_TOO_FAR
    sampler = IndexSampler(SIZE, shuffle=True, seed=SEED, num_epochs=steps)
    stream = oracle(range(SIZE), sampler, [Noise(), Batch(GLOBAL_BATCH, drop_remainder=True)])
    return list(itertools.islice(stream, steps))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """Returns what the processes of each life report, one life after another, over one folder of checkpoints."""
    folder = tmp_path_factory.mktemp("elastic")
    said = []
    for number, life in enumerate(LIVES):
        with Pipe(folder / f"arrivals_{number}") as arrivals:
            said.append(
                run_group(
                    "train",
                    life.processes,
                    folder / f"life_{number}.log",
                    devices=life.devices,
                    folder=folder / "checkpoints",
                    save_at=STEPS_PER_LIFE * (number + 1),
                    stop_at=STEPS_PER_LIFE * (number + 1) + STEPS_TOO_FAR,
                    worker_count=life.workers,
                    arrivals=arrivals.path,
                    killed=life.killed,
                )
            )
    return said


def surviving_keys(told: list[list[Any]], number: int) -> list[dict[str, Any]]:
    """Returns what the processes of a life that were not killed report."""
    return [process for index, process in enumerate(told[number]) if index != LIVES[number].killed]


def expected_weights(steps: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns the model after this many global batches."""
    weights = np.arange(48, dtype=np.int32)
    for batch in expected()[:steps]:
        weights = weights * 31 + batch["noise"].view(np.int32).sum(dtype=np.int32) + batch["number"].sum(dtype=np.int32)
    return weights


@each_life
def test_every_group_goes_on_where_the_one_before_saved(told: list[list[Any]], number: int) -> None:
    """A position saved by n processes, in the background and with a sharded model, is valid for m processes too."""
    life = LIVES[number]
    assert [process["begin"] for process in surviving_keys(told, number)] == [number * STEPS_PER_LIFE] * (
        life.processes - (life.killed is not None)
    )
    assert {process["devices"] for process in surviving_keys(told, number)} == {life.processes * life.devices}


@each_life
def test_global_arrays_are_those_of_a_single_process(told: list[list[Any]], number: int) -> None:
    """Byte for byte, for every number of processes, devices and workers; every process sees all of it."""
    begin, end = number * STEPS_PER_LIFE, (number + 1) * STEPS_PER_LIFE + STEPS_TOO_FAR
    lost = LIVES[number].killed is not None
    for process in surviving_keys(told, number):
        assert equal_streams(expected()[begin : end - lost], process["global"])


@each_life
def test_local_batches_laid_end_to_end_are_the_global_one(told: list[list[Any]], number: int) -> None:
    """Process k has the k-th run of each global batch, and nothing else."""
    share = GLOBAL_BATCH // LIVES[number].processes
    for process in surviving_keys(told, number):
        rows = slice(process["process"] * share, (process["process"] + 1) * share)
        for local, whole in zip(process["local"], process["global"], strict=True):
            assert equal_streams([jax.tree.map(lambda leaf, rows=rows: leaf[rows], whole)], [local])


@each_life
def test_the_model_has_seen_every_batch_once_and_in_order(told: list[list[Any]], number: int) -> None:
    """A model restored with the loader, over other devices, continues as if there had been one group all along."""
    if LIVES[number].killed is None:
        steps = (number + 1) * STEPS_PER_LIFE + STEPS_TOO_FAR
        for process in told[number]:
            assert np.array_equal(process["weights"], expected_weights(steps))


def test_who_survives_a_killed_process_can_close_at_once(told: list[list[Any]]) -> None:
    """While JAX waits for the lost process, or has raised an error, `close()` returns and leaves no worker.

    The workers of the killed process end by themselves: `run_group` checks that.
    """
    killed = [number for number, life in enumerate(LIVES) if life.killed is not None]
    assert killed
    for number in killed:
        assert [process["left"] for process in surviving_keys(told, number)] == [[]] * (LIVES[number].processes - 1)
