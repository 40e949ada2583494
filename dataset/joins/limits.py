"""Parts of one other stream: its first elements, and those after them; and its elements kept in memory."""

import copy
import dataclasses
from types import NoneType
from typing import Any, final

import numpy as np

from millstream.core.checks import as_integer
from millstream.dataset.iterators.dataset_iterator import DatasetIterator, Drawn, drawn_from, move_to, position_of
from millstream.dataset.iterators.recovering_iterator import RecoveringIterator
from millstream.dataset.stream_steps import Join, OpenBelow
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.envelope import SavedPosition, is_anything, is_number, values_of
from millstream.loader.scheduling.feed import KEPT_ELEMENTS

_LIMITED = "a limited dataset"
_SKIPPED = "a stream without its first elements"
_CACHED = "a cached dataset"


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Take(Join):
    """The first elements of a stream."""

    count: int

    def opened(self, open_below: OpenBelow) -> RecoveringIterator[Any]:
        return _LimitIterator(open_below(*self.above), self.count)

    @property
    def text(self) -> str:
        return f".take({self.count})"


@final
class _LimitIterator(RecoveringIterator[Any]):
    """Draws a limited number of elements."""

    def __init__(self, parent: DatasetIterator[Any], limit: int) -> None:
        super().__init__(parent)
        self._limit = limit

    def _draw_one(self) -> Any:
        if self._step >= self._limit:
            raise StopIteration
        return next(self._parent)

    def _draw(self, count: int) -> Drawn[Any]:
        return drawn_from(self._parent, min(count, self._limit - self._step))

    def _state(self) -> SavedPosition:
        return SavedPosition((_LIMITED, self._step, position_of(self._parent)))

    def _move(self, position: Any) -> None:
        step, saved = values_of(position, _LIMITED, is_number, is_anything)
        if step > self._limit:
            raise CheckpointError(
                f"The state is after {step} elements, and here .take({self._limit}) ends before: use its former count."
            )
        move_to(self._parent, saved)
        self._step = step

    def seek(self, step: int) -> None:
        if not 0 <= as_integer(step, "step") <= self._limit:
            raise IndexError(f"step must be between 0 and {self._limit}, the number of elements of .take, got {step}.")
        self._go(lambda: self._seek(step))

    def _seek(self, step: int) -> None:
        self._parent.seek(step)
        self._step = step


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Skip(Join):
    """The elements of a stream after the first `count`."""

    count: int

    def opened(self, open_below: OpenBelow) -> RecoveringIterator[Any]:
        return _SkippedIterator(open_below(*self.above), self.count)

    @property
    def text(self) -> str:
        return f".skip({self.count})"


@final
class _SkippedIterator(RecoveringIterator[Any]):
    """Draws from a stream whose first elements it drops. It is at the beginning until the first draw after them."""

    def __init__(self, parent: DatasetIterator[Any], num_skipped: int) -> None:
        super().__init__(parent)
        self._num_skipped = num_skipped

    def _draw(self, count: int) -> Drawn[Any]:
        left = 0 if self._step else self._num_skipped
        while left:
            skipped = drawn_from(self._parent, min(left, KEPT_ELEMENTS))
            left -= len(skipped.values)
            if skipped.error is not None or not skipped.values:
                return Drawn([], skipped.error)
        return drawn_from(self._parent, count)

    def _state(self) -> SavedPosition:
        return SavedPosition((_SKIPPED, self._step, self._num_skipped, position_of(self._parent)))

    def _move(self, position: Any) -> None:
        step, skipped, saved = values_of(position, _SKIPPED, is_number, is_number, is_anything)
        if skipped != self._num_skipped:
            raise CheckpointError(
                f"The state is of a stream without its first {skipped} elements, and here it is {self._num_skipped}: "
                f"write .skip({skipped})."
            )
        move_to(self._parent, saved)
        self._step = step


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Cache(Join):
    """The elements of a stream, kept in memory once they have been drawn."""

    text = ".cache()"

    def opened(self, open_below: OpenBelow) -> RecoveringIterator[Any]:
        return _CacheIterator(open_below(*self.above))


@final
class _CacheIterator(RecoveringIterator[Any]):
    """Keeps the elements that it draws, and yields copies of them, which operations may change in place."""

    def __init__(self, parent: DatasetIterator[Any]) -> None:
        super().__init__(parent)
        self._beginning = position_of(parent)
        self._kept: list[Any] = []
        # False while the parent may be after another element than the last one kept.
        self._is_in_step = True

    def _draw(self, count: int) -> Drawn[Any]:
        missing = self._step + count - len(self._kept)
        error = self._keep_next(missing) if missing > 0 else None
        return Drawn(list(map(_copied, self._kept[self._step : self._step + count])), error)

    def _state(self) -> SavedPosition:
        return SavedPosition((_CACHED, self._step, self._beginning))

    def _move(self, position: Any) -> None:
        step, beginning = values_of(position, _CACHED, is_number, is_anything)
        if not self._kept or beginning != self._beginning:
            # The state may belong to another stream, and is then refused.
            self._is_in_step = False
            move_to(self._parent, beginning)
            self._is_in_step = not self._kept
        # The elements before it are drawn with the next one, when the workers below are there.
        self._step = step

    def _keep_next(self, count: int) -> BaseException | None:
        """Keeps the next elements of the parent. Returns the error that follows them, if any."""
        if not self._is_in_step:
            move_to(self._parent, self._beginning)
            skipped = drawn_from(self._parent, len(self._kept))
            if skipped.error is not None:
                return skipped.error
        self._is_in_step = False
        drawn = drawn_from(self._parent, count)
        self._kept += drawn.values
        self._is_in_step = drawn.error is None
        if drawn.error is None and len(self._kept) < self._step:
            return CheckpointError(
                f"The state is at element {self._step} of a cached dataset, which has {len(self._kept)}."
            )
        return drawn.error


_UNCHANGEABLE = frozenset({int, float, complex, bool, str, bytes, NoneType})


def _copied(value: Any) -> Any:
    """Returns a copy of an element, with copies of all that can be changed in it."""
    kind = type(value)
    if kind in _UNCHANGEABLE:
        return value
    if kind is dict:
        return {name: _copied(member) for name, member in value.items()}
    if kind is list or kind is tuple:
        return kind(map(_copied, value))
    if kind is np.ndarray and not value.dtype.hasobject:
        return value.copy(order="K") if value.flags.writeable else value
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001  (an open file, for instance: there is one of it)
        return value
