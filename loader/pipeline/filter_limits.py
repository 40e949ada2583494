"""Limits for the share of records that Filters may drop."""

from typing import Final, NamedTuple


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
