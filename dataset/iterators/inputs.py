"""Inputs: streams that a join, or the operations after one, take elements from.

An input fetches, which may run user code and fail. It waits for nothing, but returns an object to wait for. It gives
the elements that it has fetched, which does none of that. So a join takes from several inputs together only elements
that all of them have fetched, and its position is a number of elements of each. What changes it otherwise, for instance
a stream that follows another one, happens in a fetch.

    fetch ──▶ fetched elements ──▶ take ──▶ taken elements, which count: `position(back)` is that before the last ones

Guarantees:
    * `fetch` and `take` wait for no thread and no process of the library.
    * `take` fails only if the copy of a kept element, or the restart of an ended input, does.
    * What is taken together never spans the end of a stream below, because a stream ends in a fetch.
    * An interrupted fetch or take leaves the inputs at any position. Who draws from them moves them to a known one.
"""

import abc
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

from millstream.core.closing import close_each
from millstream.core.signals import interrupts
from millstream.dataset.iterators.dataset_iterator import (
    DatasetIterator,
    call_if_possible,
)
from millstream.dataset.nodes.lowering import InOrder
from millstream.loader import reporting
from millstream.loader.measuring import FED_CHAIN, Profiler
from millstream.loader.pipeline.elements import END, Lack, add_note
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.views import Insight
from millstream.sharding import NoSharding

if TYPE_CHECKING:
    from millstream.loader.engine.worker_choice import WorkerChoice
    from millstream.loader.reporting.snapshot import LoaderSnapshot


class PassedError(Exception):
    """The position before a taken element is no longer known. A consumer needs it if `next` lost that element."""


class Input(abc.ABC):
    """A stream that elements are taken from.

    Attributes:
        name: the description of what it iterates over.
        step: the number of elements taken since the beginning of the stream.
        draw_again: returns the first elements, drawn a second time, and True if they are batches; None if that is
            impossible.
        replaced: the sums of earlier streams below, which others have replaced.
        is_closed: True once it is closed.
    """

    name = ""
    step = 0
    draw_again: Callable[[int], tuple[list[Any], bool]] | None = None
    replaced: "LoaderSnapshot | None" = None
    is_closed = False
    watches_itself = True
    """True if a fetch that never ends is an error by itself, because those of the streams below are watched."""

    @property
    def class_name(self) -> str:
        """The name of what it iterates over, or that of its class, for errors."""
        return self.name or type(self).__name__

    @abc.abstractmethod
    def num_ready(self) -> int:
        """Returns the number of elements that can be taken now."""

    @abc.abstractmethod
    def fetch(self, limit: int) -> Lack | None:
        """Fetches at least one element, and up to `limit` if others come with it.

        Returns the reason if there are none. At the end of the stream, that is END each time. It raises the error in
        place of the next element.
        """

    def fill(self, count: int) -> int:  # noqa: ARG002  (for those that must fetch many at a time)
        """Returns the number of fetched elements of an input that is not due yet, of which `count` are wanted."""
        return self.num_ready()

    @abc.abstractmethod
    def take(self, count: int) -> list[Any]:
        """Returns the next elements, which were fetched. The list is the caller's."""

    @abc.abstractmethod
    def position(self, back: int = 0) -> Any:
        """Returns the saved position before the last `back` elements, all of which were taken together.

        Raises PassedError if a user's iterator is past it.
        """

    @abc.abstractmethod
    def move(self, position: Any) -> None:
        """Moves to a saved position. After an error, it is at any one."""

    @abc.abstractmethod
    def for_operations(self) -> None:
        """Is called once if operations get the elements, and the positions between those of a fetch are not needed."""

    @abc.abstractmethod
    def insights(self) -> list[Insight]:
        """Returns the views of the stream; those of the streams below if it measures nothing itself."""

    @abc.abstractmethod
    def start_prefetch(self) -> None: ...

    @abc.abstractmethod
    def prepare_to_move(self) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    def below(self) -> Iterator[tuple[str, "Input"]]:
        """Yields the names of the streams below, and these."""
        return iter(())


