"""Streams that take turns: interleaved, concatenated, repeated; a limited number is open at a time. Streams zipped."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, final

from millstream.core.closing import close_each, open_each
from millstream.core.signals import is_from_signal_handler
from millstream.dataset.iterators.inputs import Input, JoinedInput, SingleInput
from millstream.dataset.stream_steps import Join, OpenBelow, StreamStep, as_stream, step_of
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.envelope import SavedPosition, is_anything, is_flag, is_list, is_number, values_of
from millstream.loader.pipeline.elements import END, Lack


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

    def opened(self, open_below: OpenBelow) -> JoinedInput:
        return _InputsInTurn(self.datasets, min(self.cycle_length, len(self.datasets)), open_below)

    @property
    def text(self) -> str:
        if self.cycle_length == 1:
            return f"concatenate({len(self.datasets)} datasets)"
        return f"interleave({len(self.datasets)} datasets, cycle_length={self.cycle_length})"


MAX_HOLES = 64
"""The number of missing elements of a MapDataset up to which datasets after them are opened before their turn."""

_KIND = "interleaved datasets"
_REPEATED = "a repeated dataset"
_ZIPPED = "zipped datasets"


class _Slot:
    """An open dataset with its number, -1 for none. Once it has ended, `last` is its position at its end."""

    number = -1
    input: Input | None = None
    last: Any = None

    def position(self, back: int) -> SavedPosition:
        last = self.last if self.input is None else self.input.position(back)
        return SavedPosition((self.number, self.input is None, last))


def _turns_of(rank: int, count: int, num_open: int) -> int:
    """Returns the number of elements of one of several slots, by its rank in their order, among the next `count`."""
    return max(0, -(-(count - rank) // num_open))


@final
class _InputsInTurn(JoinedInput):
    """An element of one slot after another.

    All slots read ahead concurrently. Once a dataset has ended, the next ones are opened before their turn, so that the
    first elements of short datasets are ready by then. They are at their beginning, and not part of a state.
    """

    def __init__(self, datasets: Any, num_slots: int, open_below: OpenBelow) -> None:
        super().__init__(())
        self._datasets = datasets
        self._open_below = open_below
        self._slots = [_Slot() for _ in range(num_slots)]
        self._early: dict[int, Input] = {}
        self._next = 0
        self._turn = 0
        self._is_begun = False
        # The turn before the latest elements, the numbers of the slots that had them, in order, and their number.
        self._latest: tuple[int, list[int], int] = 0, [], 0

    def below(self) -> Iterator[tuple[str, Input]]:
        """Yields the open datasets, also before their turn, without names, because others replace them."""
        return (("", one) for one in dict.fromkeys(self.open_inputs()))

    def open_inputs(self) -> Iterator[Input]:
        yield from [*self._early.values(), *(slot.input for slot in self._slots if slot.input is not None)]

    def fetch(self, limit: int) -> Lack | None:
        self.read_together()
        self._begin()
        ended = 0
        while ended < len(self._slots):
            slot = self._slots[self._turn]
            ended += 1
            if slot.input is not None:
                order = self._order()
                lack = None
                if not slot.input.num_ready():
                    lack = self.fetch_from(slot.input, _turns_of(0, limit, len(order)), slot.number)
                if lack is None:
                    self._ready = self._num_ready(order, limit)
                if lack is not END:
                    return lack
                self._open_next(slot)
                self._open_early()
                ended = 0
            self._turn = (self._turn + 1) % len(self._slots)
        return END

    def _order(self) -> list[int]:
        """Returns the numbers of the open slots, in the order of their turns."""
        numbers = [*range(self._turn, len(self._slots)), *range(self._turn)]
        return [number for number in numbers if self._slots[number].input is not None]

    def _num_ready(self, order: Sequence[int], limit: int) -> int:
        """Returns the number of elements up to the first slot that has fetched none for its turn."""
        ready = limit
        for rank, number in enumerate(order):
            one = self._slots[number].input
            if one is not None and (wanted := _turns_of(rank, ready, len(order))):
                ready = min(ready, one.fill(wanted) * len(order) + rank)
        return ready

    def take(self, count: int) -> list[Any]:
        order = self._order()
        values: list[Any] = [None] * count
        for rank, number in enumerate(order[:count]):
            one = self._slots[number].input
            if one is not None:
                values[rank :: len(order)] = one.take(_turns_of(rank, count, len(order)))
        self._latest = self._turn, order, count
        self._turn = (order[(count - 1) % len(order)] + 1) % len(self._slots)
        self._count(count)
        return values

    def position(self, back: int = 0) -> SavedPosition:
        self._begin()
        turn, backs = self._turn, dict[int, int]()
        if back:
            turn, order, count = self._latest
            stop = count - back
            backs = {
                number: _turns_of(rank, count, len(order)) - _turns_of(rank, stop, len(order))
                for rank, number in enumerate(order)
            }
            if stop:
                turn = (order[(stop - 1) % len(order)] + 1) % len(self._slots)
        slots = tuple([slot.position(backs.get(number, 0)) for number, slot in enumerate(self._slots)])
        return SavedPosition((_KIND, self.step - back, self._next, turn, slots))

    def move(self, position: Any) -> None:
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
                    slot.input = self._opened(self._datasets[number], number)
                    slot.input.move(saved)
        except BaseException:
            close_each(slot.input for slot in slots if slot.input is not None)
            raise
        for _, replaced in self.below():
            self.keep_measurements(replaced)
        close_each(self.open_inputs())
        self._early.clear()
        self._slots, self._next, self._turn, self._ready = slots, following, turn, 0
        # A state of a closed iterator may have slots in which no dataset was opened yet.
        self.step, self._is_begun, self.is_prefetching = step, False, False
        self._check_open()

    def start_prefetch(self) -> None:
        self._begin()
        super().start_prefetch()

    def _begin(self) -> None:
        if not self._is_begun and not self.is_closed:
            for slot in self._slots:
                if slot.number < 0:
                    self._open_next(slot)
            self._is_begun = True

    def _open_next(self, slot: _Slot) -> None:
        """Opens the next dataset in a slot, or none if there are no more. After an error, it can be retried."""
        number, opened = self._following()
        ended = slot.input
        # Only a slot that stays empty has the position of the dataset that has ended in it.
        last = ended.position() if ended is not None and opened is None else slot.last
        # In one statement, so that an exception of a signal handler comes before or after it.
        slot.input, self._next, slot.last = opened, number + 1, last
        if opened is not None:
            slot.number = number
        self._early.pop(number, None)
        if ended is not None:
            self.keep_measurements(ended)
            ended.close()
        self._check_open()

    def _following(self) -> tuple[int, Input | None]:
        """Returns the number and the input of the next dataset; the last number and None if there are no more."""
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
        # There may be only holes from here on, and any number of them.
        stop = min(len(self._datasets), self._next + len(self._slots) + MAX_HOLES)
        while len(self._early) < len(self._slots) and number < stop:
            try:
                dataset = self._datasets[number]
                if dataset is not None and not self._step_of(dataset, number).reads_in_threads:
                    return
                if dataset is not None:
                    self._early[number] = opened = self._opened(dataset, number)
                    opened.start_prefetch()
            except Exception as error:
                self._early.pop(number, None)
                if is_from_signal_handler(error):
                    raise
                # Its error comes at its turn.
                return
            self._check_open()
            number += 1

    def _check_open(self) -> None:
        """Closes what was opened while another thread has closed all others, and raises ValueError."""
        if self.is_closed:
            self.close()
            raise ValueError("The streams of this iterator are closed. Call iter(dataset) for a new one.")

    def _opened(self, dataset: Any, number: int) -> Input:
        opened = self._open_below(self._step_of(dataset, number))
        if self.is_for_operations:
            opened.for_operations()
        return opened

    def _step_of(self, dataset: Any, number: int) -> StreamStep:
        """Returns the step of a member, which is a step, or a dataset if it is an element of a MapDataset."""
        return dataset if isinstance(dataset, StreamStep) else step_of(as_stream(dataset, f"datasets[{number}]"))


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Repeat(Join):
    """The elements of a stream several times, or endlessly if `num_epochs` is None.

    Turns of the same stream would open it again for each epoch, and lose its workers and the elements of a cache.
    """

    num_epochs: int | None

    def opened(self, open_below: OpenBelow) -> JoinedInput:
        return _RepeatedInput(open_below(*self.above), self.num_epochs)

    @property
    def text(self) -> str:
        return f".repeat({'' if self.num_epochs is None else self.num_epochs})"


@final
class _RepeatedInput(SingleInput):
    """An input that is sent back to its beginning where it ends; so its worker processes stay."""

    def __init__(self, one: Input, num_epochs: int | None) -> None:
        super().__init__(one)
        self._num_epochs = num_epochs
        self._epoch = 0
        self._beginning = one.position()
        # The number of elements before this epoch. An epoch that yields nothing is the last.
        self._begin = 0

    def fetch(self, limit: int) -> Lack | None:
        while (lack := self.one.fetch(limit)) is END:
            if self.step == self._begin or (self._num_epochs is not None and self._epoch + 1 >= self._num_epochs):
                return END
            self.one.move(self._beginning)
            self._epoch, self._begin = self._epoch + 1, self.step
        return lack

    def position(self, back: int = 0) -> SavedPosition:
        step = self.step - back
        return SavedPosition((_REPEATED, step, self._epoch, step == self._begin, self.one.position(back)))

    def move(self, position: Any) -> None:
        step, epoch, is_empty, saved = values_of(position, _REPEATED, is_number, is_number, is_flag, is_anything)
        if self._num_epochs is not None and epoch >= self._num_epochs:
            raise CheckpointError(
                f"The state is in epoch {epoch} of a repeated dataset, and here there are {self._num_epochs}. Repeat "
                "it at least as often as the saved stream."
            )
        self.one.move(saved)
        self.step, self._epoch, self._begin = step, epoch, step if is_empty else -1


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Zip(Join):
    """Tuples of the elements that streams yield at the same time."""

    strict: bool

    def opened(self, open_below: OpenBelow) -> JoinedInput:
        return _ZippedInputs(open_each(open_below, self.above), self.strict)

    @property
    def text(self) -> str:
        return "zip" if self.strict else "zip(strict=False)"


@final
class _ZippedInputs(JoinedInput):
    """An element of each input, in order."""

    def __init__(self, inputs: Sequence[Input], strict: bool) -> None:
        super().__init__(inputs)
        self._strict = strict
        self._ended = False
        # The input that has ended first, until it is known whether the others do.
        self._shorter: int | None = None

    def fetch(self, limit: int) -> Lack | None:
        if self._ended:
            return END
        self.read_together()
        if self._shorter is None:
            for number, one in enumerate(self.inputs):
                if not one.num_ready() and (lack := self.fetch_from(one, limit, number)) is not None:
                    if lack is not END:
                        return lack
                    self._shorter = number
                    break
        if self._shorter is not None:
            return self._end(self._shorter)
        self._ready = min(limit, *(one.num_ready() for one in self.inputs))
        return None

    def take(self, count: int) -> list[Any]:
        taken = list(zip(*[one.take(count) for one in self.inputs], strict=True))
        self._count(count)
        return taken

    def _end(self, shorter: int) -> Lack:
        """Ends with an input, or raises an error if all must end together, and another one has an element."""
        longer = 0 if shorter and self._strict else None
        if self._strict and not shorter:
            for number, one in enumerate(self.inputs[1:], 1):
                lack = None if one.num_ready() else self.fetch_from(one, 1, number)
                if lack is None:
                    longer = number
                    break
                if lack is not END:
                    return lack
        self._ended = True
        # Those before it have been drawn from for the last time.
        for earlier in self.inputs[:shorter]:
            earlier.take(1)
        if longer is not None:
            raise _unequal(shorter, longer)
        return END

    def position(self, back: int = 0) -> SavedPosition:
        return SavedPosition(
            (_ZIPPED, self.step - back, self._ended, tuple([one.position(back) for one in self.inputs]))
        )

    def move(self, position: Any) -> None:
        step, ended, inputs = values_of(position, _ZIPPED, is_number, is_flag, is_list)
        if len(inputs) != len(self.inputs):
            raise CheckpointError(
                f"The state is of {len(inputs)} zipped datasets, but there are {len(self.inputs)} here: zip the "
                "same datasets as when it was saved."
            )
        for one, saved in zip(self.inputs, inputs, strict=True):
            one.move(saved)
        self.step, self._ended, self._shorter, self._ready, self.is_prefetching = step, ended, None, 0, False


def _unequal(shorter: int, longer: int) -> ValueError:
    return ValueError(
        f"Datasets that are zipped must end together, but parents[{shorter}] has ended before parents[{longer}]. "
        "Write strict=False to end with the shortest."
    )
