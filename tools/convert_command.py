"""What `millstream convert` does: it decides between writing records and unpacking a file."""

import os
from collections.abc import Sequence
from typing import Any

from millstream.loader.threads.options import available_cores
from millstream.sources.formats import FileFormat
from millstream.sources.json_lines import JsonTexts
from millstream.sources.storage.compression import HEAD_BYTES, compression_of, is_zlib
from millstream.tools.beam_conversion import BeamWriters
from millstream.tools.cli_paths import given_files
from millstream.tools.conversion import Conversion, ProcessWriters, Writers, convert
from millstream.tools.record_encoding import encoded, encoding_for
from millstream.tools.record_sizes import in_bytes
from millstream.tools.record_writers import EXTENSIONS
from millstream.tools.unpacking import MAX_RATIO, unpack


def converted(
    sources: Sequence[str],
    destination: str,
    *,
    format: str | None,  # noqa: A002  (as the option is called)
    shards: int,
    jobs: int | None,
    encode: str,
    compression: str | None,
    overwrite: bool,
    runner: str | None = None,
    runner_options: Sequence[str] = (),
    max_ratio: int = MAX_RATIO,
) -> str:
    """Converts or unpacks, and returns what was done in a line.

    Raises:
        OSError, ValueError, ImportError: as `convert` and `unpack`; files of several formats, a destination of none.
    """
    destination = os.path.join(os.getcwd(), os.path.expanduser(destination))  # noqa: PTH109, PTH111, PTH118
    if runner_options and runner is None:
        raise ValueError(f"--runner-option={runner_options[0]} is for a runner of Beam: pass --runner=NAME, too.")
    if not destination.endswith(EXTENSIONS):
        return _unpacked(sources, destination, max_ratio, overwrite=overwrite)
    found = given_files(sources, format)
    if len(found) > 1:
        raise ValueError(
            f"The files are of several formats, {', '.join(found)}, whose records are not alike: convert them one by "
            "one, or say which one they all have, --format=..."
        )
    ((kind, paths),) = found.values()
    writers: Writers = ProcessWriters(jobs or available_cores())
    if runner is not None:
        writers = BeamWriters(runner, runner_options, jobs or available_cores())
    with _opened(kind, paths, encode) as source:
        if not len(source):
            raise ValueError(f"SRC must have at least one record to convert, got none in {', '.join(paths)}.")
        encoding = encoding_for(source[0]) if encode == "auto" else encode
        if isinstance(source, JsonTexts):
            encoding = "raw"  # They are JSON already.
        encoded([source[0]], [0], encoding)  # Before anything is removed.
        conversion = Conversion(source, destination, encoding, compression, shards)
        convert(conversion, writers, overwrite=overwrite)
        size = sum(map(os.path.getsize, conversion.targets))
        return (
            f"{conversion.targets[0]}{f' and {shards - 1:,} more' if shards > 1 else ''}: {len(source):,} records, "
            f"{in_bytes(size)}"
        )


def _opened(kind: FileFormat, paths: list[str], encode: str) -> Any:
    """Returns the source; JSON that stays JSON is not parsed and written again."""
    return JsonTexts(paths) if kind.name == "jsonl" and encode != "example" else kind.open(paths)


def _unpacked(sources: Sequence[str], destination: str, max_ratio: int, *, overwrite: bool) -> str:
    rule = f"DST must end in {', '.join(EXTENSIONS[:-1])} or {EXTENSIONS[-1]} to write records, got {destination!r}"
    if len(sources) > 1:
        raise ValueError(f"{rule}; and to unpack, there must be a single SRC, got {len(sources)}.")
    path = os.path.expanduser(sources[0])  # noqa: PTH111
    with open(path, "rb") as file:  # noqa: PTH123
        start = file.read(HEAD_BYTES)
    if compression_of(start) is None and not is_zlib(start):
        raise ValueError(f"{rule}. {path!r} is not compressed: there is nothing to unpack, either.")
    if os.path.lexists(destination) and (not overwrite or os.path.realpath(path) == os.path.realpath(destination)):
        raise FileExistsError(f"{destination!r} exists already. Pass --overwrite to replace it.")
    os.makedirs(os.path.dirname(destination), exist_ok=True)  # noqa: PTH103, PTH120  (paths are strings throughout)
    return f"{destination}: {in_bytes(unpack(path, destination, max_ratio))}, unpacked"
