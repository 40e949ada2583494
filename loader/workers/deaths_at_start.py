"""Deaths of workers that have computed nothing yet. Too many in a row are an error, because all would die."""

from typing import final

from millstream.errors import WorkerDiedError

MAX_DEATHS_AT_START = 8
"""Limit for consecutive deaths of new workers before a call, in addition to the number of workers."""


@final
class DeathsAtStart:
    """Counts the deaths of new workers since one has produced a result.

    Attributes:
        count: the number of deaths.
    """

    def __init__(self, num_workers: int) -> None:
        self.count = 0
        self._limit = MAX_DEATHS_AT_START + num_workers
        self._last_number = -1

    def record_life(self, number: int) -> None:
        """Resets the count, because a worker has produced a result. One older than the last dead one proves nothing."""
        if number > self._last_number:
            self.count = 0

    def record_death(self, number: int, text: str) -> None:
        """Records that a worker has died before its first call. Deaths of idle workers do not count.

        Raises:
            WorkerDiedError: too many workers have died; with the given text.
        """
        self.count += 1
        self._last_number = number
        if self.count >= self._limit:
            raise WorkerDiedError(text)
