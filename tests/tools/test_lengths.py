"""`lengths_of`: what it counts, what it keeps, and when it counts again."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import lance
import numpy as np
import pyarrow as pa
import pytest
import tensorstore
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream.sources import ConcatenatedDataSource, MegatronDataSource, TextLineDataSource
from support.files.record_files import write_megatron

TEXTS = ["word " * (number * 7 % 23) for number in range(600)]
WORDS = [len(text.split()) for text in TEXTS]


class Split(millstream.Map):
    """The words of a text, or some of them, with a note of each call."""

    def __init__(self, notes: Path, limit: int = 1000) -> None:
        self._notes = notes
        self.limit = limit

    def map(self, element: str) -> list[str]:
        with self._notes.open("a") as file:
            file.write(".")
        return element.split()[: self.limit]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A file of texts, one a line, in a folder of its own."""
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "a.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return path


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A file with a character for each record that was read."""
    path = tmp_path / "notes"
    path.touch()
    return path


def kept_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.lengths-*-index"))


@pytest.mark.parametrize("worker_count", [0, 2])
def test_lengths_are_those_of_the_elements_whoever_counts(texts: Path, worker_count: int, tmp_path: Path) -> None:
    """The result does not depend on worker processes; it is an int64 array, one entry for each record."""
    pipelines: list[list[Any]] = [[str.split], [str.upper, str.split, np.array]]
    for maps in pipelines:
        with TextLineDataSource(texts) as source:
            lengths = millstream.lengths_of(source, maps, worker_count=worker_count)
        assert lengths.dtype == np.int64
        assert lengths.tolist() == WORDS
    assert kept_in(tmp_path) == []


def test_lengths_are_kept_beside_the_data_and_found_again(
    texts: Path, notes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lengths are saved beside the data, in a file that the log names, and found again by reading eight records.

    Changing the array changes no file, and their folder may be renamed.
    """
    caplog.set_level(logging.INFO, "millstream")
    for _ in range(2):
        with TextLineDataSource(texts) as source:
            lengths = millstream.lengths_of(source, [Split(notes)])
        assert lengths.tolist() == WORDS
        lengths[:] = 0
    (kept,) = kept_in(texts.parent)

    assert str(kept) in caplog.text
    assert kept.stat().st_mode == texts.stat().st_mode
    assert sorted(path.name for path in texts.parent.iterdir()) == sorted([kept.name, "a.txt"])
    texts.parent.rename(tmp_path / "elsewhere")
    with TextLineDataSource(tmp_path / "elsewhere" / "a.txt") as source:
        assert millstream.lengths_of(source, [Split(notes)]).tolist() == WORDS
    assert len(notes.read_text()) == len(TEXTS) + 2 * 8


