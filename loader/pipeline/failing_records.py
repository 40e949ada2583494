"""Records that fail, where `on_error="skip"` asks to continue without them.

A record fails with an Exception that the source, or an operation before the first one that gathers, raises for it. What
gathers is not a record's: the error of a Batch or a packer is raised, and so are MemoryError and KeyboardInterrupt.

Where records keep their places, because nothing before the first Batch drops, splits or regroups, a record that fails
is replaced by the next key that works, in key order. Elsewhere, all elements of the record are dropped. Both are a
pure function of the record: threads, workers and the sizes of calls make no difference.
"""

import itertools
from collections.abc import Callable

import numpy as np

from millstream.loader.pipeline.elements import Elements, FailedRecord
from millstream.loader.pipeline.source_end import SourceEnded
from millstream.signal_exceptions import is_from_signal_handler
from millstream.transforms.absence_check import AbsentElement


def is_of_record(error: BaseException) -> bool:
    """True if an exception is the failure of one record, and not of the machine, the source's end or the user."""
    is_other = isinstance(error, MemoryError | SourceEnded | AbsentElement)
    return isinstance(error, Exception) and not is_other and not is_from_signal_handler(error)


def without_failures(make: Callable[[Elements], Elements], run: Elements, failed: list[FailedRecord]) -> Elements:
    """Returns what `make` makes of a run, without the records that fail in it, which are appended to `failed`.

    Args:
        make: one step, or the reading: it stops at the first error.
        run: the elements.
        failed: the records that have failed so far.
    """
    parts: list[Elements] = []
    while True:
        made = make(run)
        if made.error is None or made.at is None or not is_of_record(made.error):
            return Elements.concatenate([*parts, made])
        rows = np.flatnonzero(run.origins.position == made.at)
        failed.append(FailedRecord.at(run.origins, int(rows[0]), made.error))
        # A FlatMap may have split the record before: what is left of it is dropped, too.
        kept = made.origins.position != made.at
        parts.append(Elements(list(itertools.compress(made.values, kept.tolist())), made.origins.take(kept)))
        rest = slice(int(rows[-1]) + 1, None)
        run = Elements(run.values[rest], run.origins.take(rest), run.error, run.at)
