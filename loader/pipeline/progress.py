"""How long a stream is, and how far along a position is: what a progress bar asks."""

from millstream.loader.pipeline.plan import Plan


def count_outputs(plan: Plan, owner: str) -> int:
    """Returns how many outputs there are.

    Raises:
        TypeError: it is not known; the error says that `owner` has no `len()`, and why.
    """
    if not plan.one_to_one:
        raise TypeError(f"This {owner} has no len(): {plan.deciding}, decides while reading.")
    if plan.num_blocks is None:
        raise TypeError(f"This {owner} has no len(): its sampler is endless. Give the sampler num_epochs.")
    return plan.num_blocks


def epoch_of(plan: Plan, block: int) -> int | None:
    """Returns the epoch that a block begins in, from 0; None where the order has no epochs."""
    num_records, length = plan.pipeline.order.num_records, plan.pipeline.order.length
    if num_records is None:
        return None
    position = block * plan.partition.global_block
    return (position if length is None else min(position, length)) // num_records
