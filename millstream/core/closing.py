"""The protocol of objects that must be closed."""

import abc
from types import TracebackType
from typing import Self


class Closing(abc.ABC):
    """A context manager that closes itself at the end of a `with` block."""

    @abc.abstractmethod
    def close(self) -> None:
        """Releases all resources. May be called more than once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
