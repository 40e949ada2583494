"""Damage to files of every format: an error with file and record, or what stands in the file; never less than that.

What stands in a damaged file is read here by other code: the standard library, NumPy and the formats' own libraries.
"""

import bz2
import csv
import dataclasses
import functools
import gzip
import io
import itertools
import json
import lzma
import os
import re
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import millstream
from millstream.errors import DataSourceError
from support.files.record_files import (
    MEGATRON_CODES,
    write_array_record,
    write_bagz,
    write_megatron,
    write_tar,
    write_tfrecord,
)
from support.processes.worker_pools import python

RECORDS = [b"record %d " % number * 4 for number in range(12)]
TEXTS = [f"line {number} of ünicode" for number in range(12)]
WRONG = object()
"""Stands for a record that cannot be read."""


@dataclasses.dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        source: reads it; a class, or one with arguments.
        write: writes a file of twelve records at a path, and those beside it.
        read: returns what stands in the files at a path, WRONG for a record that nothing can be made of; None where
            damage is always found, so that each record is as it was written.
        whole_at: the lengths at which a file that was cut is a whole file with fewer records; every other cut is found.
            None for text, which may end anywhere.
        beside: what the names of files beside it end in; damage to these counts as well.
        argument: returns what the source takes for a path.
    """

    source: Callable[[Any], Any]
    write: Callable[[Path], Any]
    read: Callable[[Path], list[Any]] | None
    whole_at: Collection[int] | None = None
    beside: Sequence[str] = ()
    argument: Callable[[Path], Any] = str

    def open(self, path: Path) -> Any:
        """Returns a source of the file."""
        return self.source(self.argument(path))


def lines_of(path: Path) -> list[bytes]:
    *lines, last = path.read_bytes().split(b"\n")
    return [line.removesuffix(b"\r") for line in lines] + [last] * bool(last)


def or_wrong(parse: Callable[[bytes], Any], content: bytes) -> Any:
    """Returns what some bytes are parsed to, or WRONG."""
    try:
        return parse(content)
    except (ValueError, MemoryError, csv.Error, zstandard.ZstdError):
        return WRONG


def read_text(path: Path) -> list[Any]:
    return [or_wrong(bytes.decode, line) for line in lines_of(path)]


def read_json(path: Path) -> list[Any]:
    return [or_wrong(lambda content: json.loads(content.decode()), line) for line in lines_of(path) if line.strip()]


def read_csv(path: Path) -> list[Any]:
    """Returns the rows, which end where a newline is not within quotes."""
    rows, row, is_quoted = [], "", False
    for character in path.read_bytes().decode("utf-8", "surrogateescape"):
        is_quoted ^= character == '"'
        row += character
        if character == "\n" and not is_quoted:
            rows.append(row)
            row = ""
    rows += [row] * bool(row)
    stored = [row.encode("utf-8", "surrogateescape") for row in rows if row.strip("\r\n")]
    header, *rest = (or_wrong(lambda row: next(csv.reader([row.decode()], strict=True)), row) for row in stored)
    if header is WRONG:
        return [WRONG]
    return [
        dict(zip(header, row, strict=True)) if row is not WRONG and len(row) == len(header) else WRONG for row in rest
    ]


def read_tar(path: Path) -> list[Any]:
    """Returns the samples of an archive."""
    samples: list[dict[str, Any]] = []
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            folder, slash, name = member.name.rpartition("/")
            base, _, extension = name.partition(".")
            key = folder + slash + base
            if not samples or samples[-1]["__key__"] != key:
                samples.append({"__key__": key})
            file = archive.extractfile(member)
            samples[-1][extension.lower()] = file.read() if file else WRONG
    return samples


def read_bag(path: Path) -> list[Any]:
    """Returns the records of a Bagz file."""
    content = path.read_bytes()
    first = int.from_bytes(content[-8:], "little")
    ends = [0, *np.frombuffer(content[first:], "<u8").tolist()]
    stored = [content[start:end] for start, end in itertools.pairwise(ends)]
    if path.suffix == ".bag":
        return stored
    return [or_wrong(zstandard.ZstdDecompressor().decompress, record) if record else b"" for record in stored]


def read_megatron(prefix: Path) -> list[Any]:
    """Returns the sequences of a dataset of Megatron's."""
    index = prefix.with_name(f"{prefix.name}.idx").read_bytes()
    dtype = {code: name for name, code in MEGATRON_CODES.items()}[index[17]]
    count = int.from_bytes(index[18:26], "little")
    lengths = np.frombuffer(index, "<i4", count, 34)
    tokens = np.frombuffer(prefix.with_name(f"{prefix.name}.bin").read_bytes(), dtype)
    return np.split(tokens, np.cumsum(lengths)[:-1])


