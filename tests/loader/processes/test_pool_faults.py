"""Faults outside the worker processes: files that break, other numbers of workers, a full disk."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from millstream.errors import DataSourceError
from millstream.sources import ArrayRecordDataSource
from support.processes.worker_pools import BATCH, EXPECTED, SIZE, loader_of, python


def flip(path: Path, content: bytes, record: bytes) -> None:
    place = content.index(record)
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


def truncate(path: Path, content: bytes, record: bytes) -> None:
    os.truncate(path, content.index(record))


def remove(path: Path, content: bytes, record: bytes) -> None:
    del content, record
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "told"), [(flip, "hash mismatch"), (truncate, None), (remove, "cannot open .*: No such file")]
)
def test_a_file_that_breaks_is_an_error_from_a_worker_too(
    damage: Callable[[Path, bytes, bytes], None], told: str | None, tmp_path: Path
) -> None:
    """A file broken before its first read is a DataSourceError with file and record, at its turn."""
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


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """If a file cannot grow, saving is an error, and the checkpoint before it is complete and restores."""
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
