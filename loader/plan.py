"""The one home of all meaning: source, sampler, shard and operations compiled into pure functions.

A plan is a list of *phases*. Phase 0 turns a run of units (see `deal`) into elements: it reads the records and runs
the operations up to the first Batch that must regroup, which is the first one behind a Filter or FlatMap. That Batch
begins phase 1, which turns one group of phase 0's elements into outputs; and so on. A pipeline whose operations are
1:1 before its first Batch has phase 0 alone, and one unit of it is one final batch.

Nothing here knows of threads, processes or time: an executor decides who calls the plan, and when.

The user's code runs in an empty `contextvars.Context`, a new one for each call of a method below. So the precision of
`decimal`, NumPy's `errstate` and the user's own variables are at their defaults there, whoever calls, and what one
call sets is gone with it.
"""

import contextvars
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from millstream.columnar import Allocate
from millstream.loader.deal import Deal, Tail
from millstream.loader.elements import Elements, Origins, describe_records
from millstream.loader.first_look import FirstLook
from millstream.loader.interruptions import cannot_wait, is_from_signal_handler
from millstream.loader.phases import compile_phases, operation_label, split_phases
from millstream.loader.random_streams import streams_of
from millstream.loader.reading import reader_of
from millstream.loader.requests import Group, Request
from millstream.loader.stage_clock import KEYS, READ, StageClock
from millstream.loader.steps import Step, annotated
from millstream.samplers.base import AdaptedSampler, VectorisedSampler, checked_keys_at
from millstream.sharding import ShardOptions
from millstream.sources import DataSource
from millstream.transforms import Batch, Transformation

Result = TypeVar("Result")

LOOK_AHEAD_KEYS = 15_360
"""Record keys are made for this many positions at once: a batch of 256 then costs a share of one large NumPy call.

Arrays of 8 times as many bytes stay below the 128 KiB from which on C libraries ask the system for fresh pages.
"""


