"""The number of tokens of each record, counted in one pass and stored until the records or operations change."""

from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_flag, named_arguments
from millstream.core.descriptions import described
from millstream.core.warn import log_warning
from millstream.loader import DataLoader, ReadOptions
from millstream.loader.pipeline.pipeline import Operations, check_operations
from millstream.samplers import SequentialSampler
from millstream.sharding import NoSharding
from millstream.sources import DataSource, MegatronDataSource
from millstream.sources.digests import spread_keys
from millstream.sources.files.offset_index import DamagedIndexError, IndexKey, Placement, find_offsets, store_offsets
from millstream.sources.files.paths import FileIdentity
from millstream.sources.files.progress import Progress
from millstream.sources.source_checks import check_source
from millstream.tools.underlying_sources import check_end, digest_of_source, files_of, is_told_apart, underlying_sources
from millstream.transforms import Batch, Map, Transformation

_BLOCK_RECORDS = 256

_COMPARED_RECORDS = 8
"""The number of records, evenly spread, that are counted again before stored lengths are returned."""

_VERSION = 2
"""The version of the counting, to be raised when it returns other lengths."""


@named_arguments()
def lengths_of(
    data_source: DataSource[Any],
    operations: Operations = (),
    feature: str | None = None,
    worker_count: int | None = 0,
    read_options: ReadOptions | None = None,
    *,
    refresh: bool = False,
    worker_init_fn: Callable[[int, int], object] | None = None,
) -> NDArray[np.int64]:
    """Returns the number of tokens of each record, an int64 array of shape (records,), for a `PackingSampler`.

    Every record is read once, in order, and goes through the operations. If that takes long, there is a progress bar.
    The lengths are stored, and returned the next time: in `.NAME.lengths-DIGEST-index` beside the first file NAME of
    the source, or in the cache folder (`$MILLSTREAM_CACHE`, else `$XDG_CACHE_HOME/millstream`, else
    `~/.cache/millstream`) if that folder is not writable or the source has no files. Records are counted again after a
    change of the source, of its files (including their times), or of the operations: their parameters, their code, and
    the result of their `fingerprint()`. A change of a function, a global variable or a file that an operation uses,
    such as that of a tokenizer, is noticed by counting eight records again; pass `refresh=True` if it may leave these
    as they are. Records that nothing tells from others are counted each time: those in memory, of `FileDataSource`,
    Zarr and Lance, and of your own source without `fingerprint()`.

    The lengths of sequences in Megatron's format are known, and nothing is read.

    Args:
        data_source: the records.
        operations: the operations before `Pack`, in order: Maps and functions; none by default.
        feature: the entry of dict elements that holds the tokens; None if elements are the tokens themselves. Tokens
            are an array, whose first axis counts, or a list. An integer is itself the number of tokens, for records
            that contain their length.
        worker_count: the number of worker processes, 0 for none; None for one per core that this process may use.
        read_options: the threads that read ahead; None for `ReadOptions()`.
        refresh: True to count all records again, and to replace what is stored.
        worker_init_fn: called in each worker with its index and the number of workers, see `DataLoader`.

    Raises:
        TypeError: an operation is not a Map or a function, so that it does not return one element per record or
            depends on the position in training; or an element is not tokens, such as a text without a tokenizer.
        ValueError: an element lacks the feature, or has a negative length; or the source is endless.
        Exception: the exception of an operation or of the source, with notes about its origin.

    Examples:
        >>> documents = ["a b c", "d", "e f"]
        >>> millstream.lengths_of(documents, [str.split])
        array([3, 1, 2])
    """
    check_source(data_source, "data_source")
    check_end(data_source)
    maps = _checked_maps(operations)
    if feature is not None and not isinstance(feature, str):
        raise TypeError(f"feature must be the name of an entry, or None, got {feature!r} of {type(feature).__name__}.")
    if not maps and feature is None and type(data_source) is MegatronDataSource:
        return data_source.sequence_lengths()
    key = _index_key(data_source, maps, feature)
    counted = [*maps, _TokenCount(feature)]
    if not as_flag(refresh, "refresh") and key is not None:
        stored = _find_lengths(key, len(data_source))
        if stored is not None and _are_valid(stored, data_source, counted, read_options):
            return stored
    lengths = _count_tokens(data_source, counted, worker_count, read_options, worker_init_fn=worker_init_fn)
    if key is not None:
        import logging  # noqa: PLC0415  (lazy: it takes long to import)

        offsets = np.cumsum(np.concatenate([[0], lengths]))
        _, path, _ = store_offsets(key, lambda: [offsets], Placement.BESIDE)
        result = f"are stored in {path}" if path else "cannot be stored: no folder is writable"
        logging.getLogger("millstream").info("millstream: the lengths of %s %s.", described(data_source), result)
    return lengths


