"""Datasets that other datasets are drawn from, and their iterators: in the consumer's thread, without read-ahead.

A combination of many datasets would otherwise have threads for each of them. What stands after it in the chain may
have workers and threads as ever, and so may a dataset beneath that asks for worker processes.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from millstream.dataset.chain import iterates_itself, iterator_of
from millstream.dataset.dataset_iterator import DatasetIterator
from millstream.dataset.fed_iterator import with_states
from millstream.dataset.iter_dataset import IterDataset
from millstream.dataset.map_dataset import MapDataset
from millstream.errors import CheckpointError

if TYPE_CHECKING:
    from millstream.loader.workers.crew import Crew


def as_stream(dataset: Any, what: str) -> IterDataset[Any]:
    """Returns a dataset as one that is read in order.

    Raises:
        TypeError: it is not a dataset; the error calls it `what`.
    """
    if isinstance(dataset, MapDataset):
        return dataset.to_iter_dataset()
    if not isinstance(dataset, IterDataset):
        raise TypeError(f"{what} must be an IterDataset or a MapDataset, got {type(dataset).__name__}.")
    return dataset


def opened_below(dataset: IterDataset[Any], crew: "Crew | None" = None) -> DatasetIterator[Any]:
    """Returns a new iterator of a dataset that works when it is asked.

    Args:
        dataset: what to iterate over.
        crew: the worker processes of what draws from it, if they are to do its work.
    """
    return with_states(dataset) if iterates_itself(dataset) else iterator_of(dataset, ahead=False, crew=crew)


def move_all(iterators: Sequence[DatasetIterator[Any]], states: Sequence[Any]) -> None:
    """Moves iterators to states; where one refuses its own, all are where they were."""
    moved: list[tuple[DatasetIterator[Any], Any]] = []
    try:
        for iterator, state in zip(iterators, states, strict=True):
            before = iterator.get_state()
            iterator.set_state(state)
            moved.append((iterator, before))
    except BaseException:
        for iterator, before in moved:
            iterator.set_state(before)
        raise


def checked_state(state: Any, keys: set[str], what: str) -> Mapping[str, Any]:
    """Returns a state that has these keys.

    Raises:
        CheckpointError: it has others, or is not a dict.
    """
    if not isinstance(state, Mapping) or state.keys() != keys:
        shown = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointError(f"The state is not that of {what}, which has {sorted(keys)}: got {shown}.")
    return state
