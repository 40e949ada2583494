"""The programs of the processes of a group: `python programs.py PROGRAM ADDRESS INDEX COUNT DESCRIPTOR`.

The arguments of the program come pickled on standard input; what it returns leaves pickled through the descriptor.
"""

import asyncio
import collections
import itertools
import logging
import os
import pickle
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import millstream
from millstream.checkpoint import CheckpointRestore, CheckpointSave
from millstream.loader.checkpoints.checkpointable import read_states, write_state
from millstream.loader.checkpoints.state import LoaderState
from support.streams import equal_streams

SIZE = 100
GLOBAL_BATCH = 12
SEED = 3


class Noise(millstream.RandomMap):
    """Makes a number into leaves of several types, one of them random."""

    def random_map(self, element: int, rng: np.random.Generator) -> dict[str, Any]:
        return {
            "number": np.int32(element),
            "noise": rng.normal(size=4).astype(np.float32),
            "nested": [np.full((2, 3), element, np.uint8)],
        }


class Row(millstream.RandomMap):
    """Makes a number into an array."""

    def random_map(self, element: int, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.concatenate([[element], rng.normal(size=3)]).astype(np.float32)


class NotThird(millstream.Filter):
    """Drops multiples of three."""

    def filter(self, element: int) -> bool:
        return element % 3 != 0


class Repeat(millstream.FlatMap):
    """Splits a number into none up to three."""

    max_fan_out = 3

    def flat_map(self, element: int) -> list[int]:
        return [element] * (element % 4)


class Document(millstream.Map):
    """Makes a number into tokens."""

    def map(self, element: int) -> dict[str, Any]:
        return {"tokens": np.arange(element * 7 % 11, dtype=np.int32) + 100 * element}


LOGICAL_SHARDS = 4
DEALT: dict[str, list[Any]] = {
    "1:1": [Noise()],
    "filter": [NotThird(), Noise()],
    "flat map": [Repeat(), Noise()],
    "packed": [NotThird(), Document(), millstream.FirstFitPack({"tokens": 12}, num_packing_bins=3)],
}
"""Operations before the Batch. Those that decide while reading are dealt to LOGICAL_SHARDS logical shards."""


EVALUATIONS: dict[str, list[Any]] = {"all": [], "filtered ahead": [NotThird()]}
"""The evaluated records are those that these operations keep."""


def loader(
    shard: millstream.ShardOptions, *operations: Any, seed: int = SEED, worker_count: int = 0
) -> millstream.DataLoader:
    """Returns a loader of endless shuffled batches, GLOBAL_BATCH numbers in each over all shards."""
    return millstream.DataLoader(
        data_source=range(SIZE),
        sampler=millstream.IndexSampler(SIZE, shuffle=True, seed=seed),
        operations=[*operations, millstream.Batch(shard.local_batch_size(GLOBAL_BATCH), drop_remainder=True)],
        shard_options=shard,
        worker_count=worker_count,
    )


def devices_in_a_row() -> NamedSharding:
    """Returns the sharding that splits the first axis over all devices of all processes."""
    return NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), PartitionSpec("data"))


def save_both(folder: Path, step: int) -> list[Any]:
    """Saves a 1:1 pipeline and a filtered one at a step, and reports what the restored filtered one yields then.

    Each process also keeps its state in a folder of its own, as on a disk of its own, and finds it there.
    """
    shard = millstream.ShardByJaxProcess(drop_remainder=True)
    for name, operations in (("whole", [Noise()]), ("filtered", [NotThird(), Noise()])):
        with ocp.CheckpointManager(folder / name) as manager, iter(loader(shard, *operations)) as batches:
            batches.seek(step)
            manager.save(step, args=ocp.args.Composite(loader=CheckpointSave(batches)))
            disk = folder / f"{name}_on_the_disk_of_{jax.process_index()}"
            disk.mkdir()
            write_state(disk, batches.get_state())
            assert read_states(disk) == [batches.get_state()]
    with ocp.CheckpointManager(folder / "filtered") as manager, iter(loader(shard, NotThird(), Noise())) as batches:
        manager.restore(step, args=ocp.args.Composite(loader=CheckpointRestore(batches)))
        return list(itertools.islice(batches, 3))