def test_lengths_of_another_tokenizer_are_counted_again(
    texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tokenizer that is read from a file was trained again: a warning says so, and `refresh` trusts no sample."""
    tokenizer, base = tmp_path / "tokenizer", str(TEXTS[3])

    def tokenize(text: str) -> list[str]:
        limit, first = map(int, tokenizer.read_text().split())
        return text.split()[: first if text == base else limit]

    def lengths(**options: Any) -> list[int]:
        with TextLineDataSource(texts) as source:
            return list(millstream.lengths_of(source, [tokenize], **options))

    def expected(limit: int, first: int) -> list[int]:
        return [min(count, first if text == base else limit) for text, count in zip(TEXTS, WORDS, strict=True)]

    for parameters in ((9, 9), (5, 9)):
        tokenizer.write_text("{} {}".format(*parameters))
        assert lengths() == lengths() == expected(*parameters)
    assert caplog.text.count("are those of other operations, and are counted again: record") == 1
    tokenizer.write_text("5 1")
    assert lengths(refresh=True) == lengths() == expected(5, 1)
    with pytest.raises(TypeError, match="refresh must be True or False"):
        lengths(refresh="no")


def test_other_operations_have_other_lengths(texts: Path, notes: Path) -> None:
    """Each parameter, function and feature has its own file of lengths."""
    with TextLineDataSource(texts) as source:
        for limit in (1000, 3, 1000, 3):
            lengths = millstream.lengths_of(source, [Split(notes, limit)])
            assert lengths.tolist() == [min(limit, count) for count in WORDS]
        counts = millstream.lengths_of(source, [lambda text: {"a": text.split(), "b": list(text)}], feature="a")
        letters = millstream.lengths_of(source, [lambda text: {"a": text.split(), "b": list(text)}], feature="b")
    assert len(notes.read_text()) == 2 * (len(TEXTS) + 8)
    assert (counts.tolist(), letters.tolist()) == (WORDS, [len(text) for text in TEXTS])


@pytest.mark.parametrize("change", ["size", "time"])
def test_a_changed_file_is_counted_again(texts: Path, notes: Path, change: str) -> None:
    """A file whose size, or only whose time, has changed is counted again."""
    with TextLineDataSource(texts) as source:
        millstream.lengths_of(source, [Split(notes)])
    before = texts.stat()
    content = texts.read_text()
    texts.write_text(content.replace("word word", "wordsword") if change == "time" else content + "one more\n")
    os.utime(texts, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000))

    with TextLineDataSource(texts) as source:
        expected = [len(source[key].split()) for key in range(len(source))]
        assert millstream.lengths_of(source, [Split(notes)]).tolist() == expected
    assert expected != WORDS


def test_every_truncation_of_the_file_is_counted_again(texts: Path) -> None:
    """A truncated or damaged file of lengths is counted again and replaced."""
    with TextLineDataSource(texts) as source:
        millstream.lengths_of(source, [str.split])
        (kept,) = kept_in(texts.parent)
        whole = kept.read_bytes()
        for length in [*range(0, len(whole), 997), len(whole) - 1]:
            kept.write_bytes(whole[:length])
            assert millstream.lengths_of(source, [str.split]).tolist() == WORDS
        kept.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert millstream.lengths_of(source, [str.split]).tolist() == WORDS
    assert kept.read_bytes() == whole


class Held:
    """A source that does not say what it holds."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, key: Any) -> str:
        return str(self._texts[key])


class Remembered(Held):
    """A source without files that says what it is."""

    def __init__(self, name: str) -> None:
        super().__init__(TEXTS)
        self._name = name

    def fingerprint(self) -> str:
        return f"remembered name={self._name}"


def in_a_folder_that_cannot_be_written_to(folder: Path) -> Any:
    path = folder / ("a" * 250)
    if not path.exists():
        path.write_text("".join(f"{text}\n" for text in TEXTS))
    return TextLineDataSource(path)


IN_THE_CACHE: dict[str, Callable[[Path], Any]] = {
    "file": in_a_folder_that_cannot_be_written_to,
    "fingerprint": lambda _: Remembered("a"),
    "another fingerprint": lambda _: Remembered("b"),
    "chain": lambda _: millstream.MapDataset.range(len(TEXTS)).map(lambda number: TEXTS[number]),
}


def test_lengths_that_cannot_be_beside_the_data_are_in_the_cache(
    tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache stores the lengths if the folder of the data is not writable, or of a source without files."""
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache" / "inner"))
    for kind in [*IN_THE_CACHE] * 2:
        assert millstream.lengths_of(IN_THE_CACHE[kind](tmp_path), [Split(notes)]).tolist() == WORDS
    assert len(notes.read_text()) == len(IN_THE_CACHE) * (len(TEXTS) + 8)
    assert len(kept_in(tmp_path / "cache" / "inner")) == len(IN_THE_CACHE)


def in_arrays(texts: list[str], folder: Path) -> Any:
    path = str(folder / "numbers.zarr")
    numbers = np.array([len(text.split()) for text in texts])
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
    tensorstore.open(spec, create=True, dtype=numbers.dtype, shape=numbers.shape).result()[...] = numbers
    return millstream.ZarrDataSource({"count": path})


def in_rows(texts: list[str], folder: Path) -> Any:
    lance.write_dataset(pa.table({"text": texts}), folder / "texts.lance")
    return millstream.LanceDataSource(folder / "texts.lance")


def in_files(texts: list[str], folder: Path) -> Any:
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text)
    return millstream.FileDataSource(folder / "*.txt")


def words_of(record: Any) -> Any:
    """Returns the words of a text, alone or in a record, or their number."""
    text = record if isinstance(record, str) else [*record.values()][-1]
    return text.split() if isinstance(text, str | bytes) else text


KINDS: dict[str, Callable[[list[str], Path], Any]] = {
    "list": lambda texts, _: texts,
    "held": lambda texts, _: Held(texts),
    "memory": lambda texts, _: millstream.InMemoryDataSource(texts),
    "concatenated": lambda texts, _: ConcatenatedDataSource([texts]),
    "chain": lambda texts, _: millstream.MapDataset.source(texts).map(str.upper),
    "dataset": lambda texts, _: millstream.HuggingFaceDataSource(datasets.Dataset.from_dict({"text": texts})),
    "arrays": in_arrays,
    "rows": in_rows,
    "files": in_files,
}


@pytest.mark.third_party
@pytest.mark.parametrize("kind", KINDS)
def test_records_that_are_not_told_apart_are_counted_each_time(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sources may differ in records that no fingerprint looks at: they are never mistaken for one another.

    Those of a Hugging Face dataset are stored, because `datasets` has a fingerprint of the whole.
    """
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "cache"))
    changed = [*TEXTS[:101], "one two three four", *TEXTS[102:]]
    for name, texts in (("a", TEXTS), ("b", changed)):
        (tmp_path / name).mkdir()
        lengths = millstream.lengths_of(KINDS[kind](texts, tmp_path / name), [words_of])
        assert lengths.tolist() == [len(text.split()) for text in texts]
    assert len(kept_in(tmp_path / "cache")) == (2 if kind == "dataset" else 0)


