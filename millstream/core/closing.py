"""The protocol of objects that must be closed."""

import abc
import contextlib
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar


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


class _Closable(Protocol):
    def close(self) -> None: ...


ClosableT = TypeVar("ClosableT", bound=_Closable)


def open_each(open_one: Callable[[Any], ClosableT], names: Iterable[Any]) -> list[ClosableT]:
    """Opens a resource for each of the names. If one raises an error, those before it are closed."""
    with contextlib.ExitStack() as stack:
        resources = []
        for name in names:
            resources.append(resource := open_one(name))
            stack.callback(resource.close)
        stack.pop_all()
        return resources


def close_each(resources: Iterable[_Closable]) -> None:
    """Closes all resources. If some raise an error, the others are closed, and one of the errors is raised then."""
    with contextlib.ExitStack() as stack:
        for resource in resources:
            stack.callback(resource.close)
