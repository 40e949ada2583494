"""Lines of text, JSON values on lines, and rows of CSV: every one as it was written, whatever ends it."""

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from millstream.errors import DataSourceError
from millstream.sources import CsvDataSource, JsonLinesDataSource, TextLineDataSource
from millstream.sources.files import spans
from millstream.sources.formats import lines as line_formats
from support.files.record_files import assert_records, every_record, records_of, write_alone

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=12).filter(
    lambda t: not t.endswith("\r")
)
ENDS = st.sampled_from(["\n", "\r\n"])


@settings(max_examples=60)
@given(st.lists(st.tuples(TEXT, ENDS), max_size=12), TEXT, st.booleans(), st.integers(3, 50))
def test_any_lines_are_read_in_any_order(
    folder: Path, lines: list[tuple[str, str]], last: str, has_mark: bool, block_bytes: int
) -> None:
    """Any lines are read: either line end, empty, last without an end, a byte order mark, and wherever blocks end."""
    content = (b"\xef\xbb\xbf" if has_mark else b"") + "".join([*map("".join, lines), last]).encode()
    expected = [line for line, _ in lines] + [last] * bool(last)
    if expected and expected[0].startswith("\ufeff") and not has_mark:
        expected[0] = expected[0][1:]
    path = write_alone(folder, content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "BLOCK_BYTES", block_bytes)
        with TextLineDataSource(path) as source:
            assert_records(source, expected)


@pytest.mark.parametrize(
    ("kind", "content", "expected"),
    [
        (TextLineDataSource, b"a\rb\r\r\n\r\nc\r", ["a\rb\r", "", "c\r"]),
        (JsonLinesDataSource, b'\xef\xbb\xbf{"a": 1}\n[2]', [{"a": 1}, [2]]),
    ],
)
def test_ends_of_lines_are_newlines(tmp_path: Path, kind: Any, content: bytes, expected: list[Any]) -> None:
    """A carriage return belongs to a line's end only before a newline; the last value may have no line end."""
    with kind(write_alone(tmp_path, content)) as source:
        assert every_record(source) == expected


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "shift_jis", "gb18030", "UTF8", "utf-8-sig", "ascii"])
def test_encodings_in_which_lines_can_be_found(tmp_path: Path, encoding: str) -> None:
    """Text is decoded as it was encoded."""
    texts = ["plain", "", "end"] + (["é"] if encoding in ("latin-1", "cp1252") else [])
    path = write_alone(tmp_path, "\n".join(texts).encode(encoding) + b"\n")
    assert records_of(TextLineDataSource(path, encoding=encoding)) == texts


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
BLANK = st.text("\r \t", max_size=3).map(lambda text: text + "\n")


@settings(max_examples=60)
@given(
    st.lists(st.tuples(JSON, st.text(" \t", max_size=2), ENDS, st.lists(BLANK, max_size=2)), min_size=1, max_size=8),
    st.lists(BLANK, max_size=2),
    st.integers(3, 40),
    st.booleans(),
)
def test_any_values_are_read_in_any_order(
    folder: Path, lines: list[tuple[Any, str, str, list[str]]], before: list[str], block_bytes: int, ascii_only: bool
) -> None:
    """Any values are read, with blanks around them, blank lines between, and whatever the last line ends with."""
    # A file with nothing but an array of objects is refused.
    assume(len(lines) > 1 or not isinstance(lines[0][0], list) or not isinstance((*lines[0][0], 0)[0], dict))
    texts = ["".join(before)]
    for value, blanks, end, after in lines:
        texts += [blanks, json.dumps(value, ensure_ascii=ascii_only), blanks, end, *after]
    path = write_alone(folder, "".join(texts).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "BLOCK_BYTES", block_bytes)
        patch.setattr(line_formats, "_BLANK_READ_BYTES", 2)
        with JsonLinesDataSource(path) as source:
            assert_records(source, [value for value, *_ in lines])


