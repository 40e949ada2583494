"""Drawing of many elements of an iterator in one call, for operations after a stream."""

import itertools
from collections.abc import Iterator
from typing import Any

from millstream.core.signals import interrupts
from millstream.dataset.iterators.chain_iterator import ReadIterator
from millstream.dataset.iterators.dataset_iterator import DatasetIterator, UsersIterator
from millstream.dataset.iterators.engine_iterator import EngineIterator
from millstream.dataset.iterators.recovering_iterator import Drawn, RecoveringIterator
from millstream.errors import CheckpointError


def state_below(iterator: DatasetIterator[Any]) -> Any:
    """Returns the state of an iterator, for code that draws from it."""
    return iterator._state_below()  # noqa: SLF001  (of the library's base class)


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
        name = iterator.name if isinstance(iterator, UsersIterator) else type(iterator).__name__
        raise CheckpointError(
            f"A {name} cannot resume from the state {state!r:.80}: its set_state raised "
            f"{type(error).__name__}: {error}. Pass a state of the same chain."
        ) from error


def drawn_from(iterator: Iterator[Any], count: int) -> Drawn[Any]:
    """Returns the next `count` elements of any iterator, fewer if it ends or fails."""
    values: list[Any] = []
    try:
        if count == 1:
            values.append(next(iterator))
        elif count and isinstance(iterator, RecoveringIterator):
            return iterator.draw(count)
        elif count and isinstance(iterator, EngineIterator):
            made = iterator.draw(count)
            return Drawn(list(made.values), made.error)
        elif count and isinstance(iterator, UsersIterator):
            try:
                values.extend(itertools.islice(iterator.iterator, count))
            finally:
                if values:
                    iterator.moved()
        else:
            values.extend(itertools.islice(iterator, count))
    except StopIteration:
        pass
    except BaseException as failure:
        if interrupts(failure):
            raise
        return Drawn(values, failure)
    return Drawn(values)
