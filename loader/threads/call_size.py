"""How many blocks a call makes: enough to pay for what a call costs, few enough to wait for."""

from typing import final

from millstream.loader.pipeline.calls import Call
from millstream.loader.pipeline.plan import Plan

CALL_SECONDS = 0.01
"""A call of several small blocks grows until it takes this long: worth its overhead, and short enough to wait for."""

RECORDS_PER_CALL = 256
"""Such a call has this many records at most, where nothing else is said."""

LEAST_RECORDS = 64
"""With many logical shards such a call may have this many records all the same: enough to pay for itself."""


@final
class CallSize:
    """Begins with one block, and doubles as long as calls are short, up to the number that is worth a call.

    Args:
        plan: whose calls these are.
        most_records: how many records a call of several blocks may have.

    Attributes:
        blocks: how many blocks the next call should make.
    """

    def __init__(self, plan: Plan, most_records: int = RECORDS_PER_CALL) -> None:
        self.blocks = 1
        # Each logical shard has records of its own ahead of the batches, and those of all together add up.
        records = max(most_records // len(plan.shards), LEAST_RECORDS)
        most = max(1, records // plan.partition.block)
        self._most = most if plan.most_blocks is None else min(most, plan.most_blocks)

    def note(self, call: Call, seconds: float) -> None:
        """Takes note of how long a call took."""
        if self.blocks < self._most and seconds * 2 < CALL_SECONDS and call.num_blocks == self.blocks:
            self.blocks = min(self.blocks * 2, self._most)
