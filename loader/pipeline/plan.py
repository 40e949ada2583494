"""Compiled pipelines: everything that determines the content and the order of a stream.

Stage 0 turns a range of blocks (see `shards`) into elements: it reads their records, and runs the operations before
the first one that regroups. Each later stage turns one group of the previous stage's elements into outputs.

User code runs in an empty context, a new one for each call of a method (see `isolated`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.core.columnar import Allocate
from millstream.core.direct_copies import DirectCopies
from millstream.core.randomness import Purpose, derive_seed
from millstream.core.signals import cannot_wait, is_from_signal_handler
from millstream.core.warn import log_warning
from millstream.loader.pipeline.calls import Blocks, Cursor, Group, Position, Request, Rest
from millstream.loader.pipeline.elements import (
    Elements,
    FailedRecord,
    Location,
    Origins,
    describe_records,
    epochs_at,
    seed_of,
)
from millstream.loader.pipeline.failing_records import (
    ErrorLog,
    KeyCycle,
    all_in_a_row,
    with_substitutes,
    without_failures,
)
from millstream.loader.pipeline.order import max_batches
from millstream.loader.pipeline.pipeline import Pipeline, check_global_batch, check_groupings
from millstream.loader.pipeline.shards import first_dynamic
from millstream.loader.pipeline.stages import Instrument, LogicalShard, compile_stages, records_per_block, split_stages
from millstream.loader.pipeline.steps import (
    MAX_HELD_RECORDS,
    Reader,
    Step,
    annotated,
    depth_step,
    isolated,
    may_depend_on_thread,
    reader_of,
    run_steps,
)
from millstream.samplers.base import POSITION_LIMIT, is_mixed
from millstream.sources.base import DataSource, is_held
from millstream.sources.source_checks import batched_read_of, is_in_memory, read_directly_of, reads_in_one_call
from millstream.transforms import Batch, Transformation

KEYS = "keys"
"""The name under which the time spent on record keys is measured."""

TURNS_APART = 1 << 20
"""The distance between the epochs of a chain that a component of a mixture reads within one epoch of the loader."""

READ = "read"
"""The name under which the time spent on reading is measured."""


def may_be_stream(source: DataSource[Any]) -> bool:
    """Returns True if a source may be a stream that ignores the keys: it seems endless, and is the user's."""
    return may_depend_on_thread(source) and len(source) >= MAX_HELD_RECORDS


