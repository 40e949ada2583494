"""Iterators that draw from any iterable, resumed by the iterable's own states if it has them."""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any, final

from millstream.core.descriptions import described, function_name
from millstream.dataset.iterators.dataset_iterator import (
    CountedIterator,
    DatasetIterator,
    Drawn,
    ForeignHolder,
    call_if_possible,
    listed,
)
from millstream.dataset.iterators.recovering_iterator import RecoveringIterator
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.envelope import (
    SavedPosition,
    UsersState,
    is_anything,
    is_flag,
    is_number,
    unreadable,
    values_of,
)
from millstream.sources.base import HeldRecords, is_held, own

_COPY_ATTEMPTS = 3

_KIND = "a stream with states of its own"


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
    if not hasattr(iterable, "__iter__"):
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
    """Returns a new iterator of an iterable, or of what a function returns."""
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
class _StatefulIterator(ForeignHolder[Any], RecoveringIterator[Any]):
    """Draws from an iterable that has `state_dict` and `load_state_dict`, or whose iterators have.

    Hugging Face datasets have them for the iterator that was begun last. So each iterator has a copy of its own.
    """

    def __init__(self, iterable: Any, name: str) -> None:
        super().__init__()
        # The step and the state that it was moved to last. Not all have a state before they have yielded an element.
        self._loaded: tuple[int, Any] = (0, None)
        self._has_ended = False
        # True if `_stateful` is a copy that nothing was drawn from.
        self._is_fresh = False
        self._stateful: Any = None
        # Copies for `_begin`, made in advance.
        self._spare: list[Any] = []
        self._iterable = iterable
        self.name = name
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

    def prepare_to_move(self) -> None:
        if not self._is_fresh and not self._spare and _has_states(self._iterable):
            self._spare.append(_copy_of(self._iterable))

    def _draw(self, count: int) -> Drawn[Any]:
        drawn: Drawn[Any] = self._use(lambda: self._drawn(count))
        self._has_ended = len(drawn.values) < count and drawn.error is None
        return drawn

    def _drawn(self, count: int) -> Drawn[Any]:
        if self._iterator is None:
            self._iterator = _begun(self._stateful)
        self._is_fresh = False
        return listed(self._iterator, count, [])

    def _state(self) -> SavedPosition:
        state: UsersState | None = None
        if self._has_ended:
            # Its owner may have begun again.
            pass
        elif self._step == self._loaded[0]:
            state = UsersState(copy.deepcopy(self._loaded[1]))
        else:
            state = UsersState(copy.deepcopy(self._stateful.state_dict()))
        return SavedPosition((_KIND, self._step, self.name, self._has_ended, state))

    def _move(self, position: Any) -> None:
        step, name, has_ended, state = values_of(position, _KIND, is_number, is_anything, is_flag, is_anything)
        if name != self.name:
            raise CheckpointError(f"The state belongs to another stream: saved {name!r}, here {self.name!r}.")
        if not isinstance(state, UsersState | NoneType):
            raise unreadable(f"it is {state!r:.40} instead of a state of {name!r}")
        call_if_possible(self._iterator, "close")
        source = copy.deepcopy(state.value) if step and state is not None else None
        self._begin(source)
        self._step, self._loaded, self._has_ended = step, (step, source), has_ended
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
