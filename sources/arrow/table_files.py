"""Tables in several files: their common schema, and columns whose values are in the names of folders."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, final

from millstream.sources.arrow.tables import arrow, columns_of, normalised, plain_types
from millstream.sources.source_checks import check_file_columns

_INTEGER = re.compile(r"-?\d{1,18}")

UNION = "union"


@final
@dataclasses.dataclass(frozen=True)
class TableFile:
    """A file of a table.

    Attributes:
        schema: its schema.
        folders: the values that the names of its folders have, `year=2024`; None for null.
        is_complete: True if these are columns of the table without being asked for.
    """

    schema: Any
    folders: Mapping[str, str | None]
    is_complete: bool

    def partition(self) -> dict[str, str | None]:
        """Returns the values of the columns that the file lacks."""
        return {name: value for name, value in self.folders.items() if name not in self.schema.names}


@final
@dataclasses.dataclass(frozen=True, eq=False)
class TableColumns:
    """The columns that all files of a table are read with.

    Attributes:
        schema: their schema.
        types: the plain types of their values, in order.
        values: for each file, the values of columns that the names of its folders have.
    """

    schema: Any
    types: Sequence[Any]
    values: Mapping[str, Mapping[str, Any]]

    @property
    def names(self) -> list[str]:
        names: list[str] = self.schema.names
        return names

    @classmethod
    def of(cls, files: Mapping[str, TableFile], wanted: Sequence[str] | None, schema: Any) -> "TableColumns":
        """Returns the columns of files, by their paths.

        Args:
            files: the files, in their order.
            wanted: the names of the columns; None for all.
            schema: the schema of all files; `UNION` for that of all their columns; None if each must be the first.
        """
        base = _base_schema([file.schema for file in files.values()], schema)
        partitions = {path: file.partition() for path, file in files.items()}
        names = dict.fromkeys(base.names if wanted is None else wanted)
        if wanted is None and schema in (None, UNION):
            rooted = [partitions[path] for path, file in files.items() if file.is_complete]
            names |= dict.fromkeys(name for values in rooted for name in values)
        for path, file in files.items():
            offered = [name for name in partitions[path] if name in names or file.is_complete]
            existing = [*file.schema.names, *offered]
            required = names if schema is None else [name for name in names if name in existing]
            remedy = ", or schema='union' to read missing ones as None" if wanted is None else ""
            check_file_columns(path, existing, list(required), is_all=wanted is None and schema is None, remedy=remedy)
        texts = {name: [values[name] for values in partitions.values() if name in values] for name in names}
        stored = {name for file in files.values() for name in file.schema.names}
        for name in names:
            if name not in stored and not texts[name]:
                raise ValueError(f"No file has the column {name!r}. Correct the name, or leave it out of the schema.")
        table = arrow().schema(
            [base.field(name) if name in base.names else _partition_field(name, texts[name]) for name in names]
        )
        for path, file in files.items():
            _check_types(path, file.schema, table, first=None if schema is not None else next(iter(files)))
        values = {
            path: {name: _converted(text, table.field(name).type) for name, text in found.items() if name in names}
            for path, found in partitions.items()
        }
        return cls(table, plain_types(table, table.names), values)

    def normalised(self, arrays: Mapping[str, Any], num_rows: int, values: Mapping[str, Any]) -> Any:
        """Returns rows as a record batch, given the arrays of the columns that the file has, and other values."""
        pa = arrow()
        columns = dict(arrays)
        for name, kind in zip(self.names, self.types, strict=True):
            if name not in columns:
                value = values.get(name)
                columns[name] = (
                    pa.nulls(num_rows, kind) if value is None else pa.repeat(pa.scalar(value, kind), num_rows)
                )
        return normalised(columns, self.names, self.types)


def _base_schema(schemas: Sequence[Any], schema: Any) -> Any:
    if schema is None:
        return schemas[0]
    if schema != UNION:
        return schema
    pa = arrow()
    try:
        return pa.unify_schemas(list(schemas), promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"The files have no common schema: {reason}. Pass the schema that they should have."
        ) from error


def _partition_field(name: str, texts: Sequence[str | None]) -> Any:
    pa = arrow()
    is_number = all(text is None or _INTEGER.fullmatch(text) for text in texts)
    return pa.field(name, pa.int64() if is_number else pa.string())


def _converted(text: str | None, kind: Any) -> Any:
    pa = arrow()
    try:
        return None if text is None else pa.scalar(text).cast(kind).as_py()
    except pa.ArrowInvalid as error:
        raise ValueError(f"The name of a folder has the value {text!r}, which is not {kind}.") from error


def _check_types(path: str, schema: Any, table: Any, first: str | None) -> None:
    """Raises ValueError if a column of a file has another type than the table, or one that cannot be promoted.

    `first` is the file that types must be equal to; None if they may be promoted.
    """
    names = [name for name in table.names if name in schema.names]
    if first is not None:
        found, expected = (columns_of(each, names) for each in (schema, table))
        for name in names:
            if found[name].type_name != expected[name].type_name:
                raise ValueError(
                    f"Column {name!r} is {found[name].type_name} in {path!r}, but {expected[name].type_name} in "
                    f"{first!r}. Write the files with one schema, or pass schema='union' to promote their types."
                )
        return
    for name, kind, wanted in zip(names, plain_types(schema, names), plain_types(table, names), strict=True):
        if kind != wanted and not _is_promoted(kind, wanted):
            raise ValueError(
                f"Column {name!r} is {kind} in {path!r}, which cannot be promoted to {wanted}. Pass another schema."
            )


def _is_promoted(kind: Any, wanted: Any) -> bool:
    """Returns True if all values of a type are values of another one, by the rules of Arrow."""
    pa = arrow()
    try:
        schemas = [pa.schema([("x", each)]) for each in (kind, wanted)]
        return bool(pa.unify_schemas(schemas, promote_options="permissive").field("x").type == wanted)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return False
