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
from typing import final

import numpy as np

from millstream.core.signals import is_from_signal_handler
from millstream.core.warn import log_warning
from millstream.loader.operations.elements import Elements, FailedRecord, SourceEnded, add_note
from millstream.loader.pipeline.outputs import Outputs
from millstream.loader.pipeline.pipeline import Tolerance
from millstream.transforms.of_chains import AbsentElement


def is_of_record(error: BaseException) -> bool:
    """Returns True if an exception is the failure of one record, not of the machine, the stream's end or the user."""
    is_other = isinstance(error, MemoryError | SourceEnded | AbsentElement)
    return isinstance(error, Exception) and not is_other and not is_from_signal_handler(error)


def without_failures(make: Callable[[Elements], Elements], run: Elements, failed: list[FailedRecord]) -> Elements:
    """Applies a step, or the reading, to a run without the records that fail in it, which are appended to `failed`.

    `make` stops at the first error.
    """
    runs: list[Elements] = []
    while True:
        made = make(run)
        if made.error is None or made.at is None or not is_of_record(made.error):
            return Elements.concatenate([*runs, made])
        rows = np.flatnonzero(run.origins.position == made.at.position)
        failed.append(FailedRecord.at(run.origins, int(rows[0]), made.error))
        # A FlatMap may have split the record before. Its other children are dropped as well.
        kept = made.origins.position != made.at.position
        runs.append(Elements(list(itertools.compress(made.values, kept.tolist())), made.origins.take(kept)))
        remainder = slice(int(rows[-1]) + 1, None)
        run = Elements(run.values[remainder], run.origins.take(remainder), run.error, run.at)


@final
class ErrorLog:
    """The failed records of one loader in this process. Each is logged once.

    Args:
        tolerance: the number of records that may fail.
        num_records: the number of records. If all of them fail, that is an error whatever the tolerance.
    """

    def __init__(self, tolerance: Tolerance, num_records: int) -> None:
        self.texts: dict[int, str] = {}
        self._limit = num_records - 1 if tolerance.max_errors is None else tolerance.max_errors
        self._tolerance = tolerance

    def check(self, outputs: Outputs, *, are_blocks: bool) -> None:
        """Records the failures in outputs of stage 0, in the order of the stream. Truncates the outputs at the limit.

        `are_blocks` is True if each output consists of complete blocks, not of one record.
        """
        for failure in outputs.failures:
            if failure.record_key in self.texts:
                continue
            if len(self.texts) >= self._limit:
                self._cut(outputs, failure, are_blocks=are_blocks)
                return
            self.texts[failure.record_key] = failure.text
            log_warning(f"skipped {failure.where}: {failure.text}")

    def _cut(self, outputs: Outputs, failure: FailedRecord, *, are_blocks: bool) -> None:
        origins = outputs.origins
        is_before = origins.block < failure.block if are_blocks else origins.position < failure.position
        limit = "no record is left" if self._tolerance.max_errors is None else f"max_errors is {self._limit}"
        add_note(failure.error, f"millstream: on_error='skip' has skipped {len(self.texts)} records, and {limit}.")
        outputs.end_with(failure.error, int(np.count_nonzero(is_before)), failure.block)
