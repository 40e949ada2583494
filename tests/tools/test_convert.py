"""`millstream convert`: what is written, in what form, and what happens when it is killed."""

import io
import json
import os
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import datasets
import lance
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream
from millstream import (
    ArrayRecordDataSource,
    BagzDataSource,
    ConcatenatedDataSource,
    DataSourceError,
    FixedLengthFeature,
    VariableLengthFeature,
    decode_example,
    decode_examples,
)
from support.files.record_files import every_record, tfrecord_bytes, write_tfrecord
from support.processes.commands import COMMAND, run, run_here
from support.stores.object_server import ObjectServer

RECORDS = [b"record %d " % number * (number % 7) for number in range(1000)]


def records_in(*paths: Path) -> list[bytes]:
    """Returns the records of files that were written."""
    kind = ArrayRecordDataSource if paths[0].suffix == ".array_record" else BagzDataSource
    with kind(list(paths)) as source:
        return every_record(source)


def visible(folder: Path) -> list[str]:
    """Returns the names of the files in a folder that are not hidden."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize("extension", ["array_record", "bag", "bagz"])
def test_records_come_out_as_they_went_in(tmp_path: Path, extension: str) -> None:
    """All records are written in order, byte for byte, to exactly the given files."""
    write_tfrecord(tmp_path / "a.tfrecord", RECORDS)
    printed, reported = run_here("convert", "a.tfrecord", f"b.{extension}", "--shards=7", "--jobs=1", folder=tmp_path)
    names = [f"b-{number:05}-of-00007.{extension}" for number in range(7)]

    assert printed.startswith(f"{tmp_path / names[0]} and 6 more: 1,000 records, ")
    assert "millstream:" not in reported
    assert visible(tmp_path) == ["a.tfrecord", *names]
    assert records_in(*(tmp_path / name for name in names)) == RECORDS
    assert not list(tmp_path.glob(".*.conversion"))


def test_the_parts_of_a_conversion_are_the_whole(tmp_path: Path) -> None:
    """Jobs write the same bytes, in any order, and again after one was killed; files of other jobs are not touched."""
    write_tfrecord(tmp_path / "a.tfrecord", RECORDS)
    run_here("convert", "a.tfrecord", "whole.bag", "--shards=7", "--jobs=1", folder=tmp_path)
    for job in (3, 1, 2):
        printed, _ = run_here(
            "convert", "a.tfrecord", "b.bag", "--shards=7", f"--part={job}/3", "--jobs=1", folder=tmp_path
        )
        assert f"{3 - (job > 1)} of 7 files" in printed or job == 1
    for number in range(7):
        ending = f"-{number:05}-of-00007.bag"
        assert (tmp_path / f"b{ending}").read_bytes() == (tmp_path / f"whole{ending}").read_bytes()
    source = millstream.TFRecordDataSource(tmp_path / "a.tfrecord")
    paths = millstream.convert(source, tmp_path / "c.bag", num_shards=7, shards=[5, 0], worker_count=0)
    assert [path.rpartition("/")[2] for path in paths] == ["c-00000-of-00007.bag", "c-00005-of-00007.bag"]
    with pytest.raises(FileExistsError):
        millstream.convert(source, tmp_path / "c.bag", num_shards=7, shards=[0], worker_count=0)
    for wrong in ([], [7], [-1]):
        with pytest.raises(ValueError, match="shards"):
            millstream.convert(source, tmp_path / "c.bag", num_shards=7, shards=wrong)
    assert not list(tmp_path.glob(".*.conversion*"))


@pytest.mark.parametrize("name", ["a.array_record", "a.bagz", "a.bin"])
def test_the_bytes_do_not_depend_on_workers(tmp_path: Path, name: str) -> None:
    """Workers encode blocks, within row groups and over several, of one file or several: the files are the same."""
    rows = pa.table({"text": [f"{number} " * (number % 50) for number in range(3000)]})
    pq.write_table(rows.slice(0, 1000), tmp_path / "a.parquet", row_group_size=300)
    pq.write_table(rows.slice(1000), tmp_path / "b.parquet", row_group_size=2000)
    chain = millstream.MapDataset.source(millstream.ParquetDataSource(tmp_path / "*.parquet"))
    words = chain.map(lambda row: np.array(row["text"].split(), np.uint16) if row["text"] else None)
    for shards in (1, 4):
        written = {
            count: millstream.convert(words, tmp_path / f"{count}" / name, num_shards=shards, worker_count=count)
            for count in (0, 2)
        }
        assert len(written[0]) == shards
        assert [Path(path).read_bytes() for path in written[0]] == [Path(path).read_bytes() for path in written[2]]
    if name == "a.bin":
        with millstream.MegatronDataSource(written[2]) as source:
            assert [tokens.tolist() for tokens in every_record(source)] == [
                [number] * (number % 50) for number in range(3000) if number % 50
            ]


def test_without_shards_it_is_the_file_that_was_named(tmp_path: Path) -> None:
    """Without --shards, several files and ranges go in order to one file, in a folder that is created if missing."""
    write_tfrecord(tmp_path / "a.tfrecord", RECORDS)
    write_tfrecord(tmp_path / "b.tfrecord", RECORDS[:5])
    run_here("convert", "b.tfrecord", "a.tfrecord[990:1000]", "new/folder/c.x.bag", folder=tmp_path)

    assert visible(tmp_path / "new/folder") == ["c.x.bag"]
    assert records_in(tmp_path / "new/folder/c.x.bag") == RECORDS[:5] + RECORDS[990:]


def test_array_records_are_best_for_random_access(tmp_path: Path) -> None:
    """ArrayRecord files have one record per group, uncompressed unless requested."""
    write_tfrecord(tmp_path / "a.tfrecord", [b"x" * 10_000] * 100)
    run_here("convert", "a.tfrecord", "plain.array_record", folder=tmp_path)
    run_here("convert", "a.tfrecord", "small.array_record", "--compression=zstd:1", folder=tmp_path)
    for name in ("plain", "small"):
        assert records_in(tmp_path / f"{name}.array_record") == [b"x" * 10_000] * 100

    assert (tmp_path / "plain.array_record").stat().st_size > 300_000
    assert (tmp_path / "small.array_record").stat().st_size < 200_000


JSON_LINES = ['{"b": 1E5,  "a": 1.10}', '{"a": 123456789012345678901234567890, "a": 2}', '"text"', "[1, 2]"]


@pytest.mark.parametrize(
    ("name", "text", "encodes", "records"),
    [
        ("a.csv", 'name,text\nä,"two\nlines"\n', ["auto"], ['{"name":"ä","text":"two\\nlines"}']),
        ("a.txt", "ä b\nc\n", ["auto"], ["ä b", "c"]),
        ("a.jsonl", "\n\n".join(JSON_LINES) + "\r\n", ["auto", "json", "raw"], JSON_LINES),
    ],
)
def test_rows_become_json_and_lines_stay_text(
    name: str, text: str, encodes: list[str], records: list[str], tmp_path: Path
) -> None:
    """A dict of texts is JSON in UTF-8. A line of text is its bytes, and so is one of JSON, without blank lines."""
    (tmp_path / name).write_text(text)
    for encode in encodes:
        run_here("convert", name, f"{encode}.bag", f"--encode={encode}", folder=tmp_path)
        assert records_in(tmp_path / f"{encode}.bag") == [record.encode() for record in records]


def test_rows_of_parquet_become_json_or_examples(tmp_path: Path) -> None:
    """Numbers of NumPy, times and nulls are JSON; rows with arrays or bytes are Examples."""
    days = pa.array([0, 1], pa.timestamp("ns"))
    plain = pa.table({"id": pa.array([1, 2], pa.int8()), "day": days, "x": [0.5, None], "yes": [True, False]})
    pq.write_table(plain, tmp_path / "a.parquet")
    pq.write_table(pa.table({"tokens": [[1, 2], [3]], "text": ["a", None]}), tmp_path / "b.parquet")
    for name in ("a", "b"):
        run_here("convert", f"{name}.parquet", f"{name}.bag", "--jobs=2", "--shards=1", folder=tmp_path)
    columns = decode_examples(
        {"tokens": VariableLengthFeature(np.int64), "text": FixedLengthFeature((), bytes, default=b"-")}
    ).map(records_in(tmp_path / "b.bag"))

    assert [json.loads(record) for record in records_in(tmp_path / "a.bag")] == [
        {"id": 1, "day": "1970-01-01T00:00:00.000000000", "x": 0.5, "yes": True},
        {"id": 2, "day": "1970-01-01T00:00:00.000000001", "x": None, "yes": False},
    ]
    assert columns["tokens"].values.tolist() == [1, 2, 3]
    assert columns["text"].tolist() == [b"a", b"-"]


def test_tokens_are_written_once_and_read_by_both_sources(tmp_path: Path) -> None:
    """A function's tokens become flat files with their lengths, readable by both sources; None is skipped."""
    (tmp_path / "a.txt").write_text("".join(f"{'x ' * (number % 5)}\n" for number in range(100)))
    (tmp_path / "tokenizer.py").write_text(
        "import numpy as np\n"
        "def tokenize(line):\n"
        "    words = line.split()\n"
        "    return {'tokens': np.arange(len(words), dtype=np.int64)} if words else None\n"
    )
    options = ("--map=tokenizer:tokenize", "--dtype=uint16", "--shards=2", "--jobs=2")
    printed, _ = run("convert", "a.txt", "t.bin", *options, folder=tmp_path)
    assert "t-00000-of-00002.bin and 1 more: from 100 records, " in printed

    with millstream.MegatronDataSource(str(tmp_path / "t-*.bin")) as source:
        assert millstream.lengths_of(source).tolist() == [number % 5 for number in range(100) if number % 5]
        assert [tokens.tolist() for tokens in every_record(source)] == [
            list(range(number % 5)) for number in range(100) if number % 5
        ]
    with millstream.TokenDataSource(str(tmp_path / "t-*.bin"), window=10) as windows:
        assert windows.dtype == np.uint16
        assert len(windows) == 20
        assert windows[0]["tokens"].tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2, 3]
    run_here("convert", "a.txt", "t.bin", *options[:3], "--jobs=1", "--overwrite", folder=tmp_path)
    assert [name for name in visible(tmp_path) if name != "__pycache__"] == [
        "a.txt",
        *(f"t-0000{number}-of-00002.{extension}" for number in range(2) for extension in ("bin", "idx")),
        "tokenizer.py",
    ]


