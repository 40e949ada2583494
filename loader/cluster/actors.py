"""An actor, seen from the trainer, and the events about it."""

import dataclasses
from typing import Any, TypeAlias, final

from millstream.loader.cluster.actor import Packed
from millstream.loader.transport.payload import Failure
from millstream.loader.workers.call_runner import CallResult
from millstream.loader.workers.warm_pools import AnyWorker


@final
class Actor(AnyWorker):
    """The trainer's side of an actor. It has a process ID, that on its node, once it is ready.

    Attributes:
        handle: Ray's handle.
        runs_suspect: True if its only call is one with which another actor has died.
    """

    def __init__(self, number: int, handle: Any) -> None:
        super().__init__(number)
        self.handle = handle
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