@final
class OwnInput(Input):
    """The elements of an iterator of any class. It is at its last element, so only one is fetched at a time.

    For operations, it fetches as many as are due.
    """

    def __init__(self, iterator: DatasetIterator[Any]) -> None:
        self.iterator = iterator
        self.name = getattr(iterator, "name", "")
        self._fetches_runs = False
        self._forget()

    def _forget(self) -> None:
        self._values: list[Any] = []
        # True if no element follows them, and the error in place of the next one, if any.
        self._is_over = False
        self._error: BaseException | None = None

    @property
    def step(self) -> int:  # type: ignore[override]  # it is read only
        return getattr(self.iterator, "step", 0)

    @property
    def class_name(self) -> str:
        return self.iterator._class_name  # noqa: SLF001  (of every iterator)

    @property
    def watches_itself(self) -> bool:  # type: ignore[override]
        return self.iterator._watches_itself  # noqa: SLF001  (of every iterator)

    def num_ready(self) -> int:
        return len(self._values)

    def fetch(self, limit: int) -> Lack | None:
        self._draw(limit if self._fetches_runs else 1)
        if self._values:
            return None
        error, self._error, self._is_over = self._error, None, False
        if error is not None:
            raise error
        return END

    def fill(self, count: int) -> int:
        if self._fetches_runs:
            self._draw(count)
        return len(self._values)

    def _draw(self, count: int) -> None:
        missing = count - len(self._values)
        if missing > 0 and not self._is_over:
            drawn = self.iterator._draw_run(missing)  # noqa: SLF001  (of every iterator)
            self._values += drawn.values
            self._error, self._is_over = drawn.error, len(drawn.values) < missing

    def take(self, count: int) -> list[Any]:
        taken, self._values = self._values[:count], self._values[count:]
        return taken

    def position(self, back: int = 0) -> Any:
        if back:
            raise PassedError
        return self.iterator._position_here()  # noqa: SLF001  (of every iterator)

    def move(self, position: Any) -> None:
        self._forget()
        self.iterator._move_to(position)  # noqa: SLF001  (of every iterator)

    def for_operations(self) -> None:
        self._fetches_runs = True

    def insights(self) -> list[Insight]:
        return insights_of(self.iterator)

    def start_prefetch(self) -> None:
        call_if_possible(self.iterator, "start_prefetch")

    def prepare_to_move(self) -> None:
        call_if_possible(self.iterator, "prepare_to_move")

    def close(self) -> None:
        self.is_closed = True
        call_if_possible(self.iterator, "close")


def input_of(stream: Any) -> Input:
    """Returns the input of a stream that was opened."""
    return stream if isinstance(stream, Input) else OwnInput(stream)