def image_of(number: int) -> bytes:
    """Returns a PNG whose pixels have one value."""
    PIL.Image.new("L", (2, 2), number).save(written := io.BytesIO(), "PNG")
    return written.getvalue()


@pytest.mark.parametrize("format_name", ["images", "files", "huggingface"])
def test_folders_are_converted_with_the_names_of_their_classes(tmp_path: Path, format_name: str) -> None:
    """Images are written as they are stored, so each is decoded once, by `decode_example` and the user's decoder."""
    for number, name in enumerate(["cat", "dog", "dog"]):
        (tmp_path / "photos" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name / f"{number}.png").write_bytes(image_of(number))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    columns = {"image": [str(path) for path in sorted((tmp_path / "photos").glob("*/*"))], "label": [0, 1, -1]}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "saved")
    source = "saved" if format_name == "huggingface" else "photos"

    run_here("convert", source, f"--format={format_name}", "out.array_record", "--jobs=1", folder=tmp_path)

    text = FixedLengthFeature((), bytes)
    if format_name == "files":
        wanted = {"path": text, "bytes": text}
    else:
        wanted = {"image": text, "label": FixedLengthFeature((), np.int64), "label_name": text}
    records = [*map(decode_example(wanted).map, records_in(tmp_path / "out.array_record"))]
    assert [record["bytes" if format_name == "files" else "image"] for record in records] == [*map(image_of, range(3))]
    if format_name == "files":
        assert records[2]["path"].endswith(b"photos/dog/2.png")
    elif format_name == "images":
        assert [(record["label"], record["label_name"]) for record in records] == [
            (0, b"cat"),
            (1, b"dog"),
            (1, b"dog"),
        ]
    else:
        assert [(one["label"], one["label_name"]) for one in records] == [(0, b"cat"), (1, b"dog"), (-1, b"")]
    if format_name != "files":
        run_here("convert", source, "again.array_record", "--jobs=1", folder=tmp_path)
        assert (tmp_path / "again.array_record").read_bytes() == (tmp_path / "out.array_record").read_bytes()


