"""The stacks of workers that keep working, for those who look from outside.

A worker writes its own when a signal asks for them, in C code too, and what the signal interrupts is done again by the
system or by Python: the worker notices nothing.
"""

import contextlib

from millstream.loader.processes.crash_log import clear_stacks, wait_for_stacks
from millstream.loader.processes.pool import Pool


def stacks_of(pool: Pool) -> dict[int, str]:
    """Returns the stacks of the workers by process, those that are still starting left out. Any thread may ask."""
    stacks = {}
    # All are asked at once, and then waited for.
    for pid, worker in pool.ask_for_stacks().items():
        # Gone in the meantime, or closed by the consumer.
        with contextlib.suppress(ValueError, OSError), pool.crash_log_of(worker) as crash_log:
            stacks[pid] = wait_for_stacks(crash_log) or "(it does not answer: it is stopped, or waits for a device)"
            clear_stacks(crash_log)
    return stacks
