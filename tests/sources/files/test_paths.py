"""The files that paths select: only the text of the user is a pattern, and names of folders are not."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from millstream.sources import FileDataSource, Hdf5DataSource, JsonLinesDataSource, MdsDataSource, TokenDataSource
from support.files.record_files import every_record, write_mds
from support.processes.commands import run_here

FOLDERS = ["exp[1]", "run [v2] *draft?", "**"]
"""Names that are patterns, some of which match the folder beside them."""


def write_runs(folder: Path, name: str) -> Path:
    """Writes files into a folder, and others of the same names into folders that its name matches as a pattern."""
    for mine, text in ((True, "mine"), (False, "of another run")):
        for run_name in [name] if mine else ["exp1", "run v d draftx", "other"]:
            (folder / run_name / "part").mkdir(parents=True)
            for number in range(3):
                path = folder / run_name / "part" / str(number)
                path.with_suffix(".jsonl").write_text(json.dumps(text) + "\n")
                path.with_suffix(".bin").write_bytes(text.encode()[:4])
                with h5py.File(path.with_suffix(".h5"), "w") as file:
                    file["x"] = np.full(1, mine)
    return folder / name


READS: dict[str, Callable[[str], Any]] = {
    "lines": lambda start: every_record(JsonLinesDataSource(f"{start}*/[0-2].jsonl")),
    "a range": lambda start: every_record(JsonLinesDataSource(f"{start}part/0.jsonl[0:1]")) * 3,
    "whole files": lambda start: [
        record["bytes"].decode() for record in map(FileDataSource(f"{start}**/*.bin").__getitem__, range(3))
    ],
    "tokens": lambda start: [
        record["tokens"].tobytes().decode()
        for record in every_record(TokenDataSource(f"{start}part/*.bin", 4, dtype="uint8"))
    ],
    "HDF5": lambda start: [
        "mine" if record["x"] else "other" for record in every_record(Hdf5DataSource({"x": f"{start}*/?.h5/x"}))
    ],
}


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("start", ["", "~/", "../", "absolute"])
def test_only_the_text_of_the_user_is_a_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, start: str
) -> None:
    """The folder that a relative path or `~` stands for is literal, and so is an existing one with a bracket."""
    folder = write_runs(tmp_path, name)
    if start == "absolute":
        if "[" not in name:
            return
        start = f"{folder}/"
    monkeypatch.setenv("HOME", str(folder))
    here = folder / "elsewhere" if start == "../" else folder
    here.mkdir(exist_ok=True)
    monkeypatch.chdir(here)
    assert {kind: read(start) for kind, read in READS.items()} == dict.fromkeys(READS, ["mine"] * 3)
    assert "'mine'" in run_here("inspect", f"{start}part/*.jsonl", folder=here)[0]


def test_names_in_a_description_of_files_are_no_patterns(tmp_path: Path) -> None:
    """A file that is missing is an error, and is not replaced by one that its name matches."""
    folder = tmp_path / "data[1]"
    folder.mkdir()
    write_mds(folder, {"n": "int"}, [{"n": bytes(8)}], 20)
    for path in [*folder.iterdir()]:
        if path.suffix == ".mds":
            path.rename(tmp_path / path.name)
    (tmp_path / "data1").mkdir()
    for path in tmp_path.glob("*.mds"):
        path.rename(tmp_path / "data1" / path.name)
    with pytest.raises(FileNotFoundError, match="No such MDS file"):
        MdsDataSource(os.fspath(folder))
