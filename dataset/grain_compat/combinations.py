"""Streams of one other stream: limited, repeated, cached."""

import copy
from types import NoneType
from typing import Any, SupportsIndex, final

import numpy as np

from millstream.core.checks import as_integer, as_integer_or_none
from millstream.dataset.chain import as_stream, opened_below
from millstream.dataset.iterators.dataset_iterator import DatasetIterator, Drawn, drawn_from, move_to, state_below
from millstream.dataset.iterators.recovering_iterator import RecoveringIterator
from millstream.dataset.iterators.running import Shared
from millstream.dataset.stream_nodes import Combined
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.state import is_anything, is_flag, is_number, sealed, unsealed
from millstream.loader.scheduling.feed import KEPT_ELEMENTS


@final
class LimitIterDataset(Combined):
    """The first elements of a dataset.

    Args:
        parent: the dataset.
        count: the maximum number of elements, at least 1.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> list(millstream.experimental.LimitIterDataset(millstream.MapDataset.range(100), 3))
        [0, 1, 2]
    """

    def __init__(self, parent: Any, count: SupportsIndex) -> None:
        super().__init__(as_stream(parent, "parent"))
        self.count = as_integer(count, "count", minimum=1)

    def _drawn(self, shared: Shared) -> RecoveringIterator[Any]:
        return _LimitIterator(opened_below(self._parent, shared), self.count)

    def _line(self) -> str:
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

    def _state(self) -> dict[str, Any]:
        return sealed("a limited dataset", {"count": self._step, "parent": state_below(self._parent)})

    def _move(self, state: dict[str, Any]) -> None:
        checked = unsealed(state, "a limited dataset", {"count": is_number, "parent": is_anything})
        if checked["count"] > self._limit:
            raise CheckpointError(
                f"The state is after {checked['count']} elements, and here .take({self._limit}) ends before: use its "
                "former count."
            )
        move_to(self._parent, checked["parent"])
        self._step = checked["count"]

    def seek(self, step: int) -> None:
        if not 0 <= as_integer(step, "step") <= self._limit:
            raise IndexError(f"step must be between 0 and {self._limit}, the number of elements of .take, got {step}.")
        self._go(lambda: self._seek(step))

    def _seek(self, step: int) -> None:
        self._parent.seek(step)
        self._step = step


@final
class Skipped(Combined):
    """The elements of a dataset after the first `count`."""

    def __init__(self, parent: Any, count: SupportsIndex) -> None:
        super().__init__(as_stream(parent, "parent"))
        self.count = as_integer(count, "count", minimum=0)

    def _drawn(self, shared: Shared) -> RecoveringIterator[Any]:
        return _SkippedIterator(opened_below(self._parent, shared), self.count)

    def _line(self) -> str:
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
            values, error = drawn_from(self._parent, min(left, KEPT_ELEMENTS))
            left -= len(values)
            if error is not None or not values:
                return Drawn([], error)
        return drawn_from(self._parent, count)

    def _state(self) -> dict[str, Any]:
        return sealed(_SKIPPED, {"step": self._step, "skipped": self._num_skipped, "parent": state_below(self._parent)})

    def _move(self, state: dict[str, Any]) -> None:
        checked = unsealed(state, _SKIPPED, {"step": is_number, "skipped": is_number, "parent": is_anything})
        if checked["skipped"] != self._num_skipped:
            raise CheckpointError(
                f"The state is of a stream without its first {checked['skipped']} elements, and here it is "
                f"{self._num_skipped}: write .skip({checked['skipped']})."
            )
        move_to(self._parent, checked["parent"])
        self._step = checked["step"]


_SKIPPED = "a stream without its first elements"


@final
class RepeatIterDataset(Combined):
    """The elements of a dataset several times: the same ones, with the same draws, each time.

    Args:
        parent: the dataset.
        num_epochs: the number of times, at least 1; None for an endless stream.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> list(millstream.experimental.RepeatIterDataset(millstream.MapDataset.source(["a", "b"]), num_epochs=2))
        ['a', 'b', 'a', 'b']
    """

    def __init__(self, parent: Any, num_epochs: SupportsIndex | None = None) -> None:
        super().__init__(as_stream(parent, "parent"))
        self.num_epochs = as_integer_or_none(num_epochs, "num_epochs")

    def _drawn(self, shared: Shared) -> RecoveringIterator[Any]:
        return _RepeatIterator(opened_below(self._parent, shared), self.num_epochs)

    def _line(self) -> str:
        return f".repeat({'' if self.num_epochs is None else self.num_epochs})"


