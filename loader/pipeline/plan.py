"""The one home of all meaning: source, sampler, shard and operations compiled into pure functions.

A plan is a list of *stages*. Stage 0 turns a run of blocks (see `partition`) into elements: it reads the records and
runs the operations up to the first one that must regroup: a packer, say, or a Batch after a Filter or FlatMap. That one
begins stage 1, which turns one group of stage 0's elements into outputs; and so on. A pipeline whose operations
are 1:1 before its first Batch has stage 0 alone, and one block of it is one final batch.

Nothing here knows of threads, processes or time: an executor decides who calls the plan, and when.

The user's code runs in an empty context, a new one for each call of a method below (see `isolation`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from millstream.columnar import Allocate
from millstream.loader.pipeline.arguments import check_balance, first_deciding
from millstream.loader.pipeline.elements import Elements, FailedRecord, Origins, describe_records
from millstream.loader.pipeline.error_log import ErrorLog
from millstream.loader.pipeline.failing_records import without_failures
from millstream.loader.pipeline.isolation import isolated
from millstream.loader.pipeline.logical_shard import LogicalShard, records_per_block
from millstream.loader.pipeline.outputs import Cursor, Outputs, Position
from millstream.loader.pipeline.packing import most_batches
from millstream.loader.pipeline.partition import Partition
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.random_streams import seed_of
from millstream.loader.pipeline.reading import MOST_HELD, may_tell_threads_apart, reader_of
from millstream.loader.pipeline.requests import Fed, Group, Request
from millstream.loader.pipeline.stages import Watch, compile_stages, split_stages
from millstream.loader.pipeline.steps import Step, annotated, run_steps
from millstream.loader.pipeline.substitutes import KeyCycle, with_substitutes
from millstream.randomness import OF_BATCHES
from millstream.samplers.protocols import is_mixed
from millstream.seed_hashing import derive_seed
from millstream.signal_exceptions import cannot_wait, is_from_signal_handler
from millstream.sources.source_checks import batched_read_of
from millstream.transforms import Batch, Transformation

KEYS = "keys"
"""What finding out which records a call is about is called, where time is measured."""

READ = "read"
"""What reading them is called there."""


class Plan:
    """A pipeline of one shard, compiled.

    Attributes:
        pipeline: what it is compiled from.
        shards: the logical shards that it runs, each with its blocks. A 1:1 pipeline has one, and so have most others.
        stages: the compiled operations.
        share: how the last stage takes elements from each of several logical shards; None where there is only one.
        one_to_one: whether step k is block k: nothing that drops or splits elements, or groups them as they come.
        batched_source: whether the source reads many records in one call.
        source_knows_threads: whether the source may depend on the thread that reads.
        source_is_stream: whether it may be a stream in the guise of a source: as many threads then read as are asked
            for, and no record is read twice.
        blocks_are_batches: whether a block is a batch; else it is some records.
        most_blocks: how many blocks are worth a call, however quick they are; None where they are not batches.
        errors: the records that failed, of all passes in this process; None if the first error is raised.

    Args:
        pipeline: what to compile.
        watch: wraps each function that does a part of the work, given the name of that part: to measure it, say.
    """

    def __init__(self, pipeline: Pipeline, watch: Watch = lambda _, function: function) -> None:
        groups = split_stages(pipeline.operations)
        self.one_to_one = first_deciding(pipeline.operations) is None
        self.pipeline = pipeline = _with_shuffled_batches(pipeline, groups)
        source = pipeline.source
        self.batched_source = batched_read_of(source) is not None
        self.source_knows_threads = may_tell_threads_apart(source)
        self.blocks_are_batches = any(isinstance(operation, Batch) for operation in groups[0])
        self.share = pipeline.share
        self.shards = tuple(
            LogicalShard.of(number, pipeline, groups, functools.partial(watch, KEYS))
            for number in range(len(pipeline.logical_shards))
        )
        self.most_blocks = most_batches(groups[0], self.partition.block) if self.blocks_are_batches else None
        self.source_is_stream = self.source_knows_threads and len(source) >= MOST_HELD
        self._told: set[str] = set()
        tolerance = pipeline.tolerance
        self.errors = None if tolerance is None else ErrorLog(tolerance, len(source))
        self._read: Callable[[Origins], Elements] = watch(READ, reader_of(source))
        self.stages = compile_stages(pipeline, groups, is_template=self.partition.is_template, watch=watch)
        stage = self.stages[0]
        self._record_steps = stage.steps[: stage.num_record_steps]
        self._block_steps = stage.steps[stage.num_record_steps :]
        self._has_places = self.one_to_one or bool(self._block_steps)
        self._are_first_outputs_checked = False

    @property
    def partition(self) -> Partition:
        """The blocks of the first logical shard: all that a 1:1 pipeline has. The others' are as large."""
        return self.shards[0].partition

    @property
    def beginning(self) -> Position:
        """The position before the first output."""
        return (Cursor(0, (0,) * sum(stage.num_cursor_numbers for stage in self.stages)),) * len(self.shards)

    @property
    def reads_in_order_only(self) -> str:
        """The reason why no position but the next one can be read; "" if records can be read at random.

        A source of a user's own that claims more records than fit into memory, and that has neither a batched read nor
        a `fingerprint()`, returns whatever comes next: such as a dataset of Hugging Face that is streamed.
        """
        source = self.pipeline.source
        if not self.source_is_stream or callable(getattr(source, "fingerprint", None)):
            return ""
        return (
            f"{type(source).__name__} claims {len(source):,} records, so it is taken for a stream that returns what "
            "comes next, from the beginning in each process. If it returns the same record for the same key, give it a "
            "fingerprint() method."
        )

    @functools.cached_property
    def deciding(self) -> str:
        """What to call the first operation that decides while reading which outputs there are; "" in 1:1 pipelines."""
        number = first_deciding(self.pipeline.operations)
        return "" if number is None else self.pipeline.labels[number]

    @functools.cached_property
    def blocks_per_epoch(self) -> int:
        """How many blocks a logical shard reads in an epoch; without epochs, in as many records as the source has."""
        num_records = self.pipeline.order.num_records or len(self.pipeline.source)
        blocks = max(1, math.ceil(num_records / self.partition.global_block))
        num_blocks = self.shards[0].num_blocks
        return blocks if num_blocks is None else min(blocks, num_blocks)

    def locate(self, start: int, stop: int, shard: int = 0) -> Origins:
        """Returns the origins of the records of blocks start … stop - 1 of one of the logical shards."""
        return self.shards[shard].locator.locate(start, stop)

    def make(
        self, request: Request, allocate: Allocate, prepare_blocks: Callable[[int, int, int], Elements] | None = None
    ) -> Elements:
        """Returns the outputs that are asked for, batches in memory from `allocate`.

        The records of blocks are read by `prepare_blocks`, by default the method of this name.
        """
        if isinstance(request, Group):
            return self.follow(request.stage, request.elements, allocate)
        if isinstance(request, Fed):
            return self.finish(isolated(self._work_on, request.elements), allocate)
        return self.finish((prepare_blocks or self.prepare_blocks)(*request), allocate)

    def describe(self, request: Request) -> str:
        """Returns which records a request is about."""
        if isinstance(request, Group | Fed):
            return describe_records(request.elements.origins.named(self.pipeline.components))
        try:
            return describe_records(self.locate(*request))
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            # The user's sampler may raise; what is described must be told all the same.
            return f"the blocks {request.start} to {request.stop - 1}"

    def prepare_blocks(self, start: int, stop: int, shard: int) -> Elements:
        """Returns the prepared elements of blocks start … stop - 1; an error of the sampler comes at its block."""
        try:
            origins = self.locate(start, stop, shard)
        except BaseException as error:
            if cannot_wait(error):
                raise
            if stop - start == 1:
                return Elements.failed(annotated(error, f"the sampler, asked for the records of block {start}"))
            run = Elements.concatenate([self.prepare_blocks(block, block + 1, shard) for block in range(start, stop)])
            if run.error is None:
                # Each alone can be had: the error of all of them stands.
                whole = f"the sampler, asked for the records of blocks {start} to {stop - 1}"
                run = Elements.failed(annotated(error, whole))
            return run
        return self.prepare(origins)

    def read_blocks(self, start: int, stop: int, shard: int) -> Elements:
        """Returns the records of blocks start … stop - 1, as they are read: `work_on` prepares them.

        Raises:
            BaseException: the sampler's error, whose block `prepare_blocks` finds.
        """
        origins = self.locate(start, stop, shard)
        return isolated(self._read_records, origins)

    def work_on(self, run: Elements) -> Elements:
        """Returns the elements of records that were read, as they are before the first Batch of stage 0."""
        return isolated(self._complete, run)

    def prepare(self, origins: Origins) -> Elements:
        """Returns the elements of some records, as they are before the first Batch of stage 0."""
        return isolated(self._prepare, origins)

    def finish(self, run: Elements, allocate: Allocate) -> Elements:
        """Returns the outputs of stage 0, given the prepared elements of whole blocks."""
        failures = run.failures
        run = isolated(run_steps, self._block_steps, run, allocate)
        run.failures = failures
        if not self._are_first_outputs_checked and run.values:
            self._check_first_outputs(run)
        return run

    def _check_first_outputs(self, run: Elements) -> None:
        """Warns if the first outputs are None, but not the records: an operation lacks a `return`."""
        self._are_first_outputs_checked = True
        num_steps = len(self.stages[0].steps)
        if num_steps and all(value is None for value in run.values):
            label = self.pipeline.labels[num_steps - 1]
            self.tell_once("none", f"{label}, returned None for the first batch: did you forget `return`?")

    def note_failures(self, outputs: Outputs) -> None:
        """Notes the records that failed for outputs of stage 0, and cuts these if there are too many."""
        if self.errors is not None:
            self.errors.check(outputs, are_blocks=bool(self._block_steps))

    def tell_once(self, topic: str, text: str) -> None:
        """Says something about the stream in the log, the first time that it is about this topic."""
        if topic not in self._told:
            self._told.add(topic)
            import logging  # noqa: PLC0415  (takes long to import)

            logging.getLogger("millstream").warning("millstream: %s", text)

    def follow(self, stage: int, group: Elements, allocate: Allocate) -> Elements:
        """Returns the outputs of a later stage, given the elements of one group."""
        origins = group.origins.named(self.pipeline.components)
        group = Elements(group.values, origins, group.error)
        return isolated(run_steps, self.stages[stage].steps, group, allocate)

    def _prepare(self, origins: Origins) -> Elements:
        return self._complete(self._read_records(origins))

    def _read_records(self, origins: Origins) -> Elements:
        """Returns the records, those that fail left out if errors are skipped."""
        if self.errors is None:
            return self._read(origins)
        failed: list[FailedRecord] = []
        run = without_failures(lambda run: self._read(run.origins), Elements(range(len(origins)), origins), failed)
        run.failures = tuple(failed)
        return run

    def _complete(self, run: Elements) -> Elements:
        """Returns the elements of records that were read, those that failed replaced where each has its place."""
        run = self._work_on(run)
        if run.failures and self._has_places:
            names = self.pipeline.components
            run = with_substitutes(
                run, names, lambda origins: self._work_on(self._read_records(origins)), self._key_cycle
            )
        return run

    @functools.cached_property
    def _key_cycle(self) -> KeyCycle:
        """The order of the keys among which a substitute is found; cached, because it may sort keys."""
        order = self.pipeline.order if is_mixed(self.pipeline.order) else self.pipeline.sampler
        return KeyCycle(order, len(self.pipeline.source))

    def _work_on(self, run: Elements) -> Elements:
        if self.errors is None:
            return run_steps(self._record_steps, run, np.empty)
        failed = list(run.failures)
        for step in self._record_steps:
            run = without_failures(functools.partial(_run_step, step), run, failed)
        run.failures = tuple(sorted(failed, key=lambda failure: failure.position))
        return run


def _with_shuffled_batches(pipeline: Pipeline, stages: Sequence[Sequence[Transformation]]) -> Pipeline:
    """Returns the pipeline with the rows of a mixture permuted within each global batch.

    A pipeline that one logical shard reads alone, and that decides while reading, keeps the order: there is no share
    to balance, and the rows at the end of the order are the first ones of the batch that a longer order has there.
    """
    order, num_shards = pipeline.order, pipeline.logical_shards[0].shard_count
    check_balance(pipeline.operations, order, records_per_block(stages, pipeline.share), num_shards)
    if not is_mixed(order) or (num_shards == 1 and first_deciding(pipeline.operations) is not None):
        return pipeline
    size = records_per_block(stages, pipeline.share) * num_shards
    seed = derive_seed(seed_of(order) or 0, OF_BATCHES)
    return dataclasses.replace(pipeline, order=order.shuffled_within(size, seed))


def _run_step(step: Step, run: Elements) -> Elements:
    return step(run, np.empty)
