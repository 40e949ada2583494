"""Iterators over objects of users: their iterators, with states or without, and any iterable."""

import contextlib
import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import NoneType
from typing import Any, TypeVar, final

from millstream.core.checks import is_scalar
from millstream.core.descriptions import described, function_name
from millstream.core.signals import interrupts
from millstream.dataset.iterators.chain_positions import accepted, texts_of
from millstream.dataset.iterators.dataset_iterator import (
    DatasetIterator,
    Drawn,
    SavingIterator,
    call_if_possible,
    listed,
)
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.compatibility import accept
from millstream.loader.checkpoints.description import Description
from millstream.loader.checkpoints.envelope import (
    SavedPosition,
    UsersState,
    is_anything,
    is_flag,
    is_list,
    is_number,
    unreadable,
    values_of,
)
from millstream.loader.checkpoints.state import Stream
from millstream.loader.pipeline.elements import add_note
from millstream.sources.base import HeldRecords, is_held, own

T_co = TypeVar("T_co", covariant=True)

_COPY_ATTEMPTS = 3

_KIND = "a stream with states of its own"


class ForeignHolder(DatasetIterator[T_co]):
    """An iterator that draws from a user's one, which one thread uses at a time, `close` included.

    A `close` in another thread, or in a signal handler, leaves it to the call that uses it. Flags suffice for that, as
    in `Exclusive`: either `close` sees the call, or the call sees that the iterator is closed.
    """

    name: str
    """The description of the user's object."""
    _iterator: Any = None
    _is_used = False

    @property
    def _class_name(self) -> str:
        return self.name

    def _use(self, work: Callable[[], Any]) -> Any:
        self._is_used = True
        try:
            self._check_open_to("advance")
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


def _locate(error: BaseException, name: str, element: int) -> None:
    """Adds a note to an error of a user's iterator: the stream, and the number of the element that it stands for."""
    if not interrupts(error):
        add_note(error, f"millstream: in {name}, at element {element}.")


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
    def step(self) -> int:
        return self._count

    def __next__(self) -> Any:
        self._is_used = True
        try:
            self._check_open_to("advance")
            if self._has_failed:
                # A generator is exhausted once it has raised.
                self._restart(self._count)
            self._has_failed = True
            try:
                element = next(self._iterator)
            except StopIteration:
                self._has_failed = False
                raise
            except Exception as error:
                _locate(error, self.name, self._count)
                raise
            self._count, self._has_failed = self._count + 1, False
            return element
        finally:
            self._release()

    def _position_here(self) -> SavedPosition:
        return SavedPosition((_COUNTED, self._count, self._identity, self._content))

    def _move_to(self, position: Any, stream: Stream | None = None) -> None:
        del stream
        self._check_open_to("move")
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


def with_states(dataset: Any) -> DatasetIterator[Any]:
    """Returns a new iterator of a dataset; one without states is resumed by the number of elements it has yielded."""
    iterator: DatasetIterator[Any] = iter(dataset)
    if type(iterator).get_state is DatasetIterator.get_state:
        return counted(dataset, lambda: iter(dataset), iterator)
    return iterator._with_own_states()  # noqa: SLF001  (of every DatasetIterator)


def checked_iterable(iterable: Any) -> Any:
    """Returns an iterable that can be read several times, or a function of iterators. Refuses anything else."""
    if hasattr(iterable, "__next__"):
        raise TypeError(
            f"iterable must begin again with each iter(iterable), got {type(iterable).__name__}, an iterator that "
            "is read once. Pass the function that returns it, such as the generator function without the "
            "parentheses, or an object whose __iter__ returns a new iterator."
        )
    if isinstance(iterable, type):
        raise TypeError(f"iterable must be an iterable, got a class. Pass an instance: {iterable.__name__}(...).")
    if not hasattr(iterable, "__iter__") or is_scalar(iterable):
        _check_function(iterable)
    return iterable


def iterator_of_iterable(
    iterable: Any, name: str, describe: Callable[[], dict[str, dict[str, str]]]
) -> DatasetIterator[Any]:
    """Returns a new iterator, resumed by states of the iterable if it has them, and otherwise by drawing again."""
    begin: Callable[[], Iterator[Any]] = functools.partial(_begun, iterable)
    if is_held(iterable) and (reader := HeldRecords(iterable)).copies:
        # As for every source in memory: operations may change what they get.
        begin = functools.partial(map, own, reader.records)
    if _has_states(iterable) or _has_states(first := begin()):
        return _StatefulIterator(iterable, name)
    return CountedIterator(f"IterDataset.source({name})", describe(), begin, first)