def cut_short(states: Path) -> None:
    file = states / "process_1-of-4.json"
    file.write_bytes(file.read_bytes()[:100])


def move(states: Path) -> None:
    """Moves one process's state a batch further than the others."""
    file = states / "process_2-of-4.json"
    state = LoaderState.decode(file.read_bytes())
    further = state.cursors[0]._replace(position=state.cursors[0].position + GLOBAL_BATCH)
    moved = state._replace(step=state.step + 1, cursors=(further,))
    file.write_bytes(moved.encode())


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "half-written": (cut_short, "Cannot read"),
    "one missing": (lambda states: (states / "process_1-of-4.json").unlink(), "process_1-of-4.json is missing"),
    "mixed": (
        lambda states: shutil.copy(states / "process_0-of-4.json", states / "process_0-of-5.json"),
        "states of 4 and 5 processes",
    ),
}
"""Mistakes in a checkpoint of four processes, and the text of each error."""


def save_and_restore(folder: Path, step: int) -> tuple[list[Any], dict[str, tuple[str, bool]]]:
    """Runs `save_both`, damages copies of the checkpoint of the 1:1 pipeline, and runs `restore_each`."""
    filtered = save_both(folder, step)
    if jax.process_index() == 0:
        for name, damage in {**{name: damage for name, (damage, _) in DAMAGES.items()}, "places": move}.items():
            shutil.copytree(folder / "whole", folder / name)
            damage(folder / name / str(step) / "loader")
    multihost_utils.sync_global_devices("damaged")
    return filtered, restore_each(folder)


def restore_each(folder: Path) -> dict[str, tuple[str, bool]]:
    """Tries to resume from checkpoints of `save_and_restore` in ways that fail on any number of processes, or on some.

    Reports of each attempt why it failed, and whether the iterator is where it was.
    """
    attempts = {
        **{name: (folder / name, SEED, False) for name in (*DAMAGES, "places")},
        "another seed": (folder / "whole", SEED + 1, False),
        "another pipeline": (folder / "whole", SEED, True),
        "filtered": (folder / "filtered", SEED, True),
    }
    shard, told = millstream.ShardByJaxProcess(drop_remainder=True), {}
    for name, (checkpoints, seed, is_filtered) in attempts.items():
        operations = [NotThird(), Noise()] if is_filtered else [Noise()]
        whole = itertools.islice(loader(shard, *operations, seed=seed), 3)
        with ocp.CheckpointManager(checkpoints) as manager, iter(loader(shard, *operations, seed=seed)) as batches:
            before = [next(batches), batches.get_state()]
            try:
                manager.restore(manager.latest_step(), args=ocp.args.Composite(loader=CheckpointRestore(batches)))
                why = ""
            except millstream.CheckpointError as error:
                why = "\n".join([str(error), *getattr(error, "__notes__", [])])
            is_where_it_was = batches.get_state() == before[1]
            rest = [before[0], *itertools.islice(batches, 2)]
        told[name] = why, is_where_it_was and equal_streams(list(whole), rest)
    return told


def restore(folder: Path, batches: millstream.DataLoaderIterator, *, by_itself: bool) -> None:
    """Restores by a manager, or as Orbax's newer interface has an iterator do it."""
    if by_itself:
        (states,) = {file.parent for file in folder.rglob("process_*.json")}

        async def load() -> None:
            await (await batches.load(states))

        asyncio.run(load())
        return
    with ocp.CheckpointManager(folder) as manager:
        manager.restore(manager.latest_step(), args=CheckpointRestore(batches))


