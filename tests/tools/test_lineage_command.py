"""`millstream lineage` on a script that a user would have: its answers are those of the loader."""

from pathlib import Path
from typing import Any

import pytest

import millstream
from support.processes.commands import run

SCRIPT = """
import millstream


def build_loader():
    lines = millstream.TextLineDataSource(["a.txt", "b.txt"])
    corpora: dict[str, Any] = {"lines": lines, "numbers": ["0", "1", "2", "3", "4"]}
    return millstream.load(corpora, weights={"lines": 3, "numbers": 1}, shuffle=True, seed=0, batch_size=4)


def build_filtered():
    return millstream.load(range(9), transformations=[millstream.FilterTransform(bool)], num_epochs=1)


def build_nothing():
    return 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script and its data."""
    (tmp_path / "train_something.py").write_text(SCRIPT)
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{line}\n" for line in range(6)))
    return tmp_path


def loader_of(folder: Path) -> millstream.DataLoader:
    """Returns the same loader as the script's."""
    lines = millstream.TextLineDataSource([folder / "a.txt", folder / "b.txt"])
    corpora: dict[str, Any] = {"lines": lines, "numbers": ["0", "1", "2", "3", "4"]}
    return millstream.load(corpora, weights={"lines": 3, "numbers": 1}, shuffle=True, seed=0, batch_size=4)


def test_records_and_steps_are_traced_up_to_a_state(folder: Path) -> None:
    """The table, the steps of a record before the state's, and each record of a step with its file."""
    loader = loader_of(folder)
    batches = iter(loader)
    for _ in range(10):
        next(batches)
    (folder / "state").write_bytes(batches.get_state())
    batches.close()

    arguments = ["--state=state", "--key=7", "--key=13", "--step=2"]
    printed, reported = run("lineage", "train_something:build_loader", *arguments, folder=folder)

    assert reported == ""
    steps = [[step for step in row if step >= 0] for row in loader.steps_of([7, 13], stop=10).tolist()]
    expected = ["the state is at step 10", *str(loader.composition(stop=10)).splitlines(), ""]
    expected += [f"record 7 of lines: number 1 in '{folder}/b.txt'"]
    expected += [f"  in {len(steps[0])} of these steps: {' '.join(map(str, steps[0]))}", ""]
    expected += ["record 13 of numbers: number 1"]
    expected += [f"  in {len(steps[1])} of these steps: {' '.join(map(str, steps[1]))}", ""]
    assert printed.splitlines()[: len(expected)] == expected
    listed = printed.splitlines()[len(expected) :]
    assert listed[0] == "step 2 has 4 records"
    assert [int(line.split()[1]) for line in listed[1:]] == loader.record_keys(2).tolist()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train_something:build_loader"], "stop must be given for an endless order"),
        (["train_something:build_loader", "--stop=3", "--key=17"], "keys must be between 0 and 16, the last record"),
        (["train_something:build_filtered"], "composition(start, stop) needs a 1:1 pipeline"),
        (["train_something:build_nothing"], "that returns a DataLoader, but it returned a int"),
        (["train_something:missing"], "'train_something:missing' cannot be imported"),
        (["train_something"], "LOADER must be MODULE:FUNCTION"),
        (["train_something:build_loader", "--state=b.txt"], "Cannot read the state"),
    ],
)
def test_questions_without_an_answer_are_one_sentence(folder: Path, arguments: list[str], words: str) -> None:
    """The last line names the error; there is no traceback."""
    _, reported = run("lineage", *arguments, folder=folder, status=1)

    assert words in reported.splitlines()[-1]
