"""Checks of the names and paths of columns, for sources of tables and arrays in files."""

import os
from collections.abc import Mapping, Sequence
from typing import Any


def checked_columns(columns: Any) -> tuple[str, ...] | None:
    """Returns the argument `columns` as a tuple: at least one name, each once, or None for all columns."""
    if columns is None:
        return None
    if isinstance(columns, str) or not all(isinstance(name, str) for name in columns):
        raise TypeError(f"columns must be a sequence of names, or None for all columns, got {columns!r}.")
    if not len(set(columns)) == len(columns) > 0:
        raise ValueError(f"columns must be different names, at least one, or None for all columns, got {columns!r}.")
    return tuple(columns)


def check_file_columns(path: str, names: Sequence[str], wanted: Sequence[str], *, is_all: bool) -> None:
    """Raises ValueError unless a file has the wanted columns, once each.

    Args:
        path: the file.
        names: the names of its columns.
        wanted: the names of the wanted columns.
        is_all: True if these are all columns of the first file: the file must then not have any other.
    """
    missing = [name for name in wanted if name not in names]
    others = [name for name in names if name not in wanted] if is_all else []
    if missing or others:
        origin = "are those of the first file" if is_all else "are wanted"
        raise ValueError(
            f"{path!r} has the columns {', '.join(map(repr, names))}, but {', '.join(map(repr, wanted))} {origin}. "
            "Pass columns=[...] that all have."
        )
    twice = [name for name in wanted if names.count(name) > 1]
    if twice:
        raise ValueError(f"{path!r} has the column {twice[0]!r} twice. Pass columns=[...] without it.")
    if not names:
        raise ValueError(f"{path!r} has no columns.")


def paths_of_columns(paths: Any, name: str, example: str) -> dict[str, str]:
    if not isinstance(paths, Mapping) or not all(
        isinstance(column, str) and isinstance(path, str | os.PathLike) for column, path in paths.items()
    ):
        raise TypeError(
            f"{name} must be a mapping of columns to the paths of their {name}, such as {{'x': {example!r}}}, got "
            f"{paths!r}."
        )
    if not paths:
        raise ValueError(f"{name} must have at least one column, got none.")
    return {column: os.fsdecode(path) for column, path in paths.items()}
