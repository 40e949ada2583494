"""Which calls are in whose hands, which have to be made again, and which call is to blame for what went wrong.

Guarantees:
    * A call is completed once, by its outputs or by an error. Answers to calls that are no longer wanted are dropped.
    * Calls that were lost go out again before all others, in their order.
    * Several blocks that were made by one call, and with which something went wrong, are made by calls of one block
      each, until it shows which block is at fault.
    * A call in which MOST_DEATHS workers died is given up: so the stream never waits without end.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from millstream.loader.pipeline.calls import BlockCall, Call
from millstream.loader.pipeline.elements import Elements

MOST_DEATHS = 2
"""A call in which this many workers died is given up."""

NO_LONGER_WANTED = "outputs that are no longer wanted"
"""What a call is called in texts for people when nobody waits for it."""


class Wanting(Protocol):
    """What wants the outputs of calls."""

    def wants(self, call: Call) -> bool:
        """Whether the outputs of a call are still waited for."""

    def describe(self, call: Call) -> str:
        """Returns which records a call is about."""

    def split(self, call: BlockCall) -> list[BlockCall]:
        """Returns calls of one block each that replace a call; none if it is no longer wanted."""

    def complete(self, call: Call, elements: Elements) -> None:
        """Takes the result of a call."""


@dataclasses.dataclass(eq=False, slots=True)
class _Assigned:
    """A call in the hands of a worker, how many have died with it, and how likely it is to blame."""

    call: Call
    deaths: int = 0
    guilt: float = 0.0


class Assignments:
    """The calls that workers make, known by numbers.

    Args:
        schedule: what wants their outputs: a schedule, or what stands for several.
        numbers: gives each call a number; workers may know others already.
    """

    def __init__(self, schedule: Wanting, numbers: Iterator[int]) -> None:
        self._schedule = schedule
        self._numbers = numbers
        self._assigned: dict[int, _Assigned] = {}
        self._lost: deque[_Assigned] = deque()

    def assign(self, call: Call) -> int:
        """Returns the number of a call that a worker is to make."""
        return self._assign(_Assigned(call))

    def postpone(self, call: Call) -> None:
        """Has a call made later, for which no worker has room."""
        self._lost.append(_Assigned(call))

    def next_lost(self) -> tuple[int, Call] | None:
        """Returns a call that has to be made again, with a new number; None where there is none."""
        while self._lost:
            assigned = self._lost.popleft()
            if self._schedule.wants(assigned.call):
                return self._assign(assigned), assigned.call
        return None

    def call(self, number: int) -> Call | None:
        """Returns the call that has a number, None if it is no longer wanted."""
        assigned = self._assigned.get(number)
        return None if assigned is None else assigned.call

    def describe(self, number: int) -> str:
        """Returns which records a call is about, for texts for people."""
        call = self.call(number)
        return NO_LONGER_WANTED if call is None else self._schedule.describe(call)

    def is_suspect(self, number: int) -> bool:
        """Returns whether a worker has died that was given a call."""
        assigned = self._assigned.get(number)
        return assigned is not None and assigned.deaths > 0

    def complete(self, number: int, elements: Elements) -> None:
        """Takes the outputs of a call, or the error that comes instead of them."""
        assigned = self._assigned.pop(number, None)
        if assigned is not None:
            self._schedule.complete(assigned.call, elements)

    def lose(self, numbers: Iterable[int]) -> None:
        """Has calls made again, before all others; those that are no longer wanted are forgotten."""
        lost = [self._assigned.pop(number, None) for number in numbers]
        self._lost.extendleft(reversed([assigned for assigned in lost if assigned is not None]))

    def split(self, number: int) -> bool:
        """Has each block of a call made by a call of its own; says whether there are several, so that it can."""
        assigned = self._assigned.get(number)
        if assigned is None or not isinstance(assigned.call, BlockCall) or assigned.call.num_blocks == 1:
            return False
        del self._assigned[number]
        pieces = self._schedule.split(assigned.call)
        self._lost.extendleft(_Assigned(piece, assigned.deaths, assigned.guilt) for piece in reversed(pieces))
        return True

    def blame(self, number: int, error: Callable[[int, str], Exception], guilt: float = 1.0) -> None:
        """Takes note that a worker has died while it made a call, which has it made again, or given up.

        Args:
            number: which call.
            error: makes what is raised at the call's turn, of how many workers have died and which records they made.
            guilt: less than 1 where it may well have died of something else. Where these add up to MOST_DEATHS, the
                call is given up.
        """
        assigned = self._assigned.get(number)
        if assigned is None:
            return
        assigned.deaths += 1
        assigned.guilt += guilt
        if self.split(number):
            return
        if assigned.guilt < MOST_DEATHS:
            self.lose([number])
        else:
            self.complete(number, Elements.failed(error(assigned.deaths, self.describe(number))))

    def _assign(self, assigned: _Assigned) -> int:
        number = next(self._numbers)
        self._assigned[number] = assigned
        return number
