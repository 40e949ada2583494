"""The iterator of a join that no operations follow: a queue of elements, and the position of each.

A signal handler may raise anywhere in a fetch, and a fetch may fail halfway. The inputs are then at any position. So
the iterator sets a flag while it fetches. If it finds the flag set, it moves to an earlier state, and draws the
elements since then again. A stream is a function, so they are the same.

It waits between two fetches. An exception in a wait leaves the inputs as they are, and the next fetch goes on there.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, final

from millstream.core.signals import interrupts
from millstream.dataset.iterators.dataset_iterator import DatasetIterator, SavingIterator
from millstream.dataset.iterators.inputs import Input, JoinInsight, OwnInput, PassedError, input_of
from millstream.loader.checkpoints.checkpointable import Exclusive
from millstream.loader.checkpoints.envelope import SavedPosition
from millstream.loader.checkpoints.state import Stream
from millstream.loader.measuring import ExecutorStatus, Profiler
from millstream.loader.pipeline.elements import END, Awaited, Lack
from millstream.loader.scheduling.feed import KEPT_ELEMENTS
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.views import Insight, Measured, serve_if_requested

if TYPE_CHECKING:
    from millstream.loader.engine.crew import Crew

ResultT = TypeVar("ResultT")

_TRIES = 100
"""The number of times that a state is taken again because another thread has moved the iterator meanwhile."""


@final
class JoinIterator(Measured, Exclusive, SavingIterator[Any], Input):
    """Yields the elements of a join. It fetches only those that come together with the next one.

    Operations that run in this process take elements from it like from any input, so that they wait themselves.
    """

    _in_use = (
        "This iterator is in use: another thread, or the code that a signal handler interrupted, is drawing an "
        "element. Its position is that of several datasets, and is known between two elements only. Set a flag in the "
        "handler, and call get_state after next()."
    )
    _crew: "Crew | None" = None
    """The workers that run the calls of the chains below, if it has workers."""

    def __init__(self, join: Input) -> None:
        super().__init__((join,))
        self.join = join
        self.profiler = Profiler(())
        self._workers, self._reading = MultiprocessingOptions(), ReadOptions(0, 0)
        # The elements that were taken, those that were not delivered, and the number of all that were taken.
        self._values: list[Any] = []
        self._row = self._stop = self._num_taken = 0
        # True in a fetch, and while elements are taken and counted; it stays so if that fails.
        self._is_torn = False
        # True from the first fetch until elements are taken: an input that has ended may be replaced already.
        self._is_ahead = False
        self._kept_state: Any = None
        self._kept_step = 0
        # The number of times that it has begun to fetch, or was moved.
        self._num_moves = 0
        self._counted_step = 0

    def __next__(self) -> Any:
        """Returns the next element. After an error of an input, the next call draws the same element again."""
        while self._row == self._stop:
            self._alone(self._fetch)
        # There is no call and no backward jump from here to the end, as in a `DataLoaderIterator`.
        values, row = self._values, self._row
        value = values[row]
        self._row = row + 1
        # It belongs to the caller now.
        values[row] = None
        return value

    @property
    def step(self) -> int:  # type: ignore[override]  # it is read only
        """The number of elements yielded since the beginning of the stream."""
        return self._num_taken - self._stop + self._row

    def _fetch(self) -> None:
        """Fetches and takes elements; raises StopIteration at the end of the stream."""
        self._check_open_to("advance")
        self.count_delivered()
        if self.consumer is not None:
            self._guarded(self._take)
            return
        is_first, start = self._kept_state is None, self.profiler.begin_wait(self)
        try:
            self._guarded(self._take)
        finally:
            self.profiler.end_wait(self, start, is_first=is_first)

    def _guarded(self, work: Callable[[], ResultT]) -> ResultT:
        """Returns the result of work. Workers that an interrupt of it may have left in any state end."""
        try:
            return work()
        except BaseException as error:
            self._end_workers_if(interrupts(error))
            raise

    def _take(self) -> None:
        """Fetches and takes elements; raises StopIteration at the end of the stream."""
        while (lack := self._advance()) is not None:
            if lack is END:
                raise StopIteration
            self.wait_for(lack)

    def fetch(self, limit: int) -> Lack | None:  # noqa: ARG002  (the join knows better)
        """Fetches elements if all were taken, and waits for none. Returns the reason if there are none."""
        self._check_open_to("advance")
        self.count_delivered()
        lack = self._alone(functools.partial(self._guarded, self._advance))
        return lack if lack is None or lack is END else _Wait(self, lack)

    def take(self, count: int) -> list[Any]:
        """Returns the next elements, which were fetched."""
        start = self._row
        self._row = stop = start + count
        taken, self._values[start:stop] = self._values[start:stop], [None] * count
        return taken

    def position(self, back: int = 0) -> SavedPosition:
        if not back:
            return self._position_here()
        if self._is_torn or self._is_ahead:
            raise PassedError
        position: SavedPosition = self.join.position(self._stop - self._row + back)
        return position

    def move(self, position: Any) -> None:
        self._move_to(position)

    def for_operations(self) -> None:
        self.join.for_operations()

    def insights(self) -> list[Insight]:
        return [self.insight]

    def _advance(self) -> Lack | None:
        """Fetches and takes elements. Returns the reason if there are none."""
        crew = self._crew
        request = None if crew is None else crew.begin_request()
        lack = self._fetch_and_take()
        if crew is not None and lack is not END:
            crew.end_request(request, self._stop - self._row)
        return lack

    def _fetch_and_take(self) -> Lack | None:
        if self._is_torn:
            self._recover()
        if self._kept_state is None:
            serve_if_requested(self)
            self._keep()
        elif self.step - self._kept_step >= KEPT_ELEMENTS:
            self._keep()
        if (lack := self._fetched()) is END:
            self._is_ahead = False
            if self._crew is not None:
                # The next iterator gets the workers.
                self._crew.pause()
        if lack is not None:
            return lack
        join = self.join
        self._is_torn = True
        values = join.take(min(join.num_ready(), KEPT_ELEMENTS))
        count = len(values)
        self._values, self._row, self._stop = values, 0, count
        self._num_taken, self._is_torn, self._is_ahead = self._num_taken + count, False, False
        if self._crew is not None:
            self._crew.proceed()
        self.profiler.record_first_size(values[0])
        return None

    def _fetched(self) -> Lack | None:
        """Fetches elements if there are none. Returns the reason if there are still none."""
        self._is_torn, self._is_ahead, self._num_moves = True, True, self._num_moves + 1
        lack = None if self.join.num_ready() else self.join.fetch(KEPT_ELEMENTS)
        self._is_torn = False
        return lack

    def wait_for(self, awaited: Awaited) -> None:
        """Waits. The workers end if that is interrupted."""
        crew = self._crew
        request = None if crew is None else crew.begin_request()
        try:
            awaited.wait()
        except BaseException:
            self._end_workers_if(True)
            raise
        if crew is not None:
            crew.end_request(request, 0)

    def _end_workers_if(self, may_be_in_any_state: bool) -> None:
        if may_be_in_any_state and self._crew is not None:
            self._crew.close()

    def _keep(self) -> None:
        self._kept_state, self._kept_step = self.join.position(self._stop - self._row), self.step

    def _recover(self) -> None:
        if not (self._is_torn or self._is_ahead):
            return
        step, join = self.step, self.join
        self._is_torn = True
        join.move(self._kept_state)
        missing = step - self._kept_step
        while missing:
            lack = None if join.num_ready() else join.fetch(min(missing, KEPT_ELEMENTS))
            if lack is END:
                raise RuntimeError(f"The stream has ended at element {step - missing}, and there were {step} before.")
            if lack is None:
                missing -= len(join.take(min(missing, join.num_ready())))
            else:
                self.wait_for(lack)
        self._num_moves += 1
        self._values, self._row, self._stop, self._num_taken = [], 0, 0, step
        self._is_torn = self._is_ahead = False

    def _position_here(self) -> SavedPosition:
        for _ in range(_TRIES):
            if self._is_in_use or self._is_torn or self._is_ahead:
                # Refused if it is in use, also by a call that recovers.
                self._guarded(functools.partial(self._alone, self._recover))
            moves = self._num_moves
            try:
                position: SavedPosition = self.join.position(self._stop - self._row)
            except PassedError:
                # `next` was interrupted after it had taken elements, unless another thread is taking some.
                self._is_torn = moves == self._num_moves and not self._is_in_use
                continue
            except Exception:
                if moves == self._num_moves:
                    raise
                continue
            # Another thread may have taken from some of the inputs meanwhile.
            if moves == self._num_moves and not self._is_in_use:
                return position
        raise ValueError(self._in_use)

    def _move_to(self, position: Any, stream: Stream | None = None) -> None:
        del stream
        self._go(functools.partial(self.join.move, position))

    def seek(self, step: int) -> None:
        if (seek := getattr(self.join, "seek", None)) is None:
            super().seek(step)
        else:
            self._go(functools.partial(seek, step))

    def _go(self, move: Callable[[], None]) -> None:
        """Moves the inputs and this iterator. An interruption leaves it where it was."""
        self._check_open_to("move")
        self._alone(functools.partial(self._keep_and_move, move))

    def _keep_and_move(self, move: Callable[[], None]) -> None:
        self.count_delivered()
        if not (self._is_torn or self._is_ahead):
            with contextlib.suppress(PassedError):
                self._keep()
        self._is_torn = True
        move()
        self._num_moves += 1
        self._counted_step = self.join.step
        self._values, self._row, self._stop, self._num_taken = [], 0, 0, self.join.step
        self._kept_state, self._is_torn, self._is_ahead = None, False, False

    def start_prefetch(self) -> None:
        self._check_open_to("prefetch from")
        self._guarded(super().start_prefetch)

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._crew is not None:
                self._crew.end()

    def run_by(self, crew: "Crew", workers: MultiprocessingOptions, reading: ReadOptions) -> None:
        """Uses workers with these options, until the end, where the next iterator gets them."""
        self._crew, self._workers, self._reading = crew, workers, reading

    @functools.cached_property
    def insight(self) -> Insight:
        choice = None if self._crew is None else self._crew.choice
        insight = JoinInsight(self.join, self.profiler, self._workers, self._reading, choice)
        insight.add(self)
        return insight

    @property
    def lifecycle(self) -> str:
        return "closed" if self._closed else "running" if self.step else "idle"

    def count_delivered(self) -> None:
        # The swap is one statement without a call, so that no two threads count the same.
        step = self.step
        before, self._counted_step = self._counted_step, step
        if self.consumer is None:
            self.profiler.delivered(step - before, 0)

    def num_ready(self) -> int:
        return max(0, self._stop - self._row)

    def executor_status(self) -> ExecutorStatus | None:
        # The workers change meanwhile. A status that fails now succeeds the next time.
        with contextlib.suppress(RuntimeError, LookupError, OSError):
            return None if self._crew is None else self._crew.status()
        return None

    def worker_stacks(self) -> dict[int, str]:
        current = None if self._crew is None else self._crew.current
        return {} if current is None else current.stacks()


@final
class _Wait:
    """A wait of the caller for a call of an iterator's workers."""

    def __init__(self, iterator: JoinIterator, awaited: Awaited) -> None:
        self._iterator = iterator
        self._awaited = awaited

    def wait(self) -> None:
        self._iterator.wait_for(self._awaited)


def iterator_of(stream: DatasetIterator[Any] | Input) -> DatasetIterator[Any]:
    """Returns the iterator of a stream that was opened."""
    if isinstance(stream, OwnInput):
        stream = stream.iterator
    if isinstance(stream, DatasetIterator) and stream._recovers:  # noqa: SLF001  (of every iterator)
        return stream
    return JoinIterator(input_of(stream))
