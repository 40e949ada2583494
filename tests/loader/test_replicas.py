"""Processes of one host that need the same batches: one reads, and each has exactly its stream."""

import contextlib
import dataclasses
import gc
import hashlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream.loader.replicas import reader
from support.draw.random_groupings import GROUPINGS, grouping_pipelines
from support.draw.random_pipelines import (
    UNEVEN_ENDS,
    Pipeline,
    dealt_pipelines,
    one_to_one_operations,
    pipelines,
)
from support.faults.interrupted import interrupt_at
from support.faults.memory_limits import limited, no_threads
from support.laws import expected_of, loader_of
from support.processes.process_tree import open_descriptors, processes_below
from support.processes.worker_pools import environment
from support.streams import comparable, drain

pytestmark = [UNEVEN_ENDS, pytest.mark.usefixtures("small_groups", "own_job")]

PIPELINES: dict[str, st.SearchStrategy[Pipeline]] = {
    "1:1": pipelines(one_to_one_operations),
    "any": pipelines(),
    "logical shards": dealt_pipelines(),
    "packing": grouping_pipelines(next(iter(GROUPINGS))),
}


SHARED = millstream.ShardOptions(0, 1, share_on_host=True)


def sharing(pipeline: Pipeline) -> Pipeline:
    return dataclasses.replace(pipeline, shard=dataclasses.replace(pipeline.shard, share_on_host=True))