def dealt_loader(name: str, worker_count: int = 0, num_epochs: int | None = None) -> millstream.DataLoader:
    """Returns a loader of this process's part of a stream that is dealt to logical shards."""
    shard = millstream.ShardByJaxProcess(logical_shards=LOGICAL_SHARDS)
    return millstream.DataLoader(
        data_source=range(SIZE),
        sampler=millstream.IndexSampler(SIZE, shuffle=True, seed=SEED, num_epochs=num_epochs),
        operations=[*DEALT[name], millstream.Batch(shard.local_batch_size(GLOBAL_BATCH), drop_remainder=True)],
        shard_options=shard,
        worker_count=worker_count,
    )


def train_dealt(folder: Path, step: int, steps: int, worker_count: int) -> dict[str, list[Any]]:
    """Takes global batches of each of DEALT from the newest checkpoint on, saves, and goes on; reports the batches.

    Args:
        folder: the checkpoints.
        step: where the newest checkpoint is, if there is one.
        steps: how many steps later to save; as many are taken after that, too far.
        worker_count: processes that load, of one of the pipelines.
    """
    sharding, told = devices_in_a_row(), dict[str, list[Any]]()
    for name in DEALT:
        loader = dealt_loader(name, worker_count if name == "flat map" else 0)
        with loader, iter(loader) as batches:
            if step:
                restore(folder / f"{name} {step}", batches, by_itself=name == "packed")
            taken = []
            while batches.step < step + 2 * steps:
                local = next(batches)
                batch = jax.make_array_from_process_local_data(sharding, local)
                taken.append(multihost_utils.process_allgather(batch, tiled=True))
                if batches.step == step + steps:
                    with ocp.CheckpointManager(folder / f"{name} {step + steps}") as manager:
                        manager.save(batches.step, args=CheckpointSave(batches))
            told[name] = taken
    return told


def end_together() -> dict[str, tuple[int, list[Any]]]:
    """Takes all global batches that every process has of a finite stream, which they have agreed on before.

    In each step all processes take part in one computation: were they not to end together, this would never end.
    """
    sharding, told = devices_in_a_row(), dict[str, tuple[int, list[Any]]]()
    for name in DEALT:
        loader = dealt_loader(name, num_epochs=1)
        own = sum(1 for _ in loader)
        common = int(np.min(multihost_utils.process_allgather(np.array(own))))
        taken = [
            multihost_utils.process_allgather(jax.make_array_from_process_local_data(sharding, local), tiled=True)
            for local in itertools.islice(loader, common)
        ]
        told[name] = own, taken
    return told


def stage(steps: int) -> dict[str, Any]:
    """Takes global batches that are put on the devices ahead, and reports what they are, and what was refused."""
    shard = millstream.ShardByJaxProcess(drop_remainder=True)
    told: dict[str, Any] = {"global": [], "shapes": []}
    with millstream.device_put(iter(loader(shard, Noise())), devices_in_a_row(), buffer_size=3) as batches:
        for batch in itertools.islice(batches, steps):
            told["global"].append(multihost_utils.process_allgather(batch, tiled=True))
            told["shapes"].append(batch["number"].shape)
        told["step"] = batches.step
    other = next(device for device in jax.devices() if device.process_index != jax.process_index())
    try:
        millstream.device_put(iter(loader(shard)), other)
    except ValueError as error:
        told["refused"] = str(error).split(",")[0]
    return told


class RefuseOnOne(millstream.Map):
    """Raises, but not on host 0."""

    def map(self, element: int) -> int:
        if jax.process_index():
            raise KeyError(element)
        return element