def test_values_are_the_same_without_orjson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are the same with orjson and with Python's parser."""
    lines = [
        b'{"a": [1, 2.5, "\xc3\xa9"]}',
        b'{"b": Infinity}',
        b'"\\ud800"',
        b"18446744073709551615",
        b'[-9223372036854775809, {"c": 18446744073709551616}, 0.1000000000000000000001]',
    ]
    path = write_alone(tmp_path, b"\n".join(lines))
    with JsonLinesDataSource(path) as source:
        with_library = every_record(source)
    monkeypatch.setitem(sys.modules, "orjson", None)
    line_formats._loads.cache_clear()
    try:
        assert records_of(JsonLinesDataSource(path)) == with_library
    finally:
        line_formats._loads.cache_clear()

    big = [-(2**63) - 1, {"c": 2**64}, 0.1]
    assert with_library == [{"a": [1, 2.5, "é"]}, {"b": float("inf")}, "\ud800", 2**64 - 1, big]


EDGES = [10**18, 10**19 - 1, 10**19, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, -(10**19)]
"""Integers where 19 digits become 20, and where 64 bits end."""


@settings(max_examples=50)
@example(EDGES)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(EDGES), st.integers(-(2**70), 2**70), st.text("0123456789-a", min_size=17, max_size=24)
        ),
        max_size=8,
    )
)
def test_integers_of_any_length_are_exact(folder: Path, values: list[Any]) -> None:
    """Integers within 64 bits and beyond are read as they stand, alone on a line, beside each other and in texts."""
    lines = [*values, values, {"a": values}, *([value, str(value)] for value in values)]
    path = write_alone(folder, "".join(f"{json.dumps(line)}\n" for line in lines).encode())
    with JsonLinesDataSource(path) as source:
        # As text: a float is equal to the integer that it stands for.
        assert list(map(repr, every_record(source))) == list(map(repr, lines))


FIELD = st.text(st.sampled_from("ab,;\t\"'\n\r é"), max_size=6)
TABLES = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(FIELD, min_size=width, max_size=width), min_size=1, max_size=8)
)


@settings(max_examples=50)
@given(
    TABLES,
    # For Python's writer: delimiter, line end and quoting; with "\n" as line end, it would leave "\r" unquoted.
    st.sampled_from([(",", "\n", csv.QUOTE_ALL), (";", "\r\n", csv.QUOTE_ALL), ("\t", "\r\n", csv.QUOTE_MINIMAL)]),
    st.integers(3, 40),
    st.booleans(),
)
def test_any_table_is_read_in_any_order(
    folder: Path, table: list[list[str]], style: tuple[str, str, Any], block_bytes: int, has_mark: bool
) -> None:
    """Any table is read in any order, whatever is in its fields, wherever blocks end, and with blank lines."""
    delimiter, end, quoting = style
    names = [f"column {number},\n" for number in range(len(table[0]))]
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end, quoting=quoting)
    text.write("\ufeff" if has_mark else "")
    text.write(end)
    writer.writerow(names)
    for row in table:
        text.write(end)
        writer.writerow(row)
    path = write_alone(folder, text.getvalue().encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "BLOCK_BYTES", block_bytes)
        with CsvDataSource(path, delimiter=delimiter) as source:
            rows = [dict(zip(names, row, strict=True)) for row in table]
            assert_records(source, rows)
        with CsvDataSource(path, columns=names[:0:-1] or names, delimiter=delimiter) as source:
            assert [list(row) for row in every_record(source)] == [names[:0:-1] or names] * len(table)
            assert every_record(source) == [{name: row[name] for name in names[:0:-1] or names} for row in rows]


