"""An iterator over other iterators whose position an interruption cannot separate from theirs.

A signal handler may raise after a parent has advanced and before the iterator has counted that. `next` therefore sets a
flag while it draws. If the flag is found set, the iterator returns to an earlier state, and draws the elements since
then again. A stream is a function, so they are the same.
"""

import abc
import contextlib
import dataclasses
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, final

from millstream.core.signals import interrupts
from millstream.dataset.iterators.dataset_iterator import DatasetIterator, Drawn, SavingIterator
from millstream.dataset.nodes.lowering import InOrder
from millstream.loader import reporting
from millstream.loader.checkpoints.checkpointable import Exclusive
from millstream.loader.checkpoints.envelope import SavedPosition
from millstream.loader.checkpoints.state import Stream
from millstream.loader.measuring import FED_CHAIN, ExecutorStatus, Profiler
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.scheduling.feed import KEPT_ELEMENTS
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.views import Insight, Measured, serve_if_requested
from millstream.sharding import NoSharding

if TYPE_CHECKING:
    from millstream.loader.engine.crew import Crew
    from millstream.loader.reporting.snapshot import LoaderSnapshot

T_co = TypeVar("T_co", covariant=True)

FAST_SECONDS = 20e-6
"""The time of an element above which drawing it in a call of its own costs little."""


_TRIES = 100
"""The number of times that a state is taken again because another thread has moved the iterator meanwhile."""


