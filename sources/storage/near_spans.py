"""Spans of an object that one request reads together, because another request would take longer than the gap."""

import dataclasses
from collections.abc import Sequence

import numpy as np

_NEAR_BYTES = 32 << 10
"""Gap between spans up to which they are read by one request, because another request would take longer."""

_REQUEST_BYTES = 4 << 20
"""Limit of the bytes of one request, unless one span is larger."""


@dataclasses.dataclass(slots=True)
class JoinedSpans:
    """The range of one request, and the indices of the spans in it."""

    start: int
    stop: int
    spans: list[int]


def join_near(starts: Sequence[int], lengths: Sequence[int]) -> list[JoinedSpans]:
    """Groups spans that are near each other, without the empty ones."""
    begins = np.array(starts, np.int64)
    ends = begins + np.array(lengths, np.int64)
    order = np.argsort(begins, kind="stable")
    joined: list[JoinedSpans] = []
    for span in order[ends[order] > begins[order]].tolist():
        begin, end = int(begins[span]), int(ends[span])
        if joined and begin - joined[-1].stop <= _NEAR_BYTES:
            stop = max(joined[-1].stop, end)
            if stop - joined[-1].start <= _REQUEST_BYTES:
                joined[-1].stop = stop
                joined[-1].spans.append(span)
                continue
        joined.append(JoinedSpans(begin, end, [span]))
    return joined