@pytest.mark.parametrize("made", [millstream.load(range(4)), millstream.MapDataset.range(4).to_iter_dataset()])
def test_what_is_read_in_order_is_refused_with_the_way_out(tmp_path: Path, made: Any) -> None:
    """A loader or a stream has no random access: the error says to write the operations as a MapDataset."""
    with pytest.raises(TypeError, match=r"must have random access.*MapDataset\.source\(source\)\.map"):
        millstream.convert(made, tmp_path / "a.bag")
    with pytest.raises(ValueError, match="worker_count must be None with workers, got 2"):
        millstream.convert([b""], tmp_path / "a.bag", worker_count=2, workers=millstream.RayWorkers(1))
    assert not list(tmp_path.iterdir())


def test_chains_are_converted_as_their_elements_come(tmp_path: Path) -> None:
    """A chain is written in its order; another chain does not continue its files."""
    chain = millstream.MapDataset.source(list(range(100))).shuffle(seed=1)
    double = chain.map(lambda number: {"x": np.arange(number)})
    paths = millstream.convert(double, tmp_path / "a.array_record", num_shards=3, worker_count=0)
    records = decode_examples({"x": VariableLengthFeature(np.int64)}).map(records_in(*map(Path, paths)))

    assert records["x"].lengths.tolist() == list(chain)
    assert len(paths) == 3
    with pytest.raises(FileExistsError, match=r"overwrite=True"):
        millstream.convert(double, tmp_path / "a.array_record", num_shards=3)


