"""Which call of a plan comes next, and in which order the outputs leave: pure bookkeeping.

An executor takes calls, runs them anywhere and in any order, and hands the results back; the schedule lines the
results up, regroups them for the next phase, and gives the outputs out in the order of the stream. It knows neither
threads nor processes and is used by one thread.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator

from millstream.loader.elements import Elements, Origins
from millstream.loader.empty_epochs import EmptyEpochs
from millstream.loader.plan import Plan
from millstream.loader.requests import Group, Units
from millstream.loader.runs import Cursor, GroupRun, Run, UnitRun
from millstream.transforms import Batch

CALL_SECONDS = 0.01
"""A call of several small units grows until it takes this long: long enough to pay for itself, short enough to wait."""

RECORDS_PER_CALL = 256
"""Such a call has so many records at most, where nothing else is said."""


@dataclasses.dataclass(eq=False, slots=True)
class UnitCall:
    """A call of phase 0: make units `start … stop - 1`, of which `skip` outputs are used up."""

    start: int
    stop: int
    skip: int
    run: Run | None = None

    @property
    def request(self) -> Units:
        """What to ask the plan for."""
        return Units(self.start, self.stop)


@dataclasses.dataclass(eq=False, slots=True)
class GroupCall:
    """A call of a later phase: make the outputs of one group, of which `skip` are used up."""

    phase: int
    group: Elements
    start: Cursor
    end: Cursor
    skip: int
    run: Run | None = None

    @property
    def request(self) -> Group:
        """What to ask the plan for."""
        return Group(self.phase, self.group)


Call = UnitCall | GroupCall


def makes_several(call: Call) -> bool:
    """Whether a call makes several units, so that it can be split."""
    return isinstance(call, UnitCall) and call.stop - call.start > 1


class Regrouping:
    """Collects the outputs of one phase into groups of the next one's batch size."""

    def __init__(self, batch: Batch, start: Cursor) -> None:
        self._size = batch.batch_size
        self._keep_short = not batch.drop_remainder
        self._start = start
        self._pieces: list[tuple[Run, int, int]] = []
        self._count = 0

    def add(self, run: Run) -> Iterator[tuple[Elements, Cursor, Cursor]]:
        """Yields the groups that are full now: the elements, the place before and the place behind them."""
        row, stop = run.first, len(run.values)
        while row < stop:
            taken = min(self._size - self._count, stop - row)
            self._pieces.append((run, row, row + taken))
            self._count += taken
            row += taken
            if self._count == self._size:
                yield self._take_group()

    def finish(self) -> Iterator[tuple[Elements, Cursor, Cursor]]:
        """Yields the last, short group, if there is one and it is wanted."""
        if self._count and self._keep_short:
            elements, start, end = self._take_group()
            yield elements, start, dataclasses.replace(end, is_final=True)

    def _take_group(self) -> tuple[Elements, Cursor, Cursor]:
        pieces, self._pieces, self._count = self._pieces, [], 0
        values = [value for run, row, stop in pieces for value in run.values[row:stop]]
        origins = Origins.concatenate([run.origins.take(slice(row, stop)) for run, row, stop in pieces])
        last_run, _, stop = pieces[-1]
        start, self._start = self._start, last_run.after(stop - 1)
        return Elements(values, origins), start, self._start


