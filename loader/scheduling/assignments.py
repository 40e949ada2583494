"""The calls assigned to workers: calls that have to run again, and calls to blame for failures.

Guarantees:
    * A call is completed once, by its outputs or an error. Results of calls that are no longer wanted are dropped.
    * Lost calls are dispatched before all others, in their order.
    * If a call of several blocks fails, each block is computed by a call of its own, until the faulty block is known.
    * A call that kills MAX_DEATHS workers is given up, so the stream does not wait forever.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from millstream.loader.pipeline.calls import BlockCall, Call
from millstream.loader.pipeline.elements import Elements

MAX_DEATHS = 2
"""A call that kills this many workers is given up."""

NO_LONGER_WANTED = "outputs that are no longer wanted"
"""The description of a call that is no longer wanted."""


class Wanting(Protocol):
    """An object that wants the outputs of calls: a `Schedule`, or the schedules of several substreams."""

    def wants(self, call: Call) -> bool: ...

    def describe(self, call: Call) -> str: ...

    def split(self, call: BlockCall) -> list[BlockCall]: ...

    def complete(self, call: Call, elements: Elements) -> None: ...


@dataclasses.dataclass(eq=False, slots=True)
class _Assigned:
    """A call assigned to a worker, the number of workers that died with it, and its share of the blame."""

    call: Call
    deaths: int = 0
    guilt: float = 0.0


class Assignments:
    """The calls that workers run, by number. New numbers come from `numbers`."""

    def __init__(self, schedule: Wanting, numbers: Iterator[int]) -> None:
        self._schedule = schedule
        self._numbers = numbers
        self._assigned: dict[int, _Assigned] = {}
        # The calls that have to run again, before all others.
        self.lost: deque[_Assigned] = deque()

    def assign(self, call: Call) -> int:
        return self._assign(_Assigned(call))

    def postpone(self, call: Call) -> None:
        """Queues a call that no worker has room for."""
        self.lost.append(_Assigned(call))

    def __len__(self) -> int:
        """Returns the number of calls that are not complete."""
        return len(self._assigned) + len(self.lost)

    def next_lost(self) -> tuple[int, Call] | None:
        """Returns a call that has to run again, with a new number, or None if there is none."""
        while self.lost:
            assigned = self.lost.popleft()
            if self._schedule.wants(assigned.call):
                return self._assign(assigned), assigned.call
        return None

    def call(self, number: int) -> Call | None:
        assigned = self._assigned.get(number)
        return None if assigned is None else assigned.call

    def describe(self, number: int) -> str:
        call = self.call(number)
        return NO_LONGER_WANTED if call is None else self._schedule.describe(call)

    def is_suspect(self, number: int) -> bool:
        assigned = self._assigned.get(number)
        return assigned is not None and assigned.deaths > 0

    def complete(self, number: int, elements: Elements) -> None:
        assigned = self._assigned.pop(number, None)
        if assigned is not None:
            self._schedule.complete(assigned.call, elements)

    def lose(self, numbers: Iterable[int]) -> None:
        """Queues calls again, before all others. Drops those that are no longer wanted."""
        lost = [self._assigned.pop(number, None) for number in numbers]
        self.lost.extendleft(reversed([assigned for assigned in lost if assigned is not None]))

    def split(self, number: int) -> bool:
        """Replaces a call by one per block. Returns False if it has a single block."""
        assigned = self._assigned.get(number)
        if assigned is None or not isinstance(assigned.call, BlockCall) or assigned.call.num_blocks == 1:
            return False
        del self._assigned[number]
        calls = self._schedule.split(assigned.call)
        self.lost.extendleft(_Assigned(call, assigned.deaths, assigned.guilt) for call in reversed(calls))
        return True

    def blame(self, number: int, error: Callable[[int, str], Exception], guilt: float = 1.0) -> None:
        """Records that a worker has died with a call. The call runs again, or is given up.

        Args:
            number: the number of the call.
            error: builds the error of a call that is given up, from the number of deaths and its records.
            guilt: the probability that the call is to blame. The sum of a call that is given up is MAX_DEATHS.
        """
        assigned = self._assigned.get(number)
        if assigned is None:
            return
        assigned.deaths += 1
        assigned.guilt += guilt
        if self.split(number):
            return
        if assigned.guilt < MAX_DEATHS:
            self.lose([number])
        else:
            self.complete(number, Elements.failed(error(assigned.deaths, self.describe(number))))

    def _assign(self, assigned: _Assigned) -> int:
        number = next(self._numbers)
        self._assigned[number] = assigned
        return number
