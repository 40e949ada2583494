"""The command line as a person meets it: real processes, real files, and a user's script for `lineage`."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream
from support.files.example_messages import example_message
from support.files.record_files import write_array_record, write_bagz, write_megatron, write_tar, write_tfrecord
from support.processes.commands import COMMAND, run, run_here

RECORDS = [b"record %d" % number for number in range(100)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with a file of each format."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_tfrecord(folder / "a.tfrecord", RECORDS)
    write_bagz(folder / "a.bag", RECORDS)
    write_bagz(folder / "a.bagz", RECORDS)
    write_megatron(folder / "a_document", [np.arange(number, dtype=np.uint16) for number in range(100)])
    write_tar(folder / "a.tar", [(f"{number}.txt", record) for number, record in enumerate(RECORDS)])
    (folder / "a.txt").write_bytes(b"\n".join(RECORDS))
    (folder / "a.jsonl").write_text("".join(f'{{"number": {number}}}\n' for number in range(100)))
    (folder / "a.csv").write_text("number\n" + "".join(f"{number}\n" for number in range(100)))
    pq.write_table(pa.table({"number": range(100)}), folder / "a.parquet", row_group_size=30)
    write_array_record(folder / "a.array_record", RECORDS)
    return folder


NAMES = {
    "a.array_record": "array_record",
    "a.bag": "bagz",
    "a.bagz": "bagz",
    "a.csv": "csv",
    "a.jsonl": "jsonl",
    "a.parquet": "parquet",
    "a.tar": "webdataset",
    "a.tfrecord": "tfrecord",
    "a.txt": "text",
    "a_document": "megatron",
    "a_document.bin": "megatron",
    "a_document.idx": "megatron",
}


NOT_BY_CONTENT = {"a.bag", "a.bagz", "a.csv", "a_document", "a_document.bin", "a_document.idx"}


def test_inspect_knows_every_format(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`inspect` finds the format by the name or by the first bytes, and prints it with the number of files and records.

    A name without an extension, or of a shard, does not hide the format of most files. It writes no index anywhere.
    """
    monkeypatch.setenv("MILLSTREAM_CACHE", str(data / "cache"))
    for name, kind in NAMES.items():
        others = [] if name in NOT_BY_CONTENT else ["other", f"{name}-00000-of-00001"]
        for other in (name, *others):
            if other != name:
                (data / name).rename(data / other)
            printed, reported = run_here("inspect", other, folder=data)
            lines = printed.splitlines()
            assert lines[1].split()[:2] == ["format", f"{kind},"]
            assert lines[2].startswith("  files     1, ")
            assert lines[3] == "  records   100"
            assert reported == ""
            if other != name:
                (data / other).rename(data / name)
    assert {path.name for path in data.iterdir()} == {*NAMES, *NOT_BY_CONTENT} - {"a_document"}


def test_inspect_shows_units(data: Path) -> None:
    """`inspect` prints the units that are read as a whole, or the files; it reads no row for its size."""
    printed, _ = run_here("inspect", "a.parquet", folder=data)

    assert "  units     4 that are read whole, of 30 records (median), at most 30\n" in printed
    assert "  sizes" not in printed
    printed, _ = run_here("inspect", "a.txt", folder=data)
    assert "  units     1 file, of 100 records (median), at most 100\n" in printed


def test_inspect_groups_files_by_format(data: Path) -> None:
    """Patterns are expanded, files of one format are one source, and ranges count."""
    printed, _ = run_here("inspect", "a.tf*", "a.bag*", "a.tfrecord[10:15]", folder=data)
    records = [line.split()[1] for line in printed.splitlines() if line.startswith("  records")]

    assert printed.count("  format") == 2
    assert records == ["105", "200"]


def test_inspect_shows_examples_and_json_feature_by_feature(tmp_path: Path) -> None:
    """`inspect` prints type, size and beginning of each feature, in lines of at most 120 characters."""
    features: dict[str, tuple[str, list[Any]]] = {
        "label": ("int64", [7]),
        "tokens": ("int64", list(range(1000))),
        "image": ("bytes", [bytes(5000)]),
        "texts": ("bytes", [b"one", b"two"]),
        "empty": ("float32", []),
    }
    write_tfrecord(tmp_path / "a.tfrecord", [example_message(features)])
    write_tfrecord(tmp_path / "b.tfrecord", [json.dumps({"text": "x" * 10_000, "none": None}).encode()])
    printed, _ = run_here("inspect", "a.tfrecord", folder=tmp_path)
    shown = {line.split()[0]: " ".join(line.split()[1:]) for line in printed.splitlines()}
    assert "a tf.train.Example" in printed
    assert shown["label"] == "int64 7"
    assert shown["tokens"].startswith("int64 (1000,) 0 1 2 3 ")
    assert shown["image"].startswith(r"bytes, 5,000 b'\x00\x00")
    assert shown["texts"] == "list of 2 [b'one', b'two']"
    assert shown["empty"] == "float32 (0,)"
    more, _ = run_here("inspect", "b.tfrecord", folder=tmp_path)
    assert "str, 10,000" in more
    assert ": JSON" in more
    assert max(map(len, (printed + more).splitlines())) <= 120