class RecoveringIterator(Measured, Exclusive, SavingIterator[T_co]):
    """Draws from its parents, and stays at the same position as they, whatever interrupts it.

    Many elements are drawn in one call, which takes a fraction of the time of as many calls.
    """

    _in_use = (
        "This iterator is in use: another thread, or the code that a signal handler interrupted, is drawing an "
        "element. Its position is that of several datasets, and is known between two elements only. Set a flag in the "
        "handler, and call get_state after next()."
    )
    _crew: "Crew | None" = None
    """The workers that run the calls of the iterators below, if those of no iterator above do."""
    workers = MultiprocessingOptions()
    """The options of these workers."""
    reading = ReadOptions(0, 0)
    """The threads in each of them."""
    name = ""
    """The description of what it iterates over."""
    _reads_together = False
    """True to start prefetching in all streams before the first of them is waited for."""
    _is_prefetching = False
    """True if the streams below prefetch from this position on."""
    draw_again: Callable[[int], tuple[list[Any], bool]] | None = None
    """Returns the first elements, drawn a second time, and True if they are batches; None if that is impossible."""
    replaced: "LoaderSnapshot | None" = None
    """The sums of earlier iterators below, which others have replaced."""
    _is_first = False
    """True if the first of `_waits` is one for the first element of a pass."""
    _num_waits = 0
    _counted_step = 0
    """The step up to which the profiler has counted elements."""
    _is_torn = False
    """True from before an element is drawn until it is counted; it stays so if that fails."""
    _kept_state: Any = None
    _kept_step = 0
    _step = 0
    """The number of elements yielded."""
    _num_since = 0
    """The number of elements since `_kept_state`."""
    _run = 1
    """The maximum number of elements of the next run."""
    _num_moves = 0
    """The number of times that it has begun to draw, or was moved."""
    _known: tuple[int, SavedPosition] = (-1, SavedPosition())
    """The last position that was taken, and `_num_moves` then."""
    _is_at_end = False
    """True if the stream ended before a draw had all of its elements."""

    def __init__(self, parents: Any = ()) -> None:
        super().__init__(parents)
        self.profiler = Profiler(())
        # The start and the end of each wait that the profiler does not have yet: it takes many together.
        self._waits: list[tuple[float, float]] = []

    def close(self) -> None:
        super().close()
        if self._crew is not None:
            self._crew.end()

    @property
    def step(self) -> int:
        """The number of elements yielded since the beginning of the stream."""
        # An interrupted draw may have counted, and an interrupted recovery may still be at an earlier element.
        return self._kept_step + self._num_since if self._is_torn else self._step

    def __next__(self) -> T_co:
        """Returns the next element. After an error of a parent, the next call draws the same element again."""
        if self.consumer is not None:
            return self._alone(self._draw_and_count)
        self.asked_at = start = time.perf_counter()
        try:
            return self._alone(self._draw_and_count)
        finally:
            self.asked_at = None
            stop = time.perf_counter()
            # In one call, so that no other thread takes the list before it has the wait.
            self._waits.append((start, stop))

    def _draw_and_count(self) -> T_co:
        try:
            self._prepare()
            element = self._draw_one()
            if not self._num_since:
                self.profiler.record_first_size(element)
            self._step, self._num_since, self._is_torn = self._step + 1, self._num_since + 1, False
        except StopIteration:
            # No parent was drawn from beyond its end.
            self._is_torn = False
            self._leave_workers()
            raise
        return element

    def _prepare(self) -> None:
        """Prepares to draw. Until elements are counted, the iterator is torn."""
        self._check_open()
        if self._is_torn:
            self._recover()
        if self._num_since >= KEPT_ELEMENTS or self._kept_state is None:
            self.count_delivered()
            self._is_first = self._kept_state is None
            if self._is_first:
                serve_if_requested(self)
                if self._reads_together and not self._is_prefetching:
                    self.start_prefetch()
            self._keep()
        self._is_torn, self._is_at_end, self._num_moves = True, False, self._num_moves + 1

    def _draw_run(self, count: int) -> Drawn[T_co]:
        self._prepare()
        drawn = self._draw_in_runs(count)
        self._num_since += len(drawn.values)
        # If elements are lacking, some parents may have been drawn from beyond the position.
        self._is_torn = len(drawn.values) < count
        self._is_at_end = self._is_torn and drawn.error is None
        if self._is_at_end:
            self._leave_workers()
        return drawn

    def _draw_in_runs(self, count: int) -> Drawn[T_co]:
        """Draws and counts elements.

        A run draws from one parent after another. The others read ahead meanwhile, but not far, so runs are long only
        where elements come fast.
        """
        values: list[T_co] = []
        while left := count - len(values):
            limit = min(left, self._run)
            begin = time.perf_counter()
            drawn = self._draw(limit) if limit > 1 else self._draw_single()
            values += drawn.values
            self._step += len(drawn.values)
            if len(drawn.values) < limit:
                return Drawn(values, drawn.error)
            is_fast = time.perf_counter() - begin < FAST_SECONDS * limit
            self._run = min(2 * self._run, KEPT_ELEMENTS) if is_fast else max(self._run // 2, 1)
        return Drawn(values)

    def _draw_single(self) -> Drawn[T_co]:
        """Returns a run of one element. `_draw` would take so long for it that no elements would seem to come fast."""
        try:
            return Drawn([self._draw_one()])
        except StopIteration:
            return Drawn([])
        except BaseException as failure:
            if interrupts(failure):
                raise
            return Drawn([], failure)

    def _leave_workers(self) -> None:
        """Leaves the workers to the next iterator, at the end of the stream."""
        if self._crew is not None:
            self._crew.pause()

    def start_prefetch(self) -> None:
        super().start_prefetch()
        self._is_prefetching = True

    def count_delivered(self) -> None:
        # Each swap is one statement without a call, so that no two threads count the same.
        waits, self._waits = self._waits, []
        step = self.step
        before, self._counted_step = self._counted_step, step
        if self.consumer is not None:
            return
        self.profiler.delivered(step - before, 0)
        if waits:
            self._num_waits += len(waits)
            self.profiler.waited_often(self.returned_at, waits, self._num_waits, is_first=self._is_first)
            self.returned_at, self._is_first = waits[-1][1], False

    @property
    def lifecycle(self) -> str:
        return "closed" if self._closed else "running" if self._step else "idle"

    @functools.cached_property
    def insight(self) -> Insight:
        return JoinInsight(self)

    def run_by(self, crew: "Crew", workers: MultiprocessingOptions, reading: ReadOptions) -> None:
        """Uses workers with these options, until the end, where the next iterator gets them."""
        self._crew, self.workers, self.reading = crew, workers, reading

    def executor_status(self) -> ExecutorStatus | None:
        # The workers change meanwhile. A status that fails now succeeds the next time.
        with contextlib.suppress(RuntimeError, LookupError, OSError):
            return None if self._crew is None else self._crew.status()
        return None

    def worker_stacks(self) -> dict[int, str]:
        current = None if self._crew is None else self._crew.current
        return {} if current is None else current.stacks()

    def below(self) -> Iterator[tuple[str, DatasetIterator[Any]]]:
        """Yields the names and the iterators of the streams below."""
        return zip(map(str, range(len(self._parents))), self._parents, strict=True)

    def keep_measurements(self, iterator: DatasetIterator[Any]) -> None:
        """Keeps the measurements of an iterator below that another one replaces."""
        for insight in insights_of(iterator):
            # Only that of the join is reported, and finding it out would read files for each stream that ends.
            insight.num_cores = insight.num_cores or 1
            snapshot = insight.snapshot()
            self.replaced = snapshot if self.replaced is None else reporting.snapshot.added(self.replaced, snapshot)

    def _position_here(self) -> SavedPosition:
        for _ in range(_TRIES):
            if self._is_in_use or self._is_torn:
                # Refused if it is in use, also by a call that recovers.
                self._alone(self._recover)
            step = self._step
            position = self._state_here()
            # Another thread may have drawn from some of the parents meanwhile.
            if step == self._step and not self._is_in_use:
                return position
        raise ValueError(self._in_use)

    def _move_to(self, position: Any, stream: Stream | None = None) -> None:
        del stream
        self._go(functools.partial(self._move, position))

    def _go(self, move: Callable[[], None]) -> None:
        """Moves the parents and this iterator. An interruption leaves it where it was."""
        self._check_open()
        self._alone(functools.partial(self._keep_and_move, move))

    def _keep_and_move(self, move: Callable[[], None]) -> None:
        self.count_delivered()
        if not self._is_torn:
            self._keep()
        self._is_torn = True
        self._is_prefetching = False
        move()
        self._num_moves += 1
        self._counted_step = self._step
        self._kept_state, self._num_since, self._is_torn, self._is_at_end = None, 0, False, False

    def _draw_one(self) -> T_co:
        """Returns the next element, and does not count it. The caller recovers from a failure.

        Joins override it, because a run of one element takes several times as long.
        """
        drawn = self._draw(1)
        if drawn.error is not None:
            raise drawn.error
        if not drawn.values:
            raise StopIteration
        return drawn.values[0]

    @abc.abstractmethod
    def _draw(self, count: int) -> Drawn[T_co]:
        """Returns the next elements, and does not count them. The caller recovers from a failure."""

    @abc.abstractmethod
    def _state(self) -> SavedPosition: ...

    @abc.abstractmethod
    def _move(self, position: Any) -> None:
        """Moves the parents and this iterator. The caller recovers from a failure."""

    def _state_here(self) -> SavedPosition:
        """Returns the position, which is taken once per position: all iterators above ask for it, at each of theirs."""
        moves = self._num_moves
        known_at, position = self._known
        if known_at != moves:
            position = self._state()
            self._known = moves, position
        return position

    def _keep(self) -> None:
        self._kept_state, self._kept_step, self._num_since = self._state_here(), self._step, 0

    def _recover(self) -> None:
        if not self._is_torn:
            return
        self._move(self._kept_state)
        self._num_moves += 1
        if self._num_since:
            drawn = self._draw_in_runs(self._num_since)
            if drawn.error is not None:
                raise drawn.error
        if self._is_at_end:
            self._draw(1)
        self._is_torn = False


MAX_NAMED = 8
"""The largest number of streams whose stages are displayed one by one."""


@final
class JoinInsight(Insight):
    """Computes the views of a join.

    Keys and hand-over are sums over its streams. Reading and operations have the name of their stream before theirs;
    with many streams, or if streams replace each other, they are sums by name, too.
    """

    def __init__(self, join: RecoveringIterator[Any]) -> None:
        order = InOrder(None, None)
        plan = Plan(Pipeline([], order, order, (), NoSharding()))
        super().__init__(plan, join.profiler, join.workers, join.reading, frontend=FED_CHAIN)
        self.add(join)
        # The join has a reference to this object.
        self._of = weakref.ref(join)

    @property
    def is_closed(self) -> bool:  # type: ignore[override]
        join = self._of()
        return join is None or join.lifecycle == "closed"

    def snapshot(self) -> "LoaderSnapshot":
        join, own = self._join, self._outermost_snapshot()
        shown = reporting.snapshot.joined(own, self._below(), join.replaced)
        return dataclasses.replace(
            shown,
            source=dataclasses.replace(own.source, name=join.name),
            order=dataclasses.replace(own.order, name="in order"),
            # Those of its streams are not counted.
            measured=dataclasses.replace(shown.measured, records=None),
        )

    def draws_from(self) -> Sequence[tuple[str, Insight]]:
        has_names = self.has_names
        return [
            (f"{name}: " if has_names else "", insight)
            for name, iterator in self._named_streams()
            for insight in insights_of(iterator)
        ]

    @property
    def has_names(self) -> bool:
        """True if the stages below have the names of their streams."""
        names = [name for name, _ in self._named_streams()]
        return 1 < len(names) <= MAX_NAMED and all(names)

    def _named_streams(self) -> Sequence[tuple[str, DatasetIterator[Any]]]:
        """Returns the iterators below; none once this one is gone, as the thread of a server may find."""
        join = self._of()
        return [] if join is None else list(join.below())

    def _first_outputs(self, count: int, pipeline: Pipeline | None) -> tuple[list[Any], bool, Any]:
        """Returns the first elements, which this thread draws a second time."""
        if (draw_again := self._join.draw_again) is None:
            return super()._first_outputs(count, pipeline)
        return *draw_again(count), ()

    @property
    def _join(self) -> RecoveringIterator[Any]:
        join = self._of()
        if join is None:
            raise AssertionError("only the iterator itself has its views")
        return join


def insights_below(stream: Any) -> list[tuple[str, Insight]]:
    """Returns the views of a stream below operations, with the prefix of its stages, which may be named like these."""
    return [
        ("" if isinstance(insight, JoinInsight) and insight.has_names else "stream: ", insight)
        for insight in insights_of(stream)
    ]


def insights_of(iterator: Any) -> list[Insight]:
    """Returns the views of an iterator; if its class is a user's, which measures nothing, those of the ones below."""
    try:
        return [iterator.insight]
    except (AttributeError, NotImplementedError):
        return [insight for parent in getattr(iterator, "_parents", ()) for insight in insights_of(parent)]
