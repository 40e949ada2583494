"""Keys are found ahead, and user code that changes the keys and positions that it gets changes no other batch."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import millstream
from millstream.loader.pipeline.elements import Origins
from millstream.loader.pipeline.order import MAX_CHUNKS, ChunkCache
from millstream.loader.pipeline.shards import Partition, Tail
from millstream.samplers import IndexSampler
from millstream.sharding import ShardOptions
from support.laws import inline_loader

Ints = NDArray[np.int64]

WAYS: dict[str, dict[str, Any]] = {
    "inline": {"read_options": millstream.ReadOptions(num_threads=0)},
    "threads": {"read_options": millstream.ReadOptions(num_threads=4)},
    "worker": {"worker_count": 1},
}


class Sorting:
    """A source that sorts its keys in place, to read in the order of a file."""

    takes_key_arrays = True

    def __len__(self) -> int:
        return 100

    def __getitem__(self, key: int) -> int:
        return 10 * key

    def __getitems__(self, keys: Ints) -> Any:
        back = np.argsort(np.argsort(keys))
        keys.sort()
        return (10 * keys)[back].tolist()


@pytest.mark.parametrize("way", WAYS)
def test_a_source_may_write_to_its_keys(way: str) -> None:
    """The array is the source's own: a second pass, another iterator and `record_keys` are not affected."""
    loader = millstream.load(Sorting(), shuffle=True, seed=0, num_epochs=1, batch_size=5, **WAYS[way])
    expected = (10 * IndexSampler(100, shuffle=True, seed=0).record_keys(0, 100)).reshape(-1, 5).tolist()
    for _ in range(2):
        with iter(loader) as batches:
            assert [batch.tolist() for batch in batches] == expected
            batches.seek(0)
            assert [next(batches).tolist() for _ in range(20)] == expected
    assert [(10 * loader.record_keys(step)).tolist() for step in range(20)] == expected


class Turned(IndexSampler):
    """Another order, in a user's subclass."""

    def turn(self, positions: Ints) -> Ints:
        return (positions + 3) % self.num_records

    def record_keys_at(self, positions: Ints) -> Ints:
        return self.turn(positions)


class InPlace(Turned):
    """The same order, computed in the array of positions."""

    def turn(self, positions: Ints) -> Ints:
        positions += 3
        positions %= self.num_records
        return positions


class OneBuffer(Turned):
    """The same order, always in the same memory."""

    buffer = np.empty(1 << 16, np.int64)

    def turn(self, positions: Ints) -> Ints:
        keys = self.buffer[: len(positions)]
        np.mod(positions + 3, self.num_records, out=keys)
        return keys


def stream(sampler: IndexSampler, way: str) -> list[list[int]]:
    """Returns the batches of 64 records 0 … 999."""
    with iter(inline_loader(range(1000), sampler, millstream.Batch(64), **WAYS[way])) as batches:
        return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("way", WAYS)
def test_a_sampler_may_reuse_its_memory(way: str) -> None:
    """A sampler may overwrite the array that it returned: 10 look-aheads keep their keys."""
    assert stream(OneBuffer(1000, num_epochs=160), way) == stream(Turned(1000, num_epochs=160), "inline")


@pytest.mark.parametrize("way", WAYS)
def test_a_sampler_cannot_write_to_its_positions(way: str) -> None:
    """A sampler that writes to its positions, by which randomness is drawn, fails at once: it would repeat draws."""
    with pytest.raises(ValueError, match="read-only"):
        stream(InPlace(1000, num_epochs=2), way)


@dataclasses.dataclass(frozen=True, eq=False)
class FailsFarAhead(Turned):
    """A sampler that has no answer, or a wrong one, for one position."""

    answer: int | None = None

    def turn(self, positions: Ints) -> Ints:
        keys = super().turn(positions)
        if 640 in positions:
            if self.answer is None:
                raise LookupError("640")
            keys[positions == 640] = self.answer
        return keys


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("answer", "error"), [(None, LookupError), (-1, ValueError)])
def test_a_samplers_failure_comes_at_its_own_batch(way: str, answer: int | None, error: type[Exception]) -> None:
    """Keys are asked for far ahead, and yet every batch before the failing position comes."""
    sampler = FailsFarAhead(1000, num_epochs=1, answer=answer)
    with iter(inline_loader(range(1000), sampler, millstream.Batch(64), **WAYS[way])) as batches:
        assert [next(batches).tolist() for _ in range(10)] == stream(Turned(1000, num_epochs=1), "inline")[:10]
        with pytest.raises(error, match="640"):
            next(batches)


