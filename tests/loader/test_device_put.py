"""Batches on the device: the same stream, the same protocol, and never more of them than was asked for."""

import dataclasses
import gc
import json
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import millstream
from millstream.core import tree
from millstream.loader import device_iterator
from millstream.loader.device_placement import Placement
from millstream.loader.threads import shared_threads, waiting
from millstream.transforms import Batch
from support import laws
from support.draw.random_pipelines import UNEVEN_ENDS, Pipeline, pipelines
from support.faults.user_faults import WAIT_SECONDS, At, Pipe, ReportThen, hang_in_c
from support.oracle.stream import oracle
from support.processes.worker_pools import at_most, environment, in_background, python
from support.streams import comparable, drain, equal_streams

pytestmark = pytest.mark.third_party

INLINE = millstream.ReadOptions(num_threads=0)


@pytest.fixture(autouse=True)
def wide_numbers() -> Iterator[None]:
    """Lets JAX keep 64 bits, so that batches can be compared to the last byte."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def loader_of(*operations: Any, **options: Any) -> millstream.DataLoader:
    """Returns a loader of the numbers below 40, shuffled, in batches of 4, made without threads by default."""
    arguments: dict[str, Any] = {
        "data_source": range(40),
        "sampler": millstream.IndexSampler(40, shuffle=True, num_epochs=1, seed=5),
        "operations": [Batch(4), *operations],
        "read_options": INLINE,
    }
    return millstream.DataLoader(**(arguments | options))


EXPECTED = [batch.tolist() for batch in loader_of()]


def on_host(batch: Any) -> Any:
    """Returns a batch with NumPy's arrays as leaves, whether it was on a device or not."""
    return jax.tree.map(np.asarray, batch)


def settle(iterator: millstream.DeviceIterator) -> None:
    """Waits until the thread has done all that it may do now: its jobs are done in order, and this is one more."""
    done = threading.Event()
    iterator._readers.submit(done.set)
    assert done.wait(WAIT_SECONDS)


def staging_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("millstream-read")]


class Trainer(RuleBasedStateMachine):
    """A training loop that does anything in any order: what it gets is the oracle's stream, on the device."""

    @initialize(pipeline=pipelines(), buffer_size=st.integers(1, 5), num_threads=st.sampled_from([0, 0, 2]))
    def begin(self, pipeline: Pipeline, buffer_size: int, num_threads: int) -> None:
        """Makes an iterator."""
        self.loader = laws.loader_of(pipeline, read_options=millstream.ReadOptions(num_threads))
        stream = oracle(pipeline.source, pipeline.sampler, pipeline.operations, pipeline.shard)
        self.expected, self.error = drain(map(on_host, stream))
        self.buffer_size = buffer_size
        self.step = 0
        self.states: list[tuple[int, bytes]] = []
        self.open()

    def open(self) -> None:
        self.beneath = iter(self.loader)
        self.iterator = millstream.device_put(self.beneath, buffer_size=self.buffer_size)

    @rule(count=st.integers(1, 6))
    def take(self, count: int) -> None:
        """Batches arrive as the oracle says, and the end or the error where it says, again and again."""
        for _ in range(count):
            if self.step < len(self.expected):
                assert comparable(on_host(next(self.iterator))) == self.expected[self.step]
                self.step += 1
            else:
                with pytest.raises(self.error or StopIteration):
                    next(self.iterator)

    @rule()
    def prefetch(self) -> None:
        """Working ahead changes nothing."""
        self.iterator.start_prefetch()

    @rule()
    def get_state(self) -> None:
        """A state is the position of the training loop: a loader's own iterator resumes from there."""
        with iter(self.loader) as plain:
            plain.set_state(self.iterator.get_state())
            assert plain.step == self.step
            if self.step < len(self.expected):
                assert comparable(on_host(next(plain))) == self.expected[self.step]
        self.states.append((self.step, self.iterator.get_state()))

    @precondition(lambda self: self.states)
    @rule(which=st.integers(0, 100), is_fresh=st.booleans())
    def set_state(self, which: int, is_fresh: bool) -> None:
        """Any earlier state leads back to its position, in this iterator and in a fresh one."""
        if is_fresh:
            self.iterator.close()
            self.open()
        self.step, state = self.states[which % len(self.states)]
        self.iterator.set_state(state)

    @rule(data=st.data())
    def seek(self, data: st.DataObject) -> None:
        """Seeking goes to the step asked for."""
        self.step = data.draw(st.integers(0, len(self.expected)))
        self.iterator.seek(self.step)

    @rule()
    def fail_to_go(self) -> None:
        """A state that cannot be read, or a step that does not exist, leaves the iterator where it is."""
        with pytest.raises(millstream.CheckpointError):
            self.iterator.set_state(b"{}")
        with pytest.raises(IndexError):
            self.iterator.seek(-1)

    def teardown(self) -> None:
        """At any time, no more is staged than may be, and the step is that of the training loop."""
        if hasattr(self, "iterator"):
            assert self.iterator.step == self.step
            settle(self.iterator)
            assert self.beneath.step - self.step <= self.buffer_size
            self.iterator.close()


