"""No byte of a batch is overwritten while anybody can read it; all free memory is known, and used again."""

import contextlib
import gc
import itertools
import os
import resource
import sys
import threading
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

import millstream
from millstream.loader.pipeline.recycled_memory import ALIGNMENT
from millstream.loader.transport.arena import (
    LARGE_LEAF_BYTES,
    MAX_RESIDENT_RATIO,
    PEAK_MESSAGES,
    SPARE_BYTES,
    Allocator,
    ArenaView,
    FreeSpace,
    create_arena_file,
    whole_pages,
)
from millstream.loader.transport.payload import pack, release, unpack
from millstream.loader.transport.pickling import ClassTable
from support.faults.memory_limits import limited
from support.processes.arena_pairs import (
    address,
    arena_file,
    arena_pair,
    mapped_arenas,
    real_bytes,
    run_of,
    watched_arenas,
)
from support.processes.process_tree import open_descriptors
from support.processes.worker_pools import in_background

# Workers cannot import the modules of tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

Filled = tuple[NDArray[np.uint8], int]
"""An array, and the number that all of it is."""

NO_CLASSES = ClassTable()
SIZES = st.sampled_from([1, 63, 64, 1000, 1024, 30_000, LARGE_LEAF_BYTES - 1, LARGE_LEAF_BYTES, 100_000, 300_000])


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

    @rule(was_sent=st.booleans())
    def forget(self, was_sent: bool) -> None:
        """The worker drops what it kept, or what it has made without sending it."""
        self.made, self.kept = (self.made, []) if was_sent else ([], self.kept)

    @rule(which=st.integers(0, 50), all_of_them=st.booleans())
    def drop(self, which: int, all_of_them: bool) -> None:
        """The parent drops one array, or all of them."""
        if self.received:
            self.received.pop(which % len(self.received))
        if all_of_them:
            self.received = []

    @rule()
    def refuse(self) -> None:
        """A message comes that the parent no longer waits for."""
        payload = pack(run_of([array for array, _ in self.made]), self.allocator, NO_CLASSES)
        release(payload, self.view)
        self.made = []

    @rule()
    def release(self) -> None:
        """Memory that the parent has dropped comes back to the worker."""
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
        payload = pack(run_of([array for array, _ in arrays]), self.allocator, NO_CLASSES)
        values = unpack(payload, self.view, NO_CLASSES).values
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


ArenaMachine.TestCase.settings = settings(deadline=None, max_examples=100, stateful_step_count=30)
TestArenaMachine = ArenaMachine.TestCase


def through(allocator: Allocator, view: ArenaView, size: int, value: int = 1) -> NDArray[np.uint8]:
    """Returns an array of this many bytes that a worker has made and its parent has got."""
    run = run_of([allocator.allocate((size,), np.dtype(np.uint8))])
    run.values[0][...] = value
    payload = pack(run, allocator, NO_CLASSES)
    del run
    for offset in view.take_released():
        allocator.take_back(offset)
    (array,) = unpack(payload, view, NO_CLASSES).values
    assert isinstance(array, np.ndarray)
    return array


@pytest.mark.parametrize("keeps", [1, 6])
def test_batches_of_ever_other_sizes_share_their_memory(keeps: int) -> None:
    """Free memory serves arrays of any size: there is hardly more of it than was lately in use, however sizes vary."""
    sizes = np.exp(np.random.default_rng(0).uniform(np.log(1 << 15), np.log(1 << 22), 500)).astype(int).tolist()
    with arena_file(1 << 30) as descriptor:
        allocator, view = Allocator(descriptor, 1 << 30), ArenaView(descriptor, 1 << 30)
        held: list[NDArray[np.uint8]] = []
        most_held = 0
        for size in sizes:
            held = [*held, through(allocator, view, size)][-keeps:]
            most_held = max(most_held, sum(array.nbytes for array in held))
            assert real_bytes(descriptor) <= MAX_RESIDENT_RATIO * (most_held + 3 * (1 << 22)) + SPARE_BYTES


def test_memory_that_is_no_longer_needed_goes_back() -> None:
    """After many batches were kept and dropped, the arena shrinks to what it needs, while its worker lives."""
    with arena_file(1 << 30) as descriptor:
        allocator, view = Allocator(descriptor, 1 << 30), ArenaView(descriptor, 1 << 30)
        kept = [through(allocator, view, 1 << 22) for _ in range(40)]
        assert real_bytes(descriptor) >= 40 << 22
        del kept[1:]
        for _ in range(2 * PEAK_MESSAGES + 1):
            through(allocator, view, 1 << 15)
        assert real_bytes(descriptor) <= MAX_RESIDENT_RATIO * (2 << 22) + SPARE_BYTES


def test_memory_comes_from_the_smallest_extent_that_has_room() -> None:
    """Large extents stay whole for large arrays."""
    space = FreeSpace()
    for start, num_bytes in ((0, 10), (20, 4), (30, 6)):
        space.add(start, num_bytes)
    assert [space.take(num_bytes) for num_bytes in (5, 4, 7, 7)] == [30, 20, 0, None]