class Jitter(millstream.RandomMap):
    def random_map(self, _element: int, rng: np.random.Generator) -> int:
        return int(rng.integers(1 << 62))


class WithGenerators(IndexSampler):
    """A sampler whose `__getitem__` brings generators of its own."""

    def __getitem__(self, position: int) -> millstream.RecordMetadata:
        return millstream.RecordMetadata(position, position % 10, np.random.default_rng(position))


class Runs:
    """A custom sampler with generators of its own, and with `record_keys`."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return 10

    __getitem__ = WithGenerators.__getitem__

    def record_keys(self, start: int, stop: int) -> Ints:
        return np.arange(start, stop)


@pytest.mark.parametrize("sampler", [WithGenerators(10, seed=1, num_epochs=1), Runs(seed=1)])
def test_generators_that_are_not_read_are_warned_of(sampler: Any) -> None:
    """A sampler that has both a seed and generators of its own is told which of them counts, when it matters."""
    with pytest.warns(
        UserWarning, match=r"operations\[1\], Jitter, draws from the sampler's seed.*seed to None"
    ) as caught:
        loader = millstream.DataLoader(data_source=range(10), sampler=sampler, operations=[abs, Jitter()])
    assert caught[0].filename == __file__
    expected = inline_loader(range(10), IndexSampler(10, seed=1, num_epochs=1), Jitter())
    assert list(loader) == list(expected)
    millstream.DataLoader(data_source=range(10), sampler=sampler, operations=[abs])


def test_generators_of_a_sampler_with_runs_are_kept() -> None:
    """A sampler that gains `record_keys` for speed, and has no seed, draws what it drew before."""

    class Singles:
        __len__, __getitem__ = Runs.__len__, Runs.__getitem__

        seed = None

    one, other = (list(inline_loader(range(10), sampler, Jitter())) for sampler in (Runs(seed=None), Singles()))
    assert one == other


def test_a_custom_sampler_is_held_to_its_largest_key() -> None:
    """`largest_key` is compared with the source at construction, also where `num_records` says something else."""

    class Repeating(Turned):
        largest_key = 9

        def turn(self, positions: Ints) -> Ints:
            return positions % 10

    millstream.DataLoader(data_source=range(10), sampler=Repeating(1000, num_epochs=1))
    with pytest.raises(ValueError, match="contains record keys up to 9, but data_source has 9 records"):
        millstream.DataLoader(data_source=range(9), sampler=Repeating(1000, num_epochs=1))


def halve(record: dict[str, Any]) -> dict[str, Any]:
    """Changes a record in place, as users do."""
    record["value"] = record["value"] / 2
    record["seen"] += 1
    return record


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [list, tuple, millstream.InMemoryDataSource])
def test_an_operation_may_write_to_the_dicts_of_a_list(way: str, kind: Any) -> None:
    """Every epoch begins with the records as they were, with workers and without."""
    source = kind([{"value": np.float64(n), "seen": 0} for n in range(8)])
    loader = millstream.load(source, num_epochs=3, transformations=[halve], batch_size=8, **WAYS[way])
    with iter(loader) as batches:
        for batch in batches:
            assert batch["value"].tolist() == [n / 2 for n in range(8)]
            assert batch["seen"].tolist() == [1] * 8


def test_keys_are_looked_up_for_few_epochs_in_advance() -> None:
    """The first batch of a small order asks for at most 16 epochs: some orders take a millisecond for each."""
    asked = [0]

    class Recording(Turned):
        def turn(self, positions: Ints) -> Ints:
            asked.append(int(positions.max()) + 1)
            return positions % 3

    with iter(inline_loader(range(3), Recording(3), millstream.Batch(2))) as batches:
        assert next(batches).tolist() == [0, 1]
    assert 0 < max(asked) <= 16 * 3


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
    """An error in finding a whole chunk is not raised for one block, and not tried for again; an interrupt is both."""
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
    _, following = ahead.chunk_of(8)

    assert (chunk is None) == (kind is ValueError)
    for found, blocks in ((chunk, [4, 5, 6, 7]), (following, [8, 9, 10, 11])):
        assert found is None or found.block.tolist() == blocks
    assert following is not None