def fit_together() -> dict[str, list[Any]]:
    """Takes global batches of streams that differ between the hosts, and of some that end apart.

    Reports of each the shapes that came, the error that followed, and what was logged.
    """
    process, sharding = jax.process_index(), devices_in_a_row()
    by_process, by_sharding = millstream.ShardByJaxProcess(), millstream.ShardBySharding(sharding, 8)

    def load(size: int = 24, shard: Any = by_process, num_epochs: int | None = None, **options: Any) -> Any:
        options = {"seed": SEED, "batch_size": 4, **options}
        return millstream.load(range(size), shuffle=True, num_epochs=num_epochs, shard_options=shard, **options)

    def window(size: int) -> Any:
        return load(size, num_epochs=1, transformations=[millstream.WindowShuffle(3)], drop_remainder=True)

    def chain(size: int, **options: Any) -> Any:
        return millstream.MapDataset.range(size)[process :: jax.process_count()].to_iter_dataset().batch(4, **options)

    def sought(loader: Any, step: int) -> Any:
        iterator = iter(loader)
        iterator.seek(step)
        return iterator

    cases: dict[str, Callable[[], Any]] = {
        "the same": load,
        "sampler.seed": lambda: load(seed=SEED + process),
        "source": lambda: load(24 + process),
        "operations[0]": lambda: load(transformations=[Noise()] * process),
        "global batch": lambda: load(batch_size=4 + 4 * process),
        "records": lambda: load(num_epochs=1 + process),
        "step": lambda: sought(load(), 1 + process),
        "first batch": lambda: load(transformations=[RefuseOnOne()]),
        "code": lambda: load(transformations=[(lambda x: x + 1) if process else (lambda x: x + 2)]),
        "even": lambda: load(20, num_epochs=1),
        "even at its end": lambda: sought(load(20, num_epochs=1), 2),
        "even by sharding": lambda: load(20, by_sharding, num_epochs=1),
        "uneven rows": lambda: load(19, num_epochs=1),
        "uneven steps": lambda: load(17, num_epochs=1),
        "uneven at its end": lambda: sought(load(19, num_epochs=1), 2),
        "uneven by sharding": lambda: load(19, by_sharding, num_epochs=1),
        "window": lambda: window(29),
        "chain": lambda: chain(19),
        "even chain": lambda: chain(19, drop_remainder=True),
    }
    told: dict[str, list[Any]] = {}
    for name, make in cases.items():
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, lines=lines: lines.append(record.getMessage())  # type: ignore[method-assign,misc]
        logging.getLogger("millstream").addHandler(handler)
        shapes, error = [], ""
        try:
            iterable = make()
            with millstream.device_put(iter(iterable), sharding) as batches:
                for batch in itertools.islice(batches, 4):
                    shapes.append(jax.tree.leaves(batch)[0].shape)  # noqa: PERF401  (an error keeps those before)
        except Exception as failure:  # noqa: BLE001  (reported)
            error = f"{type(failure).__name__}: {failure}"
        logging.getLogger("millstream").removeHandler(handler)
        told[name] = [shapes, error, "".join(lines)]
    return told


def fill_meshes(save_to: Path, meshes: dict[str, tuple[tuple[int, ...], tuple[str, ...], tuple[Any, ...]]]) -> Any:
    """Takes global batches under the sharding of each mesh, and reports them, the shards, and what was refused.

    Args:
        save_to: a folder for the state of the loader after two steps on each mesh.
        meshes: for each the shape, the names of its axes, and the axes that split each dimension of a batch.
    """
    told: dict[str, Any] = {}
    for name, (shape, axes, spec) in meshes.items():
        mesh = jax.make_mesh(shape, axes)
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        shard = millstream.ShardBySharding(sharding, GLOBAL_BATCH, drop_remainder=True, share_on_host=True)
        taken = []
        own = iter(loader(shard, Row()))
        with millstream.device_put(own, sharding) as batches:
            for batch in itertools.islice(batches, 2):
                assert batch.sharding == sharding
                parts = {str(part.index): np.asarray(part.data) for part in batch.addressable_shards}
                taken.append((batch.shape, multihost_utils.process_allgather(batch, tiled=True), parts))
            (save_to / f"{name} {jax.process_index()}").write_bytes(batches.get_state())
            reads = own._profiler.reader is None
        try:
            others = millstream.ShardByJaxProcess(drop_remainder=True)
            millstream.device_put(iter(loader(others, Row())), sharding).close()
            refused = ""
        except ValueError as error:
            refused = str(error)
        found = (shard.shard_index, shard.shard_count)
        told[name] = {"shard": found, "taken": taken, "refused": refused, "reads": reads}
    return told


