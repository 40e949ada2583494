"""The records of a loader that failed: logged, counted, and raised if they are too many."""

from typing import final

import numpy as np

from millstream.loader.pipeline.elements import FailedRecord, add_note
from millstream.loader.pipeline.outputs import Outputs
from millstream.loader.pipeline.tolerance import Tolerance


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

        Args:
            outputs: the outputs.
            are_blocks: True if each output consists of complete blocks, not of one record.
        """
        for failure in outputs.failures:
            if failure.record_key in self.texts:
                continue
            if len(self.texts) >= self._limit:
                self._cut(outputs, failure, are_blocks=are_blocks)
                return
            self.texts[failure.record_key] = failure.text
            import logging  # noqa: PLC0415  (lazy: slow to import)

            logging.getLogger("millstream").warning("millstream: skipped %s: %s", failure.where, failure.text)

    def _cut(self, outputs: Outputs, failure: FailedRecord, *, are_blocks: bool) -> None:
        origins = outputs.origins
        is_before = origins.block < failure.block if are_blocks else origins.position < failure.position
        row = int(np.count_nonzero(is_before))
        outputs.values, outputs.origins = outputs.values[:row], origins.take(slice(row))
        outputs.first = min(outputs.first, row)
        limit = "no record is left" if self._tolerance.max_errors is None else f"max_errors is {self._limit}"
        add_note(failure.error, f"millstream: on_error='skip' has skipped {len(self.texts)} records, and {limit}.")
        outputs.error = failure.error