def chained(sources: list[Any]) -> Any:
    return millstream.MapDataset.concatenate([millstream.MapDataset.source(source).map(str) for source in sources])


@pytest.mark.parametrize("join", [ConcatenatedDataSource, chained])
def test_several_sources_are_kept_beside_the_first(join: Any, texts: Path, notes: Path, tmp_path: Path) -> None:
    """The lengths of several sources are saved beside the first, and a change of any of them counts again."""
    other = tmp_path / "b.txt"
    other.write_text("a b c\n")
    for content in ("a b c\n", "a b c\n", "a bbc\n"):
        before = other.stat()
        if other.read_text() != content:
            other.write_text(content)
            os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000))
        with TextLineDataSource(texts) as first, TextLineDataSource(other) as second:
            lengths = millstream.lengths_of(join([first, second]), [Split(notes)])
        assert lengths.tolist() == [*WORDS, len(content.split())]

    assert len(notes.read_text()) == 2 * (len(TEXTS) + 1) + 8
    assert len(kept_in(texts.parent)) == 2


def test_an_error_leaves_nothing_behind(texts: Path) -> None:
    """An error in an operation leaves no file of lengths."""

    def fail_late(text: str) -> list[str]:
        if text == TEXTS[590]:
            raise RuntimeError("No more.")
        return text.split()

    with TextLineDataSource(texts) as source, pytest.raises(RuntimeError, match="No more"):
        millstream.lengths_of(source, [fail_late])
    assert kept_in(texts.parent) == []


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 65_535), max_size=40), min_size=1, max_size=20))
def test_megatron_knows_its_lengths(tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]]) -> None:
    """Lengths of Megatron datasets come from their indices, without reading or a file of lengths."""
    folder = tmp_path_factory.mktemp("megatron")
    for name, dtype in (("a", np.uint16), ("b", np.int32)):
        write_megatron(folder / name, [np.array(row, dtype) for row in rows])
    with MegatronDataSource([folder / "b", folder / "a"]) as source:
        known = millstream.lengths_of(source)
        assert kept_in(folder) == []
        assert known.dtype == np.int64
        assert known.tolist() == millstream.lengths_of(source, [np.copy]).tolist() == 2 * list(map(len, rows))


@pytest.mark.parametrize(
    ("records", "maps", "feature", "error", "words"),
    [
        (["a"], [], None, TypeError, "got str. Pass the operations before Pack"),
        ([b"a"], [], None, TypeError, "got bytes. Pass the operations"),
        ([1.5], [], None, TypeError, "got float"),
        ([True], [], None, TypeError, "got bool"),
        ([{"a": [1], "b": 2}], [], None, TypeError, r"got a dict of 'a', 'b'. Pass the entry .* feature=\.\.\."),
        ([[1]], [], "a", TypeError, "needs dicts with the feature 'a', got list"),
        ([{"b": [1]}], [], "a", ValueError, "feature 'a', but an element has 'b'"),
        ([-1], [], None, ValueError, "cannot have -1 tokens"),
        ([[1]], [millstream.Batch(2)], None, TypeError, r"operations\[0\] is Batch.*before Pack"),
        ([[1]], [millstream.transforms.Filter(bool)], None, TypeError, r"operations\[0\] is Filter"),
        ([[1]], [], 3, TypeError, "feature must be the name"),
        ([], [], None, ValueError, "at least one record"),
        (millstream.MapDataset.source([[1]]).repeat(), [], None, ValueError, "must have an end, got an endless"),
        ("a.txt", [], None, TypeError, r"TextLineDataSource\('a\.txt'\)"),
    ],
)
def test_what_has_no_tokens_is_an_error(
    records: Any, maps: list[Any], feature: Any, error: type[Exception], words: str
) -> None:
    """Elements without a number of tokens are an error with their type and the remedy."""
    with pytest.raises(error, match=words):
        millstream.lengths_of(records, maps, feature=feature)


def test_what_counts_as_tokens() -> None:
    """Arrays count by their first axis, lists and tuples by their length; an integer is the count itself."""
    records = [[1, 2], (1, 2, 3), np.zeros((4, 7)), np.zeros(0), 5, np.int32(6), np.uint8(7)]
    assert millstream.lengths_of(records).tolist() == [2, 3, 4, 0, 5, 6, 7]
