"""The iterator of an IterDataset: a position in a stream that can be queried, saved and restored."""

import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar, final

from millstream.core.closing import Closing
from millstream.core.signals import interrupts
from millstream.dataset.arguments import only_parent
from millstream.dataset.iterators.chain_positions import accepted, accepting, texts_of
from millstream.errors import CheckpointError
from millstream.grain_kinds import STATS, Stats
from millstream.loader.checkpoints.checkpointable import Checkpointable
from millstream.loader.checkpoints.compatibility import accept
from millstream.loader.checkpoints.description import Description
from millstream.loader.checkpoints.envelope import (
    SavedPosition,
    UsersState,
    ending_of,
    is_list,
    is_number,
    opened_dict,
    sealed_dict,
    values_of,
    wrong_kind,
)
from millstream.loader.checkpoints.state import Stream, stream_from
from millstream.loader.views import Insight, Inspectable

T_co = TypeVar("T_co", covariant=True)

CLOSED = "Trying to advance a closed iterator. Call iter(dataset) for a new one."


class Drawn(NamedTuple, Generic[T_co]):
    """Elements of an iterator, fewer than requested if it ends or fails, and the error that followed them."""

    values: list[T_co]
    error: BaseException | None = None


def listed(iterator: Iterator[Any], count: int, values: list[Any]) -> Drawn[Any]:
    """Appends the next `count` elements of any iterator to `values`, fewer if it ends or fails."""
    try:
        if count == 1:
            values.append(next(iterator))
        else:
            values.extend(itertools.islice(iterator, count))
    except StopIteration:
        pass
    except BaseException as failure:
        if interrupts(failure):
            raise
        return Drawn(values, failure)
    return Drawn(values)


