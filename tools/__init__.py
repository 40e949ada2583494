"""Tools around training: results kept on a disk, lengths of documents, conversion of files, and the command line."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.tools.cached_source import CachedDataSource
    from millstream.tools.conversion import convert
    from millstream.tools.lengths import lengths_of
else:
    from millstream.core import lazy_imports

    # Lazy: the command line imports this package, too, and each command needs only its own modules.
    __getattr__, __dir__ = lazy_imports.hooks(
        __name__,
        {
            "CachedDataSource": "millstream.tools.cached_source",
            "convert": "millstream.tools.conversion",
            "lengths_of": "millstream.tools.lengths",
        },
    )

__all__ = ["CachedDataSource", "convert", "lengths_of"]
