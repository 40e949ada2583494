"""Orbax saves and restores the position of a dataset's iterator, through each of its interfaces, as JSON text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest

from millstream import CheckpointError, IterDataset, MapDataset
from millstream.checkpoint import CheckpointHandler, CheckpointRestore, CheckpointSave

pytestmark = pytest.mark.third_party


def stream(size: int = 4) -> IterDataset[Any]:
    """Returns a stream of all that has a state: a mixture, a filter, batches."""
    first, second = MapDataset.range(60).shuffle(seed=1), MapDataset.range(100, 160)
    mixed = IterDataset.mix({"first": first.to_iter_dataset(), "second": second.to_iter_dataset()})
    return mixed.filter(lambda number: number % 3).batch(size)


def save_with_manager(folder: Path, iterator: Any) -> None:
    with ocp.CheckpointManager(folder) as manager:
        manager.save(0, args=CheckpointSave(iterator))


def restore_with_manager(folder: Path, iterator: Any) -> None:
    with ocp.CheckpointManager(folder) as manager:
        assert manager.restore(0, args=CheckpointRestore(iterator)) is iterator


def save_with_handler(folder: Path, iterator: Any) -> None:
    with ocp.Checkpointer(CheckpointHandler()) as checkpointer:
        checkpointer.save(folder / "position", iterator)


def restore_with_handler(folder: Path, iterator: Any) -> None:
    with ocp.Checkpointer(CheckpointHandler()) as checkpointer:
        assert checkpointer.restore(folder / "position", iterator) is iterator


def save_new(folder: Path, iterator: Any) -> None:
    ocp_v1.save_checkpointables(folder / "new", {"position": iterator})


def load_new(folder: Path, iterator: Any) -> None:
    ocp_v1.load_checkpointables(folder / "new", {"position": iterator})


@pytest.mark.parametrize(
    ("save", "restore"),
    [(save_with_manager, restore_with_manager), (save_with_handler, restore_with_handler), (save_new, load_new)],
    ids=["manager", "handler", "new"],
)
def test_a_restored_iterator_continues_exactly(
    save: Callable[[Path, Any], None], restore: Callable[[Path, Any], None], tmp_path: Path
) -> None:
    """A new iterator of a rebuilt dataset continues exactly; the file contains the state; other datasets refuse it."""
    with iter(stream()) as iterator, iter(stream()) as other, iter(stream(5)) as wrong:
        for _ in range(3):
            next(iterator)
        save(tmp_path, iterator)
        (file,) = tmp_path.rglob("process_0-of-1.json")
        assert json.loads(file.read_text()) == iterator.get_state()
        restore(tmp_path, other)
        assert [batch.tolist() for batch in other] == [batch.tolist() for batch in iterator]
        with pytest.raises(Exception, match=r"batch_size|another stream|loader") as caught:
            restore(tmp_path, wrong)
        assert isinstance(caught.value, CheckpointError) or caught.value.__cause__ is not None
        assert next(wrong).tolist() == next(iter(stream(5))).tolist()


def test_the_states_of_other_processes_are_no_help(tmp_path: Path) -> None:
    """A folder that lacks this process's state is a CheckpointError that says what it holds."""
    (tmp_path / "process_0-of-2.json").write_text("{}")
    (tmp_path / "process_1-of-2.json").write_text("{}")
    with iter(stream()) as iterator:
        with pytest.raises(CheckpointError, match="holds no process_0-of-1"):
            CheckpointHandler().restore(tmp_path, iterator)
        for path in tmp_path.iterdir():
            path.unlink()
        (tmp_path / "process_0-of-1.json").write_text("not JSON")
        with pytest.raises(CheckpointError, match="not valid JSON"):
            CheckpointHandler().restore(tmp_path, iterator)
