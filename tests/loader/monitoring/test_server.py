"""Looking at a pipeline from outside: who may, what is said, and what is left when it is over."""

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
from typing import Any

import cloudpickle
import pytest

import millstream
from millstream.loader import monitoring
from millstream.loader.monitoring import NotServed, connected, query, served_processes
from millstream.loader.processes import process_report
from support.faults.user_faults import WAIT_SECONDS
from support.processes.worker_pools import at_most, python

# Workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

FORKS = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
"""JAX, which another test may have imported, warns of every fork: here, the child does next to nothing."""


@pytest.fixture(autouse=True)
def _own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives sockets names of this test alone."""
    monkeypatch.setattr(monitoring, "SOCKETS", f"millstream-test-{os.getpid()}")
    monkeypatch.delenv("MILLSTREAM_TOP", raising=False)
    # However busy the machine is.
    monkeypatch.setattr(process_report, "STACKS_SECONDS", WAIT_SECONDS)
    monkeypatch.setattr(monitoring, "CONNECT_SECONDS", 2 * WAIT_SECONDS)


def doubled(value: int) -> int:
    return 2 * value


def loader_of(**options: Any) -> millstream.DataLoader:
    return millstream.load(range(40), num_epochs=1, transformations=[doubled], batch_size=4, **options)


def wait_for_end_of_server() -> None:
    """Waits until the thread that answers has ended, for which it has a minute."""
    for thread in threading.enumerate():
        if thread.name == "millstream-top":
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()


DISCONNECTING = """
import os, signal, socket, urllib.request
import millstream
from millstream.loader.monitoring import connected, query, start_endpoint

signal.signal(signal.SIGPIPE, signal.SIG_DFL)
loader = millstream.load(range(40), batch_size=4)
loader.serve_top()
first, *clients = [connected(os.getpid()) for _ in range(4)]
# They have disconnected before they are answered, because the first one has asked nothing yet.
for client in clients:
    client.sendall(b"GET /snapshot HTTP/1.0\\r\\n\\r\\n")
    client.close()
