"""Records that fail, with `on_error="skip"`.

A record fails with an Exception that is raised for it by the source, or by an operation before the first one that
gathers elements. The error of a Batch or packer belongs to no single record. It is raised, and so are MemoryError and
KeyboardInterrupt.

If no operation before the first Batch drops, splits or regroups, records keep their positions. A record that fails is
then replaced by the next key that works, in key order. Otherwise, all elements of the record are dropped. Both are pure
functions of the record: threads, workers and call sizes do not matter.
"""

import itertools
from collections.abc import Callable

import numpy as np

from millstream.loader.pipeline.elements import Elements, FailedRecord
from millstream.loader.pipeline.source_end import SourceEnded
from millstream.signal_exceptions import is_from_signal_handler
from millstream.transforms.absence_check import AbsentElement


def is_of_record(error: BaseException) -> bool:
    """Returns True if an exception is the failure of one record, not of the machine, the stream's end or the user."""
    is_other = isinstance(error, MemoryError | SourceEnded | AbsentElement)
    return isinstance(error, Exception) and not is_other and not is_from_signal_handler(error)


def without_failures(make: Callable[[Elements], Elements], run: Elements, failed: list[FailedRecord]) -> Elements:
    """Applies a function to a run without the records that fail in it, which are appended to `failed`.

    Args:
        make: one step, or the reading. It stops at the first error.
        run: the elements.
        failed: the records that have failed so far.
    """
    runs: list[Elements] = []
    while True:
        made = make(run)
        if made.error is None or made.at is None or not is_of_record(made.error):
            return Elements.concatenate([*runs, made])
        rows = np.flatnonzero(run.origins.position == made.at)
        failed.append(FailedRecord.at(run.origins, int(rows[0]), made.error))
        # A FlatMap may have split the record before. Its other children are dropped as well.
        kept = made.origins.position != made.at
        runs.append(Elements(list(itertools.compress(made.values, kept.tolist())), made.origins.take(kept)))
        remainder = slice(int(rows[-1]) + 1, None)
        run = Elements(run.values[remainder], run.origins.take(remainder), run.error, run.at)
