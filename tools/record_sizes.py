"""How many bytes the records of a source have: known, or of some of them; and that as a picture in text."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.sources.files.spans import SpanRecords
from millstream.sources.storage.paths import FileIdentity
from millstream.tools.lengths_cache import find_lengths

_SAMPLE = 256
"""How many records are read where nothing else says how large they are."""

_MAX_BARS = 12
_BAR = 40

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def sizes_of(source: Any) -> tuple[NDArray[np.int64], bool] | None:
    """Returns how many bytes records have, and whether these are all of them; None if records are not bytes or text.

    Nothing is read where an index knows it, or `convert` has kept it; else some records are, spread evenly.
    """
    if isinstance(source, SpanRecords):
        return source.span_sizes(), True
    if (kept := _kept_sizes(source)) is not None:
        return kept, True
    if not isinstance(source[0], bytes | str):
        return None  # Where records are read in units, a sample would be a unit each.
    keys = np.unique(np.linspace(0, len(source) - 1, _SAMPLE, dtype=np.int64))
    records = source.__getitems__(keys.tolist())
    if not all(isinstance(record, bytes | str) for record in records):
        return None
    return np.array([len(record) for record in records], np.int64), len(keys) == len(source)


def sizes_mark(identity: FileIdentity) -> str:
    """Returns under which mark the sizes of the records of a file are kept."""
    import hashlib  # noqa: PLC0415  (OpenSSL takes long to import)

    text = f"bytes of the records of {identity.size} written at {identity.modified}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _kept_sizes(source: Any) -> NDArray[np.int64] | None:
    """Returns the sizes that `convert` has kept, of a single file without a range."""
    files = getattr(source, "files", {})
    if len(files) != 1:
        return None
    ((path, identity),) = files.items()
    return find_lengths(path, sizes_mark(identity), len(source))


def in_bytes(size: float) -> str:
    """Returns a number of bytes in words, with three digits."""
    rounded = float(f"{size:.2e}")
    power = int(np.log10(max(1.0, rounded)) // 3)
    return f"{rounded / 1000**power:.3g} {_UNITS[power]}"


def histogram(sizes: NDArray[np.int64]) -> Iterator[str]:
    """Yields a line for each class of sizes: up to how many bytes, a bar, how many records."""
    exponents = np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64)
    low, high = int(exponents.min()), int(exponents.max())
    if low == high:
        return
    step = -(-(high - low + 1) // _MAX_BARS)
    counts = np.bincount((exponents - low) // step)
    for number, count in enumerate(counts.tolist()):
        bar = "#" * -(-_BAR * count // int(counts.max()))
        limit = in_bytes(2 ** (low + (number + 1) * step - 1))
        yield f"up to {limit:>8}  {bar:<{_BAR}}  {count:,}"