@pytest.mark.parametrize(
    ("elements", "name", "options", "words"),
    [
        ([[1, 2]], "a.bin", {}, "dtype must be the dtype of the tokens in the file, one of uint8.* got None"),
        ([[70_000]], "a.bin", {"dtype": "uint16"}, "Cannot write record 0 .* token 70000 exceeds the range of uint16"),
        ([np.array([-1])], "a.bin", {"dtype": "uint8"}, "token -1 exceeds the range"),
        (["text"], "a.bin", {"dtype": "uint16"}, "Tokenize the text in a Map first"),
        (["text"], "a.bin", {}, "the first record as tokens: .* Tokenize the text in a Map first"),
        ([{"a": [1]}], "a.bin", {"feature": "b"}, "the first record as tokens: it is not a dict with an entry 'b'"),
        ([{"a": [1], "b": [2]}], "a.bin", {"dtype": "uint16"}, "feature must be one of 'a', 'b'"),
        ([{"a": [1]}], "a.bin", {"dtype": "uint16", "feature": "b"}, "it is not a dict with an entry 'b'"),
        ([np.zeros(1)], "a.bin", {}, "got float64"),
        ([b""], "a.bag", {"dtype": "uint16"}, "feature and dtype are for tokens"),
        ([b""], "a.bag", {"encode": "xml"}, "encode must be one of auto, raw, json, example, got 'xml'"),
        ([b""], "a.npy", {}, "destination must end in .array_record"),
        ([b""], "a.bag", {"num_shards": 0}, "num_shards must be"),
        (millstream.MapDataset.source([b""]).repeat(), "a.bag", {}, "must have an end, got an endless MapDataset"),
        ([[1]], "a.bin", {"dtype": "uint8", "compression": "zstd"}, "Records of .bin files are never compressed"),
    ],
)
def test_elements_that_cannot_be_written_are_an_error(
    elements: Any, name: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Elements or options that cannot be written are an error with the remedy, and leave no file."""
    with pytest.raises((ValueError, DataSourceError, KeyError, TypeError), match=words):
        millstream.convert(elements, tmp_path / name, worker_count=0, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def long_text(tmp_path: Path) -> Path:
    """A file that takes some seconds to convert."""
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {number}\n" for number in range(150_000)))
    return path


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("b-*.bag"))


def test_what_was_killed_is_resumed_by_the_same_conversion_alone(tmp_path: Path, long_text: Path) -> None:
    """Other options or input are refused. The same ones resume: finished files stay, and every record is written once.

    With --overwrite, any conversion starts over.
    """
    command = ["convert", str(long_text), "b.bag", "--shards=50", "--jobs=2"]

    def inodes() -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in shards_of(tmp_path)}

    with subprocess.Popen([*COMMAND, *command], cwd=tmp_path) as process:
        while len(shards_of(tmp_path)) < 3:
            assert process.poll() is None
        process.kill()
    finished, text, status = inodes(), long_text.read_bytes(), long_text.stat()
    assert 3 <= len(finished) < 50
    assert (tmp_path / ".b.bag.conversion" / "plan.json").exists()
    _, reported = run_here(*command, "--encode=json", folder=tmp_path, status=1)
    assert "has a different encode: {'name': 'raw', 'feature': None, 'dtype': None}, here {'name': 'json'" in reported
    long_text.write_text("one\n" * 60)
    _, reported = run_here(*command, folder=tmp_path, status=1)
    assert "has a different source" in reported
    assert inodes() == finished

    long_text.write_bytes(text)
    os.utime(long_text, ns=(status.st_atime_ns, status.st_mtime_ns))
    run_here(*command, folder=tmp_path)
    assert len(inodes()) == 50
    assert finished.items() <= inodes().items()
    assert records_in(*shards_of(tmp_path)) == [b"line %d" % number for number in range(150_000)]
    assert not (tmp_path / ".b.bag.conversion").exists()
    long_text.write_text("one\n" * 60)
    run_here(*command, "--overwrite", folder=tmp_path)
    assert records_in(*shards_of(tmp_path)) == [b"one"] * 60


@pytest.mark.third_party
def test_data_of_one_shape_are_not_mixed(tmp_path: Path) -> None:
    """A conversion of rows that failed is not continued with those of another dataset of the same shape."""
    for name in ("a", "b"):
        lance.write_dataset(pa.table({"text": [f"{name}{number}" for number in range(4)]}), tmp_path / name)

    def text_of(record: dict[str, Any]) -> str:
        if record["text"] == "a3":
            raise RuntimeError("No more.")
        return str(record["text"])

    chains = [millstream.MapDataset.source(millstream.LanceDataSource(tmp_path / name)).map(text_of) for name in "ab"]
    with pytest.raises(RuntimeError, match=r"No more"):
        millstream.convert(chains[0], tmp_path / "b.bag", num_shards=2, worker_count=0)
    with pytest.raises(ValueError, match=r"has a different origins"):
        millstream.convert(chains[1], tmp_path / "b.bag", num_shards=2, worker_count=0)
    assert records_in(*shards_of(tmp_path)) == [b"a0", b"a1"]


VOCABULARY = {"a": 1, "b": 2}
IS_WHOLE = False


def tokens_of(text: str) -> Any:
    """Reads a vocabulary that no fingerprint has, and fails in the last file."""
    if text == "last" and not IS_WHOLE:
        raise RuntimeError("No more.")
    return None if text == "none" else np.array([VOCABULARY.get(word, 0) for word in text.split()], np.uint16)


@pytest.mark.parametrize("name", ["x.bin", "x.bag"])
def test_vocabularies_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A conversion is resumed only with the code, and to the bytes, of the files that are finished."""
    texts = ["a b", "b b", "none", "a", "b", "last"]

    def convert(function: Any, **options: Any) -> list[Any]:
        chain = millstream.MapDataset.source(texts).map(function)
        paths = millstream.convert(chain, tmp_path / name, num_shards=2, worker_count=0, **options)
        kind: Any = millstream.MegatronDataSource if name == "x.bin" else millstream.BagzDataSource
        return [np.frombuffer(record, np.uint16).tolist() for record in kind(paths)]

    with pytest.raises(RuntimeError, match="No more"):
        convert(tokens_of)
    with monkeypatch.context() as patched:
        patched.setitem(VOCABULARY, "b", 3)
        with pytest.raises(ValueError, match=r"Cannot resume .* A vocabulary, or the `hash\(\)` of a text"):
            convert(tokens_of)
    with pytest.raises(ValueError, match="has a different source"):
        convert(lambda text: np.array([VOCABULARY.get(text, 0)], np.uint16))
    monkeypatch.setitem(globals(), "IS_WHOLE", True)
    assert convert(tokens_of) == [[1, 2], [2, 2], [1], [2], [0]]
    monkeypatch.setitem(VOCABULARY, "b", 3)
    assert convert(tokens_of, overwrite=True) == [[1, 3], [3, 3], [1], [3], [0]]


class FailingOnce:
    """Returns the bytes of numbers from `first` on, and fails once, for 4."""

    def __init__(self, error: type[Exception], first: int = 0) -> None:
        self.failures = [error]
        self.first = first

    def __call__(self, number: int) -> bytes | None:
        if number == 4 and self.failures:
            raise self.failures.pop()
        return b"%d" % number if number >= self.first else None

    def fingerprint(self) -> str:
        return f"FailingOnce first={self.first}"


@pytest.mark.parametrize("error", [RuntimeError, FileExistsError])
def test_finished_files_stay_after_any_error(tmp_path: Path, error: type[Exception]) -> None:
    """A conversion whose function fails can be resumed, whatever error it raises, and whichever one it has replaced."""
    chains = [millstream.MapDataset.source(range(5)).map(FailingOnce(error, first)) for first in (0, 2)]
    for chain in chains:
        with pytest.raises(error):
            millstream.convert(chain, tmp_path / "b.bag", num_shards=2, worker_count=0, overwrite=True)
    assert [path.name for path in shards_of(tmp_path)] == ["b-00000-of-00002.bag"]
    millstream.convert(chains[1], tmp_path / "b.bag", num_shards=2, worker_count=0)
    assert records_in(*shards_of(tmp_path)) == [b"2", b"3", b"4"]


def test_two_at_once_are_refused(tmp_path: Path, long_text: Path) -> None:
    """A second conversion to the same files is an error and changes nothing; Ctrl-C ends the first one quietly."""
    command = ["convert", str(long_text), "b.bag", "--shards=50", "--jobs=2"]
    with subprocess.Popen([*COMMAND, *command], cwd=tmp_path, stderr=subprocess.PIPE) as process:
        try:
            while len(shards_of(tmp_path)) < 2:
                assert process.poll() is None
            # Stopped, it cannot end before the second one has looked.
            process.send_signal(signal.SIGSTOP)
            was_whole = len(shards_of(tmp_path)) == 50
            _, reported = run_here(*command, folder=tmp_path, status=1)
            assert "Another process is writing" in reported or was_whole
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGCONT)
            assert process.stderr is not None
            assert b"Traceback" not in process.stderr.read()
            process.wait()
        finally:
            process.kill()
    # A machine may be so slow that all was written before the signal came.
    assert process.returncode == 130 or len(shards_of(tmp_path)) == 50