class DatasetIterator(Inspectable, Checkpointable, Closing, Generic[T_co]):
    """Yields the elements of an `IterDataset`. Its position is just after the last element it yielded.

    `iter(dataset)` returns one. For your own iterator, subclass it, pass the iterator that it draws from, or several in
    a list, or nothing, to `super().__init__`, and write the three methods of the example.

    Args:
        parents: the iterator that this one draws from, or a sequence of several.

    Examples:
        >>> class EveryOther(millstream.DatasetIterator):
        ...     def __next__(self):
        ...         next(self._parent)
        ...         return next(self._parent)
        ...
        ...     def get_state(self):
        ...         return {"parent": self._parent.get_state()}
        ...
        ...     def set_state(self, state):
        ...         self._parent.set_state(state["parent"])
        >>> list(EveryOther(iter(millstream.MapDataset.range(6).to_iter_dataset())))
        [1, 3, 5]
    """

    states_are_bytes = False
    _owns_states = False
    """True if no other code keeps or changes the states that it returns and is given: iterators of the library."""
    _parents: tuple[Any, ...] = ()
    _stats: ClassVar[Stats] = STATS
    _closed: bool = False

    epoch: int | None = None
    """The epoch that the next element begins in, from 0; None if the elements have no epochs."""

    def __init__(self, parents: Any = ()) -> None:
        self._parents = tuple(parents) if isinstance(parents, Sequence) else (parents,)

    @property
    def _parent(self) -> Any:
        """The single iterator that this one draws from; AttributeError if there are none, or several."""
        return only_parent(self)

    def __len__(self) -> int:
        """Returns the number of elements left.

        Raises:
            TypeError: it is not known, because this iterator draws from a stream.
        """
        raise TypeError(f"A {type(self).__name__} has no len(): the number of elements of a stream is not known.")

    def __next__(self) -> T_co:
        """Returns the next element.

        Raises:
            StopIteration: the stream has ended; every later call raises it, too.
            ValueError: the iterator is closed.
        """
        raise NotImplementedError(f"{type(self).__name__} must define __next__.")

    def get_state(self) -> dict[str, Any]:
        """Returns the position as a small dict that can be written as JSON.

        All states of an iterator have the same keys, types and shapes. Your own method may return a dict that changes
        later, because every reader of the iterator copies it (`copy.deepcopy`).
        """
        raise NotImplementedError(f"{type(self).__name__} must define get_state to be saved.")

    if TYPE_CHECKING:
        # A class of one's own may define set_state(self, state), which is enough.
        def set_state(self, state: Any, *args: Any, **kwargs: Any) -> None: ...

    else:

        def set_state(self, state: dict[str, Any], *, allow: Collection[str] = (), strict: bool = False) -> None:
            """Moves to the position recorded in a state, of this iterator or of another one over the same dataset.

            Args:
                state: a result of `get_state`, also after a round trip through JSON.
                allow: intended differences to accept, as in `DataLoaderIterator.set_state`. An iterator of your own may
                    leave out this and `strict`.
                strict: True to refuse the state also if the code of the dataset has changed.

            Raises:
                CheckpointError: the state does not belong to this dataset.
                ValueError: the iterator is closed.
            """
            raise NotImplementedError(f"{type(self).__name__} must define set_state to be restored.")

    def seek(self, step: int) -> None:
        """Moves to the position after the first `step` elements.

        Args:
            step: 0 … the number of elements in the stream.

        Raises:
            NotImplementedError: this iterator draws from a stream, which is read in order. Iterators of one
                MapDataset can seek, also after `.take`, and those of operations after a mixture without filters.
            IndexError: there are fewer elements.
            ValueError: the iterator is closed.
        """
        raise NotImplementedError(
            f"A {type(self).__name__} cannot seek step {step}: it draws from a stream, which is read in order. Draw "
            "the elements before, or use set_state with a state that was taken there."
        )

    @property
    def insight(self) -> Insight:
        """The views of the pipeline: `profile`, `summary`, `metrics`, `trace`, `preview` and `report` need them.

        Raises:
            NotImplementedError: this iterator measures nothing, because its class is not one of the library.
        """
        raise NotImplementedError(
            f"A {type(self).__name__} has no profile, summary, metrics, trace, preview and report, because it measures "
            "nothing. Add an operation at the end of the chain, for instance .batch(n): its iterator has them."
        )

    def prepare_to_move(self) -> None:
        """Copies objects that `set_state` needs and that another thread must not copy: some allow it in one only."""
        for parent in self._parents:
            call_if_possible(parent, "prepare_to_move")

    def start_prefetch(self) -> None:
        """Starts prefetching in the background, if anything below can, and returns immediately."""
        for parent in self._parents:
            call_if_possible(parent, "start_prefetch")

    def close(self) -> None:
        """Ends all threads and worker processes below, and frees prefetched data. Idempotent.

        Afterwards `next` raises ValueError; `get_state` still works, unless the last `next` of a combination of
        datasets failed.
        """
        self._closed = True
        for parent in self._parents:
            call_if_possible(parent, "close")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {'closed' if self._closed else 'open'}{self._drawn_from()}>"

    def _position_here(self) -> SavedPosition | UsersState:
        """Returns the position for an iterator that draws from this one."""
        return UsersState(self.get_state())

    def _move_to(self, position: Any, stream: Stream | None = None) -> None:
        """Moves to a result of `_position_here`, for an iterator that draws from this one.

        `stream` is the description of the saved stream, if it is known.

        Raises:
            CheckpointError: the position is refused; a user's iterator may do so with any error.
        """
        del stream
        if not isinstance(position, UsersState):
            raise wrong_kind(f"a {self._class_name}", position)
        try:
            self.set_state(position.value)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"A {self._class_name} cannot resume from the state {position.value!r:.80}: its set_state raised "
                f"{type(error).__name__}: {error}. Pass a state of the same chain."
            ) from error

    def _draw_elements(self, count: int) -> Drawn[Any]:
        """Returns the next elements, more than one: fewer than `count` if they end, or if an error follows."""
        return listed(self, count, [])

    @property
    def _class_name(self) -> str:
        """The name of its class; for a wrapped iterator, that of the user's class."""
        return type(self).__name__

    def _with_own_states(self) -> "DatasetIterator[T_co]":
        return self if self._owns_states else UsersIterator(self)

    def _drawn_from(self) -> str:
        """Returns a description of the parents: the name of a single one, or the number of several."""
        if not self._parents:
            return ""
        what = type(self._parents[0]).__name__ if len(self._parents) == 1 else f"{len(self._parents)} iterators"
        return f", draws from {what}"

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(CLOSED)


def position_of(iterator: DatasetIterator[Any]) -> SavedPosition | UsersState:
    """Returns the position of an iterator, for code that draws from it."""
    return iterator._position_here()  # noqa: SLF001  (of the class above)


def move_to(iterator: DatasetIterator[Any], position: Any) -> None:
    """Moves an iterator to a position that `position_of` returned, also after JSON."""
    iterator._move_to(position)  # noqa: SLF001  (of the class above)


