"""Tools around training: a cache on disk, lengths and statistics of data, conversion, and the command line."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.tools.cached_source import CachedDataSource
    from millstream.tools.conversion import convert
    from millstream.tools.lengths import lengths_of
    from millstream.tools.statistics import Statistics, statistics_of
else:
    from millstream.core import lazy_imports

    # Lazy: the command line imports this package, too, and each command needs only its own modules.
    __getattr__, __dir__ = lazy_imports.hooks(__name__)

__all__ = ["CachedDataSource", "Statistics", "convert", "lengths_of", "statistics_of"]