def test_files_that_are_there_are_not_replaced_by_accident(tmp_path: Path) -> None:
    """Existing files are replaced only with --overwrite and on success, and an input is never overwritten."""
    write_tfrecord(tmp_path / "a.tfrecord", RECORDS)
    (tmp_path / "b.bag").write_text("mine")
    _, reported = run_here("convert", "a.tfrecord", "b.bag", folder=tmp_path, status=1)
    assert "exists. Pass --overwrite" in reported
    assert (tmp_path / "b.bag").read_text() == "mine"
    again = ("convert", "a.tfrecord", "b.bag", "--overwrite")
    _, reported = run_here(*again, "--encode=example", folder=tmp_path, status=1)
    assert "Cannot write record 0" in reported
    assert (tmp_path / "b.bag").read_text() == "mine"
    run_here(*again, folder=tmp_path)
    assert records_in(tmp_path / "b.bag") == RECORDS
    _, reported = run_here("convert", "b.bag", "./b.bag", "--overwrite", folder=tmp_path, status=1)
    assert "is both an input and an output" in reported
    with BagzDataSource(tmp_path / "b.bag") as source:
        upper = millstream.MapDataset.source(source).map(bytes.upper)
        for below in (ConcatenatedDataSource([source]), upper, millstream.FileDataSource(tmp_path / "*.bag")):
            with pytest.raises(ValueError, match="is both an input and an output"):
                millstream.convert(below, tmp_path / "b.bag", overwrite=True)
    assert records_in(tmp_path / "b.bag") == RECORDS
    (tmp_path / "t.idx").write_text("mine")
    with pytest.raises(FileExistsError, match=r"t\.idx' exists"):
        millstream.convert([np.zeros(2, np.uint16)], tmp_path / "t.bin", worker_count=0)
    assert (tmp_path / "t.idx").read_text() == "mine"
    assert not list(tmp_path.glob(".*.conversion"))