def evaluate() -> dict[str, list[Any]]:
    """Takes every record once, in padded global batches: all of them, and those that a filter has found ahead.

    In each step all processes take part in one computation: were they not to end together, this would never end.
    """
    shard, sharding = millstream.ShardByJaxProcess(), devices_in_a_row()
    told: dict[str, list[Any]] = {}
    for name, operations in EVALUATIONS.items():
        keys = millstream.surviving_keys(range(SIZE), operations)
        batches = millstream.DataLoader(
            data_source=range(SIZE),
            sampler=millstream.IndexSampler(len(keys), keys=keys, num_epochs=1, shuffle=True, seed=SEED),
            operations=[Row(), millstream.Batch(shard.local_batch_size(GLOBAL_BATCH), pad_remainder=True)],
            shard_options=shard,
        )
        with millstream.device_put(iter(batches), sharding) as on_device:
            told[name] = [multihost_utils.process_allgather(batch, tiled=True) for batch in on_device]
    return told


class KeepShare(millstream.Filter):
    """Keeps numbers by their parts: host h of four keeps a quarter of h of its numbers, host 0 nothing."""

    def filter(self, element: dict[str, Any]) -> bool:
        return int(element["number"]) % 4 < jax.process_index()


class FailLate(millstream.Map):
    """Raises on the last host, after its first batches."""

    def map(self, element: dict[str, Any]) -> dict[str, Any]:
        if jax.process_index() == jax.process_count() - 1 and element["number"] > SIZE // 2:
            raise KeyError(int(element["number"]))
        return element


class FailFirst(millstream.Map):
    """Raises on the last host, at its first element."""

    def map(self, element: dict[str, Any]) -> dict[str, Any]:
        if jax.process_index() == jax.process_count() - 1:
            raise KeyError(int(element["number"]))
        return element