class Schedule:
    """The calls of one pass over the stream, from a cursor on.

    Args:
        plan: what the calls are of.
        cursor: where the first one begins.
        records_per_call: how many records a call of several small units may have.
    """

    def __init__(self, plan: Plan, cursor: Cursor, records_per_call: int = RECORDS_PER_CALL) -> None:
        self._plan = plan
        self._most_units_per_call = 1 if plan.units_are_batches else max(1, records_per_call // plan.deal.unit)
        self._unit = cursor.unit
        self._skip = list(cursor.skip)
        self._units_per_call = 1
        self._failed = False
        self._ended_phases = 0
        self._pending: list[deque[Call]] = [deque() for _ in plan.phases]
        self._untaken: list[deque[Call]] = [deque() for _ in plan.phases]
        self._outputs: deque[Run] = deque()
        self._regroupings = [
            Regrouping(phase.batch, Cursor(cursor.unit, cursor.skip[:number]))
            for number, phase in enumerate(plan.phases)
            if phase.batch is not None
        ]
        self._empty_epochs = EmptyEpochs(plan) if any(phase.filters for phase in plan.phases) else None
        self._end_phases()

    @property
    def exhausted(self) -> bool:
        """Whether everything has been given out."""
        return self._ended_phases == len(self._pending) and not self._outputs

    @property
    def backlog(self) -> int:
        """How many calls are begun, or can begin, or have outputs that were not given out."""
        return sum(map(len, self._pending)) + len(self._outputs)

    @property
    def records_ahead(self) -> int:
        """How many records the backlog is about: those that calls of phase 0 read, and elements from there on."""
        in_work = sum(self._num_records(call) for pending in self._pending for call in pending)
        return in_work + sum(run.num_records for run in self._outputs)

    @property
    def next_units(self) -> int:
        """How many units the next call of phase 0 will make."""
        left = self._units_per_call if self._plan.num_units is None else self._plan.num_units - self._unit
        return min(self._units_per_call, left)

    @property
    def next_phase(self) -> int | None:
        """The phase of the call that `take` would return now; None when it would return none."""
        for phase in reversed(range(len(self._untaken))):
            if self._untaken[phase]:
                return phase
        return None if self._failed or self.next_units <= 0 else 0

    def take(self, phase: int | None = None) -> Call | None:
        """Returns a call of this phase that may run now, in order, or None; by default one of `next_phase`."""
        phase = self.next_phase if phase is None else phase
        if phase is None:
            return None
        if self._untaken[phase]:
            return self._untaken[phase].popleft()
        if phase > 0 or self._failed or self.next_units <= 0:
            return None
        call = UnitCall(self._unit, self._unit + self.next_units, self._take_skip(0))
        self._unit = call.stop
        self._pending[0].append(call)
        return call

    def wants(self, call: Call) -> bool:
        """Whether the outputs of a call that was taken are still waited for: after an error, no later ones are."""
        return call in self._pending[0 if isinstance(call, UnitCall) else call.phase]

    def split(self, call: UnitCall) -> list[UnitCall]:
        """Returns calls of one unit each that replace a call, to find out which unit is at fault.

        There are none if the outputs of the call are no longer wanted.
        """
        if not self.wants(call):
            return []
        pieces = [UnitCall(unit, unit + 1, 0) for unit in range(call.start, call.stop)]
        pieces[0].skip = call.skip
        pending = list(self._pending[0])
        place = pending.index(call)
        self._pending[0] = deque([*pending[:place], *pieces, *pending[place + 1 :]])
        return pieces

    def complete(self, call: Call, elements: Elements, seconds: float) -> None:
        """Takes the result of a call, and how long it took."""
        if isinstance(call, UnitCall):
            call.run = UnitRun(elements, call.skip, self._plan, call.stop)
            if seconds * 2 < CALL_SECONDS and call.stop - call.start == self._units_per_call:
                self._units_per_call = min(self._units_per_call * 2, self._most_units_per_call)
        else:
            call.run = GroupRun(elements, call.skip, call.start, call.end)
        call.run.num_records = self._num_records(call)
        for phase, pending in enumerate(self._pending):
            while pending and (run := pending[0].run) is not None:
                made = pending.popleft()
                if self._empty_epochs is not None:
                    units = made.stop - made.start if isinstance(made, UnitCall) else 0
                    self._empty_epochs.note(phase, units, len(run.values))
                self._forward(phase, run)
        self._end_phases()

    def pop(self) -> Run | None:
        """Returns the next outputs in order, if they are ready. Outputs with an error are the last."""
        if not self._outputs:
            return None
        run = self._outputs.popleft()
        if run.error is not None:
            self._ended_phases = len(self._pending)
            self._outputs.clear()
            for untaken in self._untaken:
                untaken.clear()
        return run

    def _forward(self, phase: int, run: Run) -> None:
        """Passes a run on to the next phase, or out."""
        if run.error is not None:
            # Nothing behind an error is ever wanted.
            self._failed = True
            self._pending[phase].clear()
            self._untaken[phase].clear()
        if phase + 1 == len(self._pending):
            self._outputs.append(run)
            return
        for group in self._regroupings[phase].add(run):
            self._enqueue(phase + 1, *group)
        if run.error is not None:
            nothing = Elements([], run.origins.take(slice(0)), run.error)
            place = Cursor(0, ())
            call = GroupCall(phase + 1, nothing, place, place, 0)
            call.run = GroupRun(nothing, 0, place, place)
            self._pending[phase + 1].append(call)

    def _enqueue(self, phase: int, group: Elements, start: Cursor, end: Cursor) -> None:
        call = GroupCall(phase, group, start, end, self._take_skip(phase))
        self._pending[phase].append(call)
        self._untaken[phase].append(call)

    def _end_phases(self) -> None:
        """Closes each phase that has no more to come: its last, short group goes on."""
        while self._ended_phases < len(self._pending):
            phase = self._ended_phases
            if self._pending[phase] or (phase == 0 and not self._failed and self.next_units > 0):
                return
            self._ended_phases += 1
            if phase + 1 < len(self._pending) and not self._failed:
                for group in self._regroupings[phase].finish():
                    self._enqueue(phase + 1, *group)

    def _num_records(self, call: Call) -> int:
        return (call.stop - call.start) * self._plan.deal.unit if isinstance(call, UnitCall) else len(call.group.values)

    def _take_skip(self, phase: int) -> int:
        skip, self._skip[phase] = self._skip[phase], 0
        return skip
