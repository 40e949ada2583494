"""The protocols of open files of records, of any format and storage."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

RecordT = TypeVar("RecordT")


class OpenFile(Protocol):
    """An open file that any number of threads may read."""

    @property
    def num_records(self) -> int:
        """The number of records in the file."""
        ...

    def close(self) -> None:
        """Closes the file. It is not being read."""
        ...


class RecordFile(OpenFile, Protocol[RecordT]):
    """An open file whose records are found one by one.

    It may have `begin`, which takes the arguments of `read`, requests the records, and returns a function that waits
    for them, so that several remote files are read concurrently.
    """

    def read(self, positions: Sequence[int], keys: Sequence[int], /) -> list[RecordT]:
        """Returns the records at the positions, numbers from 0 in any order; the keys are for errors.

        Raises:
            DataSourceError: one of the records is damaged or lost, with its position, file and key.
        """
        ...