def test_a_damaged_record_ends_it_with_file_and_record(tmp_path: Path) -> None:
    """A damaged record ends the conversion with its file and number; the next run continues with the finished files."""
    path = write_tfrecord(tmp_path / "a.tfrecord", RECORDS)
    whole, status = path.read_bytes(), path.stat()
    run_here("index", path, folder=tmp_path)
    damaged = bytearray(whole)
    damaged[-10] ^= 1
    path.write_bytes(damaged)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    command = ["convert", "a.tfrecord", "b.bag", "--shards=4", "--jobs=2"]
    _, reported = run_here(*command, folder=tmp_path, status=1)
    assert "Cannot read record 999 of" in reported
    path.write_bytes(whole)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    run_here(*command, folder=tmp_path)
    assert records_in(*shards_of(tmp_path)) == RECORDS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.txt", "b.bag", "--shards=3"], "Cannot write 2 records to 3 files"),
        (["a.txt", "b.bag", "--compression=zstd"], "Records of .bag files are never compressed. Use another format"),
        (["a.txt", "b.bagz", "--compression=none"], "Records of .bagz files are always compressed. Write a .bag file"),
        (["a.txt", "b.array_record", "--compression=lz4"], "compression must be none, zstd, or zstd with a level"),
        (["a.txt", "b.array_record", "--compression=zstd:23"], "between 1 and 22, got 23"),
        (["a.txt", "a.csv", "b.bag"], "Cannot convert files of several formats, text, csv, together"),
        (["a.txt", "b.parquet"], "DST must end in .array_record, .bag, .bagz or .bin to write records"),
        (["absent.txt", "b.bag"], "No such data file: "),
        (["bad.jsonl", "b.bag"], "record 1 of"),
        (["empty.txt", "b.bag"], "SRC must have at least one record, got none in "),
        (["a.txt", "b.bin", "--dtype=nonsense"], "dtype must be the dtype of the tokens in the file, one of uint8"),
        (["a.txt", "b.bag", "--ray=auto"], "--ray needs the number of actors, such as --jobs=64"),
        (["a.txt", "a.csv", "b.txt"], "To decompress, pass a single SRC, got 2"),
        *(
            (["a.txt", "b.bin", f"--map={name}"], "--map must be MODULE:FUNCTION")
            for name in ("tokenizer", "absent:tokenize", "json:absent", "json:__doc__")
        ),
        *(
            (["a.txt", "b.bin", f"--map={name}"], f"{name!r} cannot be imported: {cause}")
            for name, cause in (
                ("absent:tokenize", "there is no module 'absent'"),
                ("json:absent", "'absent' is not in it ("),
                ("json:__doc__", "'__doc__' is of type str, and no function ("),
            )
        ),
    ],
)
def test_what_cannot_be_converted_is_a_sentence(arguments: list[str], words: str, tmp_path: Path) -> None:
    """A conversion that cannot be done is one sentence with the reason, and leaves no file."""
    (tmp_path / "a.txt").write_text("a\nb\n")
    (tmp_path / "a.csv").write_text("a\n1\n")
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"a": \n')
    (tmp_path / "empty.txt").touch()
    _, reported = run_here("convert", *arguments, folder=tmp_path, status=1)

    assert words in reported
    assert reported.count("millstream: ") == 1  # Indices that are made are reported, too.
    assert visible(tmp_path) == ["a.csv", "a.txt", "bad.jsonl", "empty.txt"]
    assert not list(tmp_path.glob(".*.conversion"))


