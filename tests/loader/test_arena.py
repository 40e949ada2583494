"""No byte of a batch is written again while anybody can read it, and all memory is used again when nobody can."""

import contextlib
import gc
import itertools
import os
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from arena_pairs import arena_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

import millstream
from millstream.loader import pool
from millstream.loader.arena import LARGE_LEAF_BYTES, create_arena_file
from millstream.loader.class_table import ClassTable
from millstream.loader.elements import Elements, Origins
from millstream.loader.recycled_memory import ALIGNMENT, round_up
from millstream.loader.transport import pack, release, unpack

# Workers cannot import the modules of tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

Filled = tuple[NDArray[np.uint8], int]
"""An array, and the number that all of it is."""

NO_CLASSES = ClassTable()
SIZES = st.sampled_from([1, 63, 64, 1000, 1024, 30_000, LARGE_LEAF_BYTES - 1, LARGE_LEAF_BYTES, 100_000, 300_000])


def address(array: NDArray[Any]) -> int:
    """Returns where an array begins."""
    return int(array.__array_interface__["data"][0])


def run_of(arrays: list[Any]) -> Elements:
    """Returns a run of some elements."""
    numbers = np.arange(len(arrays), dtype=np.int64)
    return Elements(arrays, Origins(numbers, numbers, numbers))


class ArenaMachine(RuleBasedStateMachine):
    """A worker and its parent who make, send, keep and drop arrays in any order.

    The model is the value that each array was filled with: one that changes by itself was overwritten.
    """

    @initialize(num_bytes=st.sampled_from([1 << 16, 1 << 20, 1 << 24]))
    def begin(self, num_bytes: int) -> None:
        """Makes an arena: in the smallest, hardly anything finds room."""
        self.exit = contextlib.ExitStack()
        self.allocator, self.view = self.exit.enter_context(arena_pair(num_bytes))
        self.count = 0
        self.made: list[Filled] = []
        self.kept: list[Filled] = []
        self.received: list[Filled] = []

    @rule(size=SIZES)
    def make(self, size: int) -> None:
        """The worker makes an array for the next message."""
        array = self.allocator.allocate((size,), np.dtype(np.uint8))
        self.count += 1
        array[:] = self.count % 251
        self.made.append((array, self.count % 251))
        assert size < LARGE_LEAF_BYTES or address(array) % ALIGNMENT == 0 or array.base is None

    @rule(keeps=st.booleans(), twice=st.booleans())
    def send(self, keeps: bool, twice: bool) -> None:
        """The worker sends what it has made and keeps it, or not."""
        self.received += self.sent(self.made * (1 + twice))
        if keeps:
            self.kept += self.made
        self.made = []

    @rule()
    def send_again(self) -> None:
        """The worker sends arrays that it has kept from earlier messages."""
        self.received += self.sent(self.kept[:3])

    @rule(keeps=st.booleans())
    def fail_to_send(self, keeps: bool) -> None:
        """Something in the message cannot be pickled."""
        with pytest.raises(TypeError):
            pack(run_of([*(array for array, _ in self.made), threading.Lock()]), self.allocator, NO_CLASSES)
        if keeps:
            self.kept += self.made
        self.made = []

    @rule()
    def discard(self) -> None:
        """The worker drops what it has made without sending it."""
        self.made = []

    @rule()
    def forget(self) -> None:
        """The worker drops what it kept."""
        self.kept = []

    @rule(which=st.integers(0, 50))
    def drop(self, which: int) -> None:
        """The parent drops one array."""
        if self.received:
            self.received.pop(which % len(self.received))

    @rule()
    def drop_all(self) -> None:
        """The parent drops all arrays."""
        self.received = []

    @rule()
    def refuse(self) -> None:
        """A message comes that the parent no longer waits for."""
        parcel = pack(run_of([array for array, _ in self.made]), self.allocator, NO_CLASSES)
        release(parcel, self.view)
        self.made = []

    @rule()
    def release(self) -> None:
        """What the parent has dropped comes back to the worker."""
        for offset in self.view.take_released():
            self.allocator.take_back(offset)

    @invariant()
    def nothing_is_overwritten(self) -> None:
        """Every array that anybody has is what it was filled with, and lies apart from all others on its side."""
        for arrays in (self.made + self.kept, self.received):
            assert all(np.all(array == value) for array, value in arrays)
            spans = sorted({(address(array), address(array) + array.nbytes) for array, _ in arrays})
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))

    def sent(self, arrays: list[Filled]) -> list[Filled]:
        """Returns some of the worker's arrays as the parent gets them."""
        parcel = pack(run_of([array for array, _ in arrays]), self.allocator, NO_CLASSES)
        values, _ = unpack(parcel, self.view, NO_CLASSES)
        return list(zip(values, [value for _, value in arrays], strict=True))

    def teardown(self) -> None:
        """Drops everything: the memory of all of it can be used again."""
        if not hasattr(self, "exit"):
            return
        self.made, self.kept, self.received = [], [], []
        self.allocator.end_message()
        self.release()
        self.allocator.bytes_for(1)
        self.allocator.end_message()
        self.allocator.bytes_for(1)
        assert len(self.allocator._chunks) <= 1
        self.exit.close()