def test_inspect_draws_the_sizes_of_records(tmp_path: Path) -> None:
    """The bars of `inspect` count every record once, by its size in the index."""
    sizes = [10] * 5 + [100] * 50 + [5000] * 3
    (tmp_path / "a.txt").write_text("".join("x" * (size - 1) + "\n" for size in sizes))
    printed, _ = run_here("inspect", "a.txt", folder=tmp_path)
    bars = [line for line in printed.splitlines() if "up to" in line]

    assert "min 10 bytes, median 100 bytes" in printed
    assert sum(int(line.split()[-1]) for line in bars) == 58
    assert max(bars, key=lambda line: line.count("#")).split()[-1] == "50"


def test_index_makes_the_indices_that_sources_use(data: Path) -> None:
    """`index` builds an index for each format that needs one, and finds it at the second call."""
    for _ in range(2):
        printed, _ = run_here("index", *sorted(data.glob("a*")), folder=data)
        assert printed.count("indexed") == 7
        for name in ("array_record", "parquet"):
            assert f"{name}: 100 records in 1 file, which need no index" in printed
    kept = {path.name for path in data.glob(".*-index")}
    assert kept == {
        ".a.bag.bagz-index",
        ".a.bagz.bagz-index",
        ".a.csv.csv-index",
        ".a.jsonl.json-lines-index",
        ".a.tar.webdataset-index",
        ".a.tfrecord.tfrecord-index",
        ".a.txt.lines-index",
        ".a_document.bin.megatron-index",
    }


