"""The number of records of a pipeline that may fail, and the share that Filters may drop."""

from typing import Final, NamedTuple, Self

from millstream.checks import as_integer
from millstream.samplers.protocols import is_packed


class FilterLimits(NamedTuple):
    """Shares of each thousand consecutive records, 0 … 1.

    Attributes:
        warning: the share from which a warning is logged, once; None for no warning.
        error: the share from which an error is raised; None for no error.
    """

    warning: float | None = None
    error: float | None = None


UNLIMITED: Final = FilterLimits()
"""No limits."""

MAX_ERRORS = 1000
"""The default for the number of records that may fail. The error of the next one is raised."""


class Tolerance(NamedTuple):
    """The number of records that may fail.

    Attributes:
        max_errors: the maximum number of record keys; None for any number except all.
    """

    max_errors: int | None

    @classmethod
    def of(cls, on_error: object, max_errors: object) -> Self | None:
        """Returns the tolerance for two arguments of a loader; None if the first error is raised.

        Raises:
            TypeError, ValueError: an argument has the wrong type or is out of range, or the two contradict each other.
        """
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}.")
        if max_errors is not None:
            max_errors = as_integer(max_errors, "max_errors", 0)
        if on_error == "skip":
            return cls(max_errors)
        if max_errors != MAX_ERRORS:
            raise ValueError(f"max_errors={max_errors} needs on_error='skip': on_error='raise' raises the first error.")
        return None


def check_tolerance(tolerance: Tolerance | None, sampler: object) -> None:
    """Refuses to skip errors in packed rows, because no other document fits into a planned row."""
    if tolerance is not None and is_packed(sampler):
        raise ValueError(
            "on_error must be 'raise' with a PackingSampler, got 'skip'. Rows are planned from the lengths of their "
            "documents, so a failed one can neither be dropped nor replaced. Omit such documents from lengths."
        )