class Plan:
    """A pipeline of one shard, compiled.

    Attributes:
        source: where records come from.
        sampler: their order.
        deal: which positions make up which unit.
        phases: the compiled operations.
        one_to_one: whether step k is unit k: no Filter and no FlatMap anywhere.
        batched_source: whether the source reads many records in one call.
        tail_records: how many records of this shard's tail get into an output, as far as phase 0's batches decide it.
            A template is none of them.
        num_units: how many units have outputs; None when the order is endless.
        unit_limit: how many units can be asked for: num_units, and fewer than would have positions from 2**63 on.
        clock: where the time goes: the one thing here that changes.
        units_are_batches: whether a unit is a batch, which is worth a call; else it is some records.
        tail_grows: whether the outputs of the tail are the first ones of the unit that a longer order has there.
    """

    def __init__(
        self,
        source: DataSource[Any],
        sampler: VectorisedSampler | AdaptedSampler,
        operations: Sequence[Transformation],
        names: Sequence[str],
        shard: ShardOptions,
    ) -> None:
        self._recipe = (source, sampler, operations, names, shard)
        self.source = source
        groups = split_phases(operations)
        leading = [operation for operation in groups[0] if isinstance(operation, Batch)]
        self.one_to_one = all(operation.keeps_count for operation in operations)
        self.batched_source = hasattr(source, "__getitems__")
        self.deal = Deal(
            unit=_records_per_unit(leading, groups),
            shard=shard,
            length=sampler.length,
            tail_rule=_tail_rule(leading, shard),
        )
        self.tail_records = _tail_records(self.deal.tail_share, leading)
        has_tail = self.tail_records or self.deal.tail_rule is Tail.PADDED
        self.num_units = self.deal.num_units if has_tail else self.deal.whole_units
        self.unit_limit = self.deal.unit_limit if self.num_units is None else min(self.deal.unit_limit, self.num_units)
        self.units_are_batches = bool(leading)
        self.sampler = sampler
        labels = [operation_label(number, name) for number, name in enumerate(names)]
        self.clock = clock = StageClock(labels)
        self._first_look = FirstLook(source.__getitem__, labels)
        self.tail_grows = not self.one_to_one and not leading and shard.shard_count == 1
        self._read = clock.timed(READ, reader_of(source))
        streams = functools.partial(streams_of, sampler)
        self.phases = compile_phases(groups, names, streams, is_template=self.deal.is_template, clock=clock)
        # Of functions, not of methods: a plan that refers to itself would keep its source until the collector runs.
        self._locate = clock.timed(KEYS, functools.partial(_locate, self.deal, sampler))
        self._look_ahead = functools.lru_cache(maxsize=4)(
            clock.timed(KEYS, functools.partial(_locate_chunk, self.deal, sampler))
        )

    def __reduce__(self) -> tuple[type["Plan"], tuple[Any, ...]]:
        """Crosses to another process as what it was made of."""
        return Plan, self._recipe

    @functools.cached_property
    def units_per_epoch(self) -> int:
        """How many units this shard reads in an epoch; of a sampler without epochs, in as many records as there are."""
        num_records = self.sampler.num_records or len(self.source)
        units = max(1, math.ceil(num_records / self.deal.global_unit))
        return units if self.num_units is None else min(units, self.num_units)

    def parts(self) -> list[tuple[str, Any]]:
        """Returns what the plan was made of, with what to call each part in texts for people."""
        source, sampler, operations, names, _ = self._recipe
        named = [(operation_label(i, names[i]), operation) for i, operation in enumerate(operations)]
        return [("data_source", source), ("sampler", sampler), *named]

    def locate(self, start: int, stop: int) -> Origins:
        """Returns the origins of the records of units start … stop - 1."""
        if isinstance(self.sampler, AdaptedSampler):
            # The user's own code: it is asked for what is needed, when it is needed.
            return _isolated(self._locate, start, stop)
        chunk = max(1, LOOK_AHEAD_KEYS // self.deal.unit)
        if start // chunk != (stop - 1) // chunk:
            middle = (start // chunk + 1) * chunk
            return Origins.concatenate([self.locate(start, middle), self.locate(middle, stop)])
        try:
            # Several threads may make the same keys at once, which is cheaper than a lock that one of them might keep.
            ahead = _isolated(self._look_ahead, start // chunk, chunk)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            # Whatever a user's sampler raises about other units is raised at their turn.
            return _isolated(self._locate, start, stop)
        first = (start // chunk) * chunk
        return ahead.take(slice((start - first) * self.deal.unit, (stop - first) * self.deal.unit))

    def make(
        self, request: Request, allocate: Allocate, prepare_units: Callable[[int, int], Elements] | None = None
    ) -> Elements:
        """Returns the outputs that are asked for, batches in memory from `allocate`.

        The records of units are read by `prepare_units`, by default the method of this name.
        """
        if isinstance(request, Group):
            return self.follow(request.phase, request.elements, allocate)
        return self.finish((prepare_units or self.prepare_units)(*request), allocate)

    def describe(self, request: Request) -> str:
        """Returns which records a request is about."""
        if isinstance(request, Group):
            return describe_records(request.elements.origins)
        try:
            return describe_records(self.locate(*request))
        except Exception:  # noqa: BLE001  (the user's sampler may raise; what is described must be told all the same)
            return f"the units {request.start} to {request.stop - 1}"

    def prepare_units(self, start: int, stop: int) -> Elements:
        """Returns the prepared elements of units start … stop - 1; an error of the sampler comes at its unit."""
        try:
            origins = self.locate(start, stop)
        except BaseException as error:
            if cannot_wait(error):
                raise
            if stop - start == 1:
                return Elements.failed(annotated(error, f"the sampler, asked for the records of unit {start}"))
            run = Elements.concatenate([self.prepare_units(unit, unit + 1) for unit in range(start, stop)])
            if run.error is None:
                # Each alone can be had: the error of all of them stands.
                whole = f"the sampler, asked for the records of units {start} to {stop - 1}"
                run = Elements.failed(annotated(error, whole))
            return run
        return self.prepare(origins)

    def prepare(self, origins: Origins) -> Elements:
        """Returns the elements of some records, as they are before the first Batch of phase 0."""
        return _isolated(self._prepare, origins)

    def finish(self, run: Elements, allocate: Allocate) -> Elements:
        """Returns the outputs of phase 0, given the prepared elements of whole units."""
        phase = self.phases[0]
        run = _isolated(_run_steps, phase.steps[phase.num_record_steps :], run, allocate)
        self._first_look.at_batches(run, last=len(phase.steps) - 1)
        return run

    def follow(self, phase: int, group: Elements, allocate: Allocate) -> Elements:
        """Returns the outputs of a later phase, given the elements of one group."""
        return _isolated(_run_steps, self.phases[phase].steps, group, allocate)

    def _prepare(self, origins: Origins) -> Elements:
        run = self._read(origins)
        watched = self._first_look.at_records(run)
        for number, step in enumerate(self.phases[0].steps[: self.phases[0].num_record_steps]):
            run = step(run, np.empty)
            if watched is not None:
                watched.after(number)
        return run


def _isolated(function: Callable[..., Result], *arguments: Any) -> Result:
    """Returns what a function returns in a context of its own, in which no context variable is set."""
    return contextvars.Context().run(function, *arguments)


def _run_steps(steps: Sequence[Step], run: Elements, allocate: Allocate) -> Elements:
    for step in steps:
        run = step(run, allocate)
    return run


def _locate(deal: Deal, sampler: VectorisedSampler | AdaptedSampler, start: int, stop: int) -> Origins:
    # User code may see slices of these, and other batches share them: nobody can write to them.
    positions = deal.positions(start, stop)
    positions.flags.writeable = False
    keys = checked_keys_at(sampler, positions)
    keys.flags.writeable = False
    return Origins(positions, keys, positions)


def _locate_chunk(deal: Deal, sampler: VectorisedSampler | AdaptedSampler, number: int, chunk: int) -> Origins:
    return _locate(deal, sampler, number * chunk, min((number + 1) * chunk, deal.unit_limit))


def _records_per_unit(leading: Sequence[Batch], groups: Sequence[Sequence[Transformation]]) -> int:
    if leading:
        return math.prod(batch.batch_size for batch in leading)
    regrouping = groups[1][0] if len(groups) > 1 else None
    return regrouping.batch_size if isinstance(regrouping, Batch) else 1


def _tail_rule(leading: Sequence[Batch], shard: ShardOptions) -> Tail:
    if any(batch.pad_remainder for batch in leading):
        return Tail.PADDED
    return Tail.TRIMMED if shard.drop_remainder or any(batch.drop_remainder for batch in leading) else Tail.SPREAD


def _tail_records(count: int, leading: Sequence[Batch]) -> int:
    """Returns how many of the tail's records are left when each Batch has dropped its remainder."""
    elements, size, kept = count, 1, count
    for batch in leading:
        size *= batch.batch_size
        if batch.drop_remainder:
            elements //= batch.batch_size
            kept = min(kept, elements * size)
        else:
            elements = math.ceil(elements / batch.batch_size)
    return kept