ArenaMachine.TestCase.settings = settings(deadline=None, max_examples=150, stateful_step_count=30)
TestArenaMachine = ArenaMachine.TestCase


@given(sizes=st.lists(st.integers(0, 300_000), min_size=1, max_size=5), keeps=st.integers(0, 3))
@settings(deadline=None, max_examples=40)
def test_the_same_batches_again_need_no_more_memory(sizes: list[int], keeps: int) -> None:
    """A consumer that holds the last few batches makes the arena grow to these, and no further."""
    with arena_pair() as (allocator, view):
        held: list[Any] = []
        used = []
        for _ in range(12):
            run = run_of([allocator.allocate((size,), np.dtype(np.uint8)) for size in sizes])
            parcel = pack(run, allocator, NO_CLASSES)
            del run
            held = [*held, unpack(parcel, view, NO_CLASSES)][-keeps - 1 :]
            for offset in view.take_released():
                allocator.take_back(offset)
            used.append(allocator._used)

    assert used[keeps + 3 :] == used[keeps + 3 : keeps + 4] * (9 - keeps)


@given(num_bytes=st.integers(1, 1 << 45))
def test_chunks_come_in_few_sizes(num_bytes: int) -> None:
    """A chunk has whole pages, and at most a quarter more than needed; there are four sizes to each power of two."""
    size = round_up(num_bytes)

    assert size % 4096 == 0
    assert num_bytes <= size < max(num_bytes + 4096, num_bytes * 5 // 4 + 4096)
    assert round_up(size) == size
    assert len(bin(size // 4096).rstrip("0")) <= 2 + 3


def test_an_arena_that_is_full_is_no_obstacle() -> None:
    """Arrays without room are private memory of the same contents."""
    with arena_pair(1 << 16) as (allocator, view):
        arrays = [allocator.allocate((1000, 30), np.dtype(np.float32)) for _ in range(4)]
        for number, array in enumerate(arrays):
            array[...] = number
        values, _ = unpack(pack(run_of(arrays), allocator, NO_CLASSES), view, NO_CLASSES)

    assert [float(value.mean()) for value in values] == [0, 1, 2, 3]


def test_the_size_of_an_arena_is_sealed() -> None:
    """No process can cut memory off from under another one, which would be killed for touching it."""
    descriptor = create_arena_file(1 << 20)
    for size in (0, 1 << 21):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------------------

BATCH = 16
ELEMENTS = 4096


def picture(number: int) -> NDArray[np.float32]:
    """Returns an element of 16 KB that tells from which record it is."""
    return np.full(ELEMENTS, number, dtype=np.float32)


def loader_of_pictures(size: int, worker_count: int = 2) -> millstream.DataLoader:
    """Returns a loader of batches of 256 KB."""
    return millstream.DataLoader(
        data_source=range(size),
        sampler=millstream.IndexSampler(size, num_epochs=1),
        operations=[picture, millstream.Batch(BATCH)],
        worker_count=worker_count,
        read_options=millstream.ReadOptions(0),
    )


def expected_of_pictures(size: int) -> list[list[float]]:
    """Returns the first number of each element of each batch."""
    return np.arange(size, dtype=np.float64).reshape(-1, BATCH).tolist()


def real_bytes() -> int:
    """Returns how much memory the arenas that this process has open take."""
    descriptors = list(Path("/proc/self/fd").iterdir())
    arenas = [file.stat() for file in descriptors if "millstream-arena" in str(file.resolve())]
    return sum({arena.st_ino: arena.st_blocks * 512 for arena in arenas}.values())


def test_batches_that_are_kept_stay_as_they_are() -> None:
    """`list(loader)`: the memory grows, and no batch is overwritten, even after the iterator is closed."""
    with iter(loader_of_pictures(BATCH * 100)) as iterator:
        batches = list(iterator)
    gc.collect()

    assert [batch[:, 0].tolist() for batch in batches] == expected_of_pictures(BATCH * 100)
    assert all(np.all(batch == batch[:, :1]) for batch in batches)
    assert all(batch.flags.writeable and address(batch) % ALIGNMENT == 0 for batch in batches)
    assert len({address(batch) for batch in batches}) == 100


@pytest.mark.third_party
def test_batches_that_jax_has_taken_stay_as_they_are() -> None:
    """`jax.device_put` on the CPU takes an aligned array as it is: while JAX has it, its memory is not used again."""
    import jax

    with iter(loader_of_pictures(BATCH * 100)) as iterator:
        taken = [jax.device_put(batch, jax.devices("cpu")[0]) for batch in iterator]
        again = iter(loader_of_pictures(BATCH * 100))
        for _ in again:
            pass
        again.close()

    assert [np.asarray(array)[:, 0].tolist() for array in taken] == expected_of_pictures(BATCH * 100)
    assert all(np.all(np.asarray(array) == np.asarray(array)[:, :1]) for array in taken)


def test_parts_of_batches_that_are_kept_stay_as_they_are() -> None:
    """A view of one row of a batch keeps the batch's memory."""
    with iter(loader_of_pictures(BATCH * 100)) as iterator:
        rows = [batch[3, 5:7] for batch in iterator]

    assert [row.tolist() for row in rows] == [[batch[3]] * 2 for batch in expected_of_pictures(BATCH * 100)]


def test_a_consumer_may_write_into_its_batches() -> None:
    """Batches are the consumer's own: what it writes into one is in no other."""
    with iter(loader_of_pictures(BATCH * 50)) as iterator:
        kept = []
        for number, batch in enumerate(iterator):
            assert np.all(batch == batch[:, :1])
            assert batch[:, 0].tolist() == expected_of_pictures(BATCH * 50)[number]
            batch[...] = -number
            kept.append(batch)

    assert [float(batch.max()) for batch in kept] == [-float(number) for number in range(50)]


def test_memory_is_bounded_where_batches_are_dropped() -> None:
    """However long the stream, the arenas hold the batches in flight and those that the consumer has."""
    with iter(loader_of_pictures(BATCH * 300)) as iterator:
        most = max(real_bytes() for _ in iterator)

    # Two workers with a batch in work, one ahead, one in the socket and two at the consumer, of 256 KB each.
    assert 0 < most <= 2 * 5 * BATCH * ELEMENTS * 4 + (1 << 22)


def test_an_arena_too_small_for_what_is_kept_gives_private_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget of shared memory is kept to, and the stream is the same."""
    monkeypatch.setattr(pool, "memory_budget", lambda: 1 << 21)
    with iter(loader_of_pictures(BATCH * 40)) as iterator:
        batches = list(iterator)
        # The kernel counts a page of its own here and there.
        assert real_bytes() <= (1 << 21) + (1 << 15)

    assert [batch[:, 0].tolist() for batch in batches] == expected_of_pictures(BATCH * 40)
    assert all(np.all(batch == batch[:, :1]) for batch in batches)
