"""Faults of user code, done for real. Worker processes import this too: it must be quick to import."""

import ctypes
import dataclasses
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np

from millstream.transforms import Map

WAIT_SECONDS = 60.0
"""The longest that a test waits for what should take milliseconds: the machine may be busy."""


class Pipe:
    """A named pipe: processes that know its path report lines to a test, or wait for the test's word.

    The test holds both ends, so nobody blocks in opening it or sees its end while the test runs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._descriptor = os.open(path, os.O_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def take(self) -> str:
        """Returns the next line that was reported, having waited for it; without one, the test fails."""
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._descriptor], [], [], WAIT_SECONDS)
            assert ready, f"nobody reported anything, only {line!r}"
            line += os.read(self._descriptor, 1)
        return line.decode().removesuffix("\n")

    def take_numbers(self) -> list[int]:
        return [int(word) for word in self.take().split()]

    def put(self, count: int = 1) -> None:
        """Lets this many of those that wait at the pipe continue."""
        os.write(self._descriptor, b"\n" * count)


def report(path: Path, *words: object) -> None:
    with path.open("w") as pipe:
        pipe.write(" ".join(map(str, words)) + "\n")


def wait_at(path: Path) -> None:
    """Returns when the test has put something into a pipe."""
    with path.open("rb", buffering=0) as pipe:
        pipe.read(1)


def first_time(path: Path) -> bool:
    """Says whether nobody has asked before, in any process."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def do_nothing() -> None:
    """Continues as if nothing had happened."""


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_hung_up() -> None:
    os.kill(os.getpid(), signal.SIGHUP)


def crash() -> None:
    """Reads from address 0."""
    ctypes.string_at(0)


def exit_at_once() -> None:
    os._exit(0)


def leave() -> None:
    sys.exit()


def leave_with_large_status() -> None:
    """Ends this process with a status that no process can have: the system keeps its last byte, 3."""
    sys.exit(2**40 + 3)


def leave_with_status() -> None:
    sys.exit(3)


def stop() -> None:
    """Stops this process: it neither runs nor ends."""
    os.kill(os.getpid(), signal.SIGSTOP)


def end_parent() -> None:
    """Kills the process that forked this one: the fork server, for a worker."""
    os.kill(os.getppid(), signal.SIGKILL)
    hang()


def eat_memory() -> None:
    """Takes a hundred and some megabytes, which a limit may not allow; without one, ends as if there were one."""
    np.ones(1 << 24)
    be_killed()


def hang() -> NoReturn:
    while True:
        threading.Event().wait()


def work_for_ever() -> NoReturn:
    while True:
        pass


def start_thread() -> None:
    threading.Thread(target=hang).start()


def hang_in_c() -> NoReturn:
    """Waits forever inside C code that keeps the interpreter's lock, deaf to all signals that can be ignored."""
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()) - {signal.SIGUSR1})
    while True:
        ctypes.PyDLL(None).pause()


def refuse_sevens(number: int) -> int:
    if number % 7 == 0:
        raise ValueError(f"{number} is a multiple of 7")
    return number


@dataclasses.dataclass(frozen=True)
class At(Map):
    """Does something at one element, and passes all elements on.

    Attributes:
        element: where.
        action: what.
        once: a path: with it, only the first process that comes there does it.
    """

    element: int
    action: Callable[[], Any]
    once: Path | None = None

    def map(self, element: Any) -> Any:
        if np.any(element == self.element) and (self.once is None or first_time(self.once)):
            self.action()
        return element


@dataclasses.dataclass(frozen=True)
class ReportThen:
    """Reports the process, and the children that it starts, and then does something.

    Attributes:
        path: the pipe to report to.
        action: what to do then.
        children: how many `sleep` processes to start before.
    """

    path: Path
    action: Callable[[], Any] = hang
    children: int = 0

    def __call__(self) -> None:
        started = [subprocess.Popen(["sleep", "1000"]).pid for _ in range(self.children)]
        report(self.path, os.getpid(), *started)
        self.action()


@dataclasses.dataclass(frozen=True)
class ListInherited:
    """Reports what a program has open that was started with all that can be inherited."""

    path: Path

    def __call__(self) -> None:
        done = subprocess.run(
            ["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, close_fds=False, check=True
        )
        report(self.path, *done.stdout.split())


@dataclasses.dataclass(frozen=True)
class WaitAt:
    """Waits for the test's word."""

    path: Path

    def __call__(self) -> None:
        wait_at(self.path)


@dataclasses.dataclass(frozen=True)
class Raise:
    """Raises an exception that is made where it is raised."""

    kind: Callable[..., BaseException]
    arguments: tuple[Any, ...] = ()

    def __call__(self) -> None:
        raise self.kind(*self.arguments)


class Numbers:
    """A source of numbers that acts when it comes to a worker process, or when that closes it.

    Args:
        size: how many numbers.
        on_arrival: what to do when it is unpickled.
        on_close: what to do in `close`.
    """

    def __init__(
        self, size: int, on_arrival: Callable[[], Any] | None = None, on_close: Callable[[], Any] | None = None
    ) -> None:
        self.size = size
        self.on_arrival = on_arrival
        self.on_close = on_close
        self.lock: Any = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: int) -> int:
        return key

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.on_arrival is not None:
            self.on_arrival()

    def close(self) -> None:
        if self.on_close is not None:
            self.on_close()


class Unread:
    """A source that must not be read."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, key: int) -> int:
        raise AssertionError(key)


class NeedsTwoError(Exception):
    """An exception that pickle alone cannot bring back: its constructor needs more than its `args`."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} {number}")


class HoldsLockError(Exception):
    """An exception that cannot be pickled: it holds a lock."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class CannotBeShownError(Exception):
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Locked(Map):
    """An operation that cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def map(self, element: Any) -> Any:
        return element


class NeedsHome:
    """An element that can be unpickled in every process but one."""

    def __init__(self, away: int) -> None:
        self.away = away

    def __reduce__(self) -> tuple[Callable[[int], Any], tuple[int]]:
        return arrive, (self.away,)


def arrive(away: int) -> NeedsHome:
    """Returns a NeedsHome, or fails where it does not want to be."""
    if os.getpid() == away:
        raise LookupError("not here")
    return NeedsHome(away)


class StaysWithin:
    """An element that can be pickled in every process but one."""

    def __init__(self, home: int) -> None:
        self.home = home

    def __reduce__(self) -> tuple[Callable[[int], Any], tuple[int]]:
        if os.getpid() == self.home:
            raise TypeError("stays here")
        return StaysWithin, (self.home,)
