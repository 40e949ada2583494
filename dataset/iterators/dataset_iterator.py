"""The iterator of an IterDataset: a position in a stream that can be queried, saved and restored."""

import contextlib
import copy
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar, final

from millstream.core.checks import as_integer
from millstream.core.closing import Closing, close_each
from millstream.core.signals import interrupts
from millstream.dataset.arguments import only_parent
from millstream.dataset.iterators.chain_positions import accepting
from millstream.errors import CheckpointError
from millstream.grain_kinds import STATS, Stats
from millstream.loader.checkpoints.checkpointable import Checkpointable
from millstream.loader.checkpoints.envelope import (
    SavedPosition,
    UsersState,
    ending_of,
    opened_dict,
    sealed_dict,
    wrong_kind,
)
from millstream.loader.checkpoints.state import Stream, stream_from
from millstream.loader.views import Insight, Inspectable

T_co = TypeVar("T_co", covariant=True)


class Drawn(NamedTuple, Generic[T_co]):
    """A run of elements of an iterator.

    Attributes:
        values: the elements, fewer than requested if the iterator ends or fails.
        error: the error that followed them; None if there was none.
    """

    values: Sequence[T_co]
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
    _recovers = True
    """False if an iterator around it has to return to an earlier state after an error or an interruption."""
    _owns_states = False
    """True if no other code keeps or changes the states that it returns and is given: iterators of the library."""
    _parents: tuple[Any, ...] = ()
    _stats: ClassVar[Stats] = STATS
    _closed: bool = False

    epoch: int | None = None
    """The epoch that the next element begins in, from 0; None if the elements have no epochs."""

    def __init__(self, parents: Any = ()) -> None:
        self._parents = tuple(parents) if isinstance(parents, tuple | Sequence) else (parents,)

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

    def skip(self, count: int) -> None:
        """Moves on by `count` elements that are not trained on, as `seek(step + count)` does: `step` counts them.

        Args:
            count: the number of elements, from 0 on.

        Raises:
            NotImplementedError, IndexError: as `seek`.
            ValueError: the iterator is closed, or count is negative.
        """
        number, step = as_integer(count, "count", minimum=0), getattr(self, "step", None)
        with contextlib.suppress(NotImplementedError):
            if step is not None:
                self.seek(step + number)
                return
        raise NotImplementedError(
            f"A {self._class_name} cannot skip {number} elements: it draws from a stream, which is read in order. "
            f"Write dataset.skip({number}) for those at the beginning, or draw them."
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
        close_each(parent for parent in self._parents if callable(getattr(parent, "close", None)))

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

    def _draw_run(self, count: int) -> Drawn[Any]:
        """Returns the next elements: fewer than `count` if they end, or if an error follows."""
        return listed(self, count, [])

    @property
    def _watches_itself(self) -> bool:
        """True if a draw that never ends is an error by itself, because those of the iterators below are watched."""
        return bool(self._parents)

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
        if len(self._parents) > 1:
            return f", draws from {len(self._parents)} iterators"
        (parent,) = self._parents
        return f", draws from {getattr(parent, 'class_name', type(parent).__name__)}"

    def _check_open_to(self, tried: str) -> None:
        if self._closed:
            raise ValueError(f"Trying to {tried} a closed iterator. Call iter(dataset) for a new one.")


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
        self._check_open_to("move")
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
        self._check_open_to("move")
        saved = opened_dict(state)
        stream = None if saved.stream is None else stream_from(saved.stream)
        with accepting(allow, strict=strict):
            self._move_to(saved.position, stream)


_WITHOUT_STREAM = ending_of(None)


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

    @property
    def _watches_itself(self) -> bool:
        # The user's class may have a constructor that sets no parents.
        return bool(getattr(self.iterator, "_parents", ()))

    def _draw_run(self, count: int) -> Drawn[Any]:
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
