"""Windows of flat token files, and the sequences of Megatron's indexed datasets: what is read, and what is refused."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import DataSourceError
from millstream.sources import MegatronDataSource, TokenDataSource
from millstream.sources.formats import tokens as token_files
from millstream.transforms.batching.stack import stack
from support.files.record_files import MEGATRON_CODES, emptied, every_record, write_megatron
from support.stores.object_server import ObjectServer


def write_llm_c(path: Path, tokens: Any, magic: int = 20240520) -> None:
    path.write_bytes(struct.pack("<256i", magic, 1, len(tokens), *[0] * 253) + tokens.tobytes())


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.integers(1, 12),
    st.integers(1, 15),
    st.sampled_from(["uint16", "int32", "uint8", "int64"]),
)
def test_windows_are_slices_of_each_file(
    folder: Path, lengths: list[int], window: int, stride: int, dtype: str
) -> None:
    """Records, batched reads and stacked columns are the slices of each file, one file after another."""
    rng = np.random.default_rng(0)
    files = [rng.integers(0, 100, length).astype(dtype) for length in lengths]
    expected = [t[i : i + window].tolist() for t in files for i in range(0, len(t) - window + 1, stride)]
    paths = [folder / f"{number}.bin" for number in range(len(files))]
    for path, tokens in zip(paths, files, strict=True):
        tokens.tofile(path)
    if not expected:
        return
    with TokenDataSource(paths, window, stride, dtype) as source:
        keys = rng.integers(0, len(source), 20)
        records: Any = source.__getitems__(keys)
        batch = records.stack(np.empty)["tokens"]

        assert [source[key]["tokens"].tolist() for key in range(len(source))] == expected
        assert [record["tokens"].tolist() for record in records] == [expected[key] for key in keys]
        assert batch.tolist() == [expected[key] for key in keys]
        assert batch.dtype == records[0]["tokens"].dtype == source.dtype == dtype
        assert records[0]["tokens"].flags.writeable
        ends = [max([i + window for i in range(0, len(t) - window + 1, stride)], default=0) for t in files]
        assert source.dropped_tokens == sum(map(len, files)) - sum(ends)
        assert f"{source.dropped_tokens} tokens dropped)" in repr(source)


def test_tokens_in_no_window_are_a_warning_if_they_are_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files that are no multiples of the window lose their ends, which is said for more than 5 % of all tokens."""
    for name, length in (("a", 190), ("b", 11)):
        np.arange(length, dtype=np.uint8).tofile(tmp_path / name)
    assert TokenDataSource([tmp_path / "a", tmp_path / "b"], 10, dtype="uint8").dropped_tokens == 1
    assert not caplog.records
    assert TokenDataSource([tmp_path / "a", tmp_path / "b"], 12, dtype="uint8").dropped_tokens == 10 + 11
    assert "21 of 201 tokens are in no window of TokenDataSource(15 records in 2 files" in caplog.text


def test_headers_are_skipped_and_give_the_dtype(tmp_path: Path) -> None:
    """Files of NumPy, llm.c and Megatron need no dtype; raw ones are read with the one that is given."""
    tokens = np.arange(50, dtype=np.uint16)
    np.save(tmp_path / "a.npy", tokens)
    write_llm_c(tmp_path / "b.bin", tokens)
    write_megatron(tmp_path / "c", [tokens[:20], tokens[20:]])
    wide = np.arange(70_000, 70_600, dtype=np.uint32)
    write_llm_c(tmp_path / "d.bin", wide, 20240801)
    tokens.tofile(tmp_path / "e.npy")

    for name in ("a.npy", "b.bin", "c.bin"):
        source = TokenDataSource(tmp_path / name, 9, 8)
        assert (source[5]["tokens"].tolist(), len(source), source.dtype.name) == ([*range(40, 49)], 6, "uint16")
    assert TokenDataSource(tmp_path / "d.bin", 4)[1]["tokens"].tolist() == [70_004, 70_005, 70_006, 70_007]
    assert TokenDataSource(tmp_path / "e.npy", 4, dtype="uint16")[1]["tokens"].tolist() == [4, 5, 6, 7]


@pytest.mark.third_party
def test_batches_come_from_a_store_too(tmp_path: Path, store: ObjectServer) -> None:
    """Windows of objects are those of files, and a batch asks for its windows of all objects before it waits."""
    paths = [tmp_path / f"{number}.bin" for number in range(4)]
    for number, path in enumerate(paths):
        (np.arange(100, dtype=np.uint16) + 100 * number).tofile(path)
        store.objects[f"bucket/{path.name}"] = path.read_bytes()
    local = TokenDataSource(paths, 10, dtype="uint16")
    keys = [5, 15, 25, 35, 6]
    with TokenDataSource([f"{store.url}/bucket/{path.name}" for path in paths], 10, dtype="uint16") as source:
        store.forget()
        store.gathering = len(paths)
        here, far = (stack(each.__getitems__(keys))["tokens"] for each in (local, source))
    assert far.tolist() == here.tolist()
    assert store.most_at_once >= len(paths)


