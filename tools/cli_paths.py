"""Which files a person means on the command line, and of which format they are."""

import os
from collections.abc import Callable, Sequence

from millstream.sources.formats import FORMATS, FileFormat, format_of_file
from millstream.sources.storage.paths import FilePart, resolve_paths

Refuse = Callable[[Exception], None]
"""Is told of a file that cannot be used, instead of raising the error."""

GivenFiles = dict[str, tuple[FileFormat, list[str]]]
"""Files by the name of their format: each as a path, with the range of its records if there is one."""


def given_files(paths: Sequence[str], format_name: str | None, refuse: Refuse | None = None) -> GivenFiles:
    """Returns the files that some paths mean, in their order, those of one format together.

    Args:
        paths: files, patterns, and files with a range of their records, `file[10:20]`; of a Megatron dataset, either of
            its two files, or what their names have in common.
        format_name: the format of all of them; None where names and first bytes say it.
        refuse: is told of each file that cannot be read or is of no known format, and of each path that is none; None
            to raise the first such error.

    Raises:
        OSError: a file cannot be found or read.
        DataSourceError: a file is of no format that is known.
        ValueError: a range that ends before it starts.
    """
    chosen = next((kind for kind in FORMATS if kind.name == format_name), None)
    parts: list[FilePart] = []
    for path in paths:
        try:
            parts += _parts(path)
        except _REFUSED as error:
            _refuse(error, refuse)
    found: GivenFiles = {}
    for part in dict.fromkeys(parts):
        path = part.path
        try:
            kind = chosen or format_of_file(path)
        except _REFUSED as error:
            _refuse(error, refuse)
            continue
        if kind.name == "megatron":
            path = path.removesuffix(".idx").removesuffix(".bin")
        elif part.stop is not None:
            path = f"{path}[{part.start}:{part.stop}]"
        _, of_kind = found.setdefault(kind.name, (kind, []))
        if path not in of_kind:
            of_kind.append(path)
    return found


_REFUSED = (OSError, ValueError)


def _refuse(error: Exception, refuse: Refuse | None) -> None:
    """Tells of an error, or raises it if there is nobody to be told."""
    if refuse is None:
        raise error
    refuse(error)


def _parts(path: str) -> list[FilePart]:
    if not os.path.exists(path) and os.path.exists(f"{path}.idx"):  # noqa: PTH110
        path = f"{path}.bin"
    parts = resolve_paths(path, "data")
    for part in parts:
        if os.path.isdir(part.path):  # noqa: PTH112
            raise IsADirectoryError(
                f"{part.path!r} is a directory: name the files in it, such as {os.path.join(part.path, '*')!r}."  # noqa: PTH118
            )
    return parts