@UNEVEN_ENDS
def test_a_training_loop_may_do_anything() -> None:
    """Random pipelines, buffers and actions: the stream, the states and the errors are those of the host."""
    run_state_machine_as_test(Trainer, settings=settings(deadline=None, max_examples=60, stateful_step_count=15))


@given(steps=st.lists(st.integers(1, 5), min_size=1, max_size=4), buffer_size=st.integers(1, 6))
@settings(deadline=None, max_examples=15)
def test_no_more_is_staged_than_was_said(steps: list[int], buffer_size: int) -> None:
    """Once the thread has nothing more to do, exactly `buffer_size` batches are drawn and on the device; never more."""
    drawn: list[int] = []

    def count(element: Any) -> Any:
        drawn.append(len(asked))
        return np.broadcast_to(element[:1], (7, 11, 13)).copy()

    asked: list[None] = []
    beneath = iter(loader_of(count, data_source=range(400), sampler=millstream.SequentialSampler(400)))
    with millstream.device_put(beneath, buffer_size=buffer_size) as iterator:
        assert drawn == []
        for num_batches in steps:
            for _ in range(num_batches):
                asked.append(None)
                next(iterator)
            settle(iterator)
            assert beneath.step == len(drawn) == iterator.step + buffer_size
            gc.collect()
            assert sum(array.shape == (7, 11, 13) for array in jax.live_arrays()) == buffer_size
    assert all(number < asked_before + buffer_size for number, asked_before in enumerate(drawn))


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    image: Any
    extra: Any


class Pair(NamedTuple):
    first: Any
    second: Any


def test_a_batch_keeps_its_structure() -> None:
    """Dicts, lists, tuples, named tuples and dataclasses, JAX's or not, hold arrays where the loader's did, or None."""

    def nest(batch: Any) -> Any:
        return {
            "z": Example(batch, {"a": [Pair(batch + 1, None), (np.float32(2),)]}),
            "b": Pair(Example(Example(batch.astype(ml_dtypes.bfloat16), 5), True), ()),
        }

    with millstream.device_put(iter(loader_of(nest))) as iterator:
        batch, expected = next(iterator), next(iter(loader_of(nest)))
    assert all(isinstance(leaf, jax.Array) for _, leaf in tree.leaves(batch) if leaf is not None)
    assert comparable(tree.map_leaves(np.asarray, batch)) == comparable(tree.map_leaves(np.asarray, expected))


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        ("text", r"batch\['meta'\]\[1\].image is str"),
        (np.array([b"a"], object), r"is ndarray of dtype object and shape \(1,\)"),
        (np.array(["2020-01-01"], "M8[D]"), r"is ndarray of dtype datetime64"),
    ],
    ids=["str", "objects", "times"],
)
def test_what_jax_has_no_array_of_is_an_error_that_names_it(leaf: Any, said: str) -> None:
    """A string among the leaves is a TypeError at its turn with the leaf's path; `seek` passes over the batch."""

    def add_text(batch: Any) -> Any:
        return {"x": batch, "meta": [0, Example(leaf if batch.tolist() == EXPECTED[2] else 1, None)]}

    with millstream.device_put(iter(loader_of(add_text)), buffer_size=3) as iterator:
        assert [next(iterator)["x"].tolist() for _ in range(2)] == EXPECTED[:2]
        for _ in range(2):
            with pytest.raises(TypeError, match=said) as caught:
                next(iterator)
            assert "Drop it in an operation" in str(caught.value)
            assert iterator.step == 2
        iterator.seek(3)
        assert [batch["x"].tolist() for batch in iterator] == EXPECTED[3:]


