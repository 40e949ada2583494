"""Both sides of an arena in one process, and what the arenas of this process take."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.loader.pipeline.elements import Elements, Origins
from millstream.loader.processes import pool
from millstream.loader.transport.arena import Allocator, ArenaView, create_arena_file


@contextlib.contextmanager
def arena_pair(num_bytes: int = 1 << 26) -> Iterator[tuple[Allocator, ArenaView]]:
    """Yields the worker's and the parent's side of an arena of this size."""
    with arena_file(num_bytes) as descriptor:
        yield Allocator(descriptor, num_bytes), ArenaView(descriptor, num_bytes)


@contextlib.contextmanager
def arena_file(num_bytes: int) -> Iterator[int]:
    descriptor = create_arena_file(num_bytes)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def run_of(values: list[Any]) -> Elements:
    """Returns a run of elements, each with origins of its own."""
    return Elements(values, Origins(np.outer([1, 10, 100, 1000, 10000], np.arange(len(values)))))


def mapped_arenas() -> list[tuple[int, int]]:
    """Returns the addresses at which the arenas that this process maps begin and end."""
    lines = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "millstream-arena" in line]
    return [(int(start, 16), int(stop, 16)) for start, stop in (line.split("-") for line in lines)]


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def real_bytes(descriptor: int) -> int:
    """Returns how much memory a file in memory takes."""
    return os.fstat(descriptor).st_blocks * 512


@contextlib.contextmanager
def watched_arenas(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yields a list of the descriptors of the arenas that pools make meanwhile, to look at them from outside."""
    watched: list[int] = []

    def create_watched(num_bytes: int) -> int:
        descriptor = create_arena_file(num_bytes)
        watched.append(os.dup(descriptor))
        return descriptor

    monkeypatch.setattr(pool, "create_arena_file", create_watched)
    yield watched
    for descriptor in watched:
        os.close(descriptor)