def agree_on_ends(batch_size: int, resumed_after: int) -> dict[str, Any]:
    """Takes global batches of streams that end apart until the last host has ended, with a computation in each step.

    Args:
        batch_size: the number of rows per host.
        resumed_after: the step after which each host resumes one of the streams from its own state.
    """
    sharding, shard = devices_in_a_row(), millstream.ShardByJaxProcess()
    step = jax.jit(lambda batch: jax.numpy.sum(batch["number"] * batch["valid"]))

    def numbered(element: int) -> dict[str, Any]:
        nested = {"pair": np.full(2, element, np.int16), "both": (np.int8(element), jax.numpy.bfloat16(element))}
        return {"number": np.int32(element), "nested": nested}

    def loaded(*operations: Any, size: int = SIZE) -> Any:
        sampler = millstream.IndexSampler(size, num_epochs=1)
        steps = [numbered, *operations, millstream.Batch(batch_size)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return millstream.DataLoader(
                data_source=range(size), sampler=sampler, operations=steps, shard_options=shard
            )

    def taken(batches: Any, count: int | None = None) -> list[Any]:
        found = []
        for batch in itertools.islice(batches, count):
            total = int(step(batch))
            host = multihost_utils.process_allgather(batch, tiled=True)
            kinds = (host["nested"]["pair"].shape, *(str(leaf.dtype) for leaf in host["nested"]["both"]))
            found.append((host["number"].tolist(), host["valid"].tolist(), kinds, total))
        return found

    told: dict[str, Any] = {}
    ends: dict[str, list[Any]] = {"kept": [KeepShare()], "nothing": [millstream.Filter(lambda _: False)]}
    for name, operations in ends.items():
        with millstream.device_put(iter(loaded(*operations)), sharding, ends="agree") as batches:
            told[name] = taken(batches)
            told[f"{name}: steps"] = batches.step
            told[f"{name}: again"] = taken(batches)
    with millstream.device_put(iter(loaded(KeepShare())), sharding, ends="agree") as batches:
        told["resumed"] = taken(batches, resumed_after)
        state = batches.get_state()
    with millstream.device_put(iter(loaded(KeepShare())), sharding, ends="agree") as batches:
        batches.set_state(state)
        told["resumed"] += taken(batches)
        told["resumed: steps"] = batches.step
    widened: list[Any] = (
        [millstream.Map(lambda element: {**element, "more": np.int32(1)})] if jax.process_index() else []
    )
    differing: dict[str, list[Any]] = {"failed": [FailLate()], "failed first": [FailFirst()], "structure": widened}
    for name, operations in differing.items():
        try:
            with millstream.device_put(iter(loaded(*operations)), sharding, ends="agree") as batches:
                told[name] = taken(batches)
        except Exception as error:  # noqa: BLE001  (reported)
            told[name] = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    with millstream.device_put(iter(loaded()), sharding, ends="agree") as batches:
        batches.seek(jax.process_index() // 2)
        try:
            next(batches)
        except ValueError as error:
            told["apart"] = str(error)
    with millstream.device_put(iter(loaded(size=98)), sharding, ends="agree") as batches:
        collections.deque(batches, maxlen=0)
        told["at the end"] = batches.step, len(batches), batches.metrics()["loader/records"]
    return told


def run_each(tasks: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Runs several programs one after another, each with its arguments, and reports what each returns."""
    return {program: globals()[program](**task) for program, task in tasks.items()}


def warn_or_shard() -> list[tuple[list[Any], list[str]]]:
    """Reports batches and warnings: of a loader without shards, of one that has none on purpose, and with shards."""
    told = []
    for shard in (None, millstream.NoSharding(), millstream.ShardByJaxProcess()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches = millstream.load(range(10), num_epochs=1, batch_size=2, shard_options=shard)
        told.append(([batch.tolist() for batch in batches], [str(warning.message) for warning in caught]))
    return told


def compare_hosts(bad: list[list[int]]) -> dict[str, float]:
    """Reads records of which those in the list of this process fail; returns the metrics of all hosts."""
    own = bad[jax.process_index()]

    def check(record: int) -> int:
        if record in own:
            raise ValueError("bad")
        return record

    batches = millstream.load(
        range(40),
        transformations=[check],
        batch_size=4,
        num_epochs=1,
        on_error="skip",
        shard_options=millstream.NoSharding(),
    )
    collections.deque(batches, maxlen=0)
    return batches.metrics(all_hosts=True)


def ask_jax() -> list[list[tuple[int, int]]]:
    """Returns the index and number of the processes of the run, here and in operations without and with a worker."""

    def ask(_: int) -> tuple[int, int]:
        from jax import process_index

        return int(jax.numpy.asarray(process_index())), jax.process_count()

    here = [(jax.process_index(), jax.process_count())]
    return [here, *(list(millstream.load([0], transformations=[ask], num_epochs=1, worker_count=n)) for n in (0, 1))]


def main() -> None:
    """Joins the group, runs the program, and says what it returns."""
    program, address, index, count = sys.argv[1:5]
    os.set_inheritable(int(sys.argv[5]), False)
    task = pickle.load(sys.stdin.buffer)
    jax.distributed.initialize(address, int(count), int(index))
    try:
        result = globals()[program](**task)
    except BaseException:  # noqa: BLE001  (whatever it is)
        # At an orderly exit, this process would wait for the others, which wait for this one.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    jax.distributed.shutdown()
    with open(int(sys.argv[5]), "wb") as pipe:  # noqa: PTH123  (a descriptor)
        pickle.dump(result, pipe)


if __name__ == "__main__":
    main()
