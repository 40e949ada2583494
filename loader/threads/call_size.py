"""The number of blocks per call: large enough to share the cost of a call, small enough to wait for and to hold."""

import sys
import time
from typing import final

from millstream.loader.pipeline.calls import Call
from millstream.loader.pipeline.plan import Plan
from millstream.loader.scheduling.schedule import Schedule

CALL_SECONDS = 0.01
"""A call of several small blocks grows up to this duration: worth its overhead, and short enough to wait for."""

MAX_CALL_SECONDS = 0.5
"""A call that takes longer than half of this does not grow, however much cheaper a larger one would be."""

MAX_CALL_BYTES = 8 << 20
"""Upper bound on the estimated output of a call of several blocks, in bytes. Beyond it, copying dominates the cost."""

CHEAPER = 0.8
"""A larger call is worth its wait if its time per block is at most this share of that of a call of half the size."""

NOT_CHEAPER = 0.95
"""A call shrinks if its time per block exceeds this share. It is above CHEAPER, so noise does not move the size."""

RETRY_CALLS = 64
"""The number of calls after which a size that was not cheaper is tried again, because storage and records change."""

RECORDS_PER_CALL = 256
"""The default for the maximum number of records per call of several blocks."""

MIN_RECORDS = 64
"""The number of records that such a call may have even with many logical shards, so that it is worth its overhead."""

_WEIGHT = 0.25


def cautious_estimate(known: float, latest: float) -> float:
    """Returns a running estimate, weighted towards the largest values, because memory has to hold them as well."""
    return max(latest, known + _WEIGHT * (latest - known))


def taken_call(schedule: Schedule, stage: int | None, max_blocks: int) -> Call | None:
    """Takes the next call of a stage (None for local operations), if any, and records the seconds that this took."""
    begin = time.perf_counter()
    call = schedule.take_local(max_blocks) if stage is None else schedule.take(stage, max_blocks)
    if call is not None:
        call.seconds_before += time.perf_counter() - begin
    return call


@final
class CallSize:
    """Begins with one block, doubles while a larger call is cheaper per block, and halves when it no longer is.

    The time for a batched read of a remote store hardly depends on the number of records, so its calls grow up to the
    limit, although none of them is short. The time for records that are read or computed one by one is proportional to
    their number, so their calls stay short.
    """

    def __init__(self, plan: Plan, max_records: int = RECORDS_PER_CALL, max_bytes: int = sys.maxsize) -> None:
        self._plan = plan
        self._max_bytes = max_bytes  # Of all calls together.
        self.blocks = 1
        # Each logical shard buffers its own records, and the buffers of all shards add up.
        records = max(max_records // len(plan.shards), MIN_RECORDS)
        limit = max(1, records // plan.partition.block)
        self._max_blocks = limit if plan.max_blocks_per_call is None else min(limit, plan.max_blocks_per_call)
        # The time per block in a call of each size.
        self._seconds: dict[int, float] = {}
        self.block_bytes = 0.0  # The estimated size of a block; 0 before it is known.
        self._calls_to_retry = 0

    def record(self, call: Call, seconds: float) -> None:
        """Records the duration of a call, or of its operations before the local ones.

        The time for drawing its elements counts as well, because a consumer that has asked for one waits for all.
        """
        size = call.num_blocks
        seconds += call.seconds_before
        if call.outputs is None:
            call.seconds_before = seconds
            return
        if not size:
            return
        block_bytes = call.outputs.num_bytes / size
        self.block_bytes = cautious_estimate(self.block_bytes, block_bytes)
        if self.block_bytes > self._max_bytes:
            self._plan.warn_once(
                "budget",
                f"a block takes about {self.block_bytes:,.0f} bytes, more than max_buffer_bytes={self._max_bytes:,}. "
                "One block is computed at a time. Increase ReadOptions.max_buffer_bytes to several blocks.",
            )
        if self._max_blocks == 1:
            return
        latest = seconds / size
        known = self._seconds.get(size, latest)
        self._seconds[size] = known + _WEIGHT * (latest - known)
        if size == self.blocks:
            self._choose(seconds)
        self.blocks = min(self.blocks, self._affordable_blocks)

    @property
    def _affordable_blocks(self) -> int:
        limit_bytes = min(MAX_CALL_BYTES, self._max_bytes // 2)
        fitting = limit_bytes / self.block_bytes if self.block_bytes else self._max_blocks
        limit = int(max(1, min(self._max_blocks, fitting)))
        # A power of two, unless it is the given limit, because sizes are compared with their halves.
        return limit if limit == self._max_blocks else 1 << (limit.bit_length() - 1)

    def _choose(self, seconds: float) -> None:
        is_short = seconds * 2 < CALL_SECONDS
        ratio = self._ratio
        self._calls_to_retry -= 1
        if not is_short and (ratio > NOT_CHEAPER or seconds > MAX_CALL_SECONDS) and self.blocks > 1:
            self.blocks = self._half
            self._calls_to_retry = RETRY_CALLS
        elif is_short or (
            seconds * 2 <= MAX_CALL_SECONDS and (ratio <= CHEAPER or self.blocks == 1) and self._calls_to_retry <= 0
        ):
            self.blocks = min(self.blocks * 2, self._max_blocks)

    @property
    def _ratio(self) -> float:
        """The time per block in a call of the current size, relative to one of half the size."""
        half = self._seconds.get(self._half)
        return self._seconds[self.blocks] / half if half else 0.0

    @property
    def _half(self) -> int:
        """The largest power of two below the current size."""
        return 1 << max(0, (self.blocks - 1).bit_length() - 1)
