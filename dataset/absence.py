"""Elements that are absent: what a MapDataset has at a position where a filter dropped one, or a map returned None.

A chain is compiled as if there were none, unless one of its operations may drop some. Then a block is a batch, and any
step can be sought. Where an element is absent all the same, it shows when it is made (`transforms/absence_check.py`).
"""

from typing import Any, ClassVar, final

from millstream.transforms import Filter


@final
class KeepAll(Filter[Any]):
    """Keeps every element: a pipeline that begins with it is not 1:1, so that records which fail are dropped."""

    is_between: ClassVar[bool] = True

    def filter(self, element: Any) -> bool:
        """Returns True."""
        del element
        return True


@final
class DropAbsent(Filter[Any]):
    """Keeps the elements that are there."""

    is_between: ClassVar[bool] = True

    def filter(self, element: Any) -> bool:
        """Says whether there is one."""
        return element is not None
