"""The fault matrix: what can go wrong with a loader that runs in worker processes, and the tests that do it, for real.

1  an exception in an operation       pool_errors: an_exception_arrives_at_its_turn,
                                      an_error_waits_for_batches_that_take_longer
2  one that cannot be pickled         pool_errors: an_exception_that_cannot_be_pickled_arrives_in_words,
                                      an_unusual_exception_keeps_its_type,
                                      an_exception_that_lies_keeps_its_type,
                                      an_exception_of_a_local_class_keeps_its_type
3  an element, or the pipeline, that  pool_errors: an_element_that_cannot_be_pickled_is_named,
   cannot be pickled, or unpickled    an_element_that_cannot_be_shown_is_named_as_a_whole,
                                      a_batch_that_cannot_be_pickled_is_named,
                                      elements_before_one_that_cannot_be_unpickled_here_are_delivered,
                                      elements_that_cannot_go_on_to_another_worker_are_an_error_at_their_turn,
                                      an_element_that_cannot_be_unpickled_here_is_an_error_at_its_turn,
                                      an_element_that_ends_the_process_that_pickles_it_is_an_error,
                                      a_pipeline_that_cannot_be_pickled_is_named,
                                      a_pipeline_that_cannot_be_unpickled_is_an_error
4  a process killed                   pool_deaths: a_death_changes_nothing, a_record_that_kills_is_named,
                                      only_the_call_in_work_is_blamed, a_worker_killed_within_user_code,
                                      idle_workers_killed_all_at_once_are_replaced,
                                      workers_killed_at_every_step_blame_nobody,
                                      the_fork_server_killed_is_nobodys_fault,
                                      a_fork_server_that_dies_each_time_is_an_error
5  exit status 0, sys.exit            pool_deaths: a_death_changes_nothing, a_record_that_kills_is_named
                                      pool_errors: workers_that_die_at_birth_are_an_error
6  a segmentation fault               pool_deaths: a_crash_shows_where_it_happened, a_death_changes_nothing
7  out of memory                      pool_deaths: a_worker_that_runs_out_of_memory
                                      pool_memory: the_limit_of_a_control_group_is_the_memory_that_there_is,
                                      a_limit_of_address_space_is_kept
8  stopped, or stuck                  pool_stalls: a_stall_is_a_warning_and_then_an_error,
                                      a_stall_that_ends_is_a_warning_only, a_stalled_start_is_an_error,
                                      a_consumer_that_was_away_sees_no_stall,
                                      a_wait_without_end_can_be_asked_for
                                      pool_deaths: a_stopped_fork_server_delays_only_replacements
                                      pool_parents: a_trainer_that_is_suspended_with_its_workers_sees_no_stall
9  SIGKILL to the parent              pool_parents: a_trainer_killed_leaves_nothing,
                                      a_forked_process_does_not_keep_the_workers_of_a_dead_trainer,
                                      a_trainer_killed_while_its_workers_start
10 SIGTERM to the parent              pool_parents: a_trainer_killed_leaves_nothing
11 Ctrl-C                             pool_parents: an_interrupted_trainer_leaves_nothing,
                                      the_end_of_the_interpreter_ends_the_workers
                                      pool_lives: an_interrupt_while_waiting, an_interrupt_while_closing,
                                      processes_have_names_and_ignore_interrupts
12 /dev/shm small and full            pool_memory: dev_shm_is_not_used
13 few file descriptors               pool_memory: descriptors_grow_with_workers_only,
                                      every_lack_of_descriptors_is_told_and_overcome,
                                      a_lack_of_descriptors_for_a_new_worker_is_told,
                                      closing_works_without_descriptors
14 all batches are kept               pool_memory: batches_that_are_kept_are_never_rewritten,
                                      batches_outlive_whatever_made_them,
                                      memory_of_batches_that_are_gone_serves_again
15 batches are written to, or JAX's   pool_memory: batches_can_be_written_to,
                                      batches_that_jax_keeps_are_never_rewritten
16 threads and forks                  pool_parents: jax_in_the_parent_is_not_disturbed,
                                      a_loader_outlives_the_thread_that_started_it,
                                      a_forked_process_has_workers_of_its_own
17 no main guard, no file at all      pool_parents: a_script_needs_no_main_guard, standard_input_is_a_program,
                                      a_command_is_a_program, a_notebook_is_a_program
18 a record with a flipped bit        pool_faults: a_file_that_breaks_is_an_error_from_a_worker_too
                                      array_record_faults: a_flipped_bit_is_never_silent
19 a file truncated while open        pool_faults: a_file_that_breaks_is_an_error_from_a_worker_too
                                      array_record_faults: a_file_truncated_while_open_is_an_error
20 a file that is missing             pool_faults: a_file_that_breaks_is_an_error_from_a_worker_too
                                      array_record_faults:
                                      a_file_removed_or_changed_before_its_first_read_is_an_error
21 a damaged state                    state: every_damaged_byte_is_refused, damage_is_refused_or_changes_nothing
                                      iterator: a_refused_state_leaves_everything_as_it_was
22 a state of an unknown version      state: another_version_is_refused_with_what_to_do
23 another batch size or operations   compatibility: a_difference_in_words_is_named_and_can_be_allowed
                                      orbax_handler: a_state_of_another_pipeline_is_refused
24 another number of workers          pool_faults: a_state_fits_any_number_of_workers
25 a disk that is full                pool_faults: a_full_disk_leaves_the_checkpoint_before
26 a worker that does not end         pool_stalls: closing_does_not_wait_for_user_code,
                                      closing_does_not_wait_for_the_source,
                                      threads_of_user_code_do_not_keep_a_worker, closing_while_workers_start
                                      pool_parents: closing_does_not_wait_for_a_forked_process,
                                      a_trainer_that_is_process_1_gets_no_zombies
                                      pool_lives: closing_from_another_thread,
                                      closing_from_another_thread_while_a_worker_is_replaced
27 children of a worker               pool_deaths: a_worker_killed_within_user_code,
                                      the_fork_server_takes_the_children_of_its_workers_with_it
                                      pool_lives: children_of_user_code_do_not_outlive_their_worker,
                                      the_channel_is_not_inherited_by_children_of_user_code
28 an iterator that is forgotten      pool_lives: an_iterator_that_is_forgotten_ends_its_workers,
                                      a_loader_that_is_forgotten_ends_its_idle_workers,
                                      an_exception_that_is_kept_keeps_no_more_than_it_must,
                                      an_iterator_in_a_cycle_is_collected
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from millstream.errors import DataSourceError
from millstream.sources import ArrayRecordDataSource
from support.processes.worker_pools import BATCH, EXPECTED, SIZE, loader_of, python

TESTS = Path(__file__).parents[2]


def matrix() -> dict[int, list[tuple[str, str]]]:
    """Returns the table above: for each row, the topics and the names of its tests."""
    rows: dict[int, list[tuple[str, str]]] = {}
    row, topic = 0, ""
    for line in (__doc__ or "").splitlines()[2:]:
        if (start := re.match(r"(\d+) ", line)) is not None:
            row = int(start[1])
            rows[row] = []
        for word in re.findall(r"\w+:|\w{12,}", line[38:]):
            if word.endswith(":"):
                topic = word[:-1]
            else:
                rows[row].append((topic, word))
    return rows


def test_every_row_has_its_tests() -> None:
    """The table has 28 rows, and each names tests that exist."""
    paths = {path.stem: path for path in TESTS.rglob("test_*.py")}
    rows = matrix()

    assert list(rows) == list(range(1, 29))
    assert all(rows.values())
    for topic, name in {pair for pairs in rows.values() for pair in pairs}:
        assert f"\ndef test_{name}(" in paths[f"test_{topic}"].read_text(), (topic, name)


def flip(path: Path, content: bytes, record: bytes) -> None:
    """Flips a bit of a record in a file."""
    place = content.index(record)
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


def truncate(path: Path, content: bytes, record: bytes) -> None:
    """Cuts a file off at a record."""
    os.truncate(path, content.index(record))


def remove(path: Path, content: bytes, record: bytes) -> None:
    """Removes a file."""
    del content, record
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "told"), [(flip, "hash mismatch"), (truncate, None), (remove, "cannot be opened: No such file")]
)
def test_a_file_that_breaks_is_an_error_from_a_worker_too(
    damage: Callable[[Path, bytes, bytes], None], told: str | None, tmp_path: Path
) -> None:
    """Rows 18 to 20: a file broken before its first read is a DataSourceError with file and record, at its turn."""
    records = [np.random.default_rng(number).bytes(5_000) for number in range(SIZE)]
    path = tmp_path / "file"
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    source = ArrayRecordDataSource(path)
    written = path.stat()
    damage(path, path.read_bytes(), records[EXPECTED[2][1]])
    if path.exists():
        # As a failing disk does: the file does not say that it was written to.
        os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    taken: list[Any] = []
    with iter(loader_of(data_source=source)) as iterator, pytest.raises(DataSourceError, match=told) as caught:
        taken.extend(iterator)
    assert [batch.tolist() for batch in taken] == [
        [records[number] for number in numbers] for numbers in EXPECTED[: len(taken)]
    ]
    assert repr(str(path)) in str(caught.value)
    assert iterator.step == len(taken) <= 2
    assert f"(position {2 * BATCH + 1})" in caught.value.__notes__[0] or damage is not flip


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_state_fits_any_number_of_workers(before: int, after: int) -> None:
    """Row 24: a state taken with one number of workers resumes with any other."""
    step = 5
    with iter(loader_of(worker_count=before)) as saver, iter(loader_of(worker_count=after)) as resumed:
        assert [next(saver).tolist() for _ in range(step)] == EXPECTED[:step]
        resumed.set_state(saver.get_state())
        assert [batch.tolist() for batch in resumed] == EXPECTED[step:]


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """Row 25: where a file cannot grow, saving is an error; the checkpoint before is whole, and restores."""
    code = """
import resource, sys
import orbax.checkpoint as ocp
from support.processes import worker_pools
from millstream.checkpoint import CheckpointRestore, CheckpointSave

def open_manager():
    return ocp.CheckpointManager(sys.argv[1], item_names=("data",))

def save(step):
    manager.save(step, args=ocp.args.Composite(data=CheckpointSave(iterator)))
    manager.wait_until_finished()

manager, iterator = open_manager(), iter(worker_pools.loader_of())
next(iterator)
saved = iterator.get_state()
save(1)
next(iterator)
usual = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (16, usual[1]))
try:
    save(2)
except OSError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, usual)
with open_manager() as manager:
    assert manager.all_steps() == [1]
    manager.restore(1, args=ocp.args.Composite(data=CheckpointRestore(iterator)))
assert iterator.get_state() == saved
assert [batch.tolist() for batch in iterator] == worker_pools.EXPECTED[1:]
"""
    done = python("-c", code, str(tmp_path / "checkpoints"))

    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout
