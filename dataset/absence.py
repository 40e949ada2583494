"""Elements that are absent: what a MapDataset has at a position where a filter dropped one, or a map returned None.

A chain is compiled as if there were none, unless one of its operations may drop some. Then a block is a batch, and any
step can be sought. Where an element is absent all the same, it shows when it is read.
"""

from collections.abc import Sequence
from types import NoneType
from typing import Any, final

from millstream.columnar import ColumnarRecords
from millstream.sources.base import RecordKeys
from millstream.transforms import Filter


class HoleFound(LookupError):  # noqa: N818  (found at its turn, it changes the plan and is no error)
    """An element is absent, and the plan has no room for that."""


@final
class DenseSource:
    """A MapDataset whose elements are all there; an absent one is a `HoleFound`.

    Args:
        dataset: the MapDataset.
    """

    takes_key_arrays = True

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, position: int) -> Any:
        element = self._dataset[position]
        if element is None:
            raise HoleFound(
                f"The element at position {position} of the MapDataset is absent: a map has returned None there. "
                "Drop such elements with a filter, so that it is known where they may be."
            )
        return element

    def __getitems__(self, positions: RecordKeys) -> Sequence[Any]:
        """Returns elements."""
        elements: Sequence[Any] = self._dataset.__getitems__(positions)
        if not isinstance(elements, ColumnarRecords) and NoneType in set(map(type, elements)):
            # They are then read one by one, up to the one that is absent.
            raise HoleFound
        return elements

    def fingerprint(self) -> str:
        """Returns what decides the elements."""
        words: str = self._dataset.fingerprint()
        return words


@final
class DropAbsent(Filter[Any]):
    """Keeps the elements that are there."""

    def filter(self, element: Any) -> bool:
        """Says whether there is one."""
        return element is not None
