"""Faults at the edges of the protocol between a worker and its parent, without a line for it in the product.

A `Saboteur` is an operation that changes nothing. Unpickled in a worker process, it wraps that process's copies of the
functions that make up the protocol. The wrappers count how often an edge is passed, and at the passage that the test
has armed, one process, once, does something terrible. Worker processes import this: it must be quick to import.
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from millstream.loader.processes import worker
from millstream.loader.processes.channel import Channel
from millstream.loader.transport.arena import Allocator
from millstream.transforms import Map

EDGES = (
    *("unpickle", "before receive", "after receive", "before take back", "after take back", "before allocate"),
    *("before fill", "before pack", "after pack", "before send", "half sent", "after send"),
)


class SabotageError(Exception):
    """The error that a saboteur raises."""


def sabotage() -> None:
    raise SabotageError


class Trap:
    """An order to act once, in whichever process passes the edge for the nth time first.

    It is a file that holds n. Its name is new each time it is armed, so that processes begin to count anew; to take it
    away is to win the right to act.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = itertools.count()
        self._path: Path | None = None

    def arm(self, n: int) -> None:
        self.disarm()
        self._path = self._folder / f"{next(self._names)}-{n}"
        self._path.touch()

    def disarm(self) -> None:
        """Takes the order back, if it was not carried out."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    @property
    def has_fired(self) -> bool:
        return self._path is not None and not self._path.exists()


class Passages:
    """Counts the passages of one process."""

    def __init__(self, folder: Path, action: Callable[[], None]) -> None:
        self._folder = folder
        self._action = action
        self._order = ""
        self._count = 0

    def __call__(self) -> None:
        order = next(iter(os.listdir(self._folder)), "")  # noqa: PTH208  (the name is wanted)
        if not order:
            return
        if order != self._order:
            self._order, self._count = order, 0
        self._count += 1
        if self._count == int(order.split("-")[1]):
            try:
                (self._folder / order).unlink()
            except FileNotFoundError:
                return
            self._action()


@dataclasses.dataclass(frozen=True)
class Saboteur(Map):
    """Passes elements on, and wraps the protocol of the worker process that it comes to.

    Attributes:
        edge: one of EDGES.
        action: what to do there.
        folder: where the trap is.
        home: the process that is not to be sabotaged.
    """

    edge: str
    action: Callable[[], None]
    folder: Path
    home: int = dataclasses.field(default_factory=os.getpid)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if os.getpid() == self.home:
            return
        passes = Passages(self.folder, self.action)
        if self.edge == "unpickle":
            passes()
        else:
            install(self.edge, passes)

    def map(self, element: Any) -> Any:
        return element


def install(edge: str, passes: Callable[[], None]) -> None:
    """Wraps the functions of this process that have the edge."""
    when, _, what = edge.partition(" ")
    match edge:
        case "before receive" | "after receive":
            wrap_receive(when, passes)
        case "half sent":
            original = Channel.send

            def send(channel: Channel, *args: Any) -> None:
                if not isinstance(channel._socket, HalvingSocket):
                    vars(channel)["_socket"] = HalvingSocket(channel._socket, passes)
                original(channel, *args)

            setattr(Channel, "send", send)  # noqa: B010  (mypy: a method is not to be assigned to)
        case "before fill":
            wrap(Allocator, "allocate", "after", passes)
        case "before pack" | "after pack":
            wrap(worker, "pack", when, passes)
        case "before allocate" | "before take back" | "after take back":
            wrap(Allocator, what.replace(" ", "_"), when, passes)
        case "before send" | "after send":
            wrap(Channel, "send", when, passes)
        case _:
            raise ValueError(edge)


def wrap(owner: Any, name: str, when: str, passes: Callable[[], None]) -> None:
    """Puts a passage before or after a function."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **options: Any) -> Any:
        if when == "before":
            passes()
        result = original(*args, **options)
        if when == "after":
            passes()
        return result

    setattr(owner, name, wrapper)


def wrap_receive(when: str, passes: Callable[[], None]) -> None:
    """Puts a passage before each read, or after each message."""
    original = Channel.receive

    def receive(channel: Channel) -> Iterator[Any]:
        if when == "before":
            passes()
        for message in original(channel):
            if when == "after":
                passes()
            yield message

    setattr(Channel, "receive", receive)  # noqa: B010  (mypy: a method is not to be assigned to)


class HalvingSocket:
    """Sends in two halves, with a passage between them."""

    def __init__(self, inner: Any, passes: Callable[[], None]) -> None:
        self._inner = inner
        self._passes = passes

    def send(self, data: memoryview, flags: int) -> int:
        half = len(data) // 2
        self._inner.sendall(data[:half], flags)
        self._passes()
        self._inner.sendall(data[half:], flags)
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
