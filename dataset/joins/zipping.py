"""Streams zipped to one of tuples."""

import dataclasses
from collections.abc import Sequence
from typing import Any, final

from millstream.dataset.iterators.dataset_iterator import DatasetIterator, Drawn, drawn_from, move_to, position_of
from millstream.dataset.iterators.recovering_iterator import RecoveringIterator
from millstream.dataset.stream_steps import Join, OpenBelow
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.envelope import SavedPosition, is_flag, is_list, is_number, values_of


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Zip(Join):
    """Tuples of the elements that streams yield at the same time."""

    strict: bool

    def opened(self, open_below: OpenBelow) -> RecoveringIterator[Any]:
        return _ZipIterator(list(map(open_below, self.above)), self.strict)

    @property
    def text(self) -> str:
        return "zip" if self.strict else "zip(strict=False)"


@final
class _ZipIterator(RecoveringIterator[tuple[Any, ...]]):
    """Draws an element of each stream, in order."""

    _reads_together = True

    def __init__(self, parents: Sequence[DatasetIterator[Any]], strict: bool) -> None:
        super().__init__(parents)
        self._strict = strict
        self._ended = False

    def _draw_one(self) -> tuple[Any, ...]:
        if self._ended:
            raise StopIteration
        drawn: list[Any] = []
        try:
            for parent in self._parents:
                drawn.append(next(parent))  # noqa: PERF401  (their number is needed if one has ended)
        except StopIteration:
            self._ended = True
            raise self._error_at_end(len(drawn)) or StopIteration from None
        return tuple(drawn)

    def _draw(self, count: int) -> Drawn[tuple[Any, ...]]:
        if self._ended:
            return Drawn([])
        columns: list[Sequence[Any]] = []
        shortest, error = None, None
        for number, parent in enumerate(self._parents):
            drawn = drawn_from(parent, count)
            columns.append(drawn.values)
            if len(drawn.values) < count:
                count, shortest, error = len(drawn.values), number, drawn.error
        if shortest is not None and error is None:
            self._ended = True
            error = self._error_at_end(shortest)
        return Drawn(list(zip(*[column[:count] for column in columns], strict=True)), error)

    def _error_at_end(self, shorter: int) -> BaseException | None:
        """Returns an error if all must end together, and another one yields an element or fails where one has ended."""
        if not self._strict:
            return None
        if shorter:
            return _unequal(shorter, 0)
        for number, parent in enumerate(self._parents[1:], 1):
            drawn = drawn_from(parent, 1)
            if drawn.values or drawn.error is not None:
                return drawn.error or _unequal(0, number)
        return None

    def _state(self) -> SavedPosition:
        return SavedPosition((_KIND, self._step, self._ended, tuple(map(position_of, self._parents))))

    def _move(self, position: Any) -> None:
        step, ended, parents = values_of(position, _KIND, is_number, is_flag, is_list)
        if len(parents) != len(self._parents):
            raise CheckpointError(
                f"The state is of {len(parents)} zipped datasets, but there are {len(self._parents)} here: zip the "
                "same datasets as when it was saved."
            )
        for parent, saved in zip(self._parents, parents, strict=True):
            move_to(parent, saved)
        self._step, self._ended = step, ended


_KIND = "zipped datasets"


def _unequal(shorter: int, longer: int) -> ValueError:
    return ValueError(
        f"Datasets that are zipped must end together, but parents[{shorter}] has ended before parents[{longer}]. "
        "Write strict=False to end with the shortest."
    )
