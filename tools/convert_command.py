"""The command `millstream convert`: writes records to other files, or decompresses a file."""

import os
from collections.abc import Sequence

from millstream.dataset.map_dataset import MapDataset
from millstream.loader.reporting.snapshot import bytes_text
from millstream.loader.threads.options import available_cores
from millstream.sources.files.byte_files import refuse_placeholder
from millstream.sources.files.compression import HEAD_BYTES, compression_of, is_zlib
from millstream.tools.cli_paths import find_files, load_callable
from millstream.tools.conversion import convert
from millstream.tools.record_writers import BIN_EXTENSION, EXTENSIONS
from millstream.tools.unpacking import unpack


def run_convert(
    sources: Sequence[str],
    destination: str,
    *,
    format: str | None,  # noqa: A002  (the name of the option)
    shards: int,
    jobs: int | None,
    function: str | None,
    encode: str,
    feature: str | None,
    dtype: str | None,
    compression: str | None,
    overwrite: bool,
    max_ratio: int,
) -> str:
    """Converts or decompresses, and returns a summary in one line."""
    destination = os.path.join(os.getcwd(), os.path.expanduser(destination))  # noqa: PTH109, PTH111, PTH118
    if not destination.endswith(EXTENSIONS):
        return _unpack(sources, destination, max_ratio, overwrite=overwrite)
    found = find_files(sources, format)
    if len(found) > 1:
        raise ValueError(
            f"Cannot convert files of several formats, {', '.join(found)}, together. Convert them one by one, or pass "
            "--format if all have one format."
        )
    ((kind, paths),) = found.values()
    keeps_json = kind.name == "jsonl" and function is None and encode != "example"
    keeps_json = keeps_json and not destination.endswith(BIN_EXTENSION)
    with kind.open(paths) as opened:
        # JSON that stays JSON is checked, but neither parsed nor formatted again.
        source = opened.as_texts() if keeps_json else opened
        if not len(source):
            raise ValueError(f"SRC must have at least one record, got none in {', '.join(paths)}.")
        targets = convert(
            source
            if function is None
            else MapDataset.source(source).map(load_callable(function, "--map must be MODULE:FUNCTION")),
            destination,
            encode="raw" if keeps_json else encode,
            feature=feature,
            dtype=dtype,
            compression=compression,
            num_shards=shards,
            worker_count=jobs or available_cores(),
            overwrite=overwrite,
        )
        size = bytes_text(sum(map(os.path.getsize, targets)))
        # Records for which the function returns None are not written.
        records = f"{len(source):,} records" if function is None else f"from {len(source):,} records"
        return f"{targets[0]}{f' and {shards - 1:,} more' if shards > 1 else ''}: {records}, {size}"


def _unpack(sources: Sequence[str], destination: str, max_ratio: int, *, overwrite: bool) -> str:
    rule = f"DST must end in {', '.join(EXTENSIONS[:-1])} or {EXTENSIONS[-1]} to write records, got {destination!r}"
    if len(sources) > 1:
        raise ValueError(f"{rule}. To decompress, pass a single SRC, got {len(sources)}.")
    path = os.path.expanduser(sources[0])  # noqa: PTH111
    with open(path, "rb") as file:  # noqa: PTH123
        start = file.read(HEAD_BYTES)
    refuse_placeholder(path, start)
    if compression_of(start) is None and not is_zlib(start):
        raise ValueError(f"{rule}. {path!r} is not compressed, so it cannot be decompressed either.")
    if os.path.lexists(destination) and (not overwrite or os.path.realpath(path) == os.path.realpath(destination)):
        raise FileExistsError(f"{destination!r} exists. Pass --overwrite to replace it, or choose another name.")
    os.makedirs(os.path.dirname(destination), exist_ok=True)  # noqa: PTH103, PTH120
    return f"{destination}: {bytes_text(unpack(path, destination, max_ratio))}, decompressed"