@pytest.fixture(scope="module")
def own_job() -> Iterator[None]:
    """Other runs of these tests on this machine belong to other jobs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COORDINATOR_ADDRESS", f"tests-{os.getpid()}")
        yield


@pytest.mark.parametrize("kind", PIPELINES)
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_each_member_has_its_stream(kind: str, data: st.DataObject) -> None:
    """Members that move in any order, and to any positions, get the oracle's elements and its error."""
    pipeline = sharing(data.draw(PIPELINES[kind]))
    expected, error = expected_of(pipeline)
    threads = millstream.ReadOptions(data.draw(st.sampled_from([0, 2])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "PATIENCE_SECONDS", data.draw(st.sampled_from([0.0, 0.05])))
        patch.setattr(reader, "MAX_UNREAD", data.draw(st.sampled_from([5, 64])))
        members = [iter(loader_of(pipeline, read_options=threads)) for _ in range(3)]
        for number in data.draw(st.lists(st.integers(0, 2), max_size=30)):
            member = members[number]
            if member.step < len(expected):
                assert comparable(next(member)) == expected[member.step - 1]
            if data.draw(st.integers(0, 5)) == 0:
                moved = data.draw(st.sampled_from(members))
                if data.draw(st.booleans()):
                    moved.set_state(member.get_state())
                else:
                    moved.seek(data.draw(st.integers(0, len(expected))))
        for member in members:
            step = member.step
            assert drain(member) == (expected[step:], error)
            member.close()


STEPS, SIZE = 12, 8


class Counted:
    """A source of dicts that counts its reads."""

    def __init__(self, num_records: int = 10_000, num_numbers: int = 1000) -> None:
        self.reads: list[int] = []
        self._num_records, self._num_numbers = num_records, num_numbers

    def __len__(self) -> int:
        return self._num_records

    def __getitem__(self, key: int) -> dict[str, Any]:
        self.reads.append(key)
        return {"number": key, "pixels": np.full(self._num_numbers, key)}

    def fingerprint(self) -> str:
        return f"Counted {self._num_records} {self._num_numbers}"


def shifted(element: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if element["number"] % 7 == 3:
        raise ValueError(element["number"])
    return element | {"shift": rng.random()}


def is_kept(element: dict[str, Any]) -> bool:
    return bool(element["number"] % 3)


def members_of(
    count: int, source: Any, *, shares: bool = True, operations: Any = (), **options: Any
) -> list[millstream.DataLoader]:
    """Returns equal loaders, as several processes have them."""
    return [
        millstream.load(
            source,
            shuffle=True,
            seed=0,
            transformations=operations,
            batch_size=SIZE,
            shard_options=millstream.ShardOptions(0, 1, share_on_host=shares),
            **{"read_options": millstream.ReadOptions(num_threads=0), **options},
        )
        for _ in range(count)
    ]


def taken(iterators: Sequence[Any], steps: int = STEPS) -> list[list[Any]]:
    """Returns the next batches of iterators that take each step together, as those of a training do."""
    batches = [[comparable(next(iterator)) for iterator in iterators] for _ in range(steps)]
    return [list(own) for own in zip(*batches, strict=True)]


def alone(source: Any, steps: int = STEPS, **options: Any) -> list[Any]:
    """Returns the first batches of a loader that shares with no other."""
    (loader,) = members_of(1, source, shares=False, **options)
    with iter(loader) as batches:
        return [comparable(next(batches)) for _ in range(steps)]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("drops", [False, True])
def test_one_reads(count: int, drops: bool) -> None:
    """Any number of members reads as many records as one, and all have its batches."""
    options: dict[str, Any] = {"operations": [millstream.Filter(is_kept)] if drops else []}
    source = Counted()
    with contextlib.ExitStack() as stack:
        members = [stack.enter_context(iter(loader)) for loader in members_of(count, source, **options)]
        assert taken(members) == [alone(Counted(), **options)] * count
    assert len(set(source.reads)) == len(source.reads)
    assert drops or len(source.reads) <= SIZE * (STEPS + reader.AHEAD + 1)


def test_workers_are_those_of_one() -> None:
    """Of members with worker processes, only the one that reads starts them, and it keeps them for its next pass."""
    source = Counted(num_records=10 * SIZE)
    options: dict[str, Any] = {"worker_count": 1, "num_epochs": 1}
    loaders = members_of(3, source, **options)
    with contextlib.ExitStack() as stack:
        for loader in loaders:
            stack.enter_context(loader)
        for _ in range(2):
            members = [iter(loader) for loader in loaders]
            assert taken(members, 10) == [alone(source, 10, num_epochs=1)] * 3
            assert [list(member) for member in members] == [[]] * 3
        assert len([process for process in processes_below() if process.name() == "millstream-w0"]) == 1


def test_members_may_change_their_batches() -> None:
    """A change that one member makes to its batch is in no other's, as if each had read it."""
    first, second = (iter(loader) for loader in members_of(2, Counted(num_numbers=100_000)))
    with first, second:
        changed, batch = next(first), next(second)
        expected = batch["pixels"].copy()
        changed["pixels"] += 1
        assert (batch["pixels"] == expected).all()
        assert (changed["pixels"] == expected + 1).all()


def test_without_memory_each_reads(caplog: pytest.LogCaptureFixture) -> None:
    """If the system has no memory for what is shared, each member reads by itself, and says so."""
    source, limit = Counted(num_numbers=100_000), resource.getrlimit(resource.RLIMIT_FSIZE)
    first, second = members = [iter(loader) for loader in members_of(2, source)]
    with first, second:
        batches = taken(members, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
        try:
            after = taken(members, 4)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [own + later for own, later in zip(batches, after, strict=True)] == [alone(source, 6)] * 2
    assert caplog.text.count("this process reads by itself") == 2


def test_without_descriptors_each_reads() -> None:
    """A member that may not receive another descriptor reads by itself: its stream goes on, and does not end."""
    source = Counted(num_numbers=100_000)
    first, second = members = [iter(loader) for loader in members_of(2, source)]
    with first, second:
        batches = taken(members, 2)[1]
        next(first)
        with limited(resource.RLIMIT_NOFILE, 3):
            batches += taken([second], 2)[0]
        batches += taken([second], 2)[0]
    assert batches == alone(source, 6)


@pytest.mark.parametrize("num_free", range(8))
def test_members_begin_with_few_descriptors(num_free: int) -> None:
    """Wherever the descriptors run out while a process begins to share, it has its stream, and leaves none open."""
    source = Counted()
    (loader,) = members_of(1, source)
    before = open_descriptors()
    with iter(loader) as batches:
        with limited(resource.RLIMIT_NOFILE, free_descriptors(num_free)):
            begun = taken([batches], 1)[0]
        assert begun + taken([batches], 1)[0] == alone(source, 2)
    assert open_descriptors() == before


def free_descriptors(count: int) -> int:
    """Returns the limit of open files that leaves a number of descriptors free."""
    with contextlib.ExitStack() as stack:
        return max(stack.enter_context(Path(os.devnull).open()).fileno() for _ in range(count + 1))


def test_without_threads_each_reads(caplog: pytest.LogCaptureFixture) -> None:
    """If the system has no thread for a reader, the process reads by itself, and says so."""
    (loader,) = members_of(1, Counted())
    with no_threads(), iter(loader) as batches:
        assert taken([batches], 2)[0] == alone(Counted(), 2)
    assert "reads by itself: the system has no thread left" in caplog.text


def test_batches_that_cannot_be_pickled_are_not_shared(caplog: pytest.LogCaptureFixture) -> None:
    """Elements of a class without a name reach each member, which reads by itself and says why."""

    class Local:
        pass

    def as_local(_: Any) -> Local:
        return Local()

    loaders = [millstream.load(range(9), transformations=[as_local], shard_options=SHARED) for _ in range(2)]
    first, second = map(iter, loaders)
    with first, second:
        assert [type(next(member)) for member in (first, second, first)] == [Local] * 3
    assert caplog.text.count("cannot be pickled") == 2


class RefusedError(Exception):
    """An error whose constructor has other arguments than those that it keeps."""

    def __init__(self, key: int, reason: str) -> None:
        super().__init__(f"{key} {reason}")
        self.key = key


def refuse(record: int) -> int:
    """Returns a record, but raises for one."""
    if record == 5:
        raise RefusedError(record, "is odd")
    return record


def test_an_error_is_that_of_the_operation_in_each_member() -> None:
    """It has its class and attributes, as without sharing, and the traceback of the reader."""
    loaders = [millstream.load(range(9), transformations=[refuse], shard_options=SHARED) for _ in range(2)]
    first, second = map(iter, loaders)
    with first, second:
        assert [[next(member) for _ in range(5)] for member in (first, second)] == [[0, 1, 2, 3, 4]] * 2
        for member in (first, second):
            with pytest.raises(RefusedError, match="5 is odd") as caught:
                next(member)
            assert caught.value.key == 5
            assert "in refuse" in str(caught.value.__cause__)
            assert "at record key 5" in caught.value.__notes__[0]


def test_resuming_joins_again() -> None:
    """States of members are those of one alone, and members that resume from one share again."""
    source = Counted()
    expected = alone(source)
    (loader,) = members_of(1, source, shares=False)
    with iter(loader) as batches, contextlib.ExitStack() as stack:
        members = [stack.enter_context(iter(loader)) for loader in members_of(3, source)]
        for _ in range(STEPS // 2):
            next(batches)
        taken(members, STEPS // 2)
        assert {member.get_state() for member in members} == {batches.get_state()}
        taken(members[:1], 2)
        for member in members:
            member.set_state(batches.get_state())
        source.reads.clear()
        assert taken(members, STEPS // 2) == [expected[STEPS // 2 :]] * 3
        assert len(source.reads) <= SIZE * (STEPS // 2 + reader.AHEAD + 1)


def test_failing_records_count_for_each_member() -> None:
    """Records that are skipped count in each member as if it had read them."""
    options: dict[str, Any] = {"operations": [millstream.RandomMap(shifted)], "on_error": "skip"}
    own, *shared = [*members_of(1, Counted(), shares=False, **options), *members_of(3, Counted(), **options)]
    with contextlib.ExitStack() as stack:
        members = [stack.enter_context(iter(loader)) for loader in (own, *shared)]
        batches = taken(members)
        assert batches == [batches[0]] * 4
        assert own.errors
        assert [loader.errors for loader in shared] == [own.errors] * 3


def test_epochs_and_devices() -> None:
    """Each epoch of `loader.epochs` is shared, with its own order, also if it is staged on a device."""
    source = Counted(num_records=12 * SIZE)
    (own,) = members_of(1, source, shares=False)
    expected = [[batch["number"].tolist() for batch in batches] for _, batches in own.epochs(2)]
    source.reads.clear()
    epochs = [loader.epochs(2) for loader in members_of(2, source)]
    for number, both in enumerate(zip(*epochs, strict=True)):
        with contextlib.ExitStack() as stack:
            iterators = [stack.enter_context(millstream.device_put(batches)) for _, batches in both]
            for step in range(12):
                for iterator in iterators:
                    assert next(iterator)["number"].tolist() == expected[number][step]
    assert len(source.reads) == len(source) * 2


def test_what_a_reader_has_sent_is_received_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end resets the connections on which acknowledgements wait, and no record is read again for that."""
    hear, end = reader.Reader._hear, reader.Reader._end
    may_end, has_ended = threading.Event(), threading.Event()

    def hear_position(self: reader.Reader, member: Any) -> None:
        if member.position is None:
            hear(self, member)

    def end_late(self: reader.Reader) -> None:
        assert may_end.wait(10)
        end(self)
        has_ended.set()

    monkeypatch.setattr(reader.Reader, "_hear", hear_position)
    monkeypatch.setattr(reader.Reader, "_end", end_late)
    monkeypatch.setattr(reader, "AHEAD", STEPS + 1)
    source = Counted(SIZE * STEPS)
    (loader,) = members_of(1, source, num_epochs=1)
    with iter(loader) as batches:
        next(batches)
        # As if the thread were interrupted between its acknowledgement and the reception of the next message.
        member: Any = batches._executor
        member._connection.send(b"\0")
        member._is_unread = False
        may_end.set()
        assert has_ended.wait(10)
        assert len(list(batches)) == STEPS - 1
    assert len(source.reads) == SIZE * STEPS


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "dropped"])
def test_a_reader_that_never_begins_frees_the_name(is_stopped: bool) -> None:
    """Another thread may close the iterator before the reader's thread runs: no process may wait for that reader."""
    name = f"\0millstream-test-{os.getpid()}".encode()
    listener = reader.bound(name)
    assert listener is not None
    assert reader.bound(name) is None
    unused: Any = None
    never_begun = reader.Reader(listener, unused, unused, ())
    if is_stopped:
        never_begun.stop()
    else:
        del never_begun
        gc.collect()
    del listener
    again = reader.bound(name)
    assert again is not None
    again.close()


@pytest.mark.parametrize("is_first", [True, False], ids=["reads", "maps"])
def test_an_interrupted_member_has_its_stream(is_first: bool) -> None:
    """Ctrl-C at any moment of the exchange loses no batch and no descriptor, of the member that reads or of another."""
    loaders = members_of(2, Counted())
    expected = alone(Counted(), 8)
    for moment in itertools.count():
        first, second = members = [iter(loader) for loader in loaders]
        with first, second:
            taken(members, 1)
            interrupted = first if is_first else second
            taken([second if is_first else first], 1)
            descriptors = open_descriptors()
            was_interrupted = interrupt_at(moment, lambda: next(interrupted), "millstream.loader.replicas")  # noqa: B023
            step = interrupted.step
            assert taken([interrupted], 2) == [expected[step : step + 2]]
            interrupted.close()
        assert [kind for kind in open_descriptors() - descriptors if "memfd" in kind] == []
        if not was_interrupted:
            break
    assert moment > 20


def test_a_member_that_does_not_move_holds_up_nobody() -> None:
    """A member that stays at its batch is left behind after PATIENCE_SECONDS, and later has its own batches."""
    source = Counted()
    expected = alone(source, 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "PATIENCE_SECONDS", 0.1)
        patch.setattr(reader, "MAX_UNREAD", 8)
        first, second = (iter(loader) for loader in members_of(2, source))
        with first, second:
            assert taken([first, second], 1) == [expected[:1]] * 2
            assert taken([first], 19) == [expected[1:]]
            assert taken([second], 9) == [expected[1:10]]


MEMBER = """
import hashlib, os, sys, time
import millstream

class Source:
    def __len__(self):
        return 10_000
    def __getitem__(self, key):
        with open("reads", "a") as log:
            log.write(f"{os.getpid()}\\n")
        return key

shard = millstream.ShardOptions(0, 1, share_on_host=True)
loader = millstream.load(
    Source(), shuffle=True, seed=0, batch_size=8, shard_options=shard, stall_timeout=4.0,
    transformations=[millstream.RandomMap(lambda key, rng: key + rng.random())],
    read_options=millstream.ReadOptions(num_threads=0),
)
batches = iter(loader)
for line in sys.stdin:
    if line == "reader\\n":
        print(str(batches.summary()).partition("\\nprocess ")[2].partition(" of this host")[0], flush=True)
        continue
    print(hashlib.md5(b"".join(next(batches).tobytes() for _ in range(int(line)))).hexdigest(), flush=True)
"""


@final
class Member:
    """A process that reads a stream when it is asked to."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", MEMBER],
            cwd=folder,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with self.process:
            pass

    def begin(self, asked: int | str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{asked}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """Returns a digest of the batches that it was asked for."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()


JITTER = millstream.RandomMap(lambda key, rng: key + rng.random())


def digest(batches: Iterable[Any]) -> str:
    return hashlib.md5(b"".join(batch.tobytes() for batch in batches)).hexdigest() + "\n"


def answers(members: Sequence[Member], asked: int | str) -> list[str]:
    for member in members:
        member.begin(asked)
    return [member.answer() for member in members]


@pytest.mark.slow
def test_processes_that_are_killed_and_stopped(tmp_path: Path) -> None:
    """Whenever the process that reads is killed or stopped, or another one, the others get the batches that follow.

    One process reads at a time. A stopped one is not waited for longer than half of the stall timeout, and has its own
    batches when it goes on.
    """
    log = tmp_path / "reads"

    def who_reads() -> int:
        return int(log.read_text().split()[-1])

    with contextlib.ExitStack() as stack:
        members = [stack.enter_context(Member(tmp_path)) for _ in range(4)]
        counts = [1, 1, 100, 50, 3]
        same = millstream.load(range(10_000), shuffle=True, seed=0, batch_size=8, transformations=[JITTER])
        stream = stack.enter_context(iter(same))
        expected = [digest(next(stream) for _ in range(count)) for count in counts]
        for count in (0, 1):
            assert answers(members, counts[count]) == [expected[count]] * 4
        (only_one,) = set(log.read_text().split())
        assert {told.strip() for told in answers(members, "reader")} <= {only_one, ""}
        assert answers(members, "reader").count(f"{only_one}\n") == len(members) - 1
        # Killed at some moment of its work: the reader, then one that does not read.
        for count, kills_reader in ((2, True), (3, False)):
            for member in members:
                member.begin(counts[count])
            killed = next(member for member in members if (member.process.pid == who_reads()) == kills_reader)
            members.remove(killed)
            killed.process.kill()
            assert [member.answer() for member in members] == [expected[count]] * len(members)
        stopped = next(member for member in members if member.process.pid == who_reads())
        stopped.process.send_signal(signal.SIGSTOP)
        members.remove(stopped)
        assert answers(members, counts[4]) == expected[4:]
        stopped.process.send_signal(signal.SIGCONT)
        assert answers([stopped], counts[4]) == expected[4:]
        names = set.union(*(names_of_sockets(member.process.pid) for member in [*members, stopped]))
    assert len(names) == 1
    assert names.isdisjoint(Path("/proc/net/unix").read_text().split())


def names_of_sockets(pid: int) -> set[str]:
    """Returns the names of the library's sockets that a process has open."""
    opened = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir()}
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {name for *_, number, name in sockets if name.startswith("@millstream-") and f"socket:[{number}]" in opened}