@pytest.mark.parametrize("name", ["plan.json", "0.json", "0.bag"])
def test_nothing_is_written_through_a_link(name: str, tmp_path: Path) -> None:
    """Links in the folder for unfinished files, whose name is known to everybody, lead nowhere."""
    write_tfrecord(tmp_path / "a.tfrecord", RECORDS)
    (tmp_path / "thesis.json").write_text("{}")
    (tmp_path / ".b.bag.conversion").mkdir(0o700)
    (tmp_path / ".b.bag.conversion" / name).symlink_to(tmp_path / "thesis.json")
    subprocess.run([*COMMAND, "convert", "a.tfrecord", "b.bag"], cwd=tmp_path, check=False, capture_output=True)
    assert (tmp_path / "thesis.json").read_text() == "{}"


@pytest.mark.parametrize("kind", ["open to all", "another user's", "link"])
def test_a_folder_of_others_is_refused(kind: str, tmp_path: Path) -> None:
    """A working folder that others can write to, own or have linked is an error, and is left unchanged."""
    write_tfrecord(tmp_path / "a.tfrecord", RECORDS)
    folder, target = tmp_path / ".b.bag.conversion", tmp_path / "target"
    target.mkdir(0o700)
    if kind == "open to all":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "link" or os.geteuid() != 0:
        folder.symlink_to(target if kind == "link" else "/")
    else:
        folder.mkdir()
        os.chown(folder, 65534, 65534)
    _, reported = run_here("convert", "a.tfrecord", "b.bag", folder=tmp_path, status=1)
    assert "Remove it, or choose another destination: '" in reported
    assert os.path.lexists(folder)
    assert [*target.iterdir()] == []
    assert not (tmp_path / "b.bag").exists()