first.close()
assert query(os.getpid(), "snapshot")["pipelines"]
address = start_endpoint("127.0.0.1:0", lambda: "page").server_address
first, *clients = [socket.create_connection(address) for _ in range(4)]
for client in clients:
    client.sendall(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
    client.close()
first.close()
with urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/metrics") as page:
    print(page.read().decode())
"""


def test_clients_that_disconnect_do_not_end_a_program_that_sigpipe_would_end() -> None:
    """A trainer that has given SIGPIPE its default trains on when clients of both servers go before the answer."""
    assert python("-c", DISCONNECTING).stdout == "page\n"


def test_a_snapshot_says_what_the_loader_says() -> None:
    """The answers to other processes are the numbers that `metrics()` has, and the position of each iterator."""
    loader = loader_of()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    loader.serve_top()

    (pipeline,) = query(os.getpid(), "snapshot")["pipelines"]

    metrics = loader.metrics()
    assert pipeline["measured"]["batches"] == metrics["loader/batches"] == 3
    assert pipeline["measured"]["wait_seconds"] == metrics["loader/wait_seconds"]
    assert {stage["label"] for stage in pipeline["stages"]} >= {"read", "operations[0], Map(doubled)"}
    measured = pipeline["measured"]
    assert (measured["step"], measured["records"], measured["epoch"]) == (3, 12, 0)
    assert list(map(list, batches)) == [[2 * value for value in range(4 * row, 4 * row + 4)] for row in range(3, 10)]


def test_it_is_over_when_the_loader_is_closed_or_gone() -> None:
    """The thread and the socket go with the last pipeline, closed or collected; a closed one is not served anew."""
    closed, dropped = loader_of(), loader_of()
    closed.serve_top()
    dropped.serve_top()
    assert os.getpid() in served_processes()
    assert len(query(os.getpid(), "snapshot")["pipelines"]) == 2

    closed.close()
    assert len(query(os.getpid(), "snapshot")["pipelines"]) == 1
    del dropped
    gc.collect()
    wait_for_end_of_server()

    assert served_processes() == []
    with pytest.raises(NotServed, match="cannot be monitored"):
        query(os.getpid(), "snapshot")
    with pytest.raises(ValueError, match="closed"):
        closed.serve_top()
    with loader_of() as another:
        another.serve_top()
        assert os.getpid() in served_processes()


def test_the_environment_serves_chains_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With MILLSTREAM_TOP=1, whatever is iterated over can be looked at: loaders, and chains with workers."""
    monkeypatch.setenv("MILLSTREAM_TOP", "1")
    chain = millstream.MapDataset.source(range(40)).map(doubled).batch(4).to_iter_dataset()
    elements = iter(chain.mp_prefetch(millstream.MultiprocessingOptions(num_workers=1)))
    next(elements)

    snapshot = query(os.getpid(), "snapshot")
    stacks = query(os.getpid(), "stacks")["stacks"]

    ((load,),) = (pipeline["loads"] for pipeline in snapshot["pipelines"])
    assert len(load["workers"]) == 1
    assert [one["who"].rpartition(" ")[0] for one in stacks] == ["process", "worker process"]
    assert "MainThread" in stacks[0]["text"]
    assert "test_the_environment_serves_chains_too" in stacks[0]["text"]
    assert "answer_calls" in stacks[1]["text"]
    elements.close()


def test_one_pipeline_is_served_for_all_that_it_draws_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture, operations after one, and an interleave are one pipeline with the trainer's waits and all workers.

    So it is if datasets are opened before their turn. Streams of a closed pipeline are none, even if they still exist.
    """
    monkeypatch.setenv("MILLSTREAM_TOP", "1")
    one_worker = millstream.MultiprocessingOptions(num_workers=1)
    streams = [millstream.MapDataset.range(40).to_iter_dataset().filter(bool).mp_prefetch(one_worker) for _ in "ab"]
    mixture, kept = millstream.IterDataset.mix(streams), []
    reading = millstream.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    files = [millstream.MapDataset.range(2).to_iter_dataset(reading) for _ in range(6)]
    chains: list[tuple[millstream.IterDataset[Any], str, set[str], int]] = [
        (mixture, "mix(", {"0: read", "1: read"}, 2),
        (mixture.batch(2), "mix(", {"0: read", "1: read"}, 2),
        (millstream.experimental.InterleaveIterDataset(files, cycle_length=2), "interleave(", {"read"}, 0),
    ]
    for chain, name, reads, workers in chains:
        with iter(chain) as elements:
            kept.append(elements)
            for _ in range(5):
                next(elements)
            (pipeline,) = query(os.getpid(), "snapshot")["pipelines"]
            metrics = elements.metrics()
            assert pipeline["source"].startswith(name)
            assert pipeline["measured"]["batches"] == pipeline["measured"]["step"] == metrics["loader/batches"] == 5
            assert pipeline["measured"]["wait_seconds"] == metrics["loader/wait_seconds"]
            assert {stage["label"] for stage in pipeline["stages"]} >= reads
            assert sum(len(load["workers"]) for load in pipeline["loads"]) == workers
            assert len(query(os.getpid(), "stacks")["stacks"]) == 1 + workers


def test_epochs_are_one_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """All epochs of a loader are served under one number, with the epoch and step of the current one."""
    monkeypatch.setenv("MILLSTREAM_TOP", "1")
    seen = []
    with loader_of() as loader:
        for _, batches in loader.epochs(3):
            for _ in batches:
                pass
            ((number, measured),) = (
                (pipeline["number"], pipeline["measured"]) for pipeline in query(os.getpid(), "snapshot")["pipelines"]
            )
            seen.append((number, measured["batches"], measured["step"], measured["epoch"]))
    assert len({number for number, *_ in seen}) == 1
    assert [rest for _, *rest in seen] == [[10, 10, 1], [20, 10, 2], [30, 10, 3]]


def test_an_initial_state_serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs for Grain take the initial state of a loader: it is that of an iterator, and no iterator is made."""
    monkeypatch.setenv("MILLSTREAM_TOP", "1")
    loader = loader_of()

    state = loader._create_initial_state()

    assert served_processes() == []
    assert state == iter(loader).get_state()


def test_stacks_that_were_asked_for_are_not_last_words() -> None:
    """A worker whose stacks were looked at goes on, and when it dies later they are not taken for the reason."""
    loader = loader_of(worker_count=1)
    loader.serve_top()
    with iter(loader) as batches:
        got = [list(next(batches))]
        assert "answer_calls" in query(os.getpid(), "stacks")["stacks"][1]["text"]
        assert "answer_calls" in query(os.getpid(), "stacks")["stacks"][1]["text"]
        ((load,),) = (pipeline["loads"] for pipeline in query(os.getpid(), "snapshot")["pipelines"])
        (worker,) = load["workers"]
        os.kill(worker["pid"], signal.SIGKILL)
        got += map(list, batches)

    assert got == [[2 * value for value in range(4 * row, 4 * row + 4)] for row in range(10)]
    (event,) = loader.insight.profiler.events
    assert "killed by SIGKILL" in event.text
    assert "answer_calls" not in event.text
    loader.close()


@FORKS
def test_a_forked_process_leaves_the_socket_to_its_parent() -> None:
    """A forked process is not found under its parent's number, and serves its own loader under its own."""
    loader = loader_of()
    loader.serve_top()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            own = loader_of()
            own.serve_top()
            is_served = set(served_processes()) == {os.getpid(), os.getppid()}
            status = 0 if is_served and query(os.getpid(), "snapshot")["pid"] == os.getpid() else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.getpid() in served_processes()
    assert query(os.getpid(), "snapshot")["pid"] == os.getpid()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@FORKS
def test_another_user_gets_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of another user that connects is hung up on; a client trusts no socket of another user."""
    with loader_of() as loader:
        loader.serve_top()
        name = monitoring._socket_name(os.getpid())
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.settimeout(WAIT_SECONDS)
                    connection.connect(name)
                    is_refused = received(connection, b"GET /snapshot HTTP/1.0\r\n\r\n") == b""
                monkeypatch.setattr(monitoring, "_socket_name", lambda _: name)
                with pytest.raises(PermissionError, match="does not belong to this user, 65534"):
                    query(os.getppid(), "snapshot")
                status = 0 if is_refused else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert query(os.getpid(), "snapshot")["pid"] == os.getpid()


def received(connection: socket.socket, asks: bytes) -> bytes:
    """Returns the answer that somebody gets who asks for nothing more; nothing, from whom hangs up."""
    try:
        connection.sendall(asks)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(100)
    except (BrokenPipeError, ConnectionResetError):
        return b""


def test_a_name_that_another_process_has_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a socket, to be served is an error for who asks for it; by the environment, a warning alone."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(monitoring._socket_name(os.getpid()))
        with loader_of() as loader, pytest.raises(OSError, match="in use"):
            loader.serve_top()

        monkeypatch.setenv("MILLSTREAM_TOP", "1")
        with caplog.at_level(logging.WARNING, "millstream"), loader_of() as loader:
            assert len(list(loader)) == 10
    assert "`millstream top` cannot monitor this pipeline" in caplog.text


@pytest.mark.parametrize(
    "asks", [b"GET /nonsense HTTP/1.0\r\n\r\n", b"x" * 70_000, b""], ids=["nonsense", "endless", "nothing"]
)
def test_bad_questions_end_nothing(asks: bytes) -> None:
    """Whatever comes over the socket, the next one who asks is answered."""
    with loader_of() as loader:
        loader.serve_top()
        with connected(os.getpid()) as connection, at_most(2.0):
            answer = received(connection, asks)

        assert (b" 404 " in answer) == (b"nonsense" in asks)
        assert query(os.getpid(), "snapshot")["pid"] == os.getpid()


def test_a_trainer_that_is_stopped_hides_no_other() -> None:
    """Sockets that take no more connections are left out, and asked for, an error that says why."""
    with loader_of() as loader, contextlib.ExitStack() as sockets:
        loader.serve_top()
        for number in range(8):
            listener = sockets.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(monitoring._socket_name(number))
            listener.listen(0)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sockets.enter_context(connected(number))
        assert served_processes() == [os.getpid()]
        with pytest.raises(TimeoutError, match="Process 7 does not answer: it is stopped"):
            query(7, "snapshot")


def test_top_sees_the_wait_for_the_device() -> None:
    """`top` reports the wait inside `next` of device_put, and the trainer's step."""
    go_on = threading.Event()

    def hold(value: int) -> int:
        assert value < 8 or go_on.wait(WAIT_SECONDS)
        return value

    with (
        millstream.load(range(40), num_epochs=1, transformations=[hold], batch_size=4) as held,
        millstream.device_put(iter(held), buffer_size=1) as batches,
    ):
        held.serve_top()

        def status_and_step() -> tuple[float | None, int]:
            (pipeline,) = query(os.getpid(), "snapshot")["pipelines"]
            return pipeline["waits_for"], pipeline["measured"]["step"]

        assert [next(batches).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        between = status_and_step()
        third = threading.Thread(target=next, args=(batches,))
        third.start()
        while (waiting := status_and_step())[0] is None:
            assert third.is_alive()
        go_on.set()
        third.join()

    assert between == (None, 2)
    assert waiting[1] == 2