class Plan:
    """The compiled pipeline of one shard.

    Attributes:
        given: the pipeline.
        pipeline: the same, with the rows of a mixture permuted within each global batch.
        num_remote_stages: the number of stages before the first that has local operations.
        shards: the logical shards of this shard, each with its blocks. A 1:1 pipeline has one, and so have most others.
        partition: the blocks of the first logical shard. Those of the others have the same size.
        stages: the compiled operations.
        one_to_one: True if step k is block k: no operation drops, splits or regroups elements.
        batched_source: True if the source reads many records in one call.
        has_batched_reads: True if the source has batched reads, even if these read one record after another.
        source_may_depend_on_thread: True if a record may depend on the thread that reads it.
        source_is_stream: True if the source may be a stream that ignores the keys. It is then read by exactly the
            requested number of threads, and no record is read twice.
        blocks_are_batches: True if a block is a batch; otherwise it is one or more records.
        max_blocks_per_call: the number of blocks above which a call gains nothing; None if there is no such number.
        waits_for_calls: True if a call returns complete batches, not packed ones. The consumer of the first one waits
            for all, so a call of several must be short.
        errors: the records that failed in all passes of this process; None if the first error is raised.
        beginning: the position before the first output.
        yields_held_memory: True if outputs may contain arrays that the source holds, and nothing stacks them.
        gathers_first: True if stage 0 gathers elements, so that an output of it is made of complete blocks.

    Args:
        pipeline: the pipeline to compile.
        instrument: wraps each function that does part of the work, given its name.
    """

    def __init__(self, pipeline: Pipeline, instrument: Instrument = lambda _, function: function) -> None:
        check_groupings(pipeline.operations)
        groups = split_stages(pipeline.operations)
        self.one_to_one = first_dynamic(pipeline.operations) is None
        self.given = pipeline
        self.pipeline = pipeline = _with_shuffled_batches(pipeline, groups)
        source = pipeline.source
        self.batched_source = reads_in_one_call(source)
        self.has_batched_reads = batched_read_of(source) is not None
        self.source_may_depend_on_thread = may_depend_on_thread(source)
        self.shards = tuple(LogicalShard.of(number, pipeline, groups) for number in range(len(pipeline.logical_shards)))
        self.partition = self.shards[0].partition
        self.blocks_are_batches = bool(self.shards[0].first_batches)
        self.source_is_stream = may_be_stream(source)
        tolerance = pipeline.tolerance
        read = _reader(pipeline)
        if not groups[0] or (tolerance is not None and groups[0][0].gathers):
            read = functools.partial(_read_within_depth, read, depth_step(f"reading from {type(source).__name__}"))
        self._read: Reader = read
        self.stages = compile_stages(pipeline, groups, is_template=self.partition.is_template)
        self.errors: ErrorLog | None = None
        if tolerance is not None:
            groupings = [stage.grouping for stage in self.stages if stage.grouping is not None]
            drops = not all(grouping.keeps_remainder for grouping in groupings)
            self.errors = ErrorLog(tolerance, drops_remainder=drops)
        local = [stage.has_local_steps for stage in self.stages]
        self.num_remote_stages = local.index(True) if any(local) else len(local)
        first = self.stages[0]
        self.gathers_first = first.num_record_steps < len(first.steps)
        self._replaces_failures = self.one_to_one or self.gathers_first
        # Otherwise, records that are batched here come in calls of several batches.
        sends_batches = self.blocks_are_batches and first.num_remote_steps > first.num_record_steps
        self.max_blocks_per_call = max_batches(groups[0], self.partition.block) if sends_batches else None
        self.waits_for_calls = sends_batches and self.max_blocks_per_call is None
        # The records of a batch may be copied where it will be, because a Batch stacks them.
        gathering = next((operation for operation in groups[0] if operation.gathers), None)
        self._copies_directly = (
            isinstance(gathering, Batch)
            and _stacks(gathering)
            and sends_batches
            and self.errors is None
            and read_directly_of(pipeline.view.source) is not None
        )
        # The operation that makes the outputs of stage 0.
        self._last_label = self.pipeline.labels[len(groups[0]) - 1] if groups[0] else ""
        numbers = (0,) * sum(stage.num_cursor_numbers for stage in self.stages)
        self.beginning: Position = (Cursor(0, numbers),) * len(self.shards)
        self.yields_held_memory = self._yields_held_memory()
        # What it is made of, before the functions were wrapped.
        self._compiled = self._read, self.stages
        self.begin_with(instrument)

    def measured_by(self, instrument: Instrument) -> "Plan":
        """Returns the same plan with functions that another instrument wraps. Nothing is compiled again."""
        plan = object.__new__(type(self))
        vars(plan).update(vars(self))
        plan.errors = self.errors and self.errors.emptied()
        plan.begin_with(instrument)
        return plan

    def begin_with(self, instrument: Instrument) -> None:
        """Begins with no warnings, and with functions that an instrument wraps."""
        self._warned: set[str] = set()
        self._are_first_outputs_checked = False
        read, stages = self._compiled
        wrap = functools.partial(instrument, KEYS)
        self._locators = [shard.locator.measured_by(wrap) for shard in self.shards]
        self._read = instrument(READ, read)
        self.stages = tuple([stage.measured_by(instrument) for stage in stages])
        first = self.stages[0]
        remote, rest = first.steps[: first.num_remote_steps], first.num_remote_steps
        self._record_steps, self._block_steps = remote[: first.num_record_steps], remote[first.num_record_steps :]
        self._rest_record_steps = first.steps[rest : first.num_record_steps]
        self._rest_block_steps = first.steps[max(rest, first.num_record_steps) :]

    @property
    def reads_in_order_only(self) -> str:
        """The reason why only the next position can be read; "" if records can be read at random.

        A user's source that claims more records than fit into memory, and has neither a batched read nor a
        `fingerprint()`, returns the next record whatever the key. A streamed dataset of Hugging Face is an example.
        """
        source = self.pipeline.source
        if not self.source_is_stream or callable(getattr(source, "fingerprint", None)):
            return ""
        return (
            f"{type(source).__name__} claims {len(source):,} records, so it is treated as a stream that returns the "
            "next record, from the beginning in each process. If it returns the same record for the same key, add a "
            "fingerprint() method."
        )

    def _yields_held_memory(self) -> bool:
        source = self.pipeline.source
        holds = (is_in_memory(source) or is_held(source)) and type(source) is not range
        return holds and not any(
            operation.makes_batches and _stacks(operation) for operation in self.pipeline.operations
        )

    @functools.cached_property
    def first_dynamic_label(self) -> str:
        """The label of the first operation that is not 1:1, so that outputs depend on the records; "" without one."""
        operations = self.pipeline.operations
        if (number := first_dynamic(operations)) is None:
            return ""
        # One that the library inserted drops what a dataset lacks.
        return "missing elements" if operations[number].is_between else self.pipeline.labels[number]

    @functools.cached_property
    def num_in_a_row(self) -> int:
        """The number of records that may not fail in a row if errors are skipped."""
        return all_in_a_row(len(self.pipeline.source), self.pipeline.order)

    @functools.cached_property
    def blocks_per_epoch(self) -> int:
        """The number of blocks that a logical shard reads per epoch; without epochs, per `len(source)` records."""
        num_records = self.pipeline.order.num_records or len(self.pipeline.source)
        blocks = max(1, math.ceil(num_records / self.partition.global_block))
        num_blocks = self.shards[0].num_blocks
        return blocks if num_blocks is None else min(blocks, num_blocks)

    def locate(self, start: int, stop: int, shard: int = 0) -> Origins:
        return self._locators[shard].locate(start, stop)

    def make(
        self, request: Request, allocate: Allocate, prepare_blocks: Callable[..., Elements] | None = None
    ) -> Elements:
        """Computes the outputs for a request, with batches in memory from `allocate`.

        `prepare_blocks` replaces the method of this name; it may read in several threads.
        """
        if isinstance(request, Blocks):
            if prepare_blocks is not None or self.errors is not None or self._copies_directly:
                return self._make_blocks(request, allocate, prepare_blocks or self.prepare_blocks)
            # As `prepare_blocks`, whose frames would be in each traceback.
            try:
                origins = self._locators[request.shard].locate(request.start, request.stop)
            except BaseException as error:  # noqa: BLE001  (raised again, or delivered at its block)
                return self.finish_blocks(self._without_keys(error, *request), allocate)
            context = Context()
            run = context.run(self._read, origins)
            for step in self._record_steps:
                run = context.run(step, run, np.empty)
            return self.finish_blocks(run, allocate)
        if isinstance(request, Group):
            compiled = self.stages[request.stage]
            return self._run_group_steps(compiled.steps[: compiled.num_remote_steps], request.elements, allocate)
        if isinstance(request, Rest):
            return self._run_rest(request.stage, request.elements, allocate)
        return self.finish_blocks(isolated(self._run_record_steps, request.elements, self._record_steps), allocate)

    def _make_blocks(self, blocks: Blocks, allocate: Allocate, prepare_blocks: Callable[..., Elements]) -> Elements:
        if not self._copies_directly or blocks.stop - blocks.start > 1:
            return self.finish_blocks(prepare_blocks(*blocks), allocate)
        copies = DirectCopies(allocate)
        run = prepare_blocks(*blocks, copies)
        batches = Context().run(self._block_steps[0], run, copies)
        # The elements end, so that nothing but user code refers to them.
        run.values, batches.failures = (), run.failures
        settled = [copies.settled(batch) for batch in batches.values]
        batches.values = [batch for batch, _ in settled]
        if any(are_kept for _, are_kept in settled):
            self._copies_directly = False
        return self.finish_blocks(batches, allocate, self._block_steps[1:])

    def describe(self, request: Request) -> str:
        if not isinstance(request, Blocks):
            return describe_records(request.elements.origins.named(self.pipeline.components))
        try:
            return describe_records(self.locate(*request))
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            # The user's sampler may raise. That must not hide the event that is being reported.
            return f"the blocks {request.start} to {request.stop - 1}"

    def prepare_blocks(self, start: int, stop: int, shard: int, copies: DirectCopies | None = None) -> Elements:
        """Reads and prepares blocks start … stop - 1. An error of the sampler comes at its block."""
        try:
            origins = self._locators[shard].locate(start, stop)
        except BaseException as error:  # noqa: BLE001  (raised again, or delivered at its block)
            return self._without_keys(error, start, stop, shard)
        if copies is not None:
            copies.count = len(origins)
        return isolated(self._read_and_run, origins, copies)

    def _without_keys(self, error: BaseException, start: int, stop: int, shard: int) -> Elements:
        """Returns the elements of blocks before the one at which the sampler raised an error, which follows them."""
        if cannot_wait(error):
            raise error
        if stop - start == 1:
            return Elements.failed(annotated(error, f"the sampler, at block {start}"), Location(-1, start))
        run = Elements.concatenate([self.prepare_blocks(block, block + 1, shard) for block in range(start, stop)])
        if run.error is None:
            # Every block succeeds on its own, so the error belongs to the range.
            run = Elements.failed(annotated(error, f"the sampler, at blocks {start} to {stop - 1}"))
        return run

    def read_blocks(self, start: int, stop: int, shard: int) -> Elements:
        """Reads blocks. Raises an error of the sampler, whose block `prepare_blocks` finds."""
        return isolated(self._read_records, self.locate(start, stop, shard))

    def run_record_steps(self, run: Elements) -> Elements:
        return isolated(self._complete, run)

    def prepare(self, origins: Origins, copies: DirectCopies | None = None) -> Elements:
        """Reads and prepares records: runs the operations before the first Batch of stage 0."""
        return isolated(self._read_and_run, origins, copies)

    def _read_and_run(self, origins: Origins, copies: DirectCopies | None) -> Elements:
        run = self._read_records(origins, copies)
        return run_steps(self._record_steps, run, np.empty) if self.errors is None else self._complete(run)

    def finish_blocks(self, run: Elements, allocate: Allocate, steps: Sequence[Step] | None = None) -> Elements:
        """Runs the remaining operations of stage 0, or the given steps, on the prepared records of complete blocks."""
        steps = self._block_steps if steps is None else steps
        if len(steps) == 1:
            failures = run.failures
            run = Context().run(steps[0], run, allocate)
            run.failures = failures
        elif steps:
            run = Context().run(run_steps, steps, run, allocate)
        if not self._are_first_outputs_checked and not self.stages[0].has_local_steps:
            self._check_first_outputs(run)
        return run

    def _run_rest(self, stage: int, run: Elements, allocate: Allocate) -> Elements:
        compiled = self.stages[stage]
        if stage:
            return self._run_group_steps(compiled.steps[compiled.num_remote_steps :], run, allocate)
        run = isolated(self._run_record_steps, run, self._rest_record_steps)
        run = isolated(run_steps, self._rest_block_steps, run, allocate)
        self._check_first_outputs(run)
        return run

    def _check_first_outputs(self, run: Elements) -> None:
        """Warns if the first outputs are None, because an operation lacks a `return`."""
        if self._are_first_outputs_checked or not run.values:
            return
        self._are_first_outputs_checked = True
        if self._last_label and all(value is None for value in run.values):
            self.warn_once("none", f"{self._last_label}, returned None for the first batch: did you forget `return`?")

    def warn_once(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            log_warning(text)

    def _run_group_steps(self, steps: Sequence[Step], group: Elements, allocate: Allocate) -> Elements:
        origins = group.origins.named(self.pipeline.components)
        return isolated(run_steps, steps, Elements(group.values, origins, group.error), allocate)

    def _read_records(self, origins: Origins, copies: DirectCopies | None = None) -> Elements:
        """Reads records. Those that fail are omitted if errors are skipped."""
        if self.errors is None:
            return self._read(origins, copies)
        failed: list[FailedRecord] = []
        run = without_failures(lambda run: self._read(run.origins), Elements(range(len(origins)), origins), failed)
        run.failures = tuple(failed)
        return run

    def _complete(self, run: Elements) -> Elements:
        """Runs the record steps, and replaces records that failed if each has its position."""
        run = self._run_record_steps(run, self._record_steps)
        if run.failures and self._replaces_failures:
            run = with_substitutes(
                run,
                self.pipeline.components,
                lambda origins: self._run_record_steps(self._read_records(origins), self._record_steps),
                self._key_cycle,
            )
        return run

    @functools.cached_property
    def _key_cycle(self) -> KeyCycle:
        """The order of the keys that may be substitutes. Cached, because building it may sort keys."""
        order = self.pipeline.order if is_mixed(self.pipeline.order) else self.pipeline.sampler
        return KeyCycle(order, len(self.pipeline.source))

    def _run_record_steps(self, run: Elements, steps: Sequence[Step]) -> Elements:
        if self.errors is None:
            return run_steps(steps, run, np.empty)
        failed = list(run.failures)
        for step in steps:
            run = without_failures(functools.partial(run_steps, [step], allocate=np.empty), run, failed)
        run.failures = tuple(sorted(failed, key=lambda failure: failure.position))
        return run


def _reader(pipeline: Pipeline) -> Reader:
    view = pipeline.view
    is_stacked = any(isinstance(first, Batch) and _stacks(first) for first in pipeline.operations[:1])
    if not view.differs_by_epoch:
        return reader_of(view.source, skips_none=view.skips_none, is_stacked=is_stacked)
    keys_of = functools.partial(keys_in_epochs, pipeline)
    return reader_of(view.source, keys_of, skips_none=view.skips_none, is_stacked=is_stacked)


def _read_within_depth(read: Reader, check: Step, origins: Origins, copies: DirectCopies | None = None) -> Elements:
    return check(read(origins, copies), np.empty)


def _stacks(operation: Transformation) -> bool:
    """Returns True if the batches of an operation are new arrays, and not what a function of the user makes of them."""
    return getattr(operation, "batch_fn", None) is None


def keys_in_epochs(pipeline: Pipeline, origins: Origins) -> NDArray[np.int64]:
    """Returns the positions of records in the chain that is the source: those of an epoch, if its epochs are alike."""
    if not pipeline.view.differs_by_epoch:
        return origins.record_key
    num_records, epoch = len(pipeline.source), pipeline.epoch
    epochs = epochs_at(pipeline.order, origins.position)
    if epoch is not None:
        # A component that starts over within an epoch of the loader must not have elements of the loader's next one.
        epochs = epochs * TURNS_APART + epoch
    if len(epochs) and int(epochs.max()) >= POSITION_LIMIT // num_records:
        raise OverflowError(
            f"Cannot read epoch {epochs.max()} of a dataset of {num_records} elements, whose positions exceed 2**63."
        )
    return epochs * num_records + origins.record_key


def _with_shuffled_batches(pipeline: Pipeline, stages: Sequence[Sequence[Transformation]]) -> Pipeline:
    """Returns the pipeline with the rows of a mixture permuted within each global batch.

    A pipeline that is not 1:1 and has a single logical shard keeps its order: there is no share to balance, and the
    rows at the end of the order are the first ones of the same batch in a longer order.
    """
    order, num_shards = pipeline.order, pipeline.logical_shards[0].shard_count
    check_global_batch(pipeline.operations, order, records_per_block(stages, pipeline.share), num_shards)
    if not is_mixed(order) or (num_shards == 1 and first_dynamic(pipeline.operations) is not None):
        return pipeline
    size = records_per_block(stages, pipeline.share) * num_shards
    seed = derive_seed(seed_of(order) or 0, Purpose.ROWS)
    return dataclasses.replace(pipeline, order=order.shuffled_within(size, seed))