HDF5_LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"chunks": (4, 8)},
    "gzip": {"chunks": (4, 8), "compression": "gzip"},
    "sums": {"chunks": (1, 8), "fletcher32": True},
}


def write_hdf5(path: Path) -> None:
    """Writes a file whose metadata have checksums, with a column of each layout."""
    with h5py.File(path, "w", libver="latest") as file:
        for name, options in HDF5_LAYOUTS.items():
            file.create_dataset(name, data=np.arange(12 * 8, dtype=np.int16).reshape(12, 8), **options)


def read_hdf5(path: Path, names: Iterable[str]) -> list[Any]:
    """Returns the rows."""

    def row(file: Any, key: int) -> Any:
        try:
            return {name: file[name][key] for name in names}
        except OSError:
            return WRONG

    with h5py.File(path) as file:
        return [row(file, key) for key in range(12)]


def hdf5(*names: str) -> Format:
    """Returns the format of such files, of which some columns are read."""
    return Format(
        millstream.Hdf5DataSource,
        write_hdf5,
        lambda path: read_hdf5(path, names),
        (),
        argument=lambda path: {name: f"{path}/{name}" for name in names},
    )


def write_parquet(path: Path) -> None:
    """Writes three row groups."""
    pq.write_table(pa.table({"n": range(12), "text": TEXTS}), path, row_group_size=4)


def read_parquet(path: Path) -> list[Any]:
    """Returns the rows."""

    def rows(file: Any, group: int) -> list[Any]:
        try:
            table = file.read_row_group(group)
        except (OSError, pa.ArrowException):
            return [WRONG] * file.metadata.row_group(group).num_rows
        texts = [or_wrong(bytes.decode, text) for text in table["text"].cast(pa.binary()).to_pylist()]
        numbers = table["n"].to_numpy()
        return [{"n": n, "text": text} if text is not WRONG else WRONG for n, text in zip(numbers, texts, strict=True)]

    with pq.ParquetFile(path) as file:
        return [row for group in range(file.num_row_groups) for row in rows(file, group)]


AT_RECORDS = np.cumsum([0, *(16 + len(record) for record in RECORDS)]).tolist()
"""The offsets of the records of a TFRecord file: each has 16 bytes of lengths and checksums."""


def files_of_samples() -> Iterator[tuple[str, bytes]]:
    for number, record in enumerate(RECORDS):
        yield from ((f"folder/{number}.txt", record), (f"folder/{number}.seg.cls", b"%d" % number))


def write_tokens(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.arange(48, dtype=np.uint16))


def read_tokens(path: Path) -> list[Any]:
    """Returns the windows of four tokens."""
    tokens = np.load(path)
    return [{"tokens": tokens[start : start + 4]} for start in range(0, len(tokens) - 3, 4)]


