"""The indices of a source's files that stay in memory, and the report of those that were made."""

import os
from typing import final

from millstream.sources.storage.offsets import HeldOffsets, Offsets, StoredOffsets

HELD_BYTES = 32 << 20
"""The memory that the indices of a source's files may take in a process; others are read from their files."""

_HELD_OVERHEAD_BYTES = 256
"""The memory that an index takes besides its offsets."""


@final
class HeldIndices:
    """Indices by the path of their file."""

    def __init__(self) -> None:
        self._by_path: dict[str, HeldOffsets] = {}
        self._num_bytes = 0
        self._made: list[str | None] = []
        self._failures: list[tuple[str, str, OSError]] = []

    def get(self, path: str) -> HeldOffsets | None:
        """Returns the index of a file, if it is here."""
        return self._by_path.get(path)

    def held(self, path: str, offsets: Offsets) -> Offsets:
        """Returns an index, in memory if there is room; raises DamagedIndexError."""
        num_bytes = 8 * (offsets.num_records + 1) + _HELD_OVERHEAD_BYTES
        if self._num_bytes + num_bytes > HELD_BYTES:
            return offsets
        if isinstance(offsets, StoredOffsets):
            stored, offsets = offsets, offsets.held()
            stored.close()
        if isinstance(offsets, HeldOffsets) and path not in self._by_path:
            self._num_bytes += num_bytes
            self._by_path[path] = offsets
        return offsets

    def remove(self, path: str) -> None:
        """Removes the index of a file, of which there may be none."""
        if (held := self._by_path.pop(path, None)) is not None:
            self._num_bytes -= 8 * (held.num_records + 1) + _HELD_OVERHEAD_BYTES

    def note(self, path: str, kept_at: str | None, failures: list[tuple[str, OSError]]) -> None:
        """Notes an index that was made: where it is, and the error of each folder that did not take it."""
        self._made.append(kept_at)
        self._failures += [(path, place, error) for place, error in failures]

    def report(self) -> None:
        """Logs what was noted, in a line each for what was made and for what failed."""
        if not self._made:
            return
        import logging  # noqa: PLC0415  (takes long to import)

        log = logging.getLogger("millstream")
        folders = {os.path.dirname(place) for place in self._made if place is not None}  # noqa: PTH120
        where = " and ".join(map(repr, sorted(folders)[:2])) or "memory"
        if folders:
            log.info("Indexed %d file%s; the index is in %s.", len(self._made), "s"[: len(self._made) > 1], where)
        if self._failures:
            path, place, error = self._failures[0]
            log.warning(
                "Cannot keep the index of %r%s in %r: %s. It is in %s instead. Set MILLSTREAM_CACHE to a folder that "
                "can be written to.",
                path,
                f" and of {len(self._failures) - 1} others" if len(self._failures) > 1 else "",
                os.path.dirname(place),  # noqa: PTH120
                error.strerror or error,
                where,
            )
        self._made, self._failures = [], []
