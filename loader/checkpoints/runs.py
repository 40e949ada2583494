"""The history of a run: segments between which batches were skipped or the global batch changed, and changed weights.

A trainer counts its steps. Without a history, step k takes batch k of the stream. A segment begins where that changes.
"""

import bisect
import dataclasses
import functools
import json
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self, final

from millstream.loader.checkpoints.envelope import MAX_NUMBER


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


class Span(NamedTuple):
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

    def spans(self, start: int, stop: int | None) -> Iterator[Span]:
        """Yields the batches of the steps [start, stop), segment by segment."""
        ends: Sequence[int | None] = [*(segment.step for segment in self.segments[1:]), None]
        for segment, end in zip(self.segments, ends, strict=True):
            begin = max(start, segment.step)
            until = end if stop is None else stop if end is None else min(stop, end)
            if until is None or begin < until:
                yield Span(segment, begin + segment.offset, None if until is None else until + segment.offset)

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
