"""The number of blocks per call: enough to share the cost of a call, few enough to wait for and to hold in memory."""

import sys
import time
from typing import final

from millstream.loader.pipeline.calls import Call
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.schedules import AnySchedule

CALL_SECONDS = 0.01
"""A call of several small blocks grows until it takes this long: worth its overhead, and short enough to wait for."""

MAX_CALL_SECONDS = 0.5
"""A call that takes longer than half of this does not grow, however much cheaper a larger one would be."""

MAX_CALL_BYTES = 8 << 20
"""A call of several blocks makes at most this many bytes, as far as earlier ones tell: beyond that, copying the bytes
dominates the cost."""

CHEAPER = 0.8
"""A larger call is worth its wait if a block of it takes at most this share of the time in a call of half the size."""

NOT_CHEAPER = 0.95
"""A call shrinks if a block of it takes more than this share: above CHEAPER, so that noise does not move the size."""

RETRY_CALLS = 64
"""The number of calls after which a size that was not cheaper is tried again: storage and records change."""

RECORDS_PER_CALL = 256
"""The maximum number of records in such a call by default."""

LEAST_RECORDS = 64
"""With many logical shards such a call may have this many records all the same: enough to pay for itself."""

_WEIGHT = 0.25
"""The weight of the latest call in the estimate for its size."""


def taken_call(schedule: AnySchedule, stage: int, max_blocks: int) -> Call | None:
    """Returns the next call of a stage, if any, with the seconds that it took to draw its elements."""
    begin = time.perf_counter()
    call = schedule.take(stage, max_blocks)
    if call is not None:
        call.seconds_before = time.perf_counter() - begin
    return call


@final
class CallSize:
    """Begins with one block, doubles while a larger call is cheaper per block, and halves when it no longer is.

    The time for a batched read of a remote store hardly depends on the number of records, so its calls grow up to the
    limit, although none of them is short. The time for records that are read or computed one by one is proportional to
    their number, so their calls stay short.

    Args:
        plan: whose calls these are.
        max_records: the maximum number of records in a call of several blocks.
        max_bytes: the maximum number of bytes in all calls.

    Attributes:
        blocks: how many blocks the next call should make.
        block_bytes: how many bytes a block takes; 0 before that is known.
    """

    def __init__(self, plan: Plan, max_records: int = RECORDS_PER_CALL, max_bytes: int = sys.maxsize) -> None:
        self._plan = plan
        self._max_bytes = max_bytes
        self.blocks = 1
        # Each logical shard has records of its own ahead of the batches, and those of all together add up.
        records = max(max_records // len(plan.shards), LEAST_RECORDS)
        limit = max(1, records // plan.partition.block)
        self._max_blocks = limit if plan.most_blocks is None else min(limit, plan.most_blocks)
        # The seconds that a block takes in a call of each size.
        self._seconds: dict[int, float] = {}
        self.block_bytes = 0.0
        self._calls_to_retry = 0

    def note(self, call: Call, seconds: float) -> None:
        """Records the cost of a call that is complete, in seconds.

        The time for drawing its elements counts, too: a consumer that has asked for one of them waits for all.
        """
        size = call.num_blocks
        seconds += call.seconds_before
        if not size or call.outputs is None:
            return
        block_bytes = call.outputs.num_bytes / size
        # The largest blocks count: memory has to hold them, too.
        self.block_bytes = max(block_bytes, self.block_bytes + _WEIGHT * (block_bytes - self.block_bytes))
        if self.block_bytes > self._max_bytes:
            self._plan.tell_once(
                "budget",
                f"a block takes about {self.block_bytes:,.0f} bytes, more than max_buffer_bytes={self._max_bytes:,}. "
                "One is made at a time: give ReadOptions a max_buffer_bytes of several blocks.",
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
        most = min(MAX_CALL_BYTES, self._max_bytes // 2)
        fitting = most / self.block_bytes if self.block_bytes else self._max_blocks
        limit = int(max(1, min(self._max_blocks, fitting)))
        # A power of two, unless it is the limit that was asked for: sizes are compared with their halves.
        return limit if limit == self._max_blocks else 1 << (limit.bit_length() - 1)

    def _choose(self, seconds: float) -> None:
        """Chooses the size of the next call, after one of the present size."""
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
        """The time of a block in a call of the present size, relative to one of half the size."""
        half = self._seconds.get(self._half)
        return self._seconds[self.blocks] / half if half else 0.0

    @property
    def _half(self) -> int:
        """The largest power of two below the present size."""
        return 1 << max(0, (self.blocks - 1).bit_length() - 1)