@pytest.mark.parametrize(
    ("files", "columns", "expected"),
    [
        (["a,b\n1,2\n", "b,a\n4,3"], None, [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]),
        (["a,b\n1,2\n", "b,c\n4,3"], ["b"], [{"b": "2"}, {"b": "4"}]),
        (["a,b\n1,2\n", "b,c\n4,3"], None, "1' has the columns 'b', 'c', but 'a', 'b' are those of the first file"),
        (["a,b\n1,2\n", "b,c\n4,3"], ["c"], "0' has the columns 'a', 'b', but 'c' are wanted"),
        (["a,b,a\n1,2,3\n"], ["b"], [{"b": "2"}]),
        (["a,b,a\n1,2,3\n"], None, "the column 'a' twice"),
        (["a,b", "a,b\n1,2\n"], None, [{"a": "1", "b": "2"}]),
        ([""], None, "0' is empty: expected a row of column names"),
        (['a,b\n1,"2\n3,4\n'], None, "0' has an unterminated quoted field"),
        (['a"b"c",d\n1,2\n'], None, "0' .*quoted field"),
    ],
)
def test_columns_are_those_of_the_first_file_or_those_asked_for(
    tmp_path: Path, files: list[str], columns: Any, expected: Any
) -> None:
    """In that order. A file that lacks one, has another, or has it twice is an error; one may have no rows."""
    paths = [tmp_path / f"{number}" for number in range(len(files))]
    for path, content in zip(paths, files, strict=True):
        path.write_text(content)
    if isinstance(expected, str):
        with pytest.raises((ValueError, DataSourceError), match=expected):
            CsvDataSource(paths, columns=columns)
    else:
        assert repr(records_of(CsvDataSource(paths, columns=columns))) == repr(expected)


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.text("ab,\"' é", max_size=5), min_size=2, max_size=2), min_size=1, max_size=8),
    st.sampled_from(["utf-8", "latin-1"]),
    st.sampled_from(["\n", "\r\n"]),
    st.integers(3, 40),
)
def test_quotes_may_be_characters_of_any_encoding(
    folder: Path, table: list[list[str]], encoding: str, end: str, block_bytes: int
) -> None:
    """With quotechar=None, each line is a row, whatever quotes are in it; the fields are split at the delimiter."""
    names = ['"x', "é"]
    path = write_alone(folder, "".join("\t".join(row) + end for row in [names, *table]).encode(encoding))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "BLOCK_BYTES", block_bytes)
        with CsvDataSource(path, delimiter="\t", quotechar=None, encoding=encoding) as source:
            assert_records(source, [dict(zip(names, row, strict=True)) for row in table])


def test_quotes_that_are_characters_have_an_index_of_their_own(tmp_path: Path) -> None:
    """A file is read in both ways; the error of a row says how, and so does that of another encoding."""
    path = write_alone(tmp_path, b'a\tb\n1\t"2\n3\t4"\n\xe9\t5" pipe\r9"\n')
    joined = {"a": "1", "b": "2\n3\t4"}
    for quotechar, first in (('"', joined), (None, {"a": "1", "b": '"2'}), ('"', joined)):
        with CsvDataSource(path, delimiter="\t", quotechar=quotechar, encoding="latin-1") as source:
            assert source[0] == first
            with pytest.raises(DataSourceError, match=r"a carriage return .* pass quotechar=None if quotes are char"):
                source[len(source) - 1]
    with (
        CsvDataSource(path, delimiter="\t") as source,
        pytest.raises(DataSourceError, match=r"it is not utf-8: .* Pass the encoding of the file"),
    ):
        source[1]


@pytest.mark.parametrize("content", [b'[{"a": 1}, {"a": 2}]', b'\xef\xbb\xbf [ {"a": 1},{"a": 2}]\n'])
def test_an_array_of_objects_on_one_line_is_not_json_lines(tmp_path: Path, content: bytes) -> None:
    """It would be one record, the whole data set; an array of numbers, or of several, is a record."""
    with pytest.raises(
        DataSourceError, match=r"file' is one JSON array, not JSON Lines: .* `jq -c '\.\[\]' .*\.jsonl`"
    ):
        JsonLinesDataSource(write_alone(tmp_path, content))
    for lines in (b"[1, 2]\n", b'[{"a": 1}]\n[{"a": 2}]\n'):
        with JsonLinesDataSource(write_alone(tmp_path, lines)) as source:
            assert every_record(source) == [*map(json.loads, lines.splitlines())]


def test_fields_of_any_length_are_read(tmp_path: Path) -> None:
    """Fields of any length are read; the limit that Python's csv module has stays as it was."""
    limit = csv.field_size_limit()
    path = write_alone(tmp_path, b"a,b\n" + b"x" * 300_000 + b",2\n")
    with CsvDataSource(path) as source:
        assert source[0] == {"a": "x" * 300_000, "b": "2"}

    assert csv.field_size_limit() == limit