@final
class _TokenCount(Map[Any, int]):
    def __init__(self, feature: str | None) -> None:
        self.feature = feature

    def __repr__(self) -> str:
        return "lengths_of" if self.feature is None else f"lengths_of(feature={self.feature!r})"

    def map(self, element: Any, /) -> int:
        tokens = element if self.feature is None else self._entry(element, self.feature)
        if isinstance(tokens, int | np.integer) and not isinstance(tokens, bool):
            if tokens < 0:
                raise ValueError(f"A record cannot have {tokens} tokens.")
            return int(tokens)
        if isinstance(tokens, list | tuple):
            return len(tokens)
        shape = getattr(tokens, "shape", ())
        if not shape:
            raise TypeError(self._advice(tokens))
        return int(shape[0])

    def _entry(self, element: Any, feature: str) -> Any:
        if not isinstance(element, Mapping):
            raise TypeError(
                f"lengths_of needs dicts with the feature {feature!r}, got {type(element).__name__}. Omit `feature`, "
                "or pass the operations that return dicts."
            )
        if feature not in element:
            raise ValueError(
                f"lengths_of needs the feature {feature!r}, but an element has "
                f"{', '.join(map(repr, element)) or 'no features'}."
            )
        return element[feature]

    def _advice(self, tokens: Any) -> str:
        if isinstance(tokens, Mapping) and self.feature is None:
            return (
                f"lengths_of counts the tokens of arrays and lists, got a dict of {', '.join(map(repr, tokens))}. Pass "
                "the entry that holds the tokens, lengths_of(..., feature=...)."
            )
        return (
            f"lengths_of counts the tokens of arrays and lists, got {type(tokens).__name__}. Pass the operations "
            "before Pack, which return the tokens."
        )


def _checked_maps(operations: Operations) -> list[Transformation]:
    """Returns the operations, all of which must return one element per record, whatever its position."""
    checked = check_operations(operations)
    for number, operation in enumerate(checked):
        if not isinstance(operation, Map):
            raise TypeError(
                f"lengths_of takes only Maps and functions, because the length of a record must not depend on "
                f"its position, but operations[{number}] is {described(operation)}. Pass the operations before Pack."
            )
    return checked


def _are_valid(
    stored: NDArray[np.int64], source: DataSource[Any], operations: list[Transformation], options: ReadOptions | None
) -> bool:
    """Returns True if a sample of the records, counted again, has the stored lengths."""
    keys = np.array(spread_keys(len(source), _COMPARED_RECORDS))
    found = _count_tokens(source, operations, 0, options, keys)
    if differing := np.flatnonzero(found != stored[keys]).tolist():
        key = keys[differing[0]]
        log_warning(
            f"the stored lengths of {described(source)} are those of other operations, and are counted again: record "
            f"{key} has {found[differing[0]]} tokens, and {stored[key]} when they were stored."
        )
    return not differing


def _count_tokens(
    source: DataSource[Any],
    operations: list[Transformation],
    worker_count: int | None,
    read_options: ReadOptions | None,
    keys: NDArray[np.int64] | None = None,
    *,
    worker_init_fn: Callable[[int, int], object] | None = None,
) -> NDArray[np.int64]:
    """Returns the lengths of all records, or of those with the keys."""
    count = len(source) if keys is None else len(keys)
    loader = DataLoader(
        data_source=source,
        sampler=SequentialSampler(count, keys=keys),
        operations=[*operations, Batch(_BLOCK_RECORDS)],
        worker_count=worker_count,
        shard_options=NoSharding(),
        read_options=read_options,
        worker_init_fn=worker_init_fn,
    )
    lengths = np.empty(count, np.int64)
    progress = Progress("Counting tokens", count, "records")
    done = 0
    try:
        with loader, iter(loader) as batches:
            for batch in batches:
                lengths[done : done + len(batch)] = batch
                done += len(batch)
                progress.advance(len(batch))
    finally:
        progress.close()
    return lengths


def _index_key(source: DataSource[Any], operations: list[Transformation], feature: str | None) -> IndexKey | None:
    """Returns the key of the stored lengths; None for a source without a complete fingerprint."""
    sources = list(underlying_sources(source))
    if not all(map(is_told_apart, sources)):
        return None
    files = {path: identity for below in sources for path, identity in (files_of(below) or {}).items()}
    (path, first), *others = files.items() or [("", FileIdentity(0, 0, 0, 0))]
    kind = f"lengths-{digest_of_source(source, operations, feature)}"
    return IndexKey(path, kind, _VERSION, first, tuple(others))


def _find_lengths(key: IndexKey, count: int) -> NDArray[np.int64] | None:
    offsets = find_offsets(key)
    if offsets is None or offsets.num_records != count:
        return None
    try:
        lengths = np.diff(offsets.between(0, count + 1))
    except DamagedIndexError:
        return None
    return lengths if lengths.min(initial=0) >= 0 else None
