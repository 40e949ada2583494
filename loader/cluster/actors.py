"""An actor as the trainer sees it, and what can happen to it."""

import dataclasses
from typing import Any, TypeAlias, final

from millstream.loader.cluster.actor import Packed
from millstream.loader.transport.payload import Failure
from millstream.loader.workers.call_runner import CallResult


@final
class Actor:
    """One actor.

    Attributes:
        number: which one.
        handle: Ray's.
        pid: its process on its node; None until it is ready.
        calls: the numbers of the calls it was given and has not answered, in order.
        waited: seconds that the consumer has waited since the actor began with the first of them, or was last heard.
        warned: whether it has been reported in the log since then.
        makes_suspect: whether its one call is one with which an actor has died before.
    """

    def __init__(self, number: int, handle: Any) -> None:
        self.number = number
        self.handle = handle
        self.pid: int | None = None
        self.calls: list[int] = []
        self.waited = 0.0
        self.warned = False
        self.makes_suspect = False

    @property
    def accepts_calls(self) -> bool:
        """Whether calls may be given to it: it is ready, and should it die, it is clear of what."""
        return self.pid is not None and not self.makes_suspect


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What came of a call."""

    call: int
    made: CallResult[Packed]


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineFailed:
    """The pipeline cannot be made from its pickle in an actor."""

    failure: Failure


@dataclasses.dataclass(frozen=True, slots=True)
class CallFailed:
    """Ray has not brought the outputs of a call.

    Attributes:
        call: which one.
        error: what it says.
        is_lost: whether they were made and are gone, with a node perhaps; else they cannot be had.
    """

    call: int
    error: Exception
    is_lost: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Died:
    """An actor is gone.

    Attributes:
        cause: why, as Ray says it.
        is_its_own: whether its process has ended, and not its node, or the way to it.
    """

    cause: str
    is_its_own: bool


Event: TypeAlias = Answer | PipelineFailed | CallFailed | Died
