"""Each row of the tables of docs/guarantees.md is provoked, and what its cell says is what happens."""

import contextlib
import functools
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream
from support.documents.document_tables import RowTests, rows
from support.faults.user_faults import WAIT_SECONDS
from support.files.record_files import write_array_record
from support.processes.worker_pools import environment, expect_stalls, pids_of, python

PAGE = Path(__file__).parents[1] / "docs/guarantees.md"


class Draw(millstream.RandomMap[Any, Any]):
    def __init__(self, low: int = 0) -> None:
        self.low = low

    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        return np.array([element, rng.integers(self.low, 2**40)])


def loader_of(operations: Any = None, source: Any = range(96), **options: Any) -> millstream.DataLoader:
    given: dict[str, Any] = {"shuffle": True, "seed": 0, "num_epochs": 2, "batch_size": 8, **options}
    return millstream.load(source, transformations=[Draw()] if operations is None else operations, **given)


def batches_of(loader: Any, state: Any = None) -> list[bytes]:
    """Returns the bytes of the batches, after a state if one is given."""
    with contextlib.closing(loader), iter(loader) as batches:
        if state is not None:
            batches.set_state(state)
        return [batch.tobytes() for batch in batches]


def state_of(loader: millstream.DataLoader, steps: int = 3) -> Any:
    with contextlib.closing(loader), iter(loader) as batches:
        for _ in range(steps):
            next(batches)
        return batches.get_state()


