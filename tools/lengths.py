"""How many tokens each record has: found in one pass, kept, and not looked for again while nothing changes."""

import json
from collections.abc import Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.checks import named_arguments
from millstream.descriptions import described
from millstream.loader import DataLoader, ReadOptions
from millstream.loader.checkpoints.fingerprint import fingerprint_of
from millstream.loader.pipeline.arguments import Operations, check_operations
from millstream.samplers import SequentialSampler
from millstream.sharding import NoSharding
from millstream.sources import (
    ConcatenatedDataSource,
    DataSource,
    InMemoryDataSource,
    MegatronDataSource,
    RangeDataSource,
)
from millstream.sources.files.multi_file import Files
from millstream.sources.source_checks import check_source
from millstream.sources.storage.progress import Progress
from millstream.tools.lengths_cache import find_lengths, store_lengths
from millstream.transforms import Batch, Map, Transformation

_RECORDS_AT_ONCE = 256

_LAYOUT = 1
"""The version of what a length is: to be raised when others come out."""

_IN_MEMORY = (list, tuple, range, np.ndarray, InMemoryDataSource, RangeDataSource)
"""Sources of which a fingerprint looks at some records only: two that differ in others would be mistaken."""


@named_arguments()
def lengths_of(
    data_source: DataSource[Any],
    operations: Operations = (),
    feature: str | None = None,
    worker_count: int | None = 0,
    read_options: ReadOptions | None = None,
) -> NDArray[np.int64]:
    """Returns how many tokens each record has, an int64 array of shape (records,), for a `PackingSampler`.

    Every record is read once, in order, and goes through the operations; there is a progress bar if that takes long.
    What comes out is kept, and found the next time: in `.NAME.lengths-MARK.npy` beside the first file NAME of the
    source, or in the cache folder (`$MILLSTREAM_CACHE`, `$XDG_CACHE_HOME/millstream`) where that folder cannot be
    written to, or where the records lie in no file. They are counted again after a change of the source, of its files
    (their times count, too), or of the operations: their parameters and their code. Changes of functions and global
    variables that an operation uses are not seen: then remove the file, whose path is in the log of `millstream`.
    Records that are held in memory, or are those of a source without `fingerprint()`, are counted each time.

    Of sequences in Megatron's format, the lengths are known, and nothing is read.

    Args:
        data_source: the records.
        operations: what happens to a record before `Pack`, in order: Maps and functions; by default nothing.
        feature: which entry of the elements, which are dicts then, has the tokens; None where an element is the tokens
            themselves. Tokens are an array, whose first axis counts, or a list. One integer is itself the number of
            tokens, for records that say how long they are.
        worker_count: how many worker processes, 0 for none; None for one for each core that this process may use.
        read_options: the threads that read ahead; None for `ReadOptions()`.

    Raises:
        TypeError: an operation is not a Map or a function, since what it gives is not one element for each record, or
            depends on the position in training; an element is not tokens, such as a text that is still to be
            tokenized.
        ValueError: an element lacks the feature, or says that it has less than no tokens.
        Exception: whatever an operation or the source raises, with notes that say where.

    Examples:
        >>> documents = ["a b c", "d", "e f"]
        >>> millstream.lengths_of(documents, [str.split])
        array([3, 1, 2])
    """
    check_source(data_source, "data_source")
    maps = _checked_maps(operations)
    if feature is not None and not isinstance(feature, str):
        raise TypeError(f"feature must be the name of an entry, or None, got {feature!r} of {type(feature).__name__}.")
    if not maps and feature is None and type(data_source) is MegatronDataSource:
        return data_source.sequence_lengths()
    path, mark = _identity(data_source, maps, feature)
    if mark is not None and (kept := find_lengths(path, mark, len(data_source))) is not None:
        return kept
    lengths = _counted(data_source, [*maps, _TokenCount(feature)], worker_count, read_options)
    if mark is not None:
        import logging  # noqa: PLC0415  (takes long to import)

        place = store_lengths(path, mark, lengths)
        where = f"are kept in {place}" if place else "cannot be kept: no folder takes them"
        logging.getLogger("millstream").info("millstream: the lengths of %s %s.", described(data_source), where)
    return lengths


@final
class _TokenCount(Map[Any, int]):
    """The number of tokens of an element."""

    def __init__(self, feature: str | None) -> None:
        self.feature = feature

    def __repr__(self) -> str:
        return "lengths_of" if self.feature is None else f"lengths_of(feature={self.feature!r})"

    def map(self, element: Any, /) -> int:
        """Returns the number of tokens."""
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
                f"lengths_of looks for the feature {feature!r} of dicts, got {type(element).__name__}: leave `feature` "
                "out, or give the operations that make dicts."
            )
        if feature not in element:
            raise ValueError(
                f"lengths_of looks for the feature {feature!r}, but an element has "
                f"{', '.join(map(repr, element)) or 'none'}."
            )
        return element[feature]

    def _advice(self, tokens: Any) -> str:
        if isinstance(tokens, Mapping) and self.feature is None:
            return (
                f"lengths_of counts the tokens of arrays and lists, got a dict of {', '.join(map(repr, tokens))}: say "
                "which of them are the tokens, lengths_of(..., feature=...)."
            )
        return (
            f"lengths_of counts the tokens of arrays and lists, got {type(tokens).__name__}: give the operations that "
            "make the tokens, those before Pack."
        )


def _checked_maps(operations: Operations) -> list[Transformation]:
    """Returns the operations; refuses what is not one element for each record, whatever its position."""
    checked = check_operations(operations)
    for number, operation in enumerate(checked):
        if not isinstance(operation, Map):
            raise TypeError(
                f"lengths_of takes Maps and functions only, but operations[{number}] is {described(operation)}: the "
                "lengths must be those of every record at whatever position. Give the operations before Pack."
            )
    return checked


def _counted(
    source: DataSource[Any],
    operations: list[Transformation],
    worker_count: int | None,
    read_options: ReadOptions | None,
) -> NDArray[np.int64]:
    """Returns what the operations give for each record, in order."""
    loader = DataLoader(
        data_source=source,
        sampler=SequentialSampler(len(source)),
        operations=[*operations, Batch(_RECORDS_AT_ONCE)],
        worker_count=worker_count,
        shard_options=NoSharding(),
        read_options=read_options,
    )
    lengths = np.empty(len(source), np.int64)
    progress = Progress("Counting tokens", len(source), "records")
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


def _identity(
    source: DataSource[Any], operations: list[Transformation], feature: str | None
) -> tuple[str | None, str | None]:
    """Returns the first file of a source, and a mark of what its lengths depend on; None where there is no such."""
    import hashlib  # noqa: PLC0415  (OpenSSL takes long to import)

    files: dict[str, tuple[int, int]] = {}
    if not _is_told_apart(source, files):
        return None, None
    own = fingerprint_of(source, SequentialSampler(len(source)), operations)
    words = [_LAYOUT, dict(own.words), dict(own.content), own.python, feature]
    # Where the files lie does not count, but when they were written does: a size alone may stay as it was.
    text = json.dumps([*words, list(files.values())])
    return next(iter(files), None), hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _is_told_apart(source: Any, files: dict[str, tuple[int, int]]) -> bool:
    """Returns whether a fingerprint knows a source from each other one; adds its files with their size and time."""
    if isinstance(source, ConcatenatedDataSource):
        return all(_is_told_apart(part, files) for part in source.parts.values())
    if isinstance(source, Files):
        files |= {path: (identity.size, identity.modified) for path, identity in source.files.items()}
    return callable(getattr(source, "fingerprint", None)) and not isinstance(source, _IN_MEMORY)
