"""Choices of who runs a call, and of its length, by measured durations and sizes.

Nothing here changes what a call returns. `worker_choice` decides how many workers there are.
"""

import math
import sys
from typing import TYPE_CHECKING, final

from millstream.loader.pipeline.calls import Call
from millstream.loader.pipeline.plan import Plan
from millstream.loader.threads.shared_threads import SharedThreads

if TYPE_CHECKING:
    from collections.abc import Sized

HAND_OVER_SECONDS = 0.001
"""Shorter calls run in the consumer's thread, because a transfer would cost at least a tenth of their time."""

SOLO_CALLS = 3
"""The number of initial calls that run one at a time, to measure them: concurrent threads also wait for each other."""

SOLO_SECONDS = 0.004
"""A call that takes longer certainly justifies a transfer. No more measurements are needed."""


@final
class Costs:
    """The estimated durations of the calls of a stream that threads read, and which of them are quick.

    They change slowly, so that one late block does not change who works. A measurement in a thread can only be too
    long, because of waits for the interpreter's lock and for a core, so short times get more weight there.

    Attributes:
        seconds: the estimated duration of a block or group of each stage; infinite before it is known.
        num_calls, num_blocks: the numbers of reads completed, and of their blocks, since they were last set to 0.
    """

    def __init__(self, plan: Plan, shared: SharedThreads) -> None:
        self._shared = shared
        kind = type(plan.pipeline.source), len(plan.stages)
        self._kinds = [(kind, stage) for stage in range(len(plan.stages))]
        # Other streams have measured calls of this kind.
        self._solo_calls = 0 if self._kinds[0] in shared.typical_seconds else SOLO_CALLS
        self.seconds = [math.inf for _ in plan.stages]
        self.num_calls = self.num_blocks = 0

    @property
    def are_known(self) -> bool:
        """True once several calls may run concurrently."""
        return self._solo_calls <= 0

    def is_quick(self, stage: int, num_blocks: int) -> bool:
        """Returns True if the consumer's thread should run the next call of a stage, if it may."""
        seconds = self.seconds[stage]
        if math.isinf(seconds):
            seconds = self._shared.typical_seconds.get(self._kinds[stage], seconds)
        return seconds * num_blocks < HAND_OVER_SECONDS

    def record(self, call: Call, seconds: float, *, is_here: bool) -> None:
        if call.stage == 0:
            self.num_calls += 1
            self.num_blocks += call.num_blocks
            self._shared.record_read(self, call.num_records)
        latest, known = seconds / (call.num_blocks or 1), self.seconds[call.stage]
        if self._solo_calls > 0 or math.isinf(known):
            estimate = min(known, latest)
            # The first calls are slow, because nothing is cached. But a call that takes this long is not quick.
            self._solo_calls = 0 if seconds > SOLO_SECONDS else self._solo_calls - 1
        else:
            weight = 0.1 if is_here else 0.25 if latest < known else 0.05
            estimate = known + weight * (min(latest, known + HAND_OVER_SECONDS) - known)
        self.seconds[call.stage] = self._shared.typical_seconds[self._kinds[call.stage]] = estimate


CALL_SECONDS = 0.01
"""A call of several small blocks grows up to this duration: worth its overhead, and short enough to wait for."""

MAX_CALL_SECONDS = 0.5
"""A call that takes longer than half of this does not grow, however much cheaper a larger one would be."""

MAX_CALL_BYTES = 8 << 20
"""Upper bound on the estimated output of a call of several blocks, in bytes. Beyond it, copying dominates the cost."""

MAX_BATCHES_BYTES = 1 << 20
"""Upper bound on the estimated size of a call of several complete batches, in bytes: larger ones are worth a call each,
and each worker has several calls.
"""

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


@final
class CallSize:
    """Begins with one block, doubles while a larger call is cheaper per block, and halves when it no longer is.

    The time for a batched read of a remote store hardly depends on the number of records, so its calls grow up to the
    limit, although none of them is short. The time for records that are read or computed one by one is proportional to
    their number, so their calls stay short. So do calls of several complete batches, which only workers get, because a
    message costs more than a small batch.

    Attributes:
        blocks: the number of blocks of the next call.
        block_bytes: the estimated size of a block; 0 before it is known.
        sharers: as many objects as streams share the bytes. Each of them may have a call, whatever the others hold.
    """

    def __init__(
        self,
        plan: Plan,
        max_records: int = RECORDS_PER_CALL,
        max_bytes: int = sys.maxsize,
        *,
        are_messages: bool = False,
    ) -> None:
        self._plan = plan
        self._max_bytes = max_bytes  # Of all calls together.
        self.sharers: Sized = ()
        self._max_call_bytes = MAX_BATCHES_BYTES if plan.waits_for_calls else MAX_CALL_BYTES
        self.blocks = 1
        # Each logical shard buffers its own records, and the buffers of all shards add up.
        records = max(max_records // len(plan.shards), MIN_RECORDS)
        limit = max(1, records // plan.partition.block)
        self._max_blocks = limit if plan.max_blocks_per_call is None else min(limit, plan.max_blocks_per_call)
        if plan.waits_for_calls and not are_messages:
            self._max_blocks = 1
        # The time per block in a call of each size.
        self._seconds: dict[int, float] = {}
        self.block_bytes = 0.0
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
        limit_bytes = min(self._max_call_bytes, self._max_bytes // (2 * max(1, len(self.sharers))))
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
            not self._plan.waits_for_calls
            and seconds * 2 <= MAX_CALL_SECONDS
            and (ratio <= CHEAPER or self.blocks == 1)
            and self._calls_to_retry <= 0
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
