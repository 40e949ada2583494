"""Streams that take turns: interleaved, concatenated, repeated. A limited number of them is open at a time."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, final

from millstream.core.signals import interrupts, is_from_signal_handler
from millstream.dataset.iterators.dataset_iterator import DatasetIterator, Drawn, drawn_from, move_to, position_of
from millstream.dataset.iterators.recovering_iterator import RecoveringIterator
from millstream.dataset.stream_steps import Join, OpenBelow, StreamStep, as_stream, step_of
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.envelope import SavedPosition, is_anything, is_flag, is_list, is_number, values_of


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Turns(Join):
    """One element of each of `cycle_length` streams, one after another. With one, each stream follows the one before.

    Attributes:
        datasets: the streams as steps, or a `MapDataset` whose elements are datasets, the node of which is above.
        cycle_length: the number of streams that are open at a time.
    """

    datasets: Any
    cycle_length: int

    def opened(self, open_below: OpenBelow) -> RecoveringIterator[Any]:
        return _TurnsIterator(self.datasets, min(self.cycle_length, len(self.datasets)), open_below)

    @property
    def text(self) -> str:
        if self.cycle_length == 1:
            return f"concatenate({len(self.datasets)} datasets)"
        return f"interleave({len(self.datasets)} datasets, cycle_length={self.cycle_length})"


_KIND = "interleaved datasets"
_REPEATED = "a repeated dataset"


class _Slot:
    """An open dataset with its number, -1 for none. Once it has ended, `last` is its position at its end."""

    number = -1
    iterator: DatasetIterator[Any] | None = None
    last: Any = None

    def position(self) -> SavedPosition:
        last = self.last if self.iterator is None else position_of(self.iterator)
        return SavedPosition((self.number, self.iterator is None, last))


_NOTHING = object()
"""Stands for the turn of a slot whose dataset has ended."""


def _in_turn(columns: Sequence[list[Any]]) -> list[Any]:
    """Returns the elements of the first round, of the second one, and so on."""
    rounds = itertools.zip_longest(*columns, fillvalue=_NOTHING)
    return [value for value in itertools.chain.from_iterable(rounds) if value is not _NOTHING]


@final
class _TurnsIterator(RecoveringIterator[Any]):
    """Draws from one slot after another.

    All slots read ahead concurrently. Once a dataset has ended, the next ones are opened before their turn, so that the
    first elements of short datasets are ready by then. They are at their beginning, and not part of a state.
    """

    _reads_together = True

    def __init__(self, datasets: Any, num_slots: int, open_below: OpenBelow) -> None:
        super().__init__()
        self._datasets = datasets
        self._open_below = open_below
        self._slots = [_Slot() for _ in range(num_slots)]
        self._early: dict[int, DatasetIterator[Any]] = {}
        self._next = 0
        self._turn = 0
        self._is_begun = False

    def below(self) -> Iterator[tuple[str, DatasetIterator[Any]]]:
        """Yields the open datasets, also before their turn, without names, because others replace them."""
        opened = dict.fromkeys([*(slot.iterator for slot in self._slots), *self._early.values()])
        return (("", iterator) for iterator in opened if iterator is not None)

    def _draw(self, count: int) -> Drawn[Any]:
        values: list[Any] = []
        error: BaseException | None = None
        while error is None and (left := count - len(values)):
            slots = self._next_slots(left)
            if not slots:
                break
            drawn = self._draw_rounds(slots, left // len(slots))
            values += drawn.values
            error = drawn.error
        return Drawn(values, error)

    def _draw_one(self) -> Any:
        ended = 0
        while ended < len(self._slots):
            slot = self._slots[self._turn]
            ended += 1
            element = _NOTHING
            if slot.iterator is not None:
                try:
                    element = next(slot.iterator)
                except StopIteration:
                    self._open_next(slot)
                    self._open_early()
                    ended = 0
            self._turn = (self._turn + 1) % len(self._slots)
            if element is not _NOTHING:
                return element
        raise StopIteration

    def _next_slots(self, limit: int) -> list[_Slot]:
        """Returns the open slots whose turns come next, at most `limit`."""
        order = self._slots[self._turn :] + self._slots[: self._turn]
        return [slot for slot in order if slot.iterator is not None][:limit]

    def _draw_rounds(self, slots: Sequence[_Slot], rounds: int) -> Drawn[Any]:
        """Returns the elements of a number of rounds, in each of which each slot has its turn.

        A slot whose dataset ends yields nothing at that turn, and continues with the next dataset.
        """
        drawn = [drawn_from(slot.iterator, rounds) for slot in slots if slot.iterator is not None]
        columns, errors = [list(one.values) for one in drawn], [one.error for one in drawn]
        # Datasets are opened in the order in which those before them end.
        while (end := min((len(column), number) for number, column in enumerate(columns)))[0] < rounds:
            at, number = end
            slot, error = slots[number], errors[number]
            if error is None:
                error = self._replace(slot)
            if error is not None:
                before = [column[: at + (other < number)] for other, column in enumerate(columns)]
                return Drawn(_in_turn(before), error)
            columns[number].append(_NOTHING)
            left = rounds - at - 1
            following = Drawn([_NOTHING] * left) if slot.iterator is None else drawn_from(slot.iterator, left)
            columns[number] += following.values
            errors[number] = following.error
        self._turn = (self._slots.index(slots[-1]) + 1) % len(self._slots)
        return Drawn(_in_turn(columns))

    def _replace(self, slot: _Slot) -> BaseException | None:
        """Opens the next dataset in a slot, and those whose turn comes next. Returns the error, if there is one."""
        try:
            self._open_next(slot)
        except BaseException as error:
            if interrupts(error):
                raise
            return error
        self._open_early()
        return None

    def _state(self) -> SavedPosition:
        self._begin()
        slots = tuple(slot.position() for slot in self._slots)
        return SavedPosition((_KIND, self._step, self._next, self._turn, slots))

    def _move(self, position: Any) -> None:
        step, following, turn, saved_slots = values_of(position, _KIND, is_number, is_number, is_number, is_list)
        if len(saved_slots) != len(self._slots):
            raise CheckpointError(
                f"The state is of {len(saved_slots)} datasets that are open at a time, and here there are "
                f"{len(self._slots)}. Interleave them with cycle_length={len(saved_slots)}."
            )
        count, last = len(self._datasets), following - 1
        if last >= count:
            raise CheckpointError(
                f"The state is at dataset {last}, and here there are {count}. Pass the datasets of the saved stream."
            )
        slots: list[_Slot] = []
        try:
            for number, has_ended, saved in saved_slots:
                slot = _Slot()
                slot.number, slot.last = number, saved
                slots.append(slot)
                if not has_ended:
                    slot.iterator = self._opened(self._datasets[number], number)
                    move_to(slot.iterator, saved)
        except BaseException:
            for slot in slots:
                if slot.iterator is not None:
                    slot.iterator.close()
            raise
        for _, replaced in self.below():
            self.keep_measurements(replaced)
        self._close_all()
        self._slots, self._next, self._turn = slots, following, turn
        # A state of a closed iterator may have slots in which no dataset was opened yet.
        self._step, self._is_begun = step, False

    def start_prefetch(self) -> None:
        self._check_open()
        self._begin()
        for slot in self._slots:
            if slot.iterator is not None:
                slot.iterator.start_prefetch()
        self._is_prefetching = True

    def close(self) -> None:
        self._close_all()
        super().close()

    def _begin(self) -> None:
        if not self._is_begun and not self._closed:
            for slot in self._slots:
                if slot.number < 0:
                    self._open_next(slot)
            self._is_begun = True

    def _open_next(self, slot: _Slot) -> None:
        """Opens the next dataset in a slot, or none if there are no more. After an error, it can be retried."""
        number, iterator = self._following()
        ended = slot.iterator
        # Only a slot that stays empty has the position of the dataset that has ended in it.
        last = position_of(ended) if ended is not None and iterator is None else slot.last
        # In one statement, so that an exception of a signal handler comes before or after it.
        slot.iterator, self._next, slot.last = iterator, number + 1, last
        if iterator is not None:
            slot.number = number
        self._early.pop(number, None)
        if ended is not None:
            self.keep_measurements(ended)
            ended.close()

    def _following(self) -> tuple[int, DatasetIterator[Any] | None]:
        """Returns the number and the iterator of the next dataset; the last number and None if there are no more."""
        for number in range(self._next, len(self._datasets)):
            if number in self._early:
                return number, self._early[number]
            # A hole of the MapDataset is not a dataset.
            if (dataset := self._datasets[number]) is not None:
                return number, self._opened(dataset, number)
        return max(self._next, len(self._datasets)) - 1, None

    def _open_early(self) -> None:
        """Opens the datasets whose turn comes next, up to the number of slots, and starts their prefetching."""
        number = max(self._early, default=self._next - 1) + 1
        while len(self._early) < len(self._slots) and number < len(self._datasets):
            try:
                dataset = self._datasets[number]
                if dataset is not None and not self._step_of(dataset, number).reads_in_threads:
                    return
                if dataset is not None:
                    self._early[number] = iterator = self._opened(dataset, number)
                    iterator.start_prefetch()
            except Exception as error:
                self._early.pop(number, None)
                if is_from_signal_handler(error):
                    raise
                # Its error comes at its turn.
                return
            number += 1

    def _opened(self, dataset: Any, number: int) -> DatasetIterator[Any]:
        return self._open_below(self._step_of(dataset, number))

    def _step_of(self, dataset: Any, number: int) -> StreamStep:
        """Returns the step of a member, which is a step, or a dataset if it is an element of a MapDataset."""
        return dataset if isinstance(dataset, StreamStep) else step_of(as_stream(dataset, f"datasets[{number}]"))

    def _close_all(self) -> None:
        early, self._early = self._early, {}
        for iterator in [*early.values(), *(slot.iterator for slot in self._slots)]:
            if iterator is not None:
                iterator.close()


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Repeat(Join):
    """The elements of a stream several times, or endlessly if `num_epochs` is None.

    Turns of the same stream would open it again for each epoch, and lose its workers and the elements of a cache.
    """

    num_epochs: int | None

    def opened(self, open_below: OpenBelow) -> RecoveringIterator[Any]:
        return _RepeatIterator(open_below(*self.above), self.num_epochs)

    @property
    def text(self) -> str:
        return f".repeat({'' if self.num_epochs is None else self.num_epochs})"


@final
class _RepeatIterator(RecoveringIterator[Any]):
    """Draws from a stream, and sends it back to its beginning where it ends; so its worker processes stay."""

    def __init__(self, parent: DatasetIterator[Any], num_epochs: int | None) -> None:
        super().__init__(parent)
        self._num_epochs = num_epochs
        self._epoch = 0
        self._beginning = position_of(parent)
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

    def _state(self) -> SavedPosition:
        return SavedPosition((_REPEATED, self._step, self._epoch, self._is_empty, position_of(self._parent)))

    def _move(self, position: Any) -> None:
        step, epoch, is_empty, saved = values_of(position, _REPEATED, is_number, is_number, is_flag, is_anything)
        if self._num_epochs is not None and epoch >= self._num_epochs:
            raise CheckpointError(
                f"The state is in epoch {epoch} of a repeated dataset, and here there are {self._num_epochs}. Repeat "
                "it at least as often as the saved stream."
            )
        move_to(self._parent, saved)
        self._step, self._epoch, self._is_empty = step, epoch, is_empty
