"""Both sides of an arena in one process."""

import contextlib
import os
from collections.abc import Iterator

from millstream.loader.arena import Allocator, ArenaView, create_arena_file


@contextlib.contextmanager
def arena_pair(num_bytes: int = 1 << 26) -> Iterator[tuple[Allocator, ArenaView]]:
    """Yields the worker's and the parent's side of an arena of this size."""
    descriptor = create_arena_file(num_bytes)
    try:
        yield Allocator(descriptor, num_bytes), ArenaView(descriptor, num_bytes)
    finally:
        os.close(descriptor)