FORMATS = {
    "ArrayRecord": Format(millstream.ArrayRecordDataSource, lambda path: write_array_record(path, RECORDS), None, ()),
    "Bagz": Format(millstream.BagzDataSource, lambda path: write_bagz(path, RECORDS), read_bag, (0,)),
    "Bagz, compressed": Format(millstream.BagzDataSource, lambda path: write_bagz(path, RECORDS), read_bag, (0,)),
    "CSV": Format(
        millstream.CsvDataSource,
        lambda path: path.write_text("n,text\n" + "".join(f'{n},"{text}\n""x"""\n' for n, text in enumerate(TEXTS))),
        read_csv,
    ),
    "HDF5": hdf5(*HDF5_LAYOUTS),
    "HDF5, plain": hdf5("plain"),
    "JSONL": Format(
        millstream.JsonLinesDataSource,
        lambda path: path.write_text("".join(json.dumps({"n": n, "t": text}) + "\n" for n, text in enumerate(TEXTS))),
        read_json,
    ),
    "Megatron": Format(
        millstream.MegatronDataSource,
        lambda path: write_megatron(path, [np.arange(n + 1, dtype=np.uint16) for n in range(12)]),
        read_megatron,
        range(34 + 12 * 12, 1000),  # After the lengths and offsets of sequences, the index has what is not read.
        (".bin", ".idx"),
    ),
    "Parquet": Format(millstream.ParquetDataSource, write_parquet, read_parquet, ()),
    "TFRecord": Format(millstream.TFRecordDataSource, lambda path: write_tfrecord(path, RECORDS), None, AT_RECORDS),
    "WebDataset": Format(
        millstream.WebDatasetDataSource, lambda path: write_tar(path, files_of_samples()), read_tar, ()
    ),
    "text": Format(millstream.TextLineDataSource, lambda path: path.write_text("\r\n".join(TEXTS)), read_text),
    "tokens": Format(functools.partial(millstream.TokenDataSource, window=4), write_tokens, read_tokens, ()),
}
IN_MEMORY = (millstream.ArrayRecordDataSource, millstream.Hdf5DataSource, millstream.ParquetDataSource)
"""Sources that keep all of a small file in memory once it was read."""
ENDINGS = {"Bagz": ".bag", "Bagz, compressed": ".bagz"}


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> Format:
    """Each format."""
    chosen: Format = FORMATS[request.param]
    return chosen


@pytest.fixture
def path(request: pytest.FixtureRequest, tmp_path: Path, form: Format) -> Path:
    """The path of a file of the format, or the beginning of the names of its files."""
    place = tmp_path / f"data{ENDINGS.get(request.node.callspec.params['form'], '')}"
    form.write(place)
    return place


def files_of(form: Format, path: Path) -> list[Path]:
    return [path.with_name(path.name + ending) for ending in form.beside] or [path]


def copies(form: Format, path: Path, contents: Iterable[tuple[Path, bytes]]) -> list[Path]:
    """Returns paths of copies with one changed file each, written before one is read, as new files are not indexed."""
    paths = []
    for number, (changed, content) in enumerate(contents):
        folder = path.parent / str(number)
        folder.mkdir()
        for file in files_of(form, path):
            (folder / file.name).write_bytes(content if file == changed else file.read_bytes())
        paths.append(folder / path.name)
    return paths


def words(record: Any) -> Any:
    return record if record is WRONG else repr(record)


def outcome(form: Format, path: Path) -> list[Any] | None:
    """Returns what is read, WRONG for a record with an error that names it; None where the file is refused by name."""
    try:
        source = form.open(path)
    except (DataSourceError, ValueError) as error:
        text = str(error)
    else:
        text = ""
    if text:
        assert str(path) in text
        return None
    with source:
        records = [record_or_wrong(source, key) for key in range(len(source))]
        if WRONG not in records:
            assert [words(record) for record in source.__getitems__(range(len(source)))] == records
        else:
            with pytest.raises(DataSourceError, match=rf"\(record key {records.index(WRONG)}\)"):
                source.__getitems__(range(len(source)))
    return records


def record_or_wrong(source: Any, key: int) -> Any:
    """Returns a record, or WRONG after an error with the file and the record."""
    try:
        return words(source[key])
    except DataSourceError as error:
        text = str(error)
    assert re.search(rf"record {key} of .*\(record key {key}\)", text)
    assert "/data" in text
    return WRONG


def check(form: Format, path: Path, original: list[Any], *, may_be_shorter: bool) -> bool:
    """Checks what is read of a damaged file, and returns whether anything was found to be wrong."""
    found = outcome(form, path)
    if found is None:
        return True
    if form.read is None:
        assert len(found) == len(original) or (may_be_shorter and len(found) < len(original))
        expected = original
    else:
        expected = [words(record) for record in form.read(path)]
        assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=False):
        assert one in (WRONG, other)
    return WRONG in found


