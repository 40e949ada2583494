"""An iterator over other iterators whose position an interruption cannot separate from theirs.

A signal handler may raise after a parent has advanced and before the iterator has counted that. `next` therefore sets a
flag while it draws. If the flag is found set, the iterator returns to an earlier state, and draws the elements since
then again. A stream is a function, so they are the same.
"""

import abc
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from millstream.dataset.iterators.brief_states import strictly
from millstream.dataset.iterators.dataset_iterator import DatasetIterator
from millstream.loader.checkpoints.checkpointable import Exclusive
from millstream.loader.iterator import DataLoaderIterator

T_co = TypeVar("T_co", covariant=True)

KEPT_ELEMENTS = 1024
"""Interval between two saved states, in elements, and therefore the maximum number of elements drawn again."""


class RecoveringIterator(Exclusive, DatasetIterator[T_co]):
    """Draws from its parents, and stays at the same position as they, whatever interrupts it."""

    _in_use = (
        "This iterator is in use: another thread, or the code that a signal handler interrupted, is drawing an "
        "element. Its position is that of several datasets, and is known between two elements only. Set a flag in the "
        "handler, and call get_state after next()."
    )
    _leader: DataLoaderIterator | None = None
    _is_torn = False
    """True from before an element is drawn until it is counted; it stays so if that fails."""
    _kept_state: Any = None
    _kept_step = 0
    _step = 0
    """The number of elements yielded, which `_draw` counts."""
    _num_since = 0
    """The number of elements since `_kept_state`."""

    def lead_with(self, leader: DataLoaderIterator) -> None:
        """Lets an iterator without elements dispatch the calls of the iterators below to its workers."""
        self._leader = leader

    def close(self) -> None:
        """Closes the iterators below, and ends the workers that only they have."""
        super().close()
        if self._leader is not None:
            self._leader.close()

    @property
    def step(self) -> int:
        """The number of elements yielded since the beginning of the stream."""
        # An interrupted draw may have counted, and an interrupted recovery may still be at an earlier element.
        return self._kept_step + self._num_since if self._is_torn else self._step

    def __next__(self) -> T_co:
        """Returns the next element.

        Raises:
            StopIteration: the stream has ended.
            ValueError: the iterator is closed, or in use by another thread or by interrupted code.
            Exception: the error of a parent; the next call draws the same element again.
        """
        return self._alone(self._draw_and_count)

    def _draw_and_count(self) -> T_co:
        try:
            self._prepare()
            element = self._draw()
            self._num_since, self._is_torn = self._num_since + 1, False
        except StopIteration:
            self._is_torn = False
            self._end_leading()
            raise
        return element

    def _prepare(self) -> None:
        """Prepares to draw. Until elements are counted, the iterator is torn."""
        self._check_open()
        self._recover()
        if self._num_since >= KEPT_ELEMENTS or self._kept_state is None:
            self._keep()
        self._is_torn = True

    def _end_leading(self) -> None:
        """Leaves the workers to the next iterator, at the end of the stream."""
        if self._leader is not None:
            self._leader.go(self._leader.position_in_plan(), 0)

    def get_state(self) -> dict[str, Any]:
        """Returns the position as a small dict that JSON can hold.

        Raises:
            ValueError: the iterator is in use by another thread or by interrupted code.
        """
        if self._is_in_use or self._is_torn:
            # Refused if it is in use, also by a call that recovers.
            self._alone(self._recover)
        return self._state()

    def set_state(self, state: dict[str, Any], *, strict: bool = False) -> None:
        """Moves to a position.

        Args:
            state: a result of `get_state`.
            strict: True to refuse the state also if code or content of the datasets below have changed.

        Raises:
            CheckpointError: it is not a state of such a dataset. The iterator is as it was.
            ValueError: the iterator is closed, or in use.
        """
        with strictly(strict=strict):
            self._go(functools.partial(self._move, state))

    def _go(self, move: Callable[[], None]) -> None:
        """Moves the parents and this iterator. An interruption leaves it where it was."""
        self._check_open()
        self._alone(functools.partial(self._keep_and_move, move))

    def _keep_and_move(self, move: Callable[[], None]) -> None:
        if not self._is_torn:
            self._keep()
        self._is_torn = True
        move()
        self._kept_state, self._num_since, self._is_torn = None, 0, False

    @abc.abstractmethod
    def _draw(self) -> T_co:
        """Returns the next element. The caller recovers from a failure."""

    @abc.abstractmethod
    def _state(self) -> dict[str, Any]:
        """Returns the position."""

    @abc.abstractmethod
    def _move(self, state: dict[str, Any]) -> None:
        """Moves the parents and this iterator. The caller recovers from a failure."""

    def _keep(self) -> None:
        self._kept_state, self._kept_step, self._num_since = self._state(), self._step, 0

    def _recover(self) -> None:
        if not self._is_torn:
            return
        self._move(self._kept_state)
        for _ in range(self._num_since):
            self._draw()
        self._is_torn = False