def drawn_from(iterator: DatasetIterator[Any], count: int) -> Drawn[Any]:
    """Returns the next `count` elements of an iterator, fewer if it ends or fails."""
    return iterator._draw_elements(count) if count > 1 else listed(iterator, count, [])  # noqa: SLF001  (as above)


def call_if_possible(iterator: object, name: str) -> None:
    """Calls a method of any iterator if it has one of this name."""
    method = getattr(iterator, name, None)
    if callable(method):
        method()


class SavingIterator(DatasetIterator[T_co]):
    """An iterator of the library, whose states are sealed positions."""

    _owns_states = True
    _described: Stream | None = None
    """The stream of the last operations, which a state describes; None if there are none."""

    def _position_here(self) -> SavedPosition:
        """Returns the position: its description, the step, and further values."""
        raise NotImplementedError

    def _move_to(self, position: Any, stream: Stream | None = None) -> None:
        raise NotImplementedError

    def get_state(self) -> dict[str, Any]:
        return self._sealed(self._position_here())

    def _unsealed_state(self) -> SavedPosition:
        return self._position_here()

    def _sealed(self, unsealed: SavedPosition) -> dict[str, Any]:
        stream = self._described
        if stream is None:
            return sealed_dict(unsealed, None, _WITHOUT_STREAM)
        return sealed_dict(unsealed, stream.fields, stream.ending)

    def _return_to(self, unsealed: SavedPosition) -> None:
        self._check_open()
        self._move_to(unsealed)

    def set_state(self, state: dict[str, Any], *, allow: Collection[str] = (), strict: bool = False) -> None:
        """Moves to the position in a state of any iterator over the same chain, with any threads and workers.

        Args:
            state: a result of `get_state`, also after a round trip through JSON.
            allow: intended differences to accept, in all datasets below, too: names or paths as in
                `DataLoaderIterator.set_state`.
            strict: True to refuse the state also if the content of a dataset has changed.

        Raises:
            CheckpointError: the state does not belong to this chain. The iterator is unchanged.
            ValueError: the iterator is closed, or `allow` has an unknown name.
        """
        self._check_open()
        saved = opened_dict(state)
        stream = None if saved.stream is None else stream_from(saved.stream)
        with accepting(allow, strict=strict):
            self._move_to(saved.position, stream)


_WITHOUT_STREAM = ending_of(None)


class ForeignHolder(DatasetIterator[T_co]):
    """An iterator that draws from a user's one, which one thread uses at a time, `close` included.

    A `close` in another thread, or in a signal handler, leaves it to the call that uses it. Flags suffice for that, as
    in `Exclusive`: either `close` sees the call, or the call sees that the iterator is closed.
    """

    _iterator: Any = None
    _is_used = False

    def _use(self, work: Callable[[], Any]) -> Any:
        self._is_used = True
        try:
            self._check_open()
            return work()
        finally:
            self._release()

    def _release(self) -> None:
        self._is_used = False
        if self._closed:
            call_if_possible(self._iterator, "close")

    def close(self) -> None:
        """Closes the user's iterator, if it can be closed, once no call uses it."""
        super().close()
        if not self._is_used:
            call_if_possible(self._iterator, "close")


_COUNTED = "a stream whose elements are counted"


def description_of_stream(
    name: str, attributes: Mapping[str, Any], kind: type | None = None
) -> dict[str, dict[str, str]]:
    """Returns the description of a stream for states without a position of their own, with the code of a class."""
    found = Description()
    found.identity["stream"] = name
    if kind is not None:
        found.add_code("stream", kind)
    for attribute, value in attributes.items():
        found.add(f"stream.{attribute}", value, is_content=True)
    return {"words": found.identity, "content": found.content}


def counted(dataset: Any, begin: Callable[[], Iterator[Any]], first: Iterator[Any]) -> "CountedIterator":
    """Returns an iterator of a user's dataset whose iterators have no states."""
    # A subclass may have a __getstate__ of its own, which returns anything.
    attributes = {name: value for name, value in vars(dataset).items() if name not in KEPT_BY_ITER_DATASET}
    kind = type(dataset)
    return CountedIterator(kind.__name__, description_of_stream(kind.__name__, attributes, kind), begin, first)