def test_a_flipped_byte_is_an_error_or_what_stands_in_the_file(form: Format, path: Path) -> None:
    """A file with one of 60 bytes changed has errors or the records that it contains, none less and no crash."""
    original = outcome(form, path)
    assert original is not None
    assert len(original) == 12
    rng = np.random.default_rng(0)
    files = files_of(form, path)
    wholes = {file: np.frombuffer(file.read_bytes(), np.uint8) for file in files}
    chosen = []
    for file, whole in wholes.items():
        # What fills up blocks is tried as well, but not above all.
        for places, count in ((np.flatnonzero(whole), 50), (np.flatnonzero(whole == 0), 10)):
            chosen += [(file, place) for place in rng.permutation(places)[:count].tolist()]
    contents = []
    for file, place in chosen:
        damaged = wholes[file].copy()
        damaged[place] ^= rng.integers(1, 256, dtype=np.uint8)
        contents.append((file, damaged.tobytes()))
    wrong = sum(check(form, copy, original, may_be_shorter=False) for copy in copies(form, path, contents))
    assert wrong > 0
    assert form.source is not millstream.TFRecordDataSource or wrong == len(chosen)


def test_a_truncation_is_an_error_or_what_stands_in_the_file(form: Format, path: Path) -> None:
    """A file cut at any of 60 lengths has errors or the records that it contains."""
    original = outcome(form, path)
    assert original is not None
    cuts = []
    for file in files_of(form, path):
        whole = file.read_bytes()
        lengths = {*range(0, len(whole), max(1, len(whole) // 60)), *range(max(0, len(whole) - 20), len(whole))}
        cuts += [(file, whole[:length], whole[length:]) for length in sorted(lengths)]
    for copy, (_, start, end) in zip(copies(form, path, [cut[:2] for cut in cuts]), cuts, strict=True):
        is_found = check(form, copy, original, may_be_shorter=True)
        if form.whole_at is not None and end.strip(b"\0"):
            assert is_found or len(start) in form.whole_at


def cut(path: Path) -> None:
    os.truncate(path, len(path.read_bytes().rstrip(b"\0")) // 2)


def replace(path: Path) -> None:
    """Puts other content of the same size in the place of a file."""
    content = path.read_bytes()
    path.with_name("new").write_bytes(content[::-1])
    path.with_name("new").replace(path)


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(0, 0))


HAPPENS: dict[str, Callable[[Path], Any]] = {
    "cut": cut,
    "replaced": replace,
    "rewritten": rewrite,
    "removed": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "another format": lambda path: path.write_bytes(b"%PDF-1.7 " * 500),
}


@pytest.mark.parametrize("change", HAPPENS)
@pytest.mark.parametrize("is_open", [False, True])
def test_what_happens_to_a_file_is_an_error_with_file_and_record(
    form: Format, path: Path, change: str, is_open: bool
) -> None:
    """An open file, or one that is put back, stays readable; what is written over it is never read."""
    with form.open(path) as source:
        original = [words(record) for record in source.__getitems__(range(12))] if is_open else []
        file = files_of(form, path)[0]
        file.with_name("kept").hardlink_to(file)
        HAPPENS[change](file)
        found = [record_or_wrong(source, key) for key in range(12)]
        if change in ("replaced", "removed"):
            file.with_name("kept").replace(file)
            assert WRONG not in [record_or_wrong(source, key) for key in range(12)]
    if not is_open:
        assert found == [WRONG] * 12
    else:
        assert all(one in (WRONG, other) for one, other in zip(found, original, strict=True))
        is_in_memory = form.source in IN_MEMORY
        assert is_in_memory or (WRONG in found) == (change not in ("removed", "replaced"))


FORBIDDEN = """
import concurrent.futures.thread, json, os, sys
import millstream
cases = [(getattr(millstream, kind), argument) for kind, argument in json.loads(sys.argv[2])]
sources = [kind(argument) for kind, argument in cases]
for file in sys.argv[1], *sys.argv[3:]:
    os.chmod(file, 0)
os.environ["MILLSTREAM_CACHE"] = "/dev/null/none"
if os.geteuid() == 0:
    os.seteuid(65534)
for source, (kind, argument) in zip(sources, cases):
    for read in (lambda: source[7], lambda: kind(argument)):
        try:
            read()
        except OSError as error:
            print(type(error).__name__, error)
for path in ("file", "file[0:1]", "fil*"):
    try:
        millstream.ArrayRecordDataSource(f"{sys.argv[1]}/{path}")
    except OSError as error:
        print(type(error).__name__, error)
if os.getuid() == 0:
    os.seteuid(0)
"""


def test_a_file_that_may_not_be_read_is_an_error() -> None:
    """A PermissionError at construction, of a folder, too; later, the error names the record."""
    # The folders that pytest makes are closed to others.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        secret = Path(folder) / "secret"
        secret.mkdir()
        write_array_record(secret / "file", RECORDS)
        places: list[Path] = []
        cases, files = [], []
        for name, form in FORMATS.items():
            if isinstance(form.source, type):
                places.append(Path(folder) / f"{len(places)}{ENDINGS.get(name, '')}")
                form.write(places[-1])
                cases.append((form.source.__name__, form.argument(places[-1])))
                files += files_of(form, places[-1])
        ran = python("-c", FORBIDDEN, secret, json.dumps(cases), *files, check=True)
        secret.chmod(0o700)
    *lines, one, part, several = ran.stdout.splitlines()
    for line in (one, part, several):
        assert re.fullmatch(rf"PermissionError.*{secret}.*", line)
    for place, read, constructed in zip(places, lines[::2], lines[1::2], strict=True):
        assert re.fullmatch(rf"DataSourceError Cannot read record 7 .*{place}.*Permission denied.*", read)
        assert re.fullmatch(rf"PermissionError.*{place}.*", constructed)


@pytest.mark.parametrize("content", [b"", b"%PDF-1.7 \x00\xff" * 500], ids=["empty", "another format"])
def test_what_is_not_of_the_format_is_refused(form: Format, path: Path, content: bytes) -> None:
    """A file of another format is refused by name, or its records are errors; an empty file may have none."""
    for file in files_of(form, path):
        file.write_bytes(content)
    found = outcome(form, path)
    assert found is None or set(found) == ({WRONG} if content else set())


@pytest.mark.parametrize(
    ("form", "compress"),
    [
        *itertools.product(
            ["CSV", "JSONL", "TFRecord", "WebDataset", "text", "tokens"],
            [gzip.compress, bz2.compress, lzma.compress, zlib.compress],
        ),
    ],
    indirect=["form"],
)
def test_compressed_files_are_refused_with_advice(form: Format, path: Path, compress: Callable[[bytes], bytes]) -> None:
    """A file compressed as a whole has no random access: the error names the file and the command that converts it."""
    path.write_bytes(compress(path.read_bytes()))
    with pytest.raises(
        DataSourceError,
        match=r"data' is compressed as a whole, by \w+, .*Decompress it once.*python -m millstream convert",
    ):
        form.open(path)


def zipped(content: bytes) -> bytes:
    """Returns an archive of one file."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("data", content)
    return archive.getvalue()


@pytest.mark.parametrize("form", ["CSV", "JSONL", "TFRecord", "WebDataset", "text", "tokens"], indirect=True)
def test_other_compressed_files_are_refused_by_content_or_name(form: Format, path: Path) -> None:
    """Those that no command here decompresses, and those whose content shows nothing, are refused as well."""
    content = path.read_bytes()
    packed = {"a": zipped(content), "b": pa.compress(content, "lz4", asbytes=True)}
    packed |= {f"c.{name}": pa.compress(content, name, asbytes=True) for name in ("brotli", "snappy")}
    for name, written in packed.items():
        path.with_name(name).write_bytes(written)
        with pytest.raises(DataSourceError, match=r"compressed as a whole, by \w+, .* and read the result\.$"):
            form.open(path.with_name(name))


PLACEHOLDERS = {
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a2146" * 8 + b"\nsize 14694\n": "git lfs pull",
    b"/annex/objects/SHA256E-s14694--4d7a2146.bin\n": "git annex get",
}
"""The content of files that name data elsewhere, and the command that fetches it."""


@pytest.mark.parametrize("content", PLACEHOLDERS)
def test_a_placeholder_for_a_file_is_refused(form: Format, path: Path, content: bytes) -> None:
    """A source of files is not built if one of them, or one beside them, was not fetched from large file storage."""
    for file in files_of(form, path):
        kept = file.read_bytes()
        file.write_bytes(content)
        with pytest.raises(DataSourceError, match=rf"'.*{file.name}' is a .* Run `{PLACEHOLDERS[content]}`"):
            form.open(path)
        file.write_bytes(kept)


@pytest.mark.parametrize("content", PLACEHOLDERS)
def test_a_placeholder_among_files_that_are_records_is_refused(tmp_path: Path, content: bytes) -> None:
    """The first file is looked at when the source is built, the others when they are read; so are descriptions."""
    command = PLACEHOLDERS[content]
    for name in ("data/a/1.png", "data/b/2.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"an image")
    (tmp_path / "data/b/2.png").write_bytes(content)
    for source in (
        millstream.FileDataSource(f"{tmp_path}/data/*/*.png"),
        millstream.ImageFolderDataSource(tmp_path / "data"),
    ):
        assert b"an image" in source[0].values()
        with pytest.raises(DataSourceError, match=rf"record 0 of '.*2\.png' \(record key 1\).*{command}"):
            source[1]
    with pytest.raises(DataSourceError, match=command):
        millstream.FileDataSource(f"{tmp_path}/data/b/*")
    tfds = functools.partial(millstream.TfdsDataSource, split="train")
    for kind, name in ((millstream.MdsDataSource, "index.json"), (tfds, "dataset_info.json")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataSourceError, match=rf"{name}' .*{command}"):
            kind(tmp_path)


def test_a_batch_compares_each_file_once(form: Format, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may be written to while it is open: one call per file and batch finds out, and not one per record."""
    with form.open(path) as source:
        source[0]
        calls: list[int] = []
        fstat = os.fstat

        def noted(descriptor: int) -> os.stat_result:
            calls.append(descriptor)
            return fstat(descriptor)

        monkeypatch.setattr(os, "fstat", noted)
        source.__getitems__(range(12))
    assert len(calls) == (form.source not in IN_MEMORY) or form.source is millstream.Hdf5DataSource


NO_JSON = [b'{"a": 1', b"[1] [2]", b"\xff", b"{'a': 1}", b"nothing", b"[" * 5000]
NO_ROWS = {
    "1": "it has 1 fields, but the first row of the file names 2 columns",
    "1,2,3": "it has 3 fields",
    '"1"x,2': "it is not a row of CSV: .* quotes",
    "1\r2,3": "it is not a row of CSV",
}
UNDECODABLE: list[tuple[Any, bytes, str, list[Any]]] = [
    (millstream.TextLineDataSource, b"one\nthr\xe9\xe9\nfour", "it is not utf-8: .* byte 3", ["four", "one"]),
    *(
        (millstream.JsonLinesDataSource, b"[1]\n\n \n" + line + b"\n[3]\n", "it is not .*line 4 of", [[3], [1]])
        for line in NO_JSON
    ),
    *(
        (millstream.CsvDataSource, f"a,b\n0,0\n{row}\n2,2\n".encode(), reason, [{"a": n, "b": n} for n in "20"])
        for row, reason in NO_ROWS.items()
    ),
]


@pytest.mark.parametrize(("kind", "content", "reason", "others"), UNDECODABLE)
def test_a_record_that_cannot_be_decoded_is_an_error(
    tmp_path: Path, kind: Any, content: bytes, reason: str, others: list[Any]
) -> None:
    """The error has the file, the record and the reason; the records beside it are read."""
    (tmp_path / "file").write_bytes(content)
    with kind(tmp_path / "file") as source:
        with pytest.raises(DataSourceError, match=rf"record 1 of '.*file' \(record key 1\): {reason}"):
            source.__getitems__([0, 1, 2])
        assert source.__getitems__([2, 0]) == others
