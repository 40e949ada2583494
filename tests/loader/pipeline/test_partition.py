"""Positions are partitioned among shards as by cutting a list; chunks of origins are found ahead."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.loader.operations.elements import Origins
from millstream.loader.pipeline.chunk_cache import MAX_CHUNKS, ChunkCache
from millstream.loader.pipeline.partition import Partition, Tail
from millstream.sharding import ShardOptions


def test_a_block_larger_than_memory_is_its_tail() -> None:
    """A batch size larger than all records means one batch of everything, at the cost of everything."""
    partition = Partition(1 << 62, ShardOptions(1, 2), 7, Tail.SPREAD)

    assert partition.num_blocks == 1
    assert partition.positions(0, 1).tolist() == [4, 5, 6]


def origins_of(start: int, stop: int) -> Origins:
    return Origins(np.tile(np.arange(start, stop), (5, 1)))


@given(size=st.integers(1, 9), limit=st.integers(1, 40), data=st.data())
def test_chunks_are_whole_but_for_the_last(size: int, limit: int, data: st.DataObject) -> None:
    """Whichever blocks are asked for, in any order, each is in the chunk given, and no chunk is out of bounds."""
    asked: list[tuple[int, int]] = []

    def locate(start: int, stop: int) -> Origins:
        asked.append((start, stop))
        return origins_of(start, stop)

    ahead = ChunkCache(locate, size, limit)
    for block in data.draw(st.lists(st.integers(0, limit - 1), max_size=12)):
        first, chunk = ahead.chunk_of(block)
        assert chunk is not None
        assert first == block - block % size
        assert chunk.block.tolist() == list(range(first, min(first + size, limit)))
    assert all(start % size == 0 and stop == min(start + size, limit) for start, stop in asked)
    assert len(ahead._chunks) <= MAX_CHUNKS


def test_nobody_waits_for_a_chunk_that_is_being_found() -> None:
    """A caller that comes meanwhile, here from within, gets no chunk; the finder and all later callers get it."""
    seen: list[Origins | None] = []

    def locate(start: int, stop: int) -> Origins:
        seen.append(ahead.chunk_of(start)[1])
        return origins_of(start, stop)

    ahead = ChunkCache(locate, 4, 100)
    _, chunk = ahead.chunk_of(5)

    assert seen == [None]
    assert chunk is not None
    assert ahead.chunk_of(7)[1] is chunk


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_no_chunk_and_blocks_no_later_one(kind: type[BaseException]) -> None:
    """An error in finding a whole chunk is not raised for one block, an interrupt is; the next call finds the chunk."""
    broken = True

    def locate(start: int, stop: int) -> Origins:
        if broken:
            raise kind
        return origins_of(start, stop)

    ahead = ChunkCache(locate, 4, 100)
    if kind is ValueError:
        assert ahead.chunk_of(5) == (4, None)
    else:
        with pytest.raises(kind):
            ahead.chunk_of(5)
    broken = False
    _, chunk = ahead.chunk_of(5)

    assert chunk is not None
    assert chunk.block.tolist() == [4, 5, 6, 7]