def test_an_index_that_cannot_be_kept_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that no folder can store is an error that names MILLSTREAM_CACHE."""
    path = write_tfrecord(tmp_path / ("a" * 250), RECORDS)
    (tmp_path / "file").touch()
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "file" / "cache"))
    _, reported = run_here("index", path, folder=tmp_path, status=1)

    assert "Cannot write the indices of" in reported
    assert "MILLSTREAM_CACHE" in reported


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", "absent.txt"], "millstream: No such data file: '{folder}/absent.txt'"),
        (["inspect", "*.nothing"], "millstream: No data file matches the pattern: '{folder}/*.nothing'"),
        (
            ["inspect", "mixed"],
            "millstream: '{folder}/mixed' is a directory. Pass its files, such as '{folder}/mixed/**/*'.",
        ),
        (["inspect", "zeros"], "millstream: Cannot tell the format of '{folder}/zeros' from its name or first"),
        (["inspect", "zeros", "--format=tfrecord"], "millstream: '{folder}/zeros' is not a TFRecord file"),
        (["inspect", "a.txt[3:2]"], "millstream: A range of records must have 0 <= start"),
    ],
)
def test_what_goes_wrong_is_a_sentence(arguments: list[str], words: str, tmp_path: Path) -> None:
    """An error is one sentence on the standard error with exit status 1, and no traceback."""
    (tmp_path / "zeros").write_bytes(bytes(1000))
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "mixed" / "b").mkdir(parents=True)
    printed, reported = run_here(*arguments, folder=tmp_path, status=1)

    assert printed == ""
    assert reported.startswith(words.format(folder=tmp_path))
    assert reported.count("\n") == 1


def test_each_command_has_help(tmp_path: Path) -> None:
    """The help of each command begins with its usage and has its purpose; the version is printed alone."""
    assert run_here("--version", folder=tmp_path)[0] == f"millstream {millstream.__version__}\n"
    for command in ("inspect", "index", "convert", "lineage", "top"):
        printed, _ = run_here(command, "--help", folder=tmp_path)
        usage, purpose, *_ = printed.split("\n\n")
        assert usage.startswith(f"usage: millstream {command} [-h]")
        assert purpose.endswith(".")


def test_inspect_goes_on_after_what_it_cannot_read(tmp_path: Path) -> None:
    """`inspect` reports each unreadable file in a sentence, prints the others, and exits with status 1."""
    (tmp_path / "a.txt").touch()
    (tmp_path / "b").write_bytes(bytes(1000))
    (tmp_path / "c.tar").write_bytes(bytes(1000))
    (tmp_path / "d.jsonl").write_text("{}\n")
    printed, reported = run_here("inspect", "*", "absent", folder=tmp_path, status=1)

    assert re.findall("format +([a-z]+)", printed) == ["text", "jsonl"]
    assert re.findall("records +([0-9]+)", printed) == ["0", "1"]
    assert [line.split("'")[1] for line in reported.splitlines()] == [
        str(tmp_path / name) for name in ("b", "absent", "c.tar")
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["inspect"], ["nonsense"], ["inspect", "a", "--format=b"], ["top", "--interval=x"]),
        *(["convert", "a", "b.bag", option] for option in ("--shards=0", "--jobs=-1", "--encode=xml", "--part=4/3")),
    ],
)
def test_wrong_usage_has_a_status_of_its_own(arguments: list[str], tmp_path: Path) -> None:
    """Wrong usage prints the usage and exits with status 2."""
    _, reported = run_here(*arguments, folder=tmp_path, status=2)

    assert reported.startswith("usage: millstream")
    assert "invalid _" not in reported, "the name of a private function"


def test_warnings_are_sentences_too(tmp_path: Path) -> None:
    """A warning is one sentence, without the line of code that it comes from."""
    write_array_record(tmp_path / "a.array_record", RECORDS, "group_size:10")
    _, reported = run("inspect", "a.array_record", folder=tmp_path)

    assert reported.startswith(f"millstream: '{tmp_path}/a.array_record' was written with group_size:10.")
    assert reported.count("\n") == 1


def test_the_script_is_installed(data: Path) -> None:
    """The script `millstream` prints the same as `python -m millstream`."""
    script = Path(sys.executable).parent / "millstream"
    done = subprocess.run([script, "inspect", "a.txt"], cwd=data, capture_output=True, text=True, check=True)

    assert done.stdout == run_here("inspect", "a.txt", folder=data)[0]


def test_names_in_files_cannot_control_the_terminal(tmp_path: Path) -> None:
    """Control characters in keys, columns and file names are printed escaped, and so are names that are not UTF-8."""
    (tmp_path / "a\x1b[2J.jsonl").write_text(json.dumps({"\x1b]0;title\x07": 1}) + "\n")
    (tmp_path / "b.csv").write_text("\x1b[31mred,x\n1,2\n")
    (tmp_path / (name := os.fsdecode(b"\xff.txt"))).write_text("a\n")
    printed, _ = run("inspect", "a\x1b[2J.jsonl", "b.csv", name, folder=tmp_path)

    assert "\x1b" not in printed
    assert r"\x1b]0;title\x07" in printed
    assert r"\x1b[31mred" in printed
    assert r"\udcff.txt" in printed


def test_a_reader_that_leaves_early_is_no_error(data: Path) -> None:
    """A closed pipe, as of `| head -1`, ends the command without a message."""
    with subprocess.Popen(
        [*COMMAND, "inspect", "a.txt"], cwd=data, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_ctrl_c_ends_quietly(tmp_path: Path) -> None:
    """Ctrl-C in a scan exits with status 130, prints no traceback and leaves no partial index."""
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        file.truncate(1 << 42)  # A sparse file that takes a quarter of an hour to read.
    with subprocess.Popen(
        [*COMMAND, "index", path], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            while not list(tmp_path.glob(".*.part")):
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            printed, reported = process.communicate(timeout=300)
        finally:
            process.kill()
    # A machine that is slow may have logged how far it was.
    assert (printed, b"Traceback" in reported, b"millstream:" in reported) == (b"", False, False)
    assert process.returncode == 130
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


SCRIPT = """
import millstream


def build_loader():
    lines = millstream.TextLineDataSource(["a.txt", "b.txt"])
    corpora = {"lines": lines, "numbers": ["0", "1", "2", "3", "4"]}
    return millstream.load(corpora, weights={"lines": 3, "numbers": 1}, shuffle=True, seed=0, batch_size=4)


def build_filtered():
    return millstream.load(range(9), transformations=[millstream.Filter(bool)], num_epochs=1)


def build_nothing():
    return 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script and its data."""
    (tmp_path / "train_something.py").write_text(SCRIPT)
    (tmp_path / "needs_more.py").write_text("import a_missing_library")
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{line}\n" for line in range(6)))
    return tmp_path


def test_records_and_steps_are_traced_up_to_a_state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table, the steps of a record before the state's, and each record of a step with its file."""
    monkeypatch.chdir(folder)
    loader = runpy.run_path("train_something.py")["build_loader"]()
    batches = iter(loader)
    for _ in range(10):
        next(batches)
    (folder / "state").write_bytes(batches.get_state())
    batches.close()

    arguments = ["--state=state", "--key=7", "--key=13", "--step=2"]
    printed, reported = run_here("lineage", "train_something:build_loader", *arguments, folder=folder)

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
        (["needs_more:build_loader"], "No module named 'a_missing_library'"),
        (["json:dumps"], "got 'json:dumps': missing a required argument: 'obj'."),
        (["train_something:build_loader", "--state=b.txt"], "Cannot read the state"),
    ],
)
def test_questions_without_an_answer_are_one_sentence(folder: Path, arguments: list[str], words: str) -> None:
    """The last line names the error; there is no traceback."""
    _, reported = run_here("lineage", *arguments, folder=folder, status=1)

    assert words in reported.splitlines()[-1]
