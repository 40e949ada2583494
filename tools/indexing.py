"""The indices of files, made ahead, so that no training run has to wait for them."""

from collections.abc import Iterator, Sequence

from millstream.sources.files.spans import SpanRecords
from millstream.sources.formats import FileFormat
from millstream.sources.storage.offset_index import Placement


def indexed(kind: FileFormat, paths: Sequence[str]) -> Iterator[str]:
    """Finds the places of the records of some files, keeps them, and yields what there is in a line.

    Raises:
        OSError: a file cannot be read, DataSourceError if it is damaged; no folder takes the index.
        ValueError: they have no records.
    """
    with kind.open(list(paths), Placement.BESIDE) as source:
        number = len(source.files)
        what = f"{kind.name}: {len(source):,} records in {number:,} file{'s'[: number > 1]}"
        if not isinstance(source, SpanRecords):
            yield f"{what}, which need no index"
            return
        if lost := source.unkept_indices:
            raise PermissionError(
                f"The index of {lost[0]!r} and {len(lost) - 1:,} other files cannot be kept: neither the folders that "
                "they are in nor the cache folder can be written to. Set MILLSTREAM_CACHE to one that can."
            )
        yield f"{what}, indexed"
