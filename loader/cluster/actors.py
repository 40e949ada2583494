"""An actor, seen from the trainer, and the events about it."""

import dataclasses
from typing import Any, TypeAlias, final

from millstream.loader.cluster.actor import Packed
from millstream.loader.transport.payload import Failure
from millstream.loader.workers.call_runner import CallResult


@final
class Actor:
    """The trainer's side of an actor.

    Attributes:
        number: the actor's number. It is unique in the pool.
        handle: Ray's handle.
        pid: the process ID on its node; None until it is ready.
        calls: the numbers of the unanswered calls, in the order sent.
        waited: seconds that the consumer has waited since the actor began its first unanswered call, or since its
            last sign of life.
        warned: True if a warning about the current stall has been logged.
        runs_suspect: True if its only call is one with which another actor has died.
    """

    def __init__(self, number: int, handle: Any) -> None:
        self.number = number
        self.handle = handle
        self.pid: int | None = None
        self.calls: list[int] = []
        self.waited = 0.0
        self.warned = False
        self.runs_suspect = False

    @property
    def accepts_calls(self) -> bool:
        """True if it is ready, and does not run a suspect call, to which its death must be attributable."""
        return self.pid is not None and not self.runs_suspect


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call."""

    call: int
    result: CallResult[Packed]


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineFailed:
    """The pipeline could not be unpickled in an actor."""

    failure: Failure


@dataclasses.dataclass(frozen=True, slots=True)
class CallFailed:
    """Ray did not deliver the outputs of a call.

    Attributes:
        call: the number of the call.
        error: Ray's error.
        is_lost: True if the outputs were computed and lost, for instance with a node. False if Ray cannot send them.
    """

    call: int
    error: Exception
    is_lost: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Died:
    """An actor has died.

    Attributes:
        cause: Ray's explanation.
        is_its_own: True if its own process ended, and not its node or the connection to it.
    """

    cause: str
    is_its_own: bool


Event: TypeAlias = Answer | PipelineFailed | CallFailed | Died
