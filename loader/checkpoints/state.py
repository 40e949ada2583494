"""States of loaders: the position of one shard in a stream, the stream, and the history of the run.

A trainer counts its steps. Without a history, step k takes batch k of the stream. A segment of a run begins where
batches are skipped or the global batch changes.
"""

import bisect
import dataclasses
import functools
import json
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self, final

from millstream.errors import CheckpointError
from millstream.loader.checkpoints.envelope import (
    MAX_NUMBER,
    SavedPosition,
    ending_of,
    opened_bytes,
    sealed_bytes,
    unreadable,
)
from millstream.loader.checkpoints.fingerprint import Declared, Fingerprint
from millstream.loader.pipeline.calls import Cursor, Position
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.shards import first_dynamic, joining_batch


class Segment(NamedTuple):
    """Steps that take one batch of the stream after another.

    Attributes:
        step: the first step.
        first: the number of the batch that this step takes, in batches of the segment's size.
        global_batch: the number of records per step over all shards.
    """

    step: int
    first: int
    global_batch: int

    @property
    def offset(self) -> int:
        """The number of a batch, less its step."""
        return self.first - self.step


class BatchRange(NamedTuple):
    """Steps of one segment: the numbers of their batches, [start, stop). `stop` is None without an end."""

    segment: Segment
    start: int
    stop: int | None