class JoinedInput(Input):
    """The elements of several inputs, or of one in another way. It is a join, which decides whose element is next."""

    is_for_operations = False
    is_prefetching = False
    """True if the inputs prefetch from this position on."""
    _ready = 0
    """The number of elements that can be taken."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        self.inputs = tuple(inputs)

    def below(self) -> Iterator[tuple[str, Input]]:
        return zip(map(str, range(len(self.inputs))), self.inputs, strict=True)

    def open_inputs(self) -> Iterator[Input]:
        return iter(self.inputs)

    def num_ready(self) -> int:
        return self._ready

    def _count(self, taken: int) -> None:
        """Counts elements that are taken."""
        self._ready -= taken
        self.step += taken

    def for_operations(self) -> None:
        self.is_for_operations = True
        for one in self.open_inputs():
            one.for_operations()

    def start_prefetch(self) -> None:
        self.is_prefetching = True
        for one in self.open_inputs():
            one.start_prefetch()

    def fetch_from(self, one: Input, limit: int, name: Any) -> Lack | None:
        """Fetches elements of an input. An error gets a note with its name."""
        try:
            return one.fetch(limit)
        except Exception as error:
            self.locate(error, name)
            raise

    def locate(self, error: BaseException, name: Any) -> None:
        """Adds a note to an error of an input: which of several has raised it."""
        if not interrupts(error):
            add_note(error, f"millstream: in dataset {name!r} of {self.class_name}.")

    def read_together(self) -> None:
        """Starts prefetching in all inputs before the first of them is waited for."""
        if not self.is_prefetching:
            self.start_prefetch()

    def prepare_to_move(self) -> None:
        for one in self.open_inputs():
            one.prepare_to_move()

    def close(self) -> None:
        self.is_closed = True
        close_each(self.open_inputs())

    @functools.cached_property
    def insight(self) -> "JoinInsight":
        """The views of a join below others."""
        return JoinInsight(self, Profiler(()), MultiprocessingOptions(), ReadOptions(0, 0))

    def insights(self) -> list[Insight]:
        return [self.insight]

    def keep_measurements(self, ended: Input) -> None:
        """Keeps the measurements of an input that another one replaces."""
        for insight in ended.insights():
            # Only that of the join is reported, and finding it out would read files for each stream that ends.
            insight.num_cores = insight.num_cores or 1
            snapshot = insight.snapshot()
            self.replaced = snapshot if self.replaced is None else reporting.snapshot.added(self.replaced, snapshot)


class SingleInput(JoinedInput):
    """The elements of one other input, in another way. By default, its fetched elements are those of that one."""

    def __init__(self, one: Input) -> None:
        super().__init__((one,))
        self.one = one

    def num_ready(self) -> int:
        return self.one.num_ready()

    def take(self, count: int) -> list[Any]:
        taken = self.one.take(count)
        self.step += count
        return taken


MAX_NAMED = 8
"""The largest number of streams whose stages are displayed one by one."""


@final
class JoinInsight(Insight):
    """Computes the views of a join.

    Keys and hand-over are sums over its streams. Reading and operations have the name of their stream before theirs;
    with many streams, or if streams replace each other, they are sums by name, too.
    """

    def __init__(
        self,
        join: Input,
        profiler: Profiler,
        workers: MultiprocessingOptions,
        reading: ReadOptions,
        choice: "WorkerChoice | None" = None,
    ) -> None:
        order = InOrder(None, None)
        plan = Plan(Pipeline([], order, order, (), NoSharding()))
        super().__init__(plan, profiler, workers, reading, frontend=FED_CHAIN, choice=choice)
        # The join has a reference to this object.
        self._of = weakref.ref(join)

    @property
    def is_closed(self) -> bool:  # type: ignore[override]
        join = self._of()
        return join is None or join.is_closed

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
            for name, one in self._named_streams()
            for insight in one.insights()
        ]

    @property
    def has_names(self) -> bool:
        """True if the stages below have the names of their streams."""
        names = [name for name, _ in self._named_streams()]
        return 1 < len(names) <= MAX_NAMED and all(names)

    def _named_streams(self) -> Sequence[tuple[str, Input]]:
        """Returns the streams below; none once this one is gone, as the thread of a server may find."""
        join = self._of()
        return [] if join is None else list(join.below())

    def _first_outputs(self, count: int, pipeline: Pipeline | None) -> tuple[list[Any], bool, Any]:
        """Returns the first elements, which this thread draws a second time."""
        if (draw_again := self._join.draw_again) is None:
            return super()._first_outputs(count, pipeline)
        return *draw_again(count), ()

    @property
    def _join(self) -> Input:
        join = self._of()
        if join is None:
            raise AssertionError("only the iterator itself has its views")
        return join


def insights_below(stream: Input) -> list[tuple[str, Insight]]:
    """Returns the views of a stream below operations, with the prefix of its stages, which may be named like these."""
    return [
        ("" if isinstance(insight, JoinInsight) and insight.has_names else "stream: ", insight)
        for insight in stream.insights()
    ]


def insights_of(iterator: Any) -> list[Insight]:
    """Returns the views of an iterator; if its class is a user's, which measures nothing, those of the ones below."""
    try:
        return [iterator.insight]
    except (AttributeError, NotImplementedError):
        return [insight for parent in getattr(iterator, "_parents", ()) for insight in insights_of(parent)]
