"""Workers run the code of the trainer, or say which module is another one by now."""

import importlib
import os
import signal
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import millstream
from support.processes.worker_pools import pids_of


class Modules:
    """Modules of the user in a folder of their own, which may be edited."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, **sources: str) -> None:
        for name, source in sources.items():
            (self.folder / f"{name}.py").write_text(source)
        importlib.invalidate_caches()


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    """Yields modules: operations, whose helper has a constant, and one that workers do not need."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = Modules(tmp_path)
    made.write(
        my_helper="FACTOR = 1\nclass Scale:\n    def __call__(self, x):\n        return x * 1\n",
        my_operations="import my_helper\ndef scale(x):\n    return my_helper.Scale()(x) * my_helper.FACTOR\n",
        my_late="def late(x):\n    import my_helper\n    return my_helper.Scale()(x)\n",
        my_model="SIZE = 1\n",
    )
    yield made
    for name in ("my_helper", "my_operations", "my_late", "my_model"):
        sys.modules.pop(name, None)


EDITS = {
    "my_helper": "FACTOR = 1000\nclass Scale:\n    def __call__(self, x):\n        return x * 1\n",
    "my_operations": "import my_helper\ndef scale(x):\n    return x * 1000\n",
}


def loader_of(module: str, function: str = "scale") -> millstream.DataLoader:
    operation = getattr(importlib.import_module(module), function)
    return millstream.load(range(2000), transformations=[operation], num_epochs=1, batch_size=4, worker_count=1)


@pytest.mark.parametrize("edited", EDITS)
def test_a_replaced_or_later_worker_refuses_another_code(modules: Modules, edited: str) -> None:
    """An edited module, that of an operation or one that it imports, is an error that names it, and not other data."""
    loader = loader_of("my_operations")
    with iter(loader) as iterator:
        assert next(iterator).tolist() == [0, 1, 2, 3]
        modules.write(**{edited: EDITS[edited]})
        for pid in pids_of(iterator):
            os.kill(pid, signal.SIGKILL)
        expected = rf"Cannot import {edited} in a worker: \S+/{edited}\.py has changed since the trainer imported it"
        rest: list[list[int]] = []
        with pytest.raises(RuntimeError, match=expected):
            rest.extend(batch.tolist() for batch in iterator)
        assert rest == [list(range(4 * step, 4 * step + 4)) for step in range(1, len(rest) + 1)]
    with pytest.raises(RuntimeError, match=expected):
        next(iter(loader_of("my_operations")))
    # The trainer may import it again.
    importlib.reload(sys.modules["my_helper"])
    importlib.reload(sys.modules["my_operations"])
    assert next(iter(loader_of("my_operations"))).tolist() == [0, 1000, 2000, 3000]


@pytest.mark.parametrize("writes_bytecode", [False, True])
def test_an_edit_before_the_first_loader_is_noticed(
    modules: Modules, writes_bytecode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that was changed after the trainer had imported it is told from its file; so is any other edit."""
    monkeypatch.setattr(sys, "dont_write_bytecode", not writes_bytecode)
    importlib.import_module("my_operations")
    edited = EDITS["my_helper"] if writes_bytecode else EDITS["my_helper"].replace("x * 1", "x * 7")
    modules.write(my_helper=edited)
    with pytest.raises(RuntimeError, match="Cannot import my_helper"):
        next(iter(loader_of("my_operations")))


def test_modules_in_a_zip_archive_are_compared(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import them, as in a program that is one file, and an archive that was replaced is noticed."""
    archive = modules.folder / "program.zip"

    def write(factor: int) -> None:
        sources = {path.name: path.read_text() for path in modules.folder.glob("my_*.py")}
        with zipfile.ZipFile(archive, "w") as file:
            for name, source in sources.items():
                file.writestr(name, source.replace("FACTOR = 1", f"FACTOR = {factor}"))

    write(1)
    monkeypatch.setattr(sys, "path", [str(archive), *(path for path in sys.path if path != str(modules.folder))])
    with iter(loader_of("my_operations")) as iterator:
        assert sys.modules["my_helper"].__spec__.loader.archive == str(archive)  # type: ignore[union-attr]  # a zipimporter
        assert next(iterator).tolist() == [0, 1, 2, 3]
        write(2)
        for pid in pids_of(iterator):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="Cannot import my_helper in a worker"):
            list(iterator)


def test_other_files_may_change(modules: Modules) -> None:
    """Modules that workers do not import are edited freely; one that they import late is compared then."""
    for name in ("my_late", "my_model", "my_helper"):
        importlib.import_module(name)
    loader = loader_of("my_late", "late")
    modules.write(my_model="SIZE = 2\n")
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    loader.close()
    modules.write(my_helper=EDITS["my_helper"])
    with pytest.raises(RuntimeError, match="Cannot import my_helper") as caught:
        next(iter(loader_of("my_late", "late")))
    assert "record key 0" in str(caught.value.__notes__)


def test_a_module_that_only_workers_import_is_the_same_in_all(modules: Modules) -> None:
    """A later worker that imports another content than the first did raises an error that names the module."""
    loader = loader_of("my_late", "late")
    with iter(loader) as iterator:
        assert next(iterator).tolist() == [0, 1, 2, 3]
        modules.write(my_helper=EDITS["my_helper"])
        for pid in pids_of(iterator):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="Cannot import my_helper in a worker"):
            list(iterator)
    assert "my_helper" not in sys.modules


def test_workers_find_modules_of_a_folder_that_was_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the import path may be filled after the fork server has looked for it: workers import from it."""
    monkeypatch.syspath_prepend(tmp_path / "later")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert list(millstream.load([0], transformations=[abs], num_epochs=1, worker_count=1)) == [0]
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "my_new.py").write_text("def scale(x):\n    return x + 1\n")
    importlib.invalidate_caches()
    assert next(iter(loader_of("my_new"))).tolist() == [1, 2, 3, 4]
    del sys.modules["my_new"]
