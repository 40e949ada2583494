"""Index files: what may lie at their names, what may happen to them, and where they are kept."""

import logging
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources import BagzDataSource, CsvDataSource, MegatronDataSource, TextLineDataSource
from millstream.sources.files import offset_index, spans
from millstream.sources.files import offset_index as offsets_module
from millstream.sources.files.offset_index import (
    DamagedIndexError,
    HeldOffsets,
    IndexKey,
    Placement,
    StoredOffsets,
    find_offsets,
    placement,
    store_offsets,
)
from millstream.sources.files.paths import FileIdentity
from millstream.sources.files.private_files import cache_folder
from millstream.sources.files.progress import Progress
from support.faults.memory_limits import limited
from support.files.record_files import every_record, records_of, write_megatron
from support.processes.worker_pools import python

LINES = [f"line {number}" for number in range(100)]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of a hundred lines, with a cache of its own."""
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return write_lines(tmp_path / "data" / "a.txt")


def write_lines(path: Path) -> Path:
    path.write_text("".join(f"{line}\n" for line in LINES))
    return path


def key_of(path: Path, kind: str = "lines") -> IndexKey:
    return IndexKey(str(path), kind, 1, FileIdentity.of(str(path)))


def index_beside(path: Path) -> Path:
    """Makes the index of a file beside it."""
    placement.set(Placement.BESIDE)
    try:
        TextLineDataSource(path).close()
    finally:
        placement.set(Placement.CACHE)
    return path.with_name(f".{path.name}.lines-index")


def index_in_cache(path: Path) -> Path:
    TextLineDataSource(path).close()
    return Path(key_of(path).cached)


KEEPERS = [index_in_cache, index_beside]


def read_lines(path: Path) -> list[str]:
    return records_of(TextLineDataSource(path))


def test_the_index_is_made_once_and_kept_in_the_cache(path: Path) -> None:
    """The folder of the data stays as it is, and the index is readable whatever the mask of the process."""
    index = index_in_cache(path)
    before = index.stat()
    assert read_lines(path) == LINES
    after = index.stat()

    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert [entry.name for entry in index.parent.iterdir()] == [index.name]
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert (index.stat().st_mode & 0o777, index.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    other = write_lines(path.with_name("b.txt"))
    mask = os.umask(0o777)
    try:
        assert index_in_cache(other).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(mask)


def test_an_index_beside_the_data_is_used(path: Path) -> None:
    """An index beside the data has mode 0644, is not matched by `*`, and leaves the cache empty."""
    index = index_beside(path)
    before = index.stat()
    assert read_lines(path.parent / "*") == LINES

    assert index.stat() == before
    assert before.st_mode & 0o777 == 0o644
    assert not Path(cache_folder()).exists()


@pytest.mark.parametrize("keep", KEEPERS)
def test_every_damage_to_an_index_is_noticed(path: Path, keep: Callable[[Path], Path]) -> None:
    """An index with a changed byte, in its header or after it, cut short or going on is rebuilt; no record is wrong."""
    index = keep(path)
    whole = index.read_bytes()
    rng = np.random.default_rng(0)
    places = [*range(64), *rng.integers(64, len(whole), 50).tolist()]
    changed = [whole[:place] + bytes([whole[place] ^ rng.integers(1, 256)]) + whole[place + 1 :] for place in places]
    for content in [*changed, *(whole[:length] for length in range(0, len(whole), 13)), whole + b"12345678"]:
        index.write_bytes(content)
        assert read_lines(path) == LINES
        if keep is index_in_cache:
            assert index.read_bytes() == whole


def put_link(place: Path) -> None:
    place.rename(place.with_name("elsewhere"))
    place.symlink_to(place.with_name("elsewhere"))


def put_foreign(place: Path) -> None:
    shift_offsets(place)
    place.chmod(0o666)


def shift_offsets(place: Path) -> None:
    """Changes an offset of a small index and the checksum with it, as a program with bad intentions would."""
    content = bytearray(place.read_bytes())
    content[64 + 8 * 50] += 1
    content[-4:] = zlib.crc32(content[64:-4]).to_bytes(4, "little")
    place.write_bytes(content)


@pytest.mark.parametrize("keep", KEEPERS)
@pytest.mark.parametrize("put", [os.mkfifo, Path.mkdir, put_link, put_foreign])
def test_other_things_at_the_name_of_an_index_are_not_used(
    path: Path, keep: Callable[[Path], Path], put: Callable[[Path], None]
) -> None:
    """A pipe, a folder, a link, a file that anyone may write to: no hang, no error, no wrong record."""
    index = keep(path)
    if put not in (put_link, put_foreign):
        index.unlink()
    put(index)
    for _ in range(2):
        assert read_lines(path) == LINES


@pytest.mark.parametrize("offset", [-1, 1 << 40, 1 << 62])
def test_no_memory_is_allocated_for_offsets_beyond_the_file(
    path: Path, offset: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An index with valid checksums and a record of a terabyte, or of less than nothing, is rebuilt."""

    def write(index: Path, first: int) -> None:
        content = bytearray(index.read_bytes())
        content[64 + 8 * first : -4] = np.full((len(content) - 68) // 8 - first, offset).tobytes()
        content[-4:] = zlib.crc32(content[64:-4]).to_bytes(4, "little")
        index.write_bytes(content)

    write(index_in_cache(path), 51)
    with TextLineDataSource(path) as source:
        assert source[50] == LINES[50]
    CsvDataSource(path).close()
    write(Path(key_of(path, "csv").cached), 0)
    with CsvDataSource(path) as rows:
        assert rows[49] == {LINES[0]: LINES[50]}
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == 2 * [
        f"millstream: the index of {str(path)!r} is rebuilt: its offsets are not those of records."
    ]


def test_an_index_that_cannot_be_opened_for_want_of_descriptors_is_not_rebuilt(path: Path) -> None:
    """The source then closes another file, and opens the index."""
    index_in_cache(path)
    with limited(resource.RLIMIT_NOFILE, 3), pytest.raises(OSError, match="Too many open files"):
        find_offsets(key_of(path))


READ_AS = """
import os, sys
import millstream
# What is imported late may be where the other user may not look.
millstream.TextLineDataSource(sys.argv[3]).close()
os.setuid(int(sys.argv[1]))
with millstream.TextLineDataSource(sys.argv[2]) as source:
    print([source[49], source[50]])
"""


def test_an_index_of_another_user_is_not_used() -> None:
    """In a shared folder, only an index of the reader, of root or of the data's owner is trusted."""
    is_root = os.geteuid() == 0
    reader, stranger = (65533, 65534) if is_root else (os.geteuid(), os.geteuid())
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        path, other = write_lines(Path(folder) / "a.txt"), write_lines(Path(folder) / "b.txt")
        index = index_beside(path)
        shift_offsets(index)
        printed, reported = [], []
        for owner in (stranger, os.geteuid()):
            os.chown(index, owner, -1)
            cache = {"MILLSTREAM_CACHE": f"{folder}/cache-{owner}"}
            ran = python("-c", READ_AS, reader, path, other, cwd="/", env=os.environ | cache)
            printed.append(ran.stdout)
            reported.append(ran.stderr)
    # The same index, from the owner of the data, is believed: only the lines themselves show that it is wrong.
    assert "does not point at one line" in reported[1]
    assert not is_root or printed[0] == "['line 49', 'line 50']\n", reported


def test_a_full_disk_leaves_the_index_in_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All records are read, by a pickled copy without a scan, too; one line says why, and no file is left behind."""
    other = write_lines(path.with_name("b.txt"))
    with limited(resource.RLIMIT_FSIZE, 100), TextLineDataSource([path, other]) as source:
        monkeypatch.setattr(spans, "Scan", None)
        with pickle.loads(pickle.dumps(source)) as copy:
            assert every_record(copy) == every_record(source) == LINES * 2
        assert len(source.unkept_indices) == 2
    (warning,) = caplog.messages
    assert warning.startswith("Cannot save the index of ")
    assert "File too large" in warning
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["a.txt", "b.txt"]
    assert list(Path(cache_folder()).iterdir()) == []


def test_a_folder_that_takes_no_file_is_skipped_for_the_next(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A cache that is a file: the index is beside the data, and the log says so once."""
    Path(cache_folder()).write_text("")
    with caplog.at_level(logging.INFO, "millstream"):
        assert read_lines(path) == LINES
    made, failed = caplog.records

    assert [entry.name for entry in sorted(path.parent.iterdir())] == [".a.txt.lines-index", "a.txt"]
    assert (made.levelname, failed.levelname) == ("INFO", "WARNING")
    assert f"in {str(path.parent)!r} instead" in failed.message


@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_rewritten_with_its_old_size_and_time_is_noticed(path: Path, is_open: bool) -> None:
    """A file rewritten with its old size and time is read as it is now, by new sources and when it is reopened."""
    path.write_text("a\nbbbbbbbb\nccc\n")
    before = path.stat()
    with TextLineDataSource(path) as source:
        path.write_text("a\nbbb\nbbbbcccc\n")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (every_record(source) if is_open else read_lines(path)) == ["a", "bbb", "bbbbcccc"]


def write_long_lines(path: Path) -> list[str]:
    """Writes a file of which no sample holds half, and returns its lines."""
    lines = [f"{number} {'x' * (number % 97)}" for number in range(1000)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return lines


def count_scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the list to which every later scan of a file adds its path."""
    scans: list[str] = []
    scanned = spans.SpanRecords._scanned

    def noted(self: spans.SpanRecords[Any], scan: Any) -> Iterator[Any]:
        scans.append(scan.path)
        return scanned(self, scan)

    monkeypatch.setattr(spans.SpanRecords, "_scanned", noted)
    return scans


def copied(folder: Path) -> Path:
    subprocess.run(["cp", "-a", folder, folder.with_name("copy")], check=True)
    return folder.with_name("copy")


def packed(folder: Path) -> Path:
    """Returns a copy through an archive that has no fractions of seconds."""
    out = folder.with_name("unpacked")
    out.mkdir()
    pack = subprocess.run(["tar", "--format=gnu", "-c", "-C", folder, "."], check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", out], input=pack.stdout, check=True)
    return out


def moved(folder: Path) -> Path:
    return folder.rename(folder.with_name("other"))


def renamed(folder: Path) -> Path:
    for file in list(folder.iterdir()):
        file.rename(file.with_name(file.name.replace("c.", "d.", 1).replace("c_", "d_", 1)))
    return folder


def protected(folder: Path) -> Path:
    for file in folder.glob("c*"):
        file.chmod(0o444)
    return folder


def linked(folder: Path) -> Path:
    for file in folder.glob("c*"):
        file.with_name(f"link-{file.name}").hardlink_to(file)
    return folder


@pytest.mark.parametrize("change", [copied, packed, moved, renamed, protected, linked])
@pytest.mark.parametrize("place", [Placement.BESIDE, Placement.CACHE])
def test_an_index_beside_the_data_goes_where_the_data_goes(
    path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], Path], place: Placement
) -> None:
    """An index beside the data is used for a copy of both, under other names, and for other permissions and links.

    So it is if it depends on two files. One in the cache belongs to the path, inode and ctime.
    """
    write_long_lines(path.with_name("c.txt"))
    write_megatron(path.with_name("c_tokens"), np.split(np.arange(12, dtype=np.uint16), [2, 6]))
    path.unlink()

    def read(folder: Path) -> list[list[object]]:
        (text,), (tokens,) = folder.glob("[cd].txt"), folder.glob("[cd]_tokens.bin")
        placement.set(place)
        sources = TextLineDataSource(text), MegatronDataSource(tokens.with_suffix(""))
        placement.set(Placement.CACHE)
        return [list(map(str, records_of(source))) for source in sources]

    expected = read(path.parent)
    scans = count_scans(monkeypatch)
    assert read(change(path.parent)) == expected
    assert len(scans) == (0 if place is Placement.BESIDE else 2)


@pytest.mark.parametrize("change", [protected, linked])
def test_an_index_beside_the_data_stays_when_an_open_source_opens_its_file_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], Path]
) -> None:
    """A change of permissions or links of the data below a source is no reason for a scan."""
    path = path.rename(path.with_name("c.txt"))
    index_beside(path)
    scans = count_scans(monkeypatch)
    with TextLineDataSource(path) as source:
        change(path.parent)
        assert every_record(source) == LINES
    assert scans == []


def kept(time: int) -> int:
    return time


def cut(time: int) -> int:
    return time - time % 10**9


def later(time: int) -> int:
    return time + 1


@pytest.mark.parametrize("part", ["lines", "tokens"])
@pytest.mark.parametrize(
    ("at", "clock"), [*((at, clock) for at in (0, 500, 998) for clock in (kept, cut)), (250, later)]
)
def test_an_index_beside_the_data_is_not_that_of_other_content(
    path: Path, at: int, clock: Callable[[int], int], part: str
) -> None:
    """Other content of the same size and time, at either end or in the middle, is scanned again.

    So it is if only the second of two files differs, and for any content if its time differs by a nanosecond.
    """
    lines, prefix = write_long_lines(path), path.with_name("tokens")
    cuts = np.arange(3, 3000, 3)
    tokens = np.arange(3000, dtype=np.uint16)
    write_megatron(prefix, np.split(tokens, cuts))
    index_beside(path)
    placement.set(Placement.BESIDE)
    MegatronDataSource(prefix).close()
    placement.set(Placement.CACHE)

    def rewritten(file: Path, write: Callable[[], object]) -> None:
        times = file.stat()
        write()
        os.utime(file, ns=(times.st_atime_ns, clock(times.st_mtime_ns)))

    if part == "tokens":
        cuts[at] += 1
        rewritten(prefix.with_suffix(".idx"), lambda: write_megatron(prefix, np.split(tokens, cuts)))
    else:
        lines[at : at + 2] = lines[at : at + 2][::-1]
        rewritten(path, lambda: path.write_text("".join(f"{line}\n" for line in lines)))
    assert read_lines(path) == lines
    with MegatronDataSource(prefix) as source:
        assert source.sequence_lengths().tolist() == np.diff([0, *cuts, 3000]).tolist()


def test_lines_that_are_not_where_the_index_says_are_errors(path: Path) -> None:
    """An open file that is rewritten, with its old size and time: a read is one whole line of it, or an error."""
    path.write_text("a\nbbbbbbbb\nccc\n")
    before = path.stat()
    with TextLineDataSource(path) as source:
        assert source[0] == "a"
        path.write_text("a\nbbb\nbbbbcccc\n")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert source[0] == "a"
        with pytest.raises(DataSourceError, match=r"record 1 of .*a\.txt.* not point at one line"):
            source.__getitems__([0, 1])


def test_a_second_file_that_changes_is_noticed_with_the_first_unchanged(path: Path) -> None:
    """If only the index of a Megatron dataset changes, reading is an error, and a new source has the new sequences."""
    prefix, tokens = path.with_name("c"), np.arange(12, dtype=np.uint16)
    write_megatron(prefix, np.split(tokens, [6]))
    times = prefix.with_name("c.bin").stat()
    with MegatronDataSource(prefix) as source:
        write_megatron(prefix, np.split(tokens, [2, 6]))
        os.utime(prefix.with_name("c.bin"), ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(DataSourceError, match=r"c\.idx' has changed since the source was constructed"):
            source[0]
    with MegatronDataSource(prefix) as source:
        assert [record.tolist() for record in every_record(source)] == [[0, 1], [2, 3, 4, 5], [*range(6, 12)]]
        assert source.sequence_lengths().tolist() == [2, 4, 6]


def test_limits_that_change_beside_a_bagz_file_are_noticed(path: Path) -> None:
    """A new source uses the changed limits beside a Bagz file; without them, reading is an error."""
    place, limits = path.with_name("t.bag"), path.with_name("limits.t.bag")
    place.write_bytes(b"aabbbb")
    for ends, expected in (([2, 6], [b"aa", b"bbbb"]), ([3, 6], [b"aab", b"bbb"])):
        limits.write_bytes(np.array(ends, "<u8").tobytes())
        assert records_of(BagzDataSource(place)) == expected
    with BagzDataSource(place) as source:
        limits.unlink()
        with pytest.raises(DataSourceError, match=r"limits\.t\.bag' has changed"):
            source[0]


@pytest.mark.parametrize("damage", ["cut short", "changed"])
def test_an_index_damaged_while_it_is_open_is_rebuilt(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """Never a signal, never a wrong record, and one line in the log; the progress that is shown ends."""
    monkeypatch.setattr(offsets_module, "HELD_BYTES", 0)
    path.write_text("".join(f"line {number}\n" for number in range(20_000)))
    index = index_in_cache(path)
    with TextLineDataSource(path) as source:
        assert source[0] == "line 0"
        closed: list[bool] = []
        monkeypatch.setattr(Progress, "close", lambda _: closed.append(True))
        if damage == "cut short":
            os.truncate(index, 4096)
        else:
            with index.open("r+b") as file:
                file.seek(64 + 8 * 15_000)
                file.write(b"\0")
        assert source.__getitems__([1, 14_999, 15_000, 19_999]) == [f"line {n}" for n in (1, 14_999, 15_000, 19_999)]
        assert source.span_sizes()[15_000] == len("line 15000\n")
    assert len(closed) == 1
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        f"millstream: the index of {str(path)!r} is rebuilt: {reason}."
        for reason in [{"cut short": "it was truncated", "changed": "the checksum of its block 3 is wrong"}[damage]]
    ]


def set_block(patch: pytest.MonkeyPatch) -> None:
    for module in (offset_index, offsets_module):
        patch.setattr(module, "BLOCK", 8)


@given(st.lists(st.lists(st.integers(0, 2**40), max_size=20), max_size=20), st.randoms(use_true_random=False))
def test_a_stored_index_gives_the_offsets_that_were_stored(chunks: list[list[int]], random: Random) -> None:
    """However the offsets are found and read, in memory or by block, they are those that were stored."""
    expected = np.sort(np.array([0, *(offset for chunk in chunks for offset in chunk)]))
    cuts = np.cumsum([len(chunk) for chunk in chunks])
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        set_block(patch)
        patch.setattr(offset_index, "_FIRST_BYTES", 64)
        patch.setenv("MILLSTREAM_CACHE", folder)
        data = Path(folder) / "data"
        data.touch()
        stored, place, failures = store_offsets(key_of(data), lambda: np.split(expected, cuts))
        assert (place, failures) == (key_of(data).cached, [])
        found = find_offsets(key_of(data))
        assert isinstance(stored, StoredOffsets)
        assert isinstance(found, StoredOffsets)
        rows = np.array([random.randrange(len(expected) - 1) for _ in range(min(5, len(expected) - 1))], np.int64)
        start = random.randrange(len(expected))
        stop = random.randrange(start, len(expected) + 1)
        for offsets in (stored, found, found.held(), HeldOffsets(expected)):
            starts, stops = offsets.spans(rows)
            assert starts.tolist() == expected[rows].tolist()
            assert stops.tolist() == expected[rows + 1].tolist()
            assert offsets.between(start, stop).tolist() == expected[start:stop].tolist()
            assert offsets.num_records == len(expected) - 1
        stored.close()
        found.close()


def test_a_changed_offset_is_found_when_its_block_is_first_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flipped bit of an index that is read from its file, block by block."""
    set_block(monkeypatch)
    monkeypatch.setattr(offset_index, "_FIRST_BYTES", 64)
    index = index_in_cache(path)
    whole = np.frombuffer(index.read_bytes(), np.uint8)

    def offsets_of(content: NDArray[np.uint8]) -> list[int] | None:
        index.write_bytes(content.tobytes())
        found = find_offsets(key_of(path))
        if found is None:
            return None
        assert isinstance(found, StoredOffsets)
        try:
            return list(found.between(0, 101).tolist())
        except DamagedIndexError:
            return None
        finally:
            found.close()

    assert offsets_of(whole) == [0, *np.cumsum([len(line) + 1 for line in LINES]).tolist()]
    for bit in np.random.default_rng(0).permutation(8 * len(whole))[:400].tolist():
        damaged = whole.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        assert offsets_of(damaged) is None


def test_unused_indices_leave_the_cache(path: Path) -> None:
    """Those that were not used for 90 days go when another is written; files of other programs stay."""
    index, old = index_in_cache(path), time.time() - 91 * 86_400
    names = ("other.0123456789abcdef.lines-index", ".other.0123456789abcdef.lines-index.0123456789ab.part")
    others = [index.with_name(name) for name in names]
    kept = [index.with_name(name) for name in ("thesis.txt", "film.part", "my-index", ".a.txt.lines-index")]
    for file in (index, *others, *kept):
        file.write_bytes(index.read_bytes())
        os.utime(file, (old, old))
    assert read_lines(path) == LINES
    assert time.time() - index.stat().st_mtime < 86_400
    program = f"import millstream\nmillstream.TextLineDataSource({str(path.with_name('new.txt'))!r})"
    path.with_name("new.txt").write_text("".join(f"{number}\n" for number in range(2000)))
    subprocess.run([sys.executable, "-c", program], check=True)

    assert index.exists()
    assert all(file.exists() for file in kept)
    assert not any(file.exists() for file in others)