@pytest.mark.parametrize("options", [{"worker_count": 2}, {"read_options": millstream.ReadOptions(2)}, {}], ids=str)
def test_kept_batches_are_never_overwritten(options: dict[str, Any]) -> None:
    """On the CPU, JAX aliases large aligned arrays: their memory is not reused while a batch is kept."""

    def enlarge(number: Any) -> Any:
        return np.full((64, 128), number, np.int64)

    loader = loader_of(operations=[enlarge, Batch(4)], **options)
    expected = [batch.copy() for batch in loader]
    host = next(iter(loader))
    aliased = jax.device_put(host).unsafe_buffer_pointer() == host.__array_interface__["data"][0]
    assert aliased, "the law is not tested: JAX copies this"
    with millstream.device_put(iter(loader)) as iterator:
        kept = list(iterator)
        for _ in range(2):
            iterator.seek(0)
            for batch in iterator:
                del batch
    assert equal_streams(expected, [np.asarray(batch) for batch in kept])


def test_an_interrupt_ends_the_wait_for_a_worker_that_hangs(tmp_path: Path) -> None:
    """After Ctrl-C, the worker that hung is gone, and the next one makes the batch."""
    with Pipe(tmp_path / "there") as there:
        operation = At(EXPECTED[4][0], ReportThen(there.path, hang_in_c), tmp_path / "once")

        def interrupt() -> None:
            there.take_numbers()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        with millstream.device_put(iter(loader_of(operation, worker_count=1))) as iterator:
            with in_background(interrupt), pytest.raises(KeyboardInterrupt):
                list(iterator)
            step = iterator.step
            assert [batch.tolist() for batch in iterator] == EXPECTED[step:]


def close_meanwhile(iterator: millstream.DeviceIterator) -> None:
    def close_while_it_waits() -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while iterator._staging is None or not iterator._staging.is_awaited:
            assert time.monotonic() < deadline
        iterator.close()

    with in_background(close_while_it_waits), pytest.raises(ValueError, match="closed"):
        next(iterator)