def test_memory_in_small_pieces_serves_large_arrays() -> None:
    """An arena full of small arrays, all dropped, has room for one as large as itself."""
    with arena_pair(1 << 24) as (allocator, _):
        small = [allocator.allocate((1 << 16,), np.dtype(np.uint8)) for _ in range(1 << 8)]
        assert allocator.bytes_for(1 << 16) is None
        del small
        whole = allocator.bytes_for(1 << 24)
        assert whole is not None
        whole[:] = 1


@pytest.mark.parametrize("size", [1 << 15, 100_000, 1 << 20])
@pytest.mark.parametrize("kept", [[], [0], [19], [3, 4, 11]])
def test_a_retired_arena_holds_what_arrays_are_on(size: int, kept: list[int]) -> None:
    """A retired arena keeps only the pages of live arrays, and address space up to the last one."""
    before = mapped_arenas()
    with arena_file(1 << 26) as descriptor:
        view = ArenaView(descriptor, 1 << 26)
        allocator = Allocator(descriptor, 1 << 26)
        every = [through(allocator, view, size, number) for number in range(20)]
        arrays = {number: every[number] for number in kept}
        del every, allocator
        view.retire()
        with pytest.raises(ValueError, match="stopped"):
            view.lease(1 << 25, 1)
        mapped = sum(stop - start for start, stop in set(mapped_arenas()) - set(before))
        assert mapped <= (24 * whole_pages(size) if kept else 0)
        for number in kept:
            # The kernel counts a page of its own here and there.
            assert 0 <= real_bytes(descriptor) - len(arrays) * whole_pages(size) < 1 << 14
            assert all((array == value).all() for value, array in arrays.items())
            del arrays[number]
        assert real_bytes(descriptor) == 0
    del view

    assert mapped_arenas() == before


def test_arrays_may_end_while_their_arena_is_retired() -> None:
    """Arrays may end in another thread at any moment: their memory goes back, and the others are as they were."""
    for _ in range(20):
        with arena_file(1 << 26) as descriptor:
            allocator, view = Allocator(descriptor, 1 << 26), ArenaView(descriptor, 1 << 26)
            arrays = [through(allocator, view, 1 << 15) for _ in range(60)]
            kept = arrays.pop(30)
            with in_background(arrays.clear):
                view.retire()
            # The kept one, perhaps the one that ended in that moment, and the kernel's own pages.
            assert real_bytes(descriptor) < 3 << 15
            assert kept.all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")  # Forks are warned of; JAX does.
def test_a_forked_process_gives_nothing_back() -> None:
    """Copies of batches that end in a forked process give nothing back: the pages are the trainer's."""
    with arena_pair() as (allocator, view):
        arrays = [through(allocator, view, 1 << 16, 7)]
    view.retire()
    if (pid := os.fork()) == 0:
        arrays.clear()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

    assert (arrays[0] == 7).all()


def test_the_size_of_an_arena_is_sealed() -> None:
    """No process can cut memory off from under another one, which would be killed for touching it."""
    descriptor = create_arena_file(1 << 20)
    for size in (0, 1 << 21):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)


def test_an_arena_that_a_limit_forbids_leaves_no_descriptor() -> None:
    """A file that may not be as large as asked is closed again: its error costs no descriptor."""
    descriptors = open_descriptors()
    with limited(resource.RLIMIT_FSIZE, 1 << 20), pytest.raises(OSError, match="File too large"):
        create_arena_file(1 << 21)
    assert open_descriptors() == descriptors


def test_a_few_kept_bytes_pin_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeping part of each batch keeps no other memory, descriptor or address space, over several loaders."""

    def labelled(number: int) -> dict[str, NDArray[Any]]:
        image = np.full(4096, number, dtype=np.float32)
        return {"image": image, "label": np.full(64, number), "hidden": image[:2048]}

    def loader() -> millstream.DataLoader:
        return millstream.DataLoader(
            data_source=range(64),
            sampler=millstream.IndexSampler(64, num_epochs=1),
            operations=[labelled, millstream.Batch(16)],
            worker_count=2,
            read_options=millstream.ReadOptions(0),
        )

    with loader() as first:
        # The fork server, which stays for later loaders, has a descriptor.
        next(iter(first))
    kept = []
    with watched_arenas(monkeypatch) as arenas:
        descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  (the names are wanted)
        before = set(mapped_arenas())
        for _ in range(3):
            with iter(loader()) as iterator:
                kept += [(batch["label"], batch["hidden"]) for batch in iterator]
            del iterator
        gc.collect()

        needed = sum(whole_pages(hidden.nbytes) for _, hidden in kept)
        assert needed <= sum(map(real_bytes, arenas)) <= needed + len(arenas) * (1 << 14)
        assert sum(stop - start for start, stop in set(mapped_arenas()) - before) <= 3 * 16 << 20
        assert len(os.listdir("/proc/self/fd")) == descriptors + len(arenas)  # noqa: PTH208
    assert [int(label[0, 0]) for label, _ in kept] == [0, 16, 32, 48] * 3
    assert [int(hidden[0, 0]) for _, hidden in kept] == [0, 16, 32, 48] * 3