@final
class _RepeatIterator(RecoveringIterator[Any]):
    """Draws from a stream, and sends it back to its beginning where it ends; so its worker processes stay."""

    def __init__(self, parent: DatasetIterator[Any], num_epochs: int | None) -> None:
        super().__init__(parent)
        self._num_epochs = num_epochs
        self._epoch = 0
        self._beginning = state_below(parent)
        # True until this epoch yields an element. An epoch that yields nothing is the last.
        self._is_empty = True

    def _draw_one(self) -> Any:
        while True:
            try:
                element = next(self._parent)
            except StopIteration:
                if self._is_last:
                    raise
                self._restart()
            else:
                self._is_empty = False
                return element

    def _draw(self, count: int) -> Drawn[Any]:
        values: list[Any] = []
        while True:
            drawn = drawn_from(self._parent, count - len(values))
            values += drawn.values
            self._is_empty = self._is_empty and not drawn.values
            if drawn.error is not None or len(values) == count or self._is_last:
                return Drawn(values, drawn.error)
            self._restart()

    def _restart(self) -> None:
        move_to(self._parent, self._beginning)
        self._epoch, self._is_empty = self._epoch + 1, True

    @property
    def _is_last(self) -> bool:
        """True if no epoch follows the one that has ended."""
        return self._is_empty or (self._num_epochs is not None and self._epoch + 1 >= self._num_epochs)

    def _state(self) -> dict[str, Any]:
        own = {"step": self._step, "epoch": self._epoch, "is_empty": self._is_empty}
        return sealed("a repeated dataset", own | {"parent": state_below(self._parent)})

    def _move(self, state: dict[str, Any]) -> None:
        checks = {"step": is_number, "epoch": is_number, "is_empty": is_flag, "parent": is_anything}
        checked = unsealed(state, "a repeated dataset", checks)
        if self._num_epochs is not None and checked["epoch"] >= self._num_epochs:
            raise CheckpointError(
                f"The state is in epoch {checked['epoch']} of a repeated dataset, and here there are "
                f"{self._num_epochs}: write .repeat with the number that it had."
            )
        move_to(self._parent, checked["parent"])
        self._step, self._epoch, self._is_empty = checked["step"], checked["epoch"], checked["is_empty"]


@final
class CacheIterDataset(Combined):
    """The elements of a dataset, kept in memory once they have been drawn: for a `RepeatIterDataset` after it.

    Where it is resumed in another process, the elements before are drawn once more.

    Args:
        parent: the dataset; all of its elements must fit into memory.

    Raises:
        TypeError: the parent is not a dataset. While reading, a CheckpointError if a state is beyond the end.

    Examples:
        >>> kept = millstream.experimental.CacheIterDataset(millstream.MapDataset.range(3).map(lambda x: x * 10))
        >>> list(millstream.experimental.RepeatIterDataset(kept, num_epochs=2))
        [0, 10, 20, 0, 10, 20]
    """

    def __init__(self, parent: Any) -> None:
        super().__init__(as_stream(parent, "parent"))

    def _drawn(self, shared: Shared) -> RecoveringIterator[Any]:
        return _CacheIterator(opened_below(self._parent, shared))

    def _line(self) -> str:
        return ".cache()"


@final
class _CacheIterator(RecoveringIterator[Any]):
    """Keeps the elements that it draws, and yields copies of them, which operations may change in place."""

    def __init__(self, parent: DatasetIterator[Any]) -> None:
        super().__init__(parent)
        self._beginning = state_below(parent)
        self._kept: list[Any] = []
        # False while the parent may be after another element than the last one kept.
        self._is_in_step = True

    def _draw(self, count: int) -> Drawn[Any]:
        missing = self._step + count - len(self._kept)
        error = self._keep_next(missing) if missing > 0 else None
        return Drawn(list(map(_copied, self._kept[self._step : self._step + count])), error)

    def _state(self) -> dict[str, Any]:
        return sealed("a cached dataset", {"position": self._step, "parent": self._beginning})

    def _move(self, state: dict[str, Any]) -> None:
        checked = unsealed(state, "a cached dataset", {"position": is_number, "parent": is_anything})
        if not self._kept or checked["parent"] != self._beginning:
            # The state may belong to another stream, and is then refused.
            self._is_in_step = False
            move_to(self._parent, checked["parent"])
            self._is_in_step = not self._kept
        # The elements before it are drawn with the next one, when the workers below are there.
        self._step = checked["position"]

    def _keep_next(self, count: int) -> BaseException | None:
        """Keeps the next elements of the parent. Returns the error that follows them, if any."""
        if not self._is_in_step:
            move_to(self._parent, self._beginning)
            _, error = drawn_from(self._parent, len(self._kept))
            if error is not None:
                return error
        self._is_in_step = False
        values, error = drawn_from(self._parent, count)
        self._kept += values
        self._is_in_step = error is None
        if error is None and len(self._kept) < self._step:
            return CheckpointError(
                f"The state is at element {self._step} of a cached dataset, which has {len(self._kept)}."
            )
        return error


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