LEAVING: dict[str, Callable[[millstream.DeviceIterator], None]] = {
    "close": millstream.DeviceIterator.close,
    "close in another thread": close_meanwhile,
    "drop": bool,  # type: ignore[dict-item]  # nothing
}


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("reading", [INLINE, millstream.ReadOptions(2)], ids=["inline", "threads"])
def test_leaving_is_bounded_while_a_read_is_stuck(
    leave: str, reading: millstream.ReadOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing takes two seconds at most, whatever user code does, and ends a `next` that waits; dropping ends all, too.

    The thread and the underlying iterator end with the iterator, without the garbage collector.
    """
    for module in (device_iterator, shared_threads):
        monkeypatch.setattr(module, "CLOSE_SECONDS", 0.2)
    is_read, goes_on = threading.Event(), threading.Event()

    def read(batch: Any) -> Any:
        is_read.set()
        goes_on.wait(WAIT_SECONDS)
        return batch

    beneath = iter(loader_of(read, read_options=reading))
    gc.disable()
    try:
        iterator = millstream.device_put(beneath)
        iterator.start_prefetch()
        assert is_read.wait(WAIT_SECONDS)
        with at_most(2.0):
            LEAVING[leave](iterator)
            del iterator
        threads = staging_threads()
        goes_on.set()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert staging_threads() == []
        with pytest.raises(ValueError, match="closed"):
            next(beneath)
    finally:
        gc.enable()


class Lines:
    """A user's stream, which notes whether it is used twice at a time. Its third `next` waits for `goes_on`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_used = self.was_used_twice = False
        self.num_closed = self.count = 0
        self.waits, self.goes_on = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[int]:
        return self.generate() if self.kind == "generator" else LinesIterator(self)

    def __deepcopy__(self, memo: Any) -> "Lines":
        return self

    def use(self) -> None:
        self.was_used_twice |= self.is_used
        self.is_used = True
        if self.count == 2:
            self.waits.set()
            assert self.goes_on.wait(WAIT_SECONDS)
        self.count += 1
        self.is_used = False

    def generate(self) -> Iterator[int]:
        try:
            while True:
                self.use()
                yield self.count
        finally:
            self.num_closed += 1


class LinesIterator:
    """An iterator of `Lines` that can be closed, and saved if its kind says so."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        if lines.kind == "states":
            self.state_dict, self.load_state_dict = dict, print

    def __iter__(self) -> "LinesIterator":
        return self

    def __next__(self) -> int:
        self.lines.use()
        return self.lines.count

    def close(self) -> None:
        self.lines.was_used_twice |= self.lines.is_used
        self.lines.num_closed += 1


CHAINS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda stream: stream,
    "batched": lambda stream: stream.batch(1),
    "mixed": lambda stream: millstream.IterDataset.mix([stream], [1]),
}


@pytest.mark.parametrize("kind", ["generator", "iterator", "states"])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_users_stream_is_never_closed_while_it_is_read(kind: str, chain: str, *, is_dropped: bool) -> None:
    """Closing or dropping waits for the read, or leaves closing to the thread that reads; nothing raises."""
    lines = Lines(kind)
    iterator = millstream.device_put(iter(CHAINS[chain](millstream.IterDataset.source(lines))))
    next(iterator)
    assert lines.waits.wait(WAIT_SECONDS)
    if is_dropped:
        del iterator
        lines.goes_on.set()
    else:
        with in_background(lambda: at_closing(iterator, lines.goes_on)):
            iterator.close()
    for thread in staging_threads():
        thread.join(WAIT_SECONDS)
    assert (lines.was_used_twice, lines.num_closed > 0) == (False, True)


class OnlyHere:
    """A stream with states, as those of Hugging Face, that can only be copied in the thread that made it."""

    def __init__(self) -> None:
        self.count, self.thread = 0, threading.get_ident()

    def __deepcopy__(self, memo: Any) -> "OnlyHere":
        assert threading.get_ident() == self.thread
        return OnlyHere()

    def __iter__(self) -> Iterator[int]:
        while self.count < 50:
            self.count += 1
            yield self.count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def hugging_face_stream() -> Any:
    import datasets

    return datasets.Dataset.from_dict({"x": list(range(1, 51))}).to_iterable_dataset(num_shards=5)


@pytest.mark.parametrize("make", [OnlyHere, hugging_face_stream])
@pytest.mark.parametrize("chain", CHAINS)
def test_streams_with_states_resume_on_the_device(make: Callable[[], Any], chain: str) -> None:
    """A new iterator and a used one go on where the state was taken, and objects are copied in the trainer's thread."""

    def begin() -> millstream.DeviceIterator:
        return millstream.device_put(iter(CHAINS[chain](millstream.IterDataset.source(make()))))

    with begin() as used, begin() as new:
        for _ in range(3):
            next(used)
        state = used.get_state()
        following = [on_host(next(used)) for _ in range(3)]
        for iterator in (used, used, new):
            iterator.set_state(state)
            assert equal_streams(following, [on_host(next(iterator)) for _ in range(3)])


def at_closing(iterator: millstream.DeviceIterator, event: threading.Event) -> None:
    """Sets an event once the iterator is being closed."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not iterator._is_closed:
        assert time.monotonic() < deadline
    event.set()


def test_a_leaf_that_does_not_fit_is_told_its_own_remedy() -> None:
    """Bytes in the other order are numbers, and a leaf with fewer axes than the sharding is no short batch."""
    swapped = np.dtype(np.float32).newbyteorder("S")
    with pytest.raises(TypeError, match=r"batch\['x'\] is .*astype\('float32'\)"):
        Placement(None).put({"x": np.ones(2, swapped)})
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("rows", "columns"))
    both = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows", "columns"))
    with pytest.raises(ValueError, match="rank") as caught:
        Placement(both).put({"x": np.ones((2, 2)), "n": np.ones(2)})
    assert "sharding of the rows alone, PartitionSpec('rows')" in caught.value.__notes__[0]


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, np.uint64(2**32), np.int64(5_000_000_000)])
def test_integers_that_jax_would_cut_are_refused(value: Any) -> None:
    """Without 64 bits, a value that does not fit into 32 is an error that names leaf, value and remedy; others pass."""
    dtype = np.asarray(value).dtype
    batch = {"id": [np.array([[1, value]], dtype)], "x": np.array([np.iinfo(dtype).max, 0], dtype)[1:]}
    assert on_host(Placement(None).put(batch))["id"][0].tolist() == [[1, int(value)]]
    jax.config.update("jax_enable_x64", False)
    with pytest.raises(OverflowError, match=rf"batch\['id'\]\[0\] on a device: its value {value} exceeds .*enable_x64"):
        Placement(None).put(batch)
    fits = {"low": np.array([-(2**31), 2**31 - 1]), "high": np.uint64(2**32 - 1), "none": np.zeros(0, np.int64)}
    assert {name: int(leaf.max()) for name, leaf in Placement(None).put(fits).items() if leaf.size} == {
        "low": 2**31 - 1,
        "high": 2**32 - 1,
    }


def test_a_notebook_shows_an_iterator_without_steps() -> None:
    """The HTML of an iterator over a stream without `step` and `len` lacks these, and is no error."""
    with millstream.device_put(iter(millstream.IterDataset.source(Lines("states")))) as iterator:
        assert "iterator" in iterator._repr_html_()


def test_leaving_a_loop_lets_go_of_everything() -> None:
    """`break` from a loop over it is enough: iterators and batches are freed without the garbage collector."""
    beneath = iter(loader_of(lambda batch: batch.astype(np.float16)))
    watched = weakref.ref(beneath)
    gc.collect()
    before = len(jax.live_arrays())
    gc.disable()
    try:
        for batch in millstream.device_put(beneath, buffer_size=3):
            assert batch.dtype == np.float16
            break
        for thread in staging_threads():
            thread.join(WAIT_SECONDS)
        del batch, beneath
        assert watched() is None
        assert len(jax.live_arrays()) == before
    finally:
        gc.enable()


def test_it_goes_on_where_the_iterator_is() -> None:
    """An iterator that is handed over in mid-stream continues from there; `len` and `epoch` count what it delivered."""
    sampler = millstream.IndexSampler(8, num_epochs=2)
    beneath = iter(loader_of(data_source=range(8), sampler=sampler))
    next(beneath)
    state = beneath.get_state()
    with millstream.device_put(beneath, buffer_size=3) as iterator:
        assert (iterator.step, iterator.get_state()) == (1, state)
        seen = [(len(iterator), iterator.epoch), *((len(iterator), iterator.epoch) for _ in iterator)]
    assert seen == [(3, 0), (2, 1), (1, 1), (0, 2)]
    assert repr(iterator) == "<DeviceIterator at step 4, prefetches up to 3 batches to the default device>"


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((loader_of(),), TypeError, r"got DataLoader. Write device_put\(iter\(loader\)\)"),
        ((iter(loader_of()), jax.local_devices), TypeError, "device must be a jax.Device"),
        ((iter(loader_of()), jax.sharding.PartitionSpec()), TypeError, r"got P\(\) of type"),
        ((iter(loader_of()), None, 0), ValueError, "buffer_size must be at least 1, got 0"),
        ((iter(loader_of()), None, 1.5), TypeError, "buffer_size must be an integer"),
    ],
    ids=["loader", "function", "spec", "zero", "half"],
)
def test_wrong_arguments_are_refused_at_once(arguments: tuple[Any, ...], error: type[Exception], said: str) -> None:
    """Wrong arguments of device_put are errors of the call."""
    with pytest.raises(error, match=said):
        millstream.device_put(*arguments)


ON_FOUR_DEVICES = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
import millstream

jax.config.update("jax_enable_x64", True)
devices = jax.devices()
assert len(devices) == 4
source = np.random.default_rng(0).normal(size=(42, 64, 8)).astype(np.float32)

def loader(**options):
    return millstream.DataLoader(
        data_source=millstream.InMemoryDataSource({"image": source, "label": np.arange(42)}),
        sampler=millstream.IndexSampler(42, shuffle=True, seed=1, num_epochs=1),
        operations=[millstream.Batch(4)],
        **options,
    )

expected = list(loader())
mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "model"))
row = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data"))
for device, wanted in [
    (devices[2], SingleDeviceSharding(devices[2])),
    (SingleDeviceSharding(devices[1]), SingleDeviceSharding(devices[1])),
    (row, row),
    (NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec("data"))),
    (NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec())),
]:
    with millstream.device_put(iter(loader(worker_count=int(device is row))), device) as batches:
        kept = [next(batches) for _ in range(10)]
    for host, batch in zip(expected, kept):
        for name in ("image", "label"):
            assert batch[name].sharding == wanted and batch[name].committed
            assert np.array_equal(np.asarray(batch[name]), host[name])

# The last batch has two rows, which four devices cannot share: an error at its turn that says what to do.
with millstream.device_put(iter(loader()), row) as batches:
    for number in range(10):
        next(batches)
    try:
        next(batches)
    except ValueError as error:
        assert "batch['image'], ndarray of dtype float32 and shape (2, 64, 8)" in error.__notes__[0], error.__notes__
        assert "drop_remainder=True" in error.__notes__[0]
    else:
        raise AssertionError
    assert batches.step == 10

# The default device is that of the thread that asks, and holds for nobody else.
with jax.default_device(devices[3]):
    batches = millstream.device_put(iter(loader()))
batch = next(batches)
assert batch["label"].devices() == {devices[3]} and not batch["label"].committed
batches.close()
with millstream.device_put(iter(loader())) as batches:
    assert next(batches)["label"].devices() == {devices[0]}

# The interpreter ends in mid-stream: nothing is closed, and nothing aborts.
endless = millstream.device_put(iter(millstream.load(range(1000), batch_size=4)), row)
print("done", next(endless).shape)
"""


def test_several_devices_of_a_process(tmp_path: Path) -> None:
    """Batches lie where the device or sharding says, equal to the host's; a program may end without closing."""
    devices = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = python("-W", "error", "-c", ON_FOUR_DEVICES, cwd=tmp_path, env=environment() | devices)
    # JAX 0.12 prints where a sharding did not fit, before it raises: only the last line is ours.
    assert (done.stdout.splitlines()[-1:], done.stderr, done.returncode) == (["done (4,)"], "", 0)


def straight() -> Any:
    return millstream.MapDataset.range(40).shuffle(seed=1).map(lambda number: number * 2).to_iter_dataset().batch(4)


def mixed() -> Any:
    streams = [millstream.MapDataset.range(40).to_iter_dataset().filter(lambda number: number % 3) for _ in range(2)]
    return millstream.IterDataset.mix(streams).batch(4)


def limited() -> Any:
    return millstream.experimental.LimitIterDataset(straight(), 7)


def in_chain(device: Any, device_buffer_size: int) -> Callable[[Any], Any]:
    """Returns a function that puts the device at the end of a chain and iterates over it."""
    return lambda chain: iter(
        millstream.experimental.device_put(chain, device, cpu_buffer_size=2, device_buffer_size=device_buffer_size)
    )


PLACES: dict[str, Callable[[Any], Any]] = {
    "outermost": lambda chain: millstream.device_put(iter(chain)),
    "in the chain": in_chain(jax.devices()[0], 3),
    "in the chain, one ahead, on the default device": in_chain(None, 1),
    "in the chain, not ahead": in_chain(jax.devices()[0], 0),
}
each_place = pytest.mark.parametrize("place", PLACES)


@pytest.mark.parametrize("chain", [straight, mixed, limited])
@each_place
def test_batches_of_chains_on_the_device(chain: Callable[[], Any], place: str) -> None:
    """Batches of a chain on the device are the chain's, and so are its states, whatever is staged."""
    expected = [batch.tolist() for batch in chain()]
    with PLACES[place](chain()) as batches, iter(chain()) as plain:
        states = [batches.get_state()]
        for number, batch in enumerate(batches):
            assert isinstance(batch, jax.Array)
            assert batch.tolist() == expected[number]
            states.append(batches.get_state())
        assert len(states) == len(expected) + 1
        for number, state in enumerate(states):
            for resumed in [batches, plain]:
                resumed.set_state(json.loads(json.dumps(state)) if isinstance(state, dict) else state)
                assert resumed.get_state() == state
                assert [batch.tolist() for batch in resumed] == expected[number:]
    if place == "outermost":
        with PLACES[place](chain()) as batches:
            batches.set_state(states[2], strict=True)
            assert (batches.step, next(batches).tolist()) == (2, expected[2])


@each_place
@pytest.mark.parametrize("who", ["JAX", "the chain"])
def test_an_error_in_a_chain_on_the_device_comes_at_its_turn(
    place: str, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX, for want of memory, or a function fails at one batch: its error follows those before it, then it comes."""
    real, failures = Placement.put, {"once"}

    def fail(by: str, number: int) -> None:
        if by == who and number == 16 and failures:
            failures.clear()
            raise RuntimeError("RESOURCE_EXHAUSTED")

    def put(placement: Placement, batch: Any) -> Any:
        fail("JAX", int(batch[0]))
        return real(placement, batch)

    def double(number: int) -> int:
        fail("the chain", 2 * number)
        return 2 * number

    monkeypatch.setattr(Placement, "put", put)
    with PLACES[place](millstream.MapDataset.range(40).to_iter_dataset().map(double).batch(4)) as batches:
        got = [next(batches).tolist() for _ in range(2)]
        before = batches.get_state()
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            next(batches)
        assert batches.get_state() == before
        got += [batch.tolist() for batch in batches]
    assert got == np.arange(0, 80, 2).reshape(-1, 4).tolist()


def test_the_waits_that_are_reported_are_those_of_the_training_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of the test's own, 2 s of waiting for each batch and 1 s of training: the metrics are just these."""
    real, main = Placement.put, threading.get_ident()
    is_waiting, clock, num_looks = threading.Event(), [0.0], [0]

    def perf_counter() -> float:
        if threading.get_ident() == main:
            # Every other time, `next` begins.
            num_looks[0] += 1
            if num_looks[0] % 2:
                is_waiting.set()
        return clock[0]

    def put(placement: Placement, batch: Any) -> Any:
        assert is_waiting.wait(WAIT_SECONDS)
        is_waiting.clear()
        clock[0] += 2.0
        return real(placement, batch)

    loader = loader_of()
    monkeypatch.setattr(Placement, "put", put)
    with millstream.device_put(iter(loader), buffer_size=1) as batches:
        monkeypatch.setattr(time, "perf_counter", perf_counter)
        for _ in range(9):
            next(batches)
            clock[0] += 1.0
        monkeypatch.undo()
        names = ("batches", "step", "first_wait_seconds", "wait_seconds", "trainer_seconds", "wait_share")
        # The last second is not over before the next call.
        expected = dict(zip(names, (9, 9, 2, 16, 8, 2 / 3), strict=True))
        for metrics in (batches.metrics(), loader.metrics()):
            assert {name: metrics[f"loader/{name}"] for name in expected} == expected
        assert batches.profile()["consumer"] == loader.profile()["consumer"] == 8
        is_waiting.set()


def test_a_device_that_never_takes_a_batch_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait for it is bounded: a line in the log, then an error with the records and the stack of the thread."""
    is_stuck, released = threading.Event(), threading.Event()

    def stuck_on_the_device(*_: Any) -> None:
        is_stuck.set()
        released.wait()

    monkeypatch.setattr(Placement, "put", stuck_on_the_device)
    monkeypatch.setattr(waiting, "STALL_WARNING_SECONDS", 0.05)
    monkeypatch.setattr(device_iterator, "SLICE_SECONDS", 0.0)
    with millstream.device_put(iter(loader_of(stall_timeout=0.2))) as batches:
        batches.start_prefetch()
        assert is_stuck.wait(WAIT_SECONDS)
        with pytest.raises(millstream.WorkerStalledError, match="stuck_on_the_device") as caught:
            next(batches)
        released.set()
    assert "record" in str(caught.value)
    assert any("finished nothing" in message for message in caplog.messages)


def test_agreed_ends_of_one_process_fill_the_last_batch() -> None:
    """The same program runs on one host: a short batch is filled, complete ones are all valid, and states resume."""
    loader = millstream.load(
        range(11), num_epochs=1, transformations=[lambda number: {"x": number}], batch_size=4, read_options=INLINE
    )
    with millstream.device_put(iter(loader), ends="agree") as batches:
        taken = [(batch["x"].tolist(), batch["valid"].tolist()) for batch in batches]
        assert taken[:2] == [([0, 1, 2, 3], [True] * 4), ([4, 5, 6, 7], [True] * 4)]
        assert taken[2:] == [([8, 9, 10, 0], [True, True, True, False])]
        assert (batches.step, list(batches)) == (3, [])
        batches.seek(2)
        (last,) = batches
        assert last["x"].tolist() == taken[2][0]
    with pytest.raises(ValueError, match="ends must be 'known' or 'agree', got 'never'"):
        millstream.device_put(iter(loader), ends="never")


@pytest.mark.parametrize("element", [(1, 2.0), [1, 2.0], Pair(1, 2.0), {"deep": (1, 2.0)}])
def test_agreed_ends_keep_the_structure_of_batches(element: Any) -> None:
    """Rows are filled in each leaf, whatever structure it is in, and no leaves become one."""
    loader = millstream.load([{"nested": element}] * 3, batch_size=2, num_epochs=1, read_options=INLINE)
    with millstream.device_put(iter(loader), ends="agree") as agreed:
        first, last = agreed
    with millstream.device_put(iter(loader)) as known:
        structures = [jax.tree.structure(batch["nested"]) for batch in (next(known), last)]
    assert len(set(structures)) == 1
    assert [leaf.tolist() for leaf in jax.tree.leaves(first["nested"])] == [[1, 1], [2.0, 2.0]]
    assert [leaf.tolist() for leaf in jax.tree.leaves(last["nested"])] == [[1, 0], [2.0, 0.0]]
    assert last["valid"].tolist() == [True, False]


@pytest.mark.parametrize(
    ("element", "error", "message"),
    [
        ({"x": None}, TypeError, "needs batches, whose leaves have rows, got an element. Add a Batch"),
        (1, TypeError, "adds a leaf 'valid' to batches, which must be dicts, got ndarray"),
        ({"valid": 1}, ValueError, "adds the leaf 'valid', which batches have already"),
        ({"x": 1}, TypeError, "needs batches, whose leaves have rows, got an element. Add a Batch"),
    ],
)
def test_batches_that_cannot_say_what_is_valid_are_refused(element: Any, error: type[Exception], message: str) -> None:
    """Batches are dicts without a leaf of that name."""
    loader = millstream.load([element] * 4, batch_size=None if "Batch" in message else 2, read_options=INLINE)
    with millstream.device_put(iter(loader), ends="agree") as batches, pytest.raises(error, match=message):
        next(batches)