@final
@dataclasses.dataclass(frozen=True)
class Run:
    """The history of a run.

    Attributes:
        segments: at least one, ascending by step, the first at step 0.
        changes: the weights of a mixture that were set at run time, with the positions from which on they hold.
    """

    segments: tuple[Segment, ...]
    changes: tuple[tuple[int, Any], ...] = ()

    @classmethod
    def beginning(cls, global_batch: int) -> Self:
        return cls((Segment(0, 0, global_batch),))

    @property
    def last(self) -> Segment:
        return self.segments[-1]

    @property
    def is_plain(self) -> bool:
        """True if step k takes batch k, with the weights of the program."""
        return len(self.segments) == 1 and not self.last.offset and not self.changes

    def segment_at(self, step: int) -> Segment:
        return self.segments[max(0, bisect.bisect_right(self.segments, step, key=operator.itemgetter(0)) - 1)]

    def moved(self, step: int, first: int, global_batch: int) -> Self:
        """Returns the history after which a step takes batch number `first`."""
        kept = tuple(segment for segment in self.segments if segment.step < step)
        is_same = bool(kept) and kept[-1].offset == first - step and kept[-1].global_batch == global_batch
        return dataclasses.replace(self, segments=kept if is_same else (*kept, Segment(step, first, global_batch)))

    def until(self, step: int) -> Self:
        """Returns the history without the segments that begin after a step."""
        kept = bisect.bisect_right(self.segments, step, key=operator.itemgetter(0))
        return dataclasses.replace(self, segments=self.segments[: max(1, kept)])

    def ranges(self, start: int, stop: int | None) -> Iterator[BatchRange]:
        """Yields the batches of the steps [start, stop), segment by segment."""
        ends: Sequence[int | None] = [*(segment.step for segment in self.segments[1:]), None]
        for segment, end in zip(self.segments, ends, strict=True):
            begin = max(start, segment.step)
            until = end if stop is None else stop if end is None else min(stop, end)
            if until is None or begin < until:
                yield BatchRange(segment, begin + segment.offset, None if until is None else until + segment.offset)

    @functools.cached_property
    def fields(self) -> dict[str, Any]:
        return {
            "changes": [[position, weights] for position, weights in self.changes],
            "segments": list(map(list, self.segments)),
        }

    @functools.cached_property
    def text(self) -> str:
        """The history as canonical JSON."""
        return json.dumps(self.fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_fields(cls, fields: Any) -> Self:
        """Raises TypeError, ValueError or KeyError if the fields are not those of a history."""
        segments = tuple(Segment(*segment) for segment in fields["segments"])
        changes = tuple((position, weights) for position, weights in fields["changes"])
        numbers = [number for segment in segments for number in segment] + [position for position, _ in changes]
        steps = [segment.step for segment in segments]
        if (
            fields.keys() != {"changes", "segments"}
            or not segments
            or any(type(number) is not int or not 0 <= number <= MAX_NUMBER for number in numbers)
            or steps != sorted(set(steps))
            or steps[0]
            or not all(segment.global_batch for segment in segments)
            or not all(isinstance(weights, dict | list) for _, weights in changes)
        ):
            raise ValueError("its run has no such segments")
        return cls(segments, changes)


@final
@dataclasses.dataclass(frozen=True)
class Stream:
    """The stream of a state, and the shard of it: the part of a state that never changes between batches.

    Attributes:
        logical_shards: the number of logical shards, to which positions are dealt in turn. Each shard runs
            logical_shards / shard_count consecutive ones. In a 1:1 pipeline, they are the shards.
        drop_remainder: `ShardOptions.drop_remainder`, which affects the last global batch.
        global_batch: the number of records per step over all shards.
        one_to_one: True if every record becomes exactly one element before it is batched.
        length: the number of positions in the sampler's order, over all epochs; None if it is endless.
    """

    shard_index: int
    shard_count: int
    logical_shards: int
    drop_remainder: bool
    global_batch: int
    one_to_one: bool
    length: int | None
    fingerprint: Fingerprint

    def before(self, position: int) -> "Stream":
        """Returns the stream as a state at a position describes it."""
        if not self.fingerprint.changes:
            return self
        count = bisect.bisect_left(self.fingerprint.changes, position, key=operator.itemgetter(0))
        if count not in self._earlier:
            self._earlier[count] = dataclasses.replace(self, fingerprint=self.fingerprint.before(position))
        return self._earlier[count]

    @functools.cached_property
    def _earlier(self) -> "dict[int, Stream]":
        return {}

    @functools.cached_property
    def fields(self) -> dict[str, Any]:
        """The stream as JSON has it, without `changes`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        named = {name: getattr(self.fingerprint, name) for name in ("content", "identity", "python")}
        return fields | {"fingerprint": {**named, "content": {**named["content"]}, "identity": {**named["identity"]}}}

    @functools.cached_property
    def ending(self) -> bytes:
        """The last bytes of every state of this stream."""
        return ending_of(self.fields)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Raises TypeError, ValueError or KeyError if the fields do not describe a stream."""
        named = fields["fingerprint"]
        fingerprint = Fingerprint(named["identity"], named["content"], named["python"])
        stream = cls(**{**fields, "fingerprint": fingerprint})
        for name in ("drop_remainder", "one_to_one"):
            _check_is(getattr(stream, name), bool, name)
        for name in ("shard_index", "shard_count", "logical_shards", "global_batch"):
            _check_number(getattr(stream, name), name, minimum=name != "shard_index")
        if stream.length is not None and (type(stream.length) is not int or stream.length < 0):
            # It may exceed 2**63: the product of records and epochs. Positions may not.
            raise ValueError(f"length is {stream.length!r:.40}")
        if stream.shard_index >= stream.shard_count or stream.logical_shards % stream.shard_count:
            raise ValueError(f"shard {stream.shard_index} of {stream.shard_count} has no logical shards")
        _check_is(stream.fingerprint.python, str, "python")
        for texts in (stream.fingerprint.identity, stream.fingerprint.content):
            _check_is(texts, dict, "a fingerprint")
            for text in texts.values():
                _check_is(text, str, "a text of the fingerprint")
        return stream


class SavedCursor(NamedTuple):
    """The position of one logical shard, between two batches.

    Attributes:
        position: the first position, over all shards, that no delivered batch has used: the start of a global block,
            or the end of the order. In a 1:1 pipeline, all shards have the same.
        skip: the numbers of elements to skip at `position`, one per stage; zeros in a 1:1 pipeline.
        is_final: True if the last delivered batch is short or padded because the order ends. A longer order has another
            batch there.
    """

    position: int
    skip: tuple[int, ...]
    is_final: bool

    @property
    def numbers(self) -> SavedPosition:
        """The cursor in a saved position."""
        return SavedPosition((self.position, self.is_final, *self.skip))

    @property
    def text(self) -> str:
        """The numbers as JSON, formatted in a third of the time of an encoder."""
        is_final = "true" if self.is_final else "false"
        return f"[{self.position},{is_final},{','.join(map(str, self.skip))}]"

    @classmethod
    def of(cls, numbers: Any) -> Self:
        """Returns the cursor that has these `numbers`. Raises TypeError or ValueError if there is none."""
        position, is_final, *skip = numbers
        for number in (position, *skip):
            _check_number(number, "a position")
        _check_is(is_final, bool, "is_final")
        return cls(position, tuple(skip), is_final)


@final
class LoaderState(NamedTuple):
    """The position of one shard in a stream, between two batches.

    Attributes:
        step: the number of batches that this shard has delivered.
        cursors: the positions of the logical shards that the shard runs, in their order; one in a 1:1 pipeline.
        run: the history of the run; None if step k takes batch k.
    """

    step: int
    cursors: tuple[SavedCursor, ...]
    stream: Stream
    run: Run | None = None

    def encode(self) -> bytes:
        # The stream is encoded once for all its states.
        position = f"[{','.join([cursor.text for cursor in self.cursors])}]"
        return sealed_bytes(self.step, position, self.stream.ending, "" if self.run is None else self.run.text)

    @staticmethod
    def decode(raw: bytes | bytearray | memoryview) -> "LoaderState":
        """Returns the state that `encode` wrote, from its bytes or from the same JSON written differently.

        Other bytes are a CheckpointError.
        """
        saved = opened_bytes(raw)
        stream = stream_from(saved.stream)
        try:
            cursors = tuple(map(SavedCursor.of, saved.position))
            num_cursors = 1 if stream.one_to_one else stream.logical_shards // stream.shard_count
            if len(cursors) != num_cursors or len({len(cursor.skip) for cursor in cursors}) > 1:
                raise ValueError(f"it must have the positions of {num_cursors} shards, got {len(cursors)}")  # noqa: TRY301
            run = None if saved.run is None else Run.from_fields(saved.run)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise unreadable(str(error)) from error
        return LoaderState(saved.step, cursors, stream, run)


def stream_from(fields: Any) -> Stream:
    """Returns the stream that a state describes. Other fields are a CheckpointError."""
    try:
        return Stream.from_fields(fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise unreadable(str(error) or type(error).__name__) from error


def _check_is(value: object, kind: type, name: str) -> None:
    if type(value) is not kind:
        raise TypeError(f"{name} is a {type(value).__name__}, not a {kind.__name__}")


def _check_number(value: object, name: str, *, minimum: int = 0) -> None:
    if type(value) is not int or not minimum <= value <= MAX_NUMBER:
        raise ValueError(f"{name} is {value!r:.40}")


def combined(states: Sequence[LoaderState]) -> LoaderState:
    """Returns the combined state of all shards that saved together. Any other states are a CheckpointError."""
    if not states:
        raise CheckpointError("set_states needs the states of all shards that saved together, got none.")
    counts = sorted({state.stream.shard_count for state in states})
    if len(counts) > 1:
        raise CheckpointError(
            f"The states are of {' and of '.join(map(str, counts))} shards. Pass the states that were saved together."
        )
    by_shard: dict[int, LoaderState] = {}
    for state in states:
        if state.stream.shard_index in by_shard:
            raise CheckpointError(
                f"Two of the {len(states)} states are of shard {state.stream.shard_index} of {counts[0]}. Pass the "
                "state of each shard once."
            )
        by_shard[state.stream.shard_index] = state
    if missing := sorted(set(range(counts[0])) - by_shard.keys()):
        raise CheckpointError(
            f"The states are of {len(states)} of {counts[0]} shards: "
            f"{_listed(missing)} missing. Pass all of them, because "
            "each shard knows only its own position."
        )
    ordered = [by_shard[index] for index in range(counts[0])]
    _check_together(ordered)
    first = ordered[0]
    all_cursors = tuple(cursor for state in ordered for cursor in state.cursors)
    cursors = first.cursors if first.stream.one_to_one else all_cursors
    # The furthest logical shard has passed the most changes of a mixture.
    furthest = max(ordered, key=lambda state: max(cursor.position for cursor in state.cursors)).stream
    # The logical shards of a 1:1 pipeline are its shards, and their number does not affect the following batches.
    alone = dataclasses.replace(furthest, shard_index=0, shard_count=1)
    return LoaderState(first.step, cursors, first.stream if first.stream.one_to_one else alone, first.run)


def _check_together(ordered: Sequence[LoaderState]) -> None:
    first = ordered[0]
    for index, state in enumerate(ordered):
        if not _is_same_stream(state.stream, first.stream):
            raise CheckpointError(
                f"The states of shard 0 and of shard {index} are of different streams. Pass the states that were saved "
                "together."
            )
        if state.run != first.run:
            raise CheckpointError(
                f"The states of shard 0 and of shard {index} are of runs that skipped other batches, or set other "
                "weights. Call skip and reweight on all hosts, at the same steps."
            )
    is_one_to_one = first.stream.one_to_one
    positions = [(state.step, state.cursors if is_one_to_one else None) for state in ordered]
    if len(set(positions)) > 1:
        listed = ", ".join(
            f"shard {index} at step {state.step}" + f", position {state.cursors[0].position}" * is_one_to_one
            for index, state in enumerate(ordered)
        )
        raise CheckpointError(
            f"The states are of different steps: {listed}. Save when all shards have taken the same number of "
            "batches, or resume with the same number of shards, each from its own state."
        )


def _is_same_stream(one: Stream, other: Stream) -> bool:
    """Returns True if two streams differ at most by their shard, and by the number of changes of a mixture so far."""
    texts = [stream.fingerprint.identity for stream in (one, other)]
    common = {path for path in texts[0].keys() & texts[1].keys() if path != "sampler.changes"}
    identities = [{path: text[path] for path in common} for text in texts]
    fingerprint = other.fingerprint
    return identities[0] == identities[1] and (
        dataclasses.replace(one, shard_index=other.shard_index, fingerprint=fingerprint) == other
    )


def _listed(shards: Sequence[int]) -> str:
    shown = ", ".join(map(str, shards[:8])) + (", …" if len(shards) > 8 else "")
    return f"shards {shown} are" if len(shards) > 1 else f"shard {shown} is"


def stream_of(plan: Plan, fingerprint: Fingerprint | None = None) -> Stream:
    """Returns the stream of a plan, with the current fingerprint of its source, sampler and operations if not given."""
    partition, shard = plan.partition, plan.pipeline.shard
    return Stream(
        shard_index=shard.shard_index,
        shard_count=shard.shard_count,
        logical_shards=partition.shard.shard_count,
        drop_remainder=shard.drop_remainder,
        global_batch=partition.global_block,
        one_to_one=plan.one_to_one,
        length=partition.length,
        fingerprint=fingerprint or fingerprint_of_pipeline(plan.pipeline),
    )


def declared_by(pipeline: Pipeline) -> Declared:
    """Returns the description of the source and the operations of a pipeline."""
    sizes: dict[int, str] | None = None if first_dynamic(pipeline.operations) is None else {}
    if sizes is not None and (joining := joining_batch(pipeline.operations)) is not None:
        # Each shard has a part of the batch, whose size depends on the number of shards.
        number, batch = joining
        sizes[number] = f"{batch.batch_size * pipeline.shard.shard_count} over all shards"
    return Declared(pipeline.source, pipeline.operations, sizes)


def fingerprint_of_pipeline(pipeline: Pipeline, declared: Declared | None = None) -> Fingerprint:
    """Returns the fingerprint of a pipeline. Only the sampler is described if the rest is given."""
    found = (declared or declared_by(pipeline)).with_sampler(pipeline.sampler)
    # The number of errors is not part of it, because it decides where the stream stops, not its content.
    further = {} if pipeline.tolerance is None else {"on_error": "skip"}
    if pipeline.epoch is not None:
        # Also of samplers that have no attribute for it: an epoch ends where the complete order goes on.
        further["sampler.first_epoch"] = str(pipeline.epoch)
    return dataclasses.replace(found, identity={**found.identity, **further})


def state_at(position: Position, step: int, plan: Plan, stream: Stream) -> LoaderState:
    cursors = tuple(saved_cursor(cursor, plan) for cursor in position)
    return LoaderState(step, cursors, stream.before(max(cursor.position for cursor in cursors)))


def saved_cursor(cursor: Cursor, plan: Plan) -> SavedCursor:
    """Returns the cursor of a logical shard of a plan as a state has it."""
    partition = plan.partition
    position, complete_blocks = cursor.block * partition.global_block, partition.complete_blocks
    return SavedCursor(
        # After a short or padded batch, the end of the order: the remainder of its block has no records.
        position=position if partition.length is None else min(position, partition.length),
        skip=cursor.skip,
        is_final=complete_blocks is not None and cursor.block > complete_blocks if plan.one_to_one else cursor.is_final,
    )


def count_outputs(plan: Plan, owner: str) -> int:
    """Returns the number of outputs of a stream. If it is unknown, a TypeError says why `owner` has no `len()`."""
    if not plan.one_to_one:
        raise TypeError(f"This {owner} has no len(): the number of outputs depends on {plan.first_dynamic_label}.")
    num_blocks = plan.shards[0].num_blocks
    if num_blocks is None:
        raise TypeError(f"This {owner} has no len(): it is endless. Pass num_epochs to the sampler, or to .repeat().")
    return num_blocks


def epoch_of(plan: Plan, position: Position) -> int | None:
    """Returns the epoch of the first record that is not consumed, from 0; None if the order has no epochs."""
    num_records, length = plan.pipeline.order.num_records, plan.pipeline.order.length
    epoch = plan.pipeline.epoch
    if not num_records:
        return epoch if num_records is None else num_records
    first_epoch: int = getattr(plan.pipeline.sampler, "first_epoch", epoch or 0)
    first = min(cursor.block for cursor in position) * plan.partition.global_block
    return first_epoch + (first if length is None else min(first, length)) // num_records
