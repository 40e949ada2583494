"""Views of a loader: its snapshot, advice, and renderings. Each module is imported when a view needs it."""

from typing import TYPE_CHECKING

from millstream.core import lazy_imports

if TYPE_CHECKING:
    from millstream.loader.reporting import preview, report, snapshot, summary
else:
    __getattr__, __dir__ = lazy_imports.hooks(__name__)

__all__ = ["preview", "report", "snapshot", "summary"]
