"""Files that are compressed as a whole: what was compressed comes out, or there is an error."""

import bz2
import gzip
import lzma
import shlex
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import DataSourceError
from millstream.sources import TextLineDataSource
from millstream.tools import convert_command
from millstream.tools.convert_command import unpack
from support.files.record_files import every_record
from support.processes.commands import run_here

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor().compress,
    "z": zlib.compress,
    # As pzstd writes it: a frame to be skipped, with the size of the next one.
    "pzst": lambda content: bytes.fromhex("502a4d1804000000") + b"size" + zstandard.ZstdCompressor().compress(content),
}
PARTS = st.lists(st.binary(max_size=2000) | st.integers(0, 300_000).map(bytes), min_size=1, max_size=4)


@pytest.mark.parametrize("ending", COMPRESS)
@settings(max_examples=25)
@given(parts=PARTS, filling=st.sampled_from([0, 4, 512]))
def test_what_was_compressed_comes_out(
    ending: str, parts: list[bytes], filling: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Several compressed members, with zeros between and after them, decompress to their concatenation."""
    folder = tmp_path_factory.mktemp("unpacking")
    packed = folder / "packed"
    packed.write_bytes(bytes(filling).join([*map(COMPRESS[ending], parts), b""]))

    assert unpack(str(packed), str(folder / "plain")) == sum(map(len, parts))
    assert (folder / "plain").read_bytes() == b"".join(parts)


@pytest.mark.parametrize("ending", COMPRESS)
def test_every_truncation_and_damage_is_an_error(ending: str, tmp_path: Path) -> None:
    """Truncated or damaged input is an error and leaves no file."""
    packed = tmp_path / "packed"
    whole = COMPRESS[ending](b"some text " * 20 + bytes(range(256)))
    for length in range(20, len(whole), 7):
        packed.write_bytes(whole[:length])
        with pytest.raises(DataSourceError, match="packed': it was truncated"):
            unpack(str(packed), str(tmp_path / "plain"))
    packed.write_bytes(whole + b"what follows is something else")
    with pytest.raises(DataSourceError, match="packed': it is damaged"):
        unpack(str(packed), str(tmp_path / "plain"))
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


BOMBS: dict[str, Callable[[], Any]] = {
    "bz2": lambda: bz2.BZ2Compressor(9),
    "gz": lambda: zlib.compressobj(9, wbits=31),
    "xz": lambda: lzma.LZMACompressor(preset=0),
    "zst": lambda: zstandard.ZstdCompressor().compressobj(),
}


@pytest.mark.parametrize("ending", BOMBS)
def test_bombs_are_errors_unless_the_limit_is_raised(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says how, and nothing of the content is left. Memory is bounded, however much comes out."""
    compressor, size = BOMBS[ending](), 64 << 20
    packed = b"".join(compressor.compress(bytes(8 << 20)) for _ in range(8)) + compressor.flush()
    (tmp_path / "packed").write_bytes(packed)
    monkeypatch.setattr(convert_command, "_ALWAYS_BYTES", 1 << 20)
    with pytest.raises(DataSourceError, match=r"may be a decompression bomb.*pass a higher limit, --max-ratio="):
        unpack(str(tmp_path / "packed"), str(tmp_path / "plain"))
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]
    tracemalloc.start()
    try:
        assert unpack(str(tmp_path / "packed"), str(tmp_path / "plain"), size // len(packed) + 1) == size
        assert tracemalloc.get_traced_memory()[1] < size / 3
    finally:
        tracemalloc.stop()


def test_a_window_of_zstd_that_a_file_cannot_need_is_an_error(tmp_path: Path) -> None:
    """A zstd window of 1 GiB for a few bytes is an error, unless the limit is raised."""
    parameters = zstandard.ZstdCompressionParameters(window_log=30, write_content_size=False)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "packed").write_bytes(compressor.compress(b"text") + compressor.flush())
    with pytest.raises(DataSourceError, match="needs more memory"):
        unpack(str(tmp_path / "packed"), str(tmp_path / "plain"))
    assert unpack(str(tmp_path / "packed"), str(tmp_path / "plain"), 10**9) == 4


@pytest.mark.parametrize(
    ("name", "plain"), [("a.txt.gz", "a.txt"), ("it's.txt", "it's.unpacked.txt"), ("b", "b.unpacked")]
)
def test_the_command_in_the_error_of_a_source_works(name: str, plain: str, tmp_path: Path) -> None:
    """The command in the error of a compressed file decompresses it, and the source reads the result."""
    (tmp_path / name).write_bytes(gzip.compress(b"one\ntwo\n"))
    with pytest.raises(DataSourceError, match="compressed as a whole, by gzip") as caught:
        TextLineDataSource(tmp_path / name)
    command = shlex.split(str(caught.value).rpartition(": ")[2])
    assert command[:3] == ["python", "-m", "millstream"]
    printed, _ = run_here(*command[3:], folder=tmp_path)

    assert printed == f"{tmp_path / plain}: 8 bytes, decompressed\n"
    with TextLineDataSource(tmp_path / plain) as source:
        assert every_record(source) == ["one", "two"]


def test_files_that_are_there_are_kept(tmp_path: Path) -> None:
    """Existing files are replaced only with --overwrite; a file that is not compressed is an error."""
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"new"))
    (tmp_path / "a.txt").write_text("old")
    _, reported = run_here("convert", "a.txt.gz", "a.txt", folder=tmp_path, status=1)
    assert "exists. Pass --overwrite" in reported
    _, reported = run_here("convert", "a.txt", "b.txt", "--overwrite", folder=tmp_path, status=1)
    assert "'a.txt' is not compressed" in reported
    assert (tmp_path / "a.txt").read_text() == "old"
    run_here("convert", "a.txt.gz", "a.txt", "--overwrite", folder=tmp_path)
    run_here("convert", "a.txt.gz", "new/folder/a.txt", folder=tmp_path)
    assert (tmp_path / "a.txt").read_text() == (tmp_path / "new/folder/a.txt").read_text() == "new"
