"""Batches drawn for measuring, one pass after the other, and what was used for them."""

from typing import final

from millstream.loader.data_loader import DataLoader
from millstream.loader.processes.process_report import private_bytes


@final
class TimedPasses:
    """Draws the batches of a loader, from a position on, and starts over at the end.

    Args:
        loader: a loader that yields batches; whoever made it closes it.
        state: where to begin; None for the beginning.

    Attributes:
        batches: how many were drawn.
    """

    def __init__(self, loader: DataLoader, state: bytes | None) -> None:
        self._loader = loader
        self._iterator = iter(loader)
        if state is not None:
            self._iterator.set_state(state)
        self._records = -self._iterator.look().records
        self.batches = 0

    @property
    def records(self) -> int:
        """How many records were used up for them."""
        return self._records + self._iterator.look().records

    @property
    def state(self) -> bytes:
        """The position after the last one."""
        return self._iterator.get_state()

    def draw_one(self) -> None:
        """Draws the next batch, and lets go of it."""
        try:
            next(self._iterator)
        except StopIteration:
            self._records += self._iterator.look().records
            self._iterator = iter(self._loader)
            next(self._iterator)
        self.batches += 1

    def let_go(self) -> None:
        """Drops what was made ahead. Worker processes stay, for what comes next."""
        self._iterator.set_state(self._iterator.get_state())

    def worker_bytes(self) -> int:
        """Returns how much memory of its own the largest worker process has; 0 without any."""
        load = self._iterator.look().load
        workers = () if load is None else load.workers
        return max((private_bytes(worker.pid) for worker in workers if worker.pid is not None), default=0)
