"""The arguments of commands: the files that they select, grouped by format, and the objects that they name."""

import glob
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from millstream.sources.file_formats import (
    FileFormat,
    files_at,
    format_named,
    format_of_file,
    format_of_folder,
    format_of_name,
)
from millstream.sources.files.paths import GLOB, FileRange
from millstream.sources.remote.urls import is_url, without_query

T = TypeVar("T")
Result = TypeVar("Result")

FilesByFormat = dict[str, tuple[FileFormat, list[str]]]
"""Paths, with their record ranges, by the name of their format."""


def find_files(
    paths: Sequence[str], format_name: str | None, on_error: Callable[[Exception], None] | None = None
) -> FilesByFormat:
    """Returns the files that the paths select, in their order.

    Args:
        paths: files, globs, and files with a record range, `file[10:20]`; for a Megatron dataset, either of its two
            files, or their common prefix; folders of a known format, or of files of one.
        format_name: the format of all files; None to detect the format of each from its name or first bytes.
        on_error: called with the error of each path or file that cannot be used; None to raise the first one.
    """
    chosen = None if format_name is None else format_named(format_name)
    found: FilesByFormat = {}

    def add(selected: tuple[FileFormat | None, FileRange]) -> None:
        known, file = selected
        path = file.path
        kind = known or format_of_file(path)
        if kind.name == "megatron":
            path = path.removesuffix(".idx").removesuffix(".bin")
        elif file.stop is not None:
            path = f"{path}[{file.start}:{file.stop}]"
        _, of_kind = found.setdefault(kind.name, (kind, []))
        if path not in of_kind:
            of_kind.append(path)

    for path in paths:
        for selected in _attempt(lambda path: _select(path, chosen), path, on_error) or ():
            _attempt(add, selected, on_error)
    return found


def _select(path: str, chosen: FileFormat | None) -> list[tuple[FileFormat | None, FileRange]]:
    """Returns the files that a path selects, or the folder, each with its format if that is known."""
    kind = chosen
    if is_url(path):
        kind = chosen or format_of_name(without_query(path).rstrip("/"))
        if kind is not None and kind.folders and not GLOB.search(path):
            return [(kind, FileRange(path))]
    elif os.path.isdir(local := os.path.expanduser(path)):  # noqa: PTH111, PTH112
        path = local
        if kind is None and (found := format_of_folder(path)) is not None:
            kind, path = found
        if kind is not None and kind.folders:
            return [(kind, FileRange(path))]
        if chosen is not None and chosen.name == "files":
            path = os.path.join(glob.escape(path), "**/*")  # noqa: PTH118
    return [(chosen, file) for file in files_at(path)]


def _attempt(action: Callable[[T], Result], argument: T, on_error: Callable[[Exception], None] | None) -> Result | None:
    try:
        return action(argument)
    except (OSError, ValueError) as error:
        if on_error is None:
            raise
        on_error(error)
        return None


def load_callable(name: str, argument: str) -> Callable[..., Any]:
    """Imports a function or loader, `module:name`, also from the current folder.

    `argument` names the argument and its form, for errors.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"{argument}, got {name!r}.")
    if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Otherwise, something that the module imports is missing.
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{argument}, but {name!r} cannot be imported: there is no module {error.name!r} in this folder, in "
            "PYTHONPATH or installed."
        ) from None
    found: Any = getattr(imported, attribute, None)
    if not callable(found):
        problem = f"is of type {type(found).__name__}, and no function" if found is not None else "is not in it"
        text = f"{argument}, but {name!r} cannot be imported: {attribute!r} {problem} ({imported.__file__})."
        raise ValueError(text)  # noqa: TRY004  (it is the text of the argument that is wrong)
    function: Callable[..., Any] = found
    return function