def test_wrong_arguments_and_files_are_refused(tmp_path: Path) -> None:
    """Each wrong argument or file is an error that names it, the rule and what to do."""
    raw = tmp_path / "raw.bin"
    np.arange(10, dtype=np.uint16).tofile(raw)
    np.save(tmp_path / "square.npy", np.zeros((2, 2), np.uint16))
    np.save(tmp_path / "float.npy", np.zeros(4))
    np.save(tmp_path / "int.npy", np.zeros(9, np.int32))
    (tmp_path / "damaged.npy").write_bytes((tmp_path / "int.npy").read_bytes()[:60])
    (tmp_path / "short.npy").write_bytes((tmp_path / "int.npy").read_bytes()[:-4])

    refused: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((raw, 4), ValueError, "dtype must be given, because .*raw.bin' has no header"),
        ((raw, 0), ValueError, "window must be at least 1, got 0"),
        ((raw, 4, 0), ValueError, "stride must be at least 1, got 0"),
        ((raw, 4, 4, "float32"), TypeError, "dtype must be an integer dtype, such as 'uint16', got 'float32'"),
        ((raw, 4, 4, "uint17"), TypeError, "dtype must be an integer dtype, such as 'uint16', got 'uint17'"),
        ((raw, 4, 4, "uint64"), DataSourceError, "has 20 bytes, but 2 tokens of uint64 .* end at byte 16"),
        ((tmp_path / "square.npy", 4), DataSourceError, r"shape \(2, 2\) .*numpy.save\(path, tokens.reshape\(-1\)\)"),
        ((tmp_path / "float.npy", 4), DataSourceError, "dtype float64; tokens are integers"),
        ((tmp_path / "damaged.npy", 4), DataSourceError, "damaged NumPy header"),
        ((tmp_path / "short.npy", 4), DataSourceError, "it is cut short"),
        ((tmp_path / "int.npy", 4, 4, "int64"), ValueError, "dtype must be that of the files, .*has int32, got int64"),
        (([raw, tmp_path / "int.npy"], 4, 4), ValueError, "dtype must be given"),
    ]
    for arguments, kind, text in refused:
        with pytest.raises(kind, match=text):
            TokenDataSource(*arguments)
    np.save(tmp_path / "uint16.npy", np.zeros(9, np.uint16))
    with pytest.raises(ValueError, match=r"All files must have tokens of one dtype, got uint16 .* and int32 in"):
        TokenDataSource([tmp_path / "uint16.npy", tmp_path / "int.npy"], 4)


def test_the_fingerprint_tells_windows_apart(tmp_path: Path) -> None:
    """Another window, stride or dtype is another source."""
    np.arange(64, dtype=np.uint16).tofile(tmp_path / "x.bin")
    cases = [(8, 8, "uint16"), (8, 4, "uint16"), (4, 8, "uint16"), (8, 8, "int16")]
    assert len({TokenDataSource(tmp_path / "x.bin", *case).fingerprint() for case in cases}) == len(cases)


SEQUENCES = [np.arange(length, dtype=np.uint16) * 300 for length in (3, 0, 5, 2)]


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=20), st.sampled_from(sorted(MEGATRON_CODES)), st.integers(1, 5)
)
def test_any_sequences_are_read_in_any_order(folder: Path, lengths: list[int], dtype: str, at_once: int) -> None:
    """Any sequences, empty ones too, are read in any order; each is an array of its own that can be written to."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 100, length).astype(dtype) for length in lengths]
    prefix = write_megatron(emptied(folder) / "data", sequences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "_SEQUENCES_PER_READ", at_once)
        with MegatronDataSource(prefix) as source:
            order = rng.permutation(len(lengths))
            records = source.__getitems__(order)

    assert [record.tolist() for record in records] == [sequences[key].tolist() for key in order]
    assert {record.dtype for record in records} == {np.dtype(dtype)}
    assert all(record.flags.writeable for record in records)


def test_paths_are_prefixes_files_and_patterns(tmp_path: Path) -> None:
    """Paths are prefixes, files or patterns, with and without the ending of the data's file."""
    for name in ("b", "a"):
        write_megatron(tmp_path / f"{name}_document", [np.array([ord(name)], np.int32)])
    for prefix in (
        tmp_path / "*_document",
        tmp_path / "*.bin",
        [tmp_path / "a_document", f"{tmp_path}/b_document.bin"],
    ):
        with MegatronDataSource(prefix) as source:
            assert [record.tolist() for record in every_record(source)] == [[97], [98]]


@pytest.mark.parametrize(
    ("offset", "form", "value", "words"),
    [
        (0, "<B", 0, "does not begin as one"),
        (9, "<Q", 2, "version 2"),
        (17, "<B", 99, "dtype 99"),
        (18, "<Q", 2**40, "ends before the offsets"),
        (18, "<Q", 3, "not contiguous|have [0-9]+ bytes"),
        (34, "<i", -1, "not contiguous"),  # The first length.
        (34, "<i", 4, "not contiguous"),
        (58, "<q", 2, "not contiguous"),  # The second offset.
    ],
)
def test_an_index_that_does_not_fit_is_an_error(tmp_path: Path, offset: int, form: str, value: int, words: str) -> None:
    """An index that does not fit is an error at construction that says what is wrong with it."""
    prefix = write_megatron(tmp_path / "data", SEQUENCES)
    content = bytearray((tmp_path / "data.idx").read_bytes())
    struct.pack_into(form, content, offset, value)
    (tmp_path / "data.idx").write_bytes(content)
    with pytest.raises(DataSourceError, match=rf"data\.idx' is not the index .*({words})"):
        MegatronDataSource(prefix)


def test_a_missing_index_is_the_usual_error(tmp_path: Path) -> None:
    """A missing index is a FileNotFoundError that names the file."""
    (tmp_path / "data.bin").write_bytes(bytes(8))
    with pytest.raises(FileNotFoundError, match=r"data\.idx"):
        MegatronDataSource(tmp_path / "data")
