"""How much Filters may drop."""

from typing import Final, NamedTuple


class FilterLimits(NamedTuple):
    """Shares of a thousand records in a row, 0 … 1.

    Attributes:
        warning: dropping this much is said in the log, once; None for any.
        error: dropping this much is an error; None for any.
    """

    warning: float | None = None
    error: float | None = None


UNLIMITED: Final = FilterLimits()
"""Whatever they drop."""
