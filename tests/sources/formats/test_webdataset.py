"""Samples of tar archives: as `tarfile` wrote them, in every format that it writes."""

import io
import itertools
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import DataSourceError
from millstream.sources import WebDatasetDataSource
from support.files.record_files import assert_records, emptied, every_record, records_of, write_tar

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
FOLDERS = st.sampled_from(["", "a/", "./", "a.b/c/", "x" * 90 + "/" + "y" * 50 + "/"])
SAMPLES = st.lists(
    st.dictionaries(
        st.sampled_from(["jpg", "seg.png", "CLS", "json", ""]), st.binary(max_size=1100), min_size=1, max_size=3
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60)
@given(st.sampled_from(FORMATS), FOLDERS, SAMPLES, st.booleans())
def test_any_samples_are_read_in_any_order(
    folder: Path, tar_format: int, inner: str, samples: list[dict[str, bytes]], has_extras: bool
) -> None:
    """Any samples are read, whatever the names, with files between them that are part of no sample."""
    files, expected = [], []
    for number, sample in enumerate(samples):
        key = f"{inner}é{number}" if tar_format != tarfile.USTAR_FORMAT else f"{inner}{number}"
        files += [("README", b"no dot"), (".hidden", b"no name")] * has_extras
        files += [(f"{key}.{extension}", content) for extension, content in sample.items()]
        expected.append({"__key__": key} | {extension.lower(): content for extension, content in sample.items()})
    path = write_tar(emptied(folder) / "a.tar", files, tar_format)

    with WebDatasetDataSource(path) as source:
        assert_records(source, expected)


def test_members_that_are_not_files_are_passed_over(tmp_path: Path) -> None:
    """Folders, links and headers of the whole archive are passed over."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "for all"}) as archive:
        for name, kind in {"d.x": tarfile.DIRTYPE, "l.x": tarfile.SYMTYPE, "h.x": tarfile.LNKTYPE}.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "1.x"
            archive.addfile(member)
        for name in ("1.x", "1.y"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())

    assert records_of(WebDatasetDataSource(path)) == [{"__key__": "1", "x": b"", "y": b""}]


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_longer_than_a_header_has_room_for(tmp_path: Path, tar_format: int) -> None:
    """Written in GNU's way and in pax's, beside short ones; a sample that comes again later is another one."""
    name = "folder/" * 60 + "n" * 200
    files = [("a.x", b"1"), (f"{name}.x", b"2"), (f"{name}.y", b"3"), ("b.x", b"4"), ("a.x", b"5")]
    with WebDatasetDataSource(write_tar(tmp_path / "a.tar", files, tar_format)) as source:
        assert [record["__key__"] for record in every_record(source)] == ["a", name, "b", "a"]
        assert source[1] == {"__key__": name, "x": b"2", "y": b"3"}


@pytest.mark.parametrize(
    ("headers", "damage"),
    [
        ({"size": "9" * 5000}, "a pax header is damaged"),  # Python refuses to make a number of so many digits.
        ({"comment": "x" * (1 << 20)}, "an extended header has more than 1,048,576 bytes"),
    ],
)
def test_headers_without_bounds_are_damage(tmp_path: Path, headers: dict[str, str], damage: str) -> None:
    """An extended header is not read into memory whatever its size, which a sparse file of a few bytes may have."""
    member = tarfile.TarInfo("a.txt")
    member.pax_headers = headers
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member, io.BytesIO())
    with pytest.raises(DataSourceError, match=rf"a\.tar' .*{damage}"):
        WebDatasetDataSource(tmp_path / "a.tar")


def test_sizes_in_base_256_and_in_pax_are_read(tmp_path: Path) -> None:
    """Sizes in base 256 and in pax are read, as archives have them whose members are larger than 8 GiB."""
    content = bytearray(
        write_tar(tmp_path / "a.tar", [("1.x", b"abc"), ("2.x", b"d")], tarfile.GNU_FORMAT).read_bytes()
    )
    content[124:136] = b"\x80" + (3).to_bytes(11, "big")
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\x00 " % sum(content[:512])
    (tmp_path / "a.tar").write_bytes(content)
    member = tarfile.TarInfo("1.x")
    member.pax_headers, member.size = {"size": "3"}, 3
    with tarfile.open(tmp_path / "b.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member, io.BytesIO(b"abc"))

    for name in ("a.tar", "b.tar"):
        with WebDatasetDataSource(tmp_path / name) as source:
            assert source[0] == {"__key__": "1", "x": b"abc"}


def test_archives_laid_end_to_end_are_one(tmp_path: Path) -> None:
    """`cat a.tar b.tar` leaves zeros in between, after which there are samples that must not be lost or joined."""
    parts = [write_tar(tmp_path / key, [(f"{key}.{key}", key.encode())]).read_bytes() for key in "aba"]
    parts += [write_tar(tmp_path / "a", [("a.y", b"y")]).read_bytes()]
    (tmp_path / "all.tar").write_bytes(b"".join(parts))

    with WebDatasetDataSource(tmp_path / "all.tar") as source:
        assert every_record(source) == [{"__key__": key, key: key.encode()} for key in "aba"] + [
            {"__key__": "a", "y": b"y"}
        ]


@settings(max_examples=60)
@given(
    st.permutations([f"{key}.{extension}" for key in ("d/1", "d/2", "3") for extension in ("jpg", "json")]),
    st.booleans(),
)
def test_a_sample_whose_files_are_not_neighbours_is_an_error(folder: Path, names: list[str], is_repeated: bool) -> None:
    """It is refused by key and file, with the remedy; the same samples in each of several shards are not."""
    files = [(name, name.encode()) for name in names]
    path = write_tar(emptied(folder) / "a.tar", files * (1 + is_repeated))
    keys = [name.partition(".")[0] for name in names]
    groups = [key for key, _ in itertools.groupby(keys)]
    split = {key for key in groups if groups.count(key) > 1}
    if split:
        with pytest.raises(
            DataSourceError, match=r"a\.tar' has the files of the sample '(d/)?[123]' .*tar --sort=name"
        ):
            WebDatasetDataSource(path)
    elif not is_repeated or groups[0] != groups[-1]:
        with WebDatasetDataSource([path, write_tar(folder / "b.tar", files)]) as source:
            assert [record["__key__"] for record in every_record(source)] == groups * (2 + is_repeated)


def test_folders_that_the_library_skips_are_skipped(tmp_path: Path) -> None:
    """Members below `__…__` at the top are no samples, which would shift the keys of all after them."""
    names = ["__meta__/info.json", "a.txt", "__x__/a/b.txt", "__b__.txt", "c/__x__/d.txt", "__MACOSX/e.txt"]
    with WebDatasetDataSource(write_tar(tmp_path / "a.tar", [(name, b"") for name in names])) as source:
        assert [record["__key__"] for record in every_record(source)] == ["a", "__b__", "c/__x__/d", "__MACOSX/e"]


def test_an_extension_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    """An extension that is there twice is an error: one of the two files would be lost."""
    path = write_tar(tmp_path / "a.tar", [("0.x", b""), ("1.JPG", b"a"), ("1.jpg", b"b")])
    with WebDatasetDataSource(path) as source:
        assert source[0] == {"__key__": "0", "x": b""}
        with pytest.raises(DataSourceError, match=r"record 1 of .*a\.tar.*its key '1' has two files .* 'jpg'"):
            source[1]
