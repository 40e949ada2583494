"""The length of a stream, and the progress of a position."""

from millstream.loader.pipeline.outputs import Position
from millstream.loader.pipeline.plan import Plan


def count_outputs(plan: Plan, owner: str) -> int:
    """Returns the number of outputs of a stream.

    Raises:
        TypeError: it is unknown. The error says that `owner` has no `len()`, and why.
    """
    if not plan.one_to_one:
        raise TypeError(f"This {owner} has no len(): the number of outputs depends on {plan.deciding}.")
    num_blocks = plan.shards[0].num_blocks
    if num_blocks is None:
        raise TypeError(f"This {owner} has no len(): its sampler is endless. Pass num_epochs to the sampler.")
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


def records_before(plan: Plan, position: Position) -> int:
    """Returns the number of records that a plan's shards have consumed. The last block may count too many."""
    return sum(cursor.block for cursor in position) * plan.partition.block
