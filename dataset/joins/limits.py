"""Parts of one other stream: its first elements, and those after them; and its elements kept in memory."""

import copy
import dataclasses
from types import NoneType
from typing import Any, final

import numpy as np

from millstream.core.checks import as_integer
from millstream.dataset.iterators.inputs import Input, JoinedInput, SingleInput
from millstream.dataset.iterators.join_iterator import iterator_of
from millstream.dataset.stream_steps import Join, OpenBelow
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.envelope import SavedPosition, is_anything, is_number, values_of
from millstream.loader.pipeline.elements import END, Lack
from millstream.loader.scheduling.feed import KEPT_ELEMENTS

_LIMITED = "a limited dataset"
_SKIPPED = "a stream without its first elements"
_CACHED = "a cached dataset"


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Take(Join):
    """The first elements of a stream."""

    count: int

    def opened(self, open_below: OpenBelow) -> JoinedInput:
        return _LimitedInput(open_below(*self.above), self.count)

    @property
    def text(self) -> str:
        return f".take({self.count})"


@final
class _LimitedInput(SingleInput):
    """A limited number of elements."""

    def __init__(self, one: Input, limit: int) -> None:
        super().__init__(one)
        self._limit = limit

    def num_ready(self) -> int:
        return min(self.one.num_ready(), self._limit - self.step)

    def fetch(self, limit: int) -> Lack | None:
        left = self._limit - self.step
        return self.one.fetch(min(limit, left)) if left > 0 else END

    def position(self, back: int = 0) -> SavedPosition:
        return SavedPosition((_LIMITED, self.step - back, self.one.position(back)))

    def move(self, position: Any) -> None:
        step, saved = values_of(position, _LIMITED, is_number, is_anything)
        if step > self._limit:
            raise CheckpointError(
                f"The state is after {step} elements, and here .take({self._limit}) ends before: use its former count."
            )
        self.one.move(saved)
        self.step = step

    def seek(self, step: int) -> None:
        """Moves to the position after the first `step` elements, if the input can do that."""
        if not 0 <= as_integer(step, "step") <= self._limit:
            raise IndexError(f"step must be between 0 and {self._limit}, the number of elements of .take, got {step}.")
        iterator_of(self.one).seek(step)
        self.step = step


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Skip(Join):
    """The elements of a stream after the first `count`."""

    count: int

    def opened(self, open_below: OpenBelow) -> JoinedInput:
        return _SkippedInput(open_below(*self.above), self.count)

    @property
    def text(self) -> str:
        return f".skip({self.count})"


@final
class _SkippedInput(SingleInput):
    """The elements after the first ones, which are dropped by the first fetches."""

    def __init__(self, one: Input, num_skipped: int) -> None:
        super().__init__(one)
        self._num_skipped = num_skipped
        # The number of these that were not dropped yet, and the position before all; None before the first fetch.
        self._left = num_skipped
        self._beginning: Any = None

    def num_ready(self) -> int:
        return 0 if self._left else self.one.num_ready()

    def fetch(self, limit: int) -> Lack | None:
        if self._left and self._beginning is None:
            self._beginning = self.one.position()
        while self._left:
            if not self.one.num_ready() and (lack := self.one.fetch(min(self._left, KEPT_ELEMENTS))) is not None:
                return lack
            self._left -= len(self.one.take(min(self._left, self.one.num_ready())))
        return None if self.one.num_ready() else self.one.fetch(limit)

    def position(self, back: int = 0) -> SavedPosition:
        is_begun = self.step > back or self._beginning is None
        saved = self.one.position(back) if is_begun else self._beginning
        return SavedPosition((_SKIPPED, self.step - back, self._num_skipped, saved))

    def move(self, position: Any) -> None:
        step, skipped, saved = values_of(position, _SKIPPED, is_number, is_number, is_anything)
        if skipped != self._num_skipped:
            raise CheckpointError(
                f"The state is of a stream without its first {skipped} elements, and here it is {self._num_skipped}: "
                f"write .skip({skipped})."
            )
        self.one.move(saved)
        self.step, self._left, self._beginning = step, 0 if step else skipped, None


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Cache(Join):
    """The elements of a stream, kept in memory once they have been drawn."""

    text = ".cache()"

    def opened(self, open_below: OpenBelow) -> JoinedInput:
        return _CachedInput(open_below(*self.above))


@final
class _CachedInput(SingleInput):
    """Elements that are kept once they were fetched. Operations may change the copies of them that they get."""

    def __init__(self, one: Input) -> None:
        super().__init__(one)
        self._beginning = one.position()
        self._kept: list[Any] = []
        # The number of these that the input yields again before others; None if that is unknown.
        self._behind: int | None = 0

    def num_ready(self) -> int:
        return max(0, len(self._kept) - self.step)

    def fetch(self, limit: int) -> Lack | None:
        # The elements before a position that was moved to are fetched with the next one, when the workers are there.
        while len(self._kept) <= self.step:
            # An error may leave the input anywhere.
            behind, self._behind = self._behind, None
            if behind is None:
                self.one.move(self._beginning)
                behind = len(self._kept)
            wanted = behind or self.step - len(self._kept) + limit
            lack = None if self.one.num_ready() else self.one.fetch(wanted)
            if lack is None and behind:
                behind -= len(self.one.take(min(behind, self.one.num_ready())))
            elif lack is None:
                self._kept += self.one.take(self.one.num_ready())
            self._behind = behind
            if lack is END and len(self._kept) < self.step:
                raise CheckpointError(
                    f"The state is at element {self.step} of a cached dataset, which has {len(self._kept)}."
                )
            if lack is not None:
                return lack
        return None

    def take(self, count: int) -> list[Any]:
        taken = list(map(_copied, self._kept[self.step : self.step + count]))
        self.step += count
        return taken

    def position(self, back: int = 0) -> SavedPosition:
        return SavedPosition((_CACHED, self.step - back, self._beginning))

    def move(self, position: Any) -> None:
        step, beginning = values_of(position, _CACHED, is_number, is_anything)
        if not self._kept or beginning != self._beginning:
            # The state may belong to another stream, and is then refused.
            self._behind = None
            self.one.move(beginning)
            self._behind = None if self._kept else 0
        self.step = step


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
