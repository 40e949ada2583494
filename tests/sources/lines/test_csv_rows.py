"""Rows of CSV files: what any writer of RFC 4180 wrote comes back, in any order."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.sources import CsvDataSource
from millstream.sources.files import span_files
from support.files.record_files import assert_records, every_record, records_of, write_alone

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
        patch.setattr(span_files, "BLOCK_BYTES", block_bytes)
        with CsvDataSource(path, delimiter=delimiter) as source:
            rows = [dict(zip(names, row, strict=True)) for row in table]
            assert_records(source, rows)
        with CsvDataSource(path, columns=names[:0:-1] or names, delimiter=delimiter) as source:
            assert [list(row) for row in every_record(source)] == [names[:0:-1] or names] * len(table)
            assert every_record(source) == [{name: row[name] for name in names[:0:-1] or names} for row in rows]


def test_files_may_have_their_columns_in_another_order(tmp_path: Path) -> None:
    """Files may have their columns in another order: all dicts are in the order of the first file."""
    (tmp_path / "1").write_text("a,b\n1,2\n")
    (tmp_path / "2").write_text("b,a\n4,3")

    with CsvDataSource(tmp_path / "*") as source:
        assert [list(row.items()) for row in every_record(source)] == [
            [("a", "1"), ("b", "2")],
            [("a", "3"), ("b", "4")],
        ]


def test_a_file_with_other_columns_is_an_error_at_construction(tmp_path: Path) -> None:
    """A file with other columns is an error, unless all files have the columns asked for."""
    (tmp_path / "1").write_text("a,b\n1,2\n")
    (tmp_path / "2").write_text("b,c\n4,3")

    with pytest.raises(ValueError, match=r"2' has the columns 'b', 'c', but 'a', 'b' are those of the first file"):
        CsvDataSource(tmp_path / "*")
    with pytest.raises(ValueError, match=r"1' has the columns 'a', 'b', but 'c' are wanted"):
        CsvDataSource(tmp_path / "*", columns=["c"])
    assert records_of(CsvDataSource(tmp_path / "*", columns=["b"])) == [{"b": "2"}, {"b": "4"}]


def test_a_name_that_is_there_twice_is_an_error_if_it_is_wanted(tmp_path: Path) -> None:
    """A name that is there twice is an error if it is wanted: a dict has room for one of them."""
    path = write_alone(tmp_path, b"a,b,a\n1,2,3\n")

    with pytest.raises(ValueError, match="the column 'a' twice"):
        CsvDataSource(path)
    with CsvDataSource(path, columns=["b"]) as source:
        assert source[0] == {"b": "2"}


def test_a_file_of_names_only_has_no_records(tmp_path: Path) -> None:
    """A file of names only has no records, and is passed over beside others."""
    (tmp_path / "1").write_text("a,b")
    (tmp_path / "2").write_text("a,b\n1,2\n")

    assert records_of(CsvDataSource([tmp_path / "1", tmp_path / "2"])) == [{"a": "1", "b": "2"}]


def test_fields_of_any_length_are_read(tmp_path: Path) -> None:
    """Fields of any length are read; the limit that Python's csv module has stays as it was."""
    limit = csv.field_size_limit()
    path = write_alone(tmp_path, b"a,b\n" + b"x" * 300_000 + b",2\n")
    with CsvDataSource(path) as source:
        assert source[0] == {"a": "x" * 300_000, "b": "2"}

    assert csv.field_size_limit() == limit
