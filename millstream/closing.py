"""Things that are closed when they are no longer needed."""

import abc
from types import TracebackType
from typing import Self


class Closing(abc.ABC):
    """Is closed at the end of a `with` block."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees what is held. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
