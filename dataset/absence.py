"""Missing elements: the positions of a MapDataset at which a filter dropped the element, or a map returned None.

A chain is compiled without missing elements unless one of its operations may drop some. A block is then a batch, and
any step can be sought. A missing element that turns up anyway is detected when it is read
(`transforms/absence_check.py`).
"""

from typing import Any, ClassVar, final

from millstream.transforms import Filter


@final
class KeepAll(Filter[Any]):
    """Keeps every element. A pipeline that begins with it is not 1:1, so that records that fail can be dropped."""

    is_between: ClassVar[bool] = True

    def filter(self, element: Any) -> bool:
        """Returns True."""
        del element
        return True


@final
class DropAbsent(Filter[Any]):
    """Drops missing elements."""

    is_between: ClassVar[bool] = True

    def filter(self, element: Any) -> bool:
        """Returns True if the element exists."""
        return element is not None
