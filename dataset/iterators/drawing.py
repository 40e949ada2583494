"""Drawing of many elements of an iterator in one call, for operations after a stream."""

import abc
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from millstream.dataset.iterators.chain_iterator import EngineIterator, ReadIterator
from millstream.dataset.iterators.dataset_iterator import DatasetIterator
from millstream.errors import CheckpointError
from millstream.signals import interrupts


class Drawn(NamedTuple):
    """Elements of an iterator.

    Attributes:
        values: the elements, fewer than requested if the iterator ends or fails.
        error: the error that followed them, if it failed.
    """

    values: list[Any]
    error: BaseException | None


class DrawnIterator(DatasetIterator[Any]):
    """An iterator that yields many elements faster in one call than one by one."""

    @abc.abstractmethod
    def draw(self, count: int) -> Drawn:
        """Returns the next elements.

        If there are fewer than `count`, the iterator's position is undefined until it is moved to a state.
        """

    @abc.abstractmethod
    def noted_state(self) -> Callable[[], dict[str, Any]]:
        """Returns a function that returns the current state of `get_state` later."""


def noted_state(iterator: DatasetIterator[Any]) -> Callable[[], Any]:
    """Returns a function that returns the current state of an iterator later, because most states are never needed.

    The state is for code that draws from the iterator: `move_to` accepts it.
    """
    if isinstance(iterator, ReadIterator):
        text = iterator.get_brief_state()
        return lambda: text
    if isinstance(iterator, DrawnIterator | EngineIterator):
        return iterator.noted_state()
    state = iterator.get_state()
    return lambda: state


def state_below(iterator: DatasetIterator[Any]) -> Any:
    """Returns the state of an iterator, for code that draws from it."""
    return noted_state(iterator)()


def move_to(iterator: DatasetIterator[Any], state: Any) -> None:
    """Moves an iterator to a state that `state_below` or its own `get_state` returned.

    Raises:
        CheckpointError: the iterator refuses the state; a user's iterator may do so with any error.
    """
    if isinstance(iterator, ReadIterator) and isinstance(state, str):
        iterator.set_brief_state(state)
        return
    try:
        iterator.set_state(state)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"A {type(iterator).__name__} cannot resume from the state {state!r:.80}: its set_state raised "
            f"{type(error).__name__}: {error}. Pass a state of the same chain."
        ) from error


def drawn_from(iterator: DatasetIterator[Any], count: int) -> Drawn:
    """Returns the next `count` elements of any iterator, fewer if it ends or fails."""
    if isinstance(iterator, DrawnIterator):
        return iterator.draw(count)
    values: list[Any] = []
    try:
        if isinstance(iterator, EngineIterator):
            while len(values) < count:
                values.extend(iterator.take(count - len(values)).values)
        else:
            values.extend(itertools.islice(iterator, count))
    except StopIteration:
        return Drawn(values, None)
    except BaseException as failure:
        if interrupts(failure):
            raise
        return Drawn(values, failure)
    return Drawn(values, None)
