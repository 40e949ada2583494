"""The amounts of everything: for a test, for a look, for the record."""

import dataclasses
from typing import TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Scale:
    """The size of a run of the suite.

    Attributes:
        name: what the command line calls it.
        seconds: how long a rate is measured, once it is warm.
        warm_seconds: how long a stream runs before it is measured.
        repeats: how often each contender runs, by default.
        limit_seconds: after this long a contender is stopped, and reported as stopped.
    """

    name: str
    seconds: float
    warm_seconds: float
    repeats: int
    limit_seconds: float

    def pick(self, *, tiny: T, quick: T, full: T) -> T:
        return {"tiny": tiny, "quick": quick, "full": full}[self.name]


TINY = Scale("tiny", seconds=0.02, warm_seconds=0.0, repeats=1, limit_seconds=60.0)
"""Everything runs, nothing is measured well: for tests, and for comparing contents."""

QUICK = Scale("quick", seconds=0.7, warm_seconds=0.5, repeats=1, limit_seconds=90.0)
"""A few minutes: to see where things stand."""

FULL = Scale("full", seconds=1.5, warm_seconds=1.0, repeats=3, limit_seconds=240.0)
"""The one whose results are kept."""

SCALES = {scale.name: scale for scale in (TINY, QUICK, FULL)}