def shards_of(count: int, state: Any = None, **options: Any) -> list[bytes]:
    """Returns the global batches that hosts read together, each of them a part."""
    parts = []
    for index in range(count):
        shard = millstream.ShardOptions(index, count, drop_remainder=True)
        with iter(loader_of(batch_size=8 // count, shard_options=shard, **options)) as batches:
            if state is not None:
                batches.set_state(state)
            parts.append(list(batches))
    return [np.concatenate(step).tobytes() for step in zip(*parts, strict=True)]


Check = Callable[[Path], None]
HAPPENS: dict[str, tuple[str, Check]] = {}
"""By the first cell of a row, the second cell, and a function that provokes the row."""


def row(first_cell: str, second_cell: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        HAPPENS[first_cell] = second_cell, check
        return check

    return register


@row("the number of workers changes", "the same batches")
@row("… between checkpoint and resume", "resumes")
def workers_change(_: Path) -> None:
    expected, state = batches_of(loader_of()), state_of(loader_of(worker_count=2))
    assert batches_of(loader_of(worker_count=3)) == expected
    assert batches_of(loader_of(worker_count=1), state) == expected[3:] == batches_of(loader_of(), state)


@row("the number of hosts changes, at one global batch size", "the same global batches; the checkpoint is valid")
def hosts_change(_: Path) -> None:
    expected = batches_of(loader_of())
    state = state_of(loader_of(batch_size=2, shard_options=millstream.ShardOptions(1, 4, drop_remainder=True)))
    for count in (1, 2, 4):
        assert shards_of(count) == expected
        assert shards_of(count, state) == expected[3:]


@row(
    "batch size or operations differ from those of the checkpoint",
    "`CheckpointError` says what was saved and what is here",
)
def arguments_differ(_: Path) -> None:
    for options, saved, here in (({"batch_size": 4}, "8", "4"), ({"operations": [Draw(7)]}, "0", "7")):
        with pytest.raises(millstream.CheckpointError, match=rf"saved .*{saved}.* here .*{here}"):
            batches_of(loader_of(**options), state_of(loader_of()))


@row("the checkpoint is damaged", "`CheckpointError`")
def checkpoint_is_damaged(_: Path) -> None:
    state = state_of(loader_of())
    for place in range(0, len(state), 7):
        damaged = state[:place] + bytes([state[place] ^ 1]) + state[place + 1 :]
        with pytest.raises(millstream.CheckpointError):
            batches_of(loader_of(), damaged)


@row("two runs use the seeds 0 and 1", "independent random numbers")
def seeds_are_neighbours(_: Path) -> None:
    loaders = [loader_of(seed=seed, shuffle=False, num_epochs=1) for seed in (0, 1)]
    draws = [{int(element[1]) for batch in loader for element in batch} for loader in loaders]
    assert [len(found) for found in draws] == [96, 96]
    assert draws[0].isdisjoint(draws[1])


def die_at_five(value: int) -> int:
    if value == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return value


@row(
    "a worker is killed (out of memory, SIGKILL)",
    "replaced, the stream continues; twice at one batch: an error with its record keys",
)
def worker_is_killed(_: Path) -> None:
    expected = batches_of(loader_of())
    with contextlib.closing(loader_of(worker_count=2)) as loader, iter(loader) as batches:
        found = [next(batches).tobytes()]
        os.kill(pids_of(batches)[0], signal.SIGKILL)
        found += [batch.tobytes() for batch in batches]
    assert found == expected
    with pytest.raises(millstream.WorkerDiedError, match=r"records 0, 1, 2, 3, 4, 5"):
        batches_of(loader_of([die_at_five], shuffle=False, worker_count=1))


def leave_at_five(value: int) -> int:
    if value == 5:
        sys.exit(0)
    return value


@row("a worker leaves with `exit(0)`", "as above")
def worker_leaves(_: Path) -> None:
    with pytest.raises(millstream.WorkerDiedError, match=r"records 0, 1, 2, 3, 4, 5"):
        batches_of(loader_of([leave_at_five], shuffle=False, worker_count=1))


def sleep_at_five(value: int) -> int:
    if value == 5:
        signal.pause()
    return value


@row("a worker is stuck", "a warning, then an error with stack and record keys (`stall_timeout`)")
def worker_is_stuck(_: Path) -> None:
    with iter(loader_of([sleep_at_five], shuffle=False, worker_count=1)) as batches:
        batches.start_prefetch()
        expect_stalls(batches, 0.5)
        with pytest.raises(millstream.WorkerStalledError, match=r"records 0, 1, 2, 3, 4, 5(?s:.*)sleep_at_five"):
            next(batches)


@row("an operation returns what cannot be pickled", "an error that names the leaf and the record key")
def result_cannot_be_pickled(_: Path) -> None:
    with pytest.raises(TypeError, match=r"\['x'\]") as caught:
        batches_of(loader_of([lambda _: {"x": threading.Lock()}], batch_size=None, worker_count=1))
    assert any("record key" in note for note in caught.value.__notes__)


TRAINER = """
import time, millstream
from support.processes.worker_pools import pids_of
batches = iter(millstream.load(range(10**6), batch_size=8, worker_count=2))
next(batches)
print(*pids_of(batches), flush=True)
time.sleep(600)
"""


@row("the trainer is killed", "no process left after 0.5 s, nothing in `/dev/shm`")
def trainer_is_killed(_: Path) -> None:
    command = [sys.executable, "-c", TRAINER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True) as trainer:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 2
        trainer.kill()
    deadline = time.monotonic() + WAIT_SECONDS
    while any(is_running(pid) for pid in pids) or list(SHARED_MEMORY.glob(f"*millstream*{trainer.pid}-*")):
        assert time.monotonic() < deadline


SHARED_MEMORY = Path("/dev/shm")


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@row("`/dev/shm` is full (64 MB in Docker)", "no effect")
def shared_memory_is_full(_: Path) -> None:
    before = mapped_in_shared_memory(os.getpid())
    with contextlib.closing(loader_of([lambda _: np.ones(10**5)], worker_count=1)) as loader, iter(loader) as batches:
        batch = next(batches)
        assert batch.nbytes == 8 * 8 * 10**5
        found = set.union(*map(mapped_in_shared_memory, [os.getpid(), *pids_of(batches)])) - before
        # A folder of decoded units is made where there is room, and has none here.
        assert not [path for path in found if "/millstream-units-" not in path]


def mapped_in_shared_memory(pid: int) -> set[str]:
    """Returns the files there that a process has mapped: those of other processes come and go."""
    words = Path(f"/proc/{pid}/maps").read_text().split()
    return {word for word in words if word.startswith(f"{SHARED_MEMORY}/")}


@row("an ArrayRecord file is cut short while open", "an error with file and record")
def file_is_cut_short(folder: Path) -> None:
    path = write_array_record(folder / "file", [b"%099d" % number for number in range(400)], "group_size:1")
    with millstream.ArrayRecordDataSource(path) as source:
        assert source[0] == b"%099d" % 0
        os.truncate(path, 20_000)
        with pytest.raises(millstream.DataSourceError, match=r"record 399 of '.*file' \(record key 399\)"):
            source[399]


SCRIPT = """
import millstream
def double(value):
    return 2 * value
print(list(millstream.load(range(4), transformations=[double], num_epochs=1, worker_count=1)))
"""


@row('a script has no `if __name__ == "__main__":`', "works; also from standard input, a REPL, a notebook")
def script_has_no_guard(folder: Path) -> None:
    (folder / "script.py").write_text(SCRIPT)
    for way in ((folder / "script.py",), ("-",), ("-c", SCRIPT)):
        assert python(*way, input=SCRIPT, check=True).stdout.strip() == "[0, 2, 4, 6]"


@pytest.mark.parametrize("first_cell", HAPPENS)
def test_what_happens_is_what_the_page_says(first_cell: str, tmp_path: Path) -> None:
    """The fault or change of a row is provoked, and has the effect of its cell."""
    HAPPENS[first_cell][1](tmp_path)


# What a checkpoint compares


class Scale(millstream.Map[Any, Any]):
    def __init__(self, factor: int = 1, function: Any = abs) -> None:
        self.factor, self.function = factor, function

    def map(self, element: Any) -> Any:
        return element


class Records:
    def __init__(self, folder: str = "a", count: int = 96) -> None:
        self.folder, self.count = folder, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: int) -> int:
        return key


def chain_of(*, first: bool) -> millstream.IterDataset[Any]:
    stream = millstream.MapDataset.source(range(96)).to_iter_dataset()
    return stream.mp_prefetch(1).batch(8) if first else stream.batch(8).mp_prefetch(1)


KEEPS = millstream.Filter(lambda value: value % 3)


def shards(count: int, operations: Any, logical_shards: int = 4) -> list[millstream.DataLoader]:
    options = [
        millstream.ShardOptions(k, count, drop_remainder=True, logical_shards=logical_shards) for k in range(count)
    ]
    return [loader_of(operations, num_epochs=None, batch_size=8 // count, shard_options=shard) for shard in options]


FINE, WARNING, REFUSED = "fine", "a warning", "`CheckpointError`"
COMPARES: dict[str, list[tuple[str, Any, Any]]] = {
    "workers, threads, buffers": [
        (FINE, lambda: loader_of(worker_count=1), lambda: loader_of(read_options=millstream.ReadOptions(0, 0)))
    ],
    "the position of `mp_prefetch` and `prefetch` in a chain": [
        (FINE, lambda: chain_of(first=True), lambda: chain_of(first=False))
    ],
    "more epochs": [(FINE, lambda: loader_of(num_epochs=2), lambda: loader_of(num_epochs=5))],
    "number of hosts, at one global batch size": [
        (FINE, lambda: shards(2, [Scale()]), lambda: shards(4, [Scale()])),
        (FINE, lambda: shards(2, [KEEPS]), lambda: shards(4, [KEEPS])),
        (REFUSED, lambda: shards(2, [KEEPS]), lambda: shards(4, [KEEPS], logical_shards=8)),
    ],
    "*content*": [
        (WARNING, lambda: loader_of([Scale(function=lambda: 1)]), lambda: loader_of([Scale(function=lambda: 2)])),
        (WARNING, lambda: loader_of([lambda value: value]), lambda: loader_of([lambda value: value + 1])),
        (WARNING, lambda: loader_of(source=Records("a")), lambda: loader_of(source=Records("b"))),
    ],
    "kinds and order of operations": [
        (REFUSED, lambda: loader_of([Scale()]), lambda: loader_of([Scale(2)])),
        (REFUSED, lambda: loader_of([Scale()]), lambda: loader_of([Scale(), Scale()])),
        (REFUSED, lambda: loader_of([Scale()]), lambda: loader_of([millstream.Filter(bool)])),
    ],
    "class, seed and parameters of the sampler": [
        (REFUSED, loader_of, lambda: loader_of(seed=1)),
        (REFUSED, loader_of, lambda: loader_of(shuffle=False)),
    ],
    "the source": [
        (REFUSED, lambda: loader_of(source=Records()), lambda: loader_of(source=Records(count=97))),
        (REFUSED, lambda: loader_of(source=Records()), loader_of),
    ],
    "global batch size": [(REFUSED, loader_of, lambda: loader_of(batch_size=16))],
}
"""By the beginning of a row's first cell, verdicts, the loader whose state is saved, and the one that gets it."""


@pytest.mark.parametrize("beginning", COMPARES)
def test_what_a_checkpoint_compares_is_what_the_page_says(beginning: str, caplog: pytest.LogCaptureFixture) -> None:
    """A state of one pipeline is accepted by the other without a word, with a warning, or refused, as the row says."""
    for verdict, saved, resumed in COMPARES[beginning]:
        states, expected = [], []
        for loader in as_list(saved()):
            with iter(loader) as batches:
                next(batches), next(batches)
                states.append(batches.get_state())
                expected.append(next(batches))
        caplog.clear()
        found = []
        for loader in as_list(resumed()):
            with iter(loader) as batches, caplog.at_level(logging.WARNING, "millstream"):
                move = functools.partial(batches.set_states, states) if len(states) > 1 else batches.set_state
                if verdict == REFUSED:
                    with pytest.raises(millstream.CheckpointError):
                        move(*states[: len(states) == 1])
                    continue
                move(*states[: len(states) == 1])
                found.append(next(batches))
        assert bool(caplog.records) == (verdict == WARNING)
        if verdict == FINE:
            assert np.concatenate(found).tobytes() == np.concatenate(expected).tobytes()


def as_list(loaders: Any) -> list[Any]:
    return loaders if isinstance(loaders, list) else [loaders]


def test_each_row_of_the_page_is_provoked() -> None:
    """The page has the rows that are provoked here, with these cells, and no others."""
    (happens, compares) = (rows(PAGE, [section]) for section in ("What happens when …", "What a checkpoint compares"))
    assert {cells[0]: cells[1] for cells in happens} == {first: second for first, (second, _) in HAPPENS.items()}
    # Damage is a row of both tables.
    *compared, (damaged, verdict) = compares
    assert [any(cells[0].startswith(beginning) for cells in compared) for beginning in COMPARES] == [True] * len(
        compared
    )
    assert (damaged, verdict) == ("any byte of the state itself", REFUSED)
    for cells in compared:
        (verdicts,) = (found for beginning, found in COMPARES.items() if cells[0].startswith(beginning))
        assert verdicts[0][0] in cells[1], cells


NOTHING_TO_PROVE = ""
"""For what is not promised, or is a rule for maintainers."""

ELSEWHERE = {
    "How workers work": {
        "a worker dies, from any cause": "a_worker_that_dies_loses_nothing",
        "your code raises an error": "an_error_comes_at_its_turn_and_says_where",
        "a worker hangs": "a_stall_is_a_warning_and_then_an_error",
        "the fork server dies": "the_fork_server_killed_is_nobodys_fault",
        "the trainer dies, even by SIGKILL": "a_trainer_killed_leaves_nothing",
    },
    "What a version promises": {
        "**streams**": "orders_draws_and_packers_are_those_of_the_release",
        "**states**": "states_of_the_release_resume",
        "**public names**": "public_names_keep_their_parameters",
        "**spellings of Grain**": "load_and_data_loader_take_each_others_spellings_and_grains",
        "**deprecations**": NOTHING_TO_PROVE,
        "**errors**": "our_errors_are_builtins_and_survive_pickling",
        "**logs, advice, reports**": "names_are_stable_and_values_are_floats",
        "**speed**": NOTHING_TO_PROVE,
        "**Python, JAX, NumPy**": "the_table_of_what_is_supported_has_the_versions_of_the_metadata",
        "Python": "the_table_of_what_is_supported_has_the_versions_of_the_metadata",
        "system": "the_workflow_runs_the_gate_on_every_supported_python",
        "processor": "the_workflow_runs_the_gate_on_every_supported_python",
        "NumPy, JAX, Orbax, array-record": "the_workflow_runs_the_gate_on_every_supported_python",
    },
    "What your code must do": {
        "Operations are pure functions": "what_is_wrong_is_named_once",
        "Records of a list, tuple, array or `InMemoryDataSource` are copied for each reader": (
            "what_an_operation_changes_in_place_is_its_own"
        ),
        "What a loader yields is yours": "batches_are_the_consumers_own",
        "A source returns the same record for the same key": "each_broken_law_of_a_source_is_found",
        "Settings of your process reach operations, those of your thread do not": (
            "every_place_is_the_oracle_of_a_program_that_has_changed_its_process"
        ),
        "A loader is fixed when it is built": "a_pass_after_a_change_is_an_error_that_names_it",
    },
    "Limits": {
        "With `Filter`, `FlatMap` or packing as documents come": (
            "a_filtered_pipeline_resumes_only_from_its_logical_shards"
        ),
        "Randomness after `Batch`": "draws_after_a_batch_are_one_per_batch_of_a_shard",
        "Another global batch size": "another_global_batch_needs_leave_and_a_position_that_it_divides",
        "Random numbers": "the_definition_is_philox_of_seed_index_epoch_operation",
        "One iterator belongs to one thread.": "a_state_of_another_thread_is_of_one_moment",
        "A state of `concatenate` or `interleave`": "a_state_of_streams_in_turn_compares_those_that_are_open",
        "A stream of your own": "a_call_that_hangs_in_the_consumers_thread_is_logged",
        "Do not fork": "a_forked_process_without_the_threads_of_a_library_gets_an_error",
        "Programs that an operation starts": "children_of_user_code_in_sessions_of_their_own",
    },
}
"""By section, the test of each promise in a table, by its first cell, or in a list, by its bold beginning."""


@pytest.mark.parametrize("section", ELSEWHERE)
def test_each_other_promise_of_the_page_has_a_test(section: str) -> None:
    """No promise is without a test, but those that are none; the tests exist."""
    named = ELSEWHERE[section]
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    beginnings = re.findall(r"^- \*\*(.*?)\*\*", text, re.MULTILINE | re.DOTALL)
    promises = [cells[0] for cells in rows(PAGE, [section])] or [" ".join(found.split()) for found in beginnings]

    assert promises == list(named)
    for test in named.values():
        assert test == NOTHING_TO_PROVE or RowTests(PAGE, {"": test})[""]() is None


def test_draws_after_a_batch_are_one_per_batch_of_a_shard() -> None:
    """A RandomMap after Batch gets one generator per batch: with more hosts, a global batch has more draws."""

    def draws(shards: int) -> list[list[float]]:
        loaders = [
            loader_of(
                [millstream.Batch(8 // shards), millstream.RandomMap(lambda _, rng: rng.random())],
                batch_size=None,
                num_epochs=1,
                shard_options=millstream.ShardOptions(index, shards, drop_remainder=True),
            )
            for index in range(shards)
        ]
        return [list(step) for step in zip(*loaders, strict=True)]

    assert [len(set(step)) for step in draws(1)] == [1] * 12
    assert [len(set(step)) for step in draws(2)] == [2] * 12