def _check_function(function: Any) -> None:
    """Raises TypeError for anything but a function that can be called without arguments."""
    if not callable(function):
        raise TypeError(f"iterable must be an iterable, got {function!r:.80} of type {type(function).__name__}.")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        # A function of C without a signature.
        return
    required = [one.name for one in parameters if one.default is one.empty and one.kind not in _VARIABLE]
    if required:
        name = function_name(function)
        raise TypeError(
            f"A function whose iterators are a stream must need no arguments, but {name} needs {', '.join(required)}. "
            f"Write functools.partial({name}, ...)."
        )


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _begun(iterable: Any) -> Iterator[Any]:
    if hasattr(iterable, "__iter__"):
        return iter(iterable)
    result = iterable()
    try:
        return iter(result)
    except TypeError:
        raise TypeError(
            f"{function_name(iterable)}() must return an iterator, got {described(result)}. Write yield in it, or "
            "return iter(...)."
        ) from None


@final
class _StatefulIterator(ForeignHolder[Any], SavingIterator[Any]):
    """Draws from an iterable that has `state_dict` and `load_state_dict`, or whose iterators have.

    Hugging Face datasets have them for the iterator that was begun last. So each iterator has a copy of its own.
    """

    _recovers = False

    def __init__(self, iterable: Any, name: str) -> None:
        super().__init__()
        # The step and the state that it was moved to last. Not all have a state before they have yielded an element.
        self._loaded: tuple[int, Any] = (0, None)
        self._has_ended = False
        # True if `_stateful` is a copy that nothing was drawn from, nor any state loaded into.
        self._is_fresh = False
        self._stateful: Any = None
        # Copies for `_begin`, made in advance.
        self._spare: list[Any] = []
        self._iterable = iterable
        self.name = name
        self.step = 0
        self._begin()

    def _begin(self, state: Any = None) -> None:
        if not _has_states(self._iterable):
            self._stateful = self._iterator = _begun(self._iterable)
        elif not self._is_fresh:
            # Not when the first element is drawn, which another thread may do: some can be copied in this one only.
            copied = self._spare.pop() if self._spare else _copy_of(self._iterable)
            self._stateful, self._iterator, self._is_fresh = copied, None, True
        if state is not None:
            self._stateful.load_state_dict(copy.deepcopy(state))
            self._is_fresh = False

    def prepare_to_move(self) -> None:
        if not self._is_fresh and not self._spare and _has_states(self._iterable):
            self._spare.append(_copy_of(self._iterable))

    def __next__(self) -> Any:
        drawn = self._draw_run(1)
        if drawn.values:
            return drawn.values[0]
        raise StopIteration if drawn.error is None else drawn.error

    def _draw_run(self, count: int) -> Drawn[Any]:
        drawn: Drawn[Any] = self._use(lambda: self._drawn(count))
        self._has_ended = len(drawn.values) < count and drawn.error is None
        self.step += len(drawn.values)
        if drawn.error is not None:
            _locate(drawn.error, self.name, self.step)
        return drawn

    def _drawn(self, count: int) -> Drawn[Any]:
        if self._iterator is None:
            self._iterator = _begun(self._stateful)
        self._is_fresh = False
        return listed(self._iterator, count, [])

    def _position_here(self) -> SavedPosition:
        state: UsersState | None = None
        if self._has_ended:
            # Its owner may have begun again.
            pass
        elif self.step == self._loaded[0]:
            state = UsersState(copy.deepcopy(self._loaded[1]))
        else:
            state = UsersState(copy.deepcopy(self._stateful.state_dict()))
        return SavedPosition((_KIND, self.step, self.name, self._has_ended, state))

    def _move_to(self, position: Any, stream: Stream | None = None) -> None:
        del stream
        self._check_open_to("move")
        step, name, has_ended, state = values_of(position, _KIND, is_number, is_anything, is_flag, is_anything)
        if name != self.name:
            raise CheckpointError(f"The state belongs to another stream: saved {name!r}, here {self.name!r}.")
        if not isinstance(state, UsersState | NoneType):
            raise unreadable(f"it is {state!r:.40} instead of a state of {name!r}")
        call_if_possible(self._iterator, "close")
        source = copy.deepcopy(state.value) if step and state is not None else None
        self._begin(source)
        self.step, self._loaded, self._has_ended = step, (step, source), has_ended
        if self._has_ended:
            self._iterator = iter(())


def _copy_of(iterable: Any) -> Any:
    """Returns a deep copy. Python raises RuntimeError if another thread, or the copy itself, adds to a dict in it."""
    for _ in range(_COPY_ATTEMPTS):
        with contextlib.suppress(RuntimeError):
            return copy.deepcopy(iterable)
    return copy.deepcopy(iterable)


def _has_states(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
