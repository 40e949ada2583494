"""Lines of text, and JSON values on lines: every one as it was written, whatever ends it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.sources import JsonLinesDataSource, TextLineDataSource
from millstream.sources.files import span_files
from millstream.sources.lines import json_lines, text_lines
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
        patch.setattr(span_files, "BLOCK_BYTES", block_bytes)
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
    texts = ["".join(before)]
    for value, blanks, end, after in lines:
        texts += [blanks, json.dumps(value, ensure_ascii=ascii_only), blanks, end, *after]
    path = write_alone(folder, "".join(texts).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span_files, "BLOCK_BYTES", block_bytes)
        patch.setattr(text_lines, "_BLANK_READ_BYTES", 2)
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
    json_lines._loads.cache_clear()
    try:
        assert records_of(JsonLinesDataSource(path)) == with_library
    finally:
        json_lines._loads.cache_clear()

    big = [-(2**63) - 1, {"c": 2**64}, 0.1]
    assert with_library == [{"a": [1, 2.5, "é"]}, {"b": float("inf")}, "\ud800", 2**64 - 1, big]