@pytest.mark.third_party
def test_objects_in_stores_are_converted(tmp_path: Path, store: ObjectServer) -> None:
    """Objects of stores are inspected and converted; a name without an extension needs --format."""
    store.objects["bucket/a.tfrecord"] = tfrecord_bytes(RECORDS)
    store.objects["bucket/a"] = tfrecord_bytes(RECORDS)
    url = f"{store.url}/bucket/a"
    printed, _ = run_here("inspect", f"{url}.tfrecord", folder=tmp_path)
    assert "  records   1,000" in printed
    run_here("convert", f"{url}.tfrecord", "a.bag", "--jobs=2", "--shards=2", folder=tmp_path)
    assert records_in(*sorted(tmp_path.glob("a-*.bag"))) == RECORDS
    _, reported = run_here("convert", url, "b.bag", folder=tmp_path, status=1)
    assert f"Cannot tell the format of '{url}' from its name. Pass --format" in reported
    run_here("convert", url, "b.bag", "--format=tfrecord", folder=tmp_path)
    assert records_in(tmp_path / "b.bag") == RECORDS


@pytest.mark.parametrize("extension", ["array_record", "bag"])
def test_a_full_disk_is_a_sentence(tmp_path: Path, extension: str) -> None:
    """A full disk is an error in one sentence, and leaves no file."""
    write_tfrecord(tmp_path / "a.tfrecord", [bytes(1_000_000)] * 4)
    run_here("index", "a.tfrecord", folder=tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, before[1]))
    try:
        _, reported = run_here("convert", "a.tfrecord", f"b.{extension}", folder=tmp_path, status=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert "File too large" in reported
    assert f"b.{extension}" in reported
    assert visible(tmp_path) == ["a.tfrecord"]
    assert not list(tmp_path.glob(".b.*"))


@pytest.mark.third_party
def test_what_array_records_own_beam_pipeline_writes_is_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe of the page runs: the records of TFRecord files, in the files of a Beam pipeline, are read."""
    pytest.importorskip("apache_beam", reason="apache-beam is not a dependency: pip install apache-beam")
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    program = page.partition("```py\nimport apache_beam")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "crawl").mkdir()
    write_tfrecord(tmp_path / "crawl" / "a.tfrecord", RECORDS)
    namespace: dict[str, Any] = {"millstream": millstream}
    exec(f"import apache_beam{program}", namespace)

    with namespace["source"] as source:
        assert sorted(every_record(source)) == sorted(RECORDS)
    assert len(visible(tmp_path)) == 65