KEPT_BY_ITER_DATASET = {"_parents", "_depth", "_step"}
"""The attributes that every IterDataset has."""


@final
class CountedIterator(ForeignHolder[Any], SavingIterator[Any]):
    """An iterator without states. Its position is the number of elements it has yielded.

    `begin` returns the iterator at its beginning; `first` is its first result.
    """

    def __init__(
        self,
        name: str,
        described: Mapping[str, Mapping[str, str]],
        begin: Callable[[], Iterator[Any]],
        first: Iterator[Any],
    ) -> None:
        super().__init__()
        self.name = name
        texts = described["words"], described["content"]
        self._identity, self._content = (SavedPosition(sorted(each.items())) for each in texts)
        self._begin = begin
        self._iterator = first
        self._count = 0
        # True if the iterator may be at another element than `_count`, or exhausted.
        self._has_failed = False

    @property
    def _class_name(self) -> str:
        return self.name

    @property
    def step(self) -> int:
        return self._count

    def __next__(self) -> Any:
        self._is_used = True
        try:
            self._check_open()
            if self._has_failed:
                # A generator is exhausted once it has raised.
                self._restart(self._count)
            self._has_failed = True
            try:
                element = next(self._iterator)
            except StopIteration:
                self._has_failed = False
                raise
            self._count, self._has_failed = self._count + 1, False
            return element
        finally:
            self._release()

    def _position_here(self) -> SavedPosition:
        return SavedPosition((_COUNTED, self._count, self._identity, self._content))

    def _move_to(self, position: Any, stream: Stream | None = None) -> None:
        del stream
        self._check_open()
        count, *saved = values_of(position, _COUNTED, is_number, is_list, is_list)
        identity, content = map(texts_of, saved, (self._identity, self._content))
        options = accepted()
        accept(identity, content, options.allow, strict=options.strict)
        before = self._count
        self._use(lambda: self._restart(count))
        if self._count < count:
            there, self._has_failed = self._count, True
            self._count = before
            raise CheckpointError(f"The state is after {count} elements of {self.name}, which has {there}.")

    def _restart(self, count: int) -> None:
        self._has_failed = True
        call_if_possible(self._iterator, "close")
        self._iterator = self._begin()
        there = sum(1 for _ in itertools.islice(self._iterator, count))
        self._count, self._has_failed = there, False


_NOTHING: Any = object()
"""Stands for the state of an iterator that has moved since a state was loaded."""


@final
class UsersIterator(DatasetIterator[Any]):
    """A user's iterator, whose states are copied when they are taken and when they are loaded.

    Its class may return an object that it changes later, and keep the one that it is given. A state that was loaded is
    the state until an element has followed, because not all can return one before.
    """

    def __init__(self, iterator: DatasetIterator[Any]) -> None:
        super().__init__(iterator)
        self.iterator = iterator
        self.name = type(iterator).__name__
        self._loaded = _NOTHING

    def __next__(self) -> Any:
        element = next(self.iterator)
        self._loaded = _NOTHING
        return element

    def _draw_elements(self, count: int) -> Drawn[Any]:
        values: list[Any] = []
        try:
            return listed(self.iterator, count, values)
        finally:
            if values:
                self._loaded = _NOTHING

    @property
    def _class_name(self) -> str:
        return self.name

    def get_state(self) -> Any:
        return copy.deepcopy(self.iterator.get_state() if self._loaded is _NOTHING else self._loaded)

    def set_state(self, state: Any, *, allow: Collection[str] = (), strict: bool = False) -> None:
        loaded = copy.deepcopy(state)
        with accepting(allow, strict=strict):
            self.iterator.set_state(copy.deepcopy(state))
        self._loaded = loaded

    def seek(self, step: int) -> None:
        self.iterator.seek(step)
        self._loaded = _NOTHING

    def __len__(self) -> int:
        return len(self.iterator)

    def __getattr__(self, name: str) -> Any:
        # Its other members are those of the user's class.
        return getattr(self.iterator, name)


def with_states(dataset: Any) -> DatasetIterator[Any]:
    """Returns a new iterator of a dataset; one without states is resumed by the number of elements it has yielded."""
    iterator: DatasetIterator[Any] = iter(dataset)
    if type(iterator).get_state is DatasetIterator.get_state:
        return counted(dataset, lambda: iter(dataset), iterator)
    return iterator._with_own_states()  # noqa: SLF001  (of the class above)
