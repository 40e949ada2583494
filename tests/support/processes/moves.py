"""Loaders with worker_count="auto" that move between this process and workers whenever a test wants."""

import random
from collections.abc import Callable

import pytest

from millstream.loader.engine import policy, worker_choice
from millstream.loader.engine.processes import Processes
from millstream.loader.engine.worker_choice import Window, WorkerChoice


def move_as(patch: pytest.MonkeyPatch, choose: Callable[[WorkerChoice, Window], None], *, waits: bool = True) -> None:
    """Lets a function choose the number of workers after each output, and waits until new workers are ready."""

    def accept_until_ready(self: Processes) -> None:
        self._receive(0.0)
        while not self.are_ready:
            self._receive(1.0)

    # One batch a call: otherwise a short stream would be over before it can move.
    patch.setattr(policy, "MAX_BATCHES_BYTES", 0)
    patch.setattr(worker_choice, "MAX_WINDOW_SECONDS", 0.0)
    patch.setattr(worker_choice, "COSTLY_SECONDS", 0.0)
    if waits:
        patch.setattr(Processes, "accept", accept_until_ready)
    patch.setattr(WorkerChoice, "record", choose)


def move_at_random(patch: pytest.MonkeyPatch, chance: random.Random, max_workers: int = 3) -> None:
    """Lets chance choose another number of workers at every second output, none included."""

    def choose(choice: WorkerChoice, _: Window) -> None:
        if not choice.is_final and chance.random() < 0.5:
            choice.num_workers = chance.randint(0, max_workers)

    move_as(patch, choose)


def move_once(patch: pytest.MonkeyPatch, num_workers: int) -> None:
    """Lets all work move to some workers after the first outputs, and stay there."""

    def choose(choice: WorkerChoice, _: Window) -> None:
        if not choice.is_final:
            choice.num_workers = num_workers

    move_as(patch, choose)
