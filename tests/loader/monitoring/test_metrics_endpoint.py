"""The endpoint for Prometheus: on the loopback address unless told otherwise, and no reason for a trainer to fail."""

import contextlib
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import millstream
from millstream.loader import monitoring
from millstream.loader.monitoring import address_from, start_endpoint
from support.faults.memory_limits import no_threads
from support.faults.user_faults import WAIT_SECONDS

TRAINER = """
import logging, sys, millstream

logging.basicConfig(format="%(message)s")
loaders = [millstream.load(range(40), batch_size=4, num_epochs=1) for _ in range(2)]
for number, loader in enumerate(loaders):
    batches = iter(loader)
    for _ in range(2 + number):
        next(batches)
print("trained", flush=True)
sys.stdin.readline()
del batches, loader
loaders[0].close()
print("closed", flush=True)
sys.stdin.readline()
"""


def free_port() -> int:
    """Returns a port that no other process takes meanwhile: the system chooses none below 32,768 for those that ask."""
    for port in range(10_000 + os.getpid() % 20_000, 32_768):
        with contextlib.suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            return port
    raise AssertionError("no port is free")


def start(folder: Path, value: str) -> "subprocess.Popen[str]":
    """Starts a trainer with a value of the environment variable, and waits until it has trained."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", TRAINER],
        cwd=folder,
        env={"PATH": "", "MILLSTREAM_METRICS_PORT": value},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "trained\n"
    return process


def end(process: "subprocess.Popen[str]") -> str:
    """Ends a trainer, which must succeed; returns what it logged."""
    _, log = process.communicate("\n\n", timeout=WAIT_SECONDS)
    assert process.returncode == 0
    return log


def page_at(port: int, path: str = "/metrics") -> str:
    """Returns the page of an endpoint."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_SECONDS) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


def batches_on(page: str) -> dict[str, float]:
    """Returns the number of batches by loader, as Prometheus's own parser reads a page."""
    (family,) = (one for one in text_string_to_metric_families(page) if one.name == "millstream_batches")
    return {sample.labels["loader"]: sample.value for sample in family.samples}


def test_each_loader_that_is_open_is_on_the_page_and_a_second_trainer_trains_without_one(tmp_path: Path) -> None:
    """The page has each loader's own counts. A second process with the same port logs that once, and trains."""
    port = free_port()
    first = start(tmp_path, str(port))
    second = start(tmp_path, str(port))

    assert batches_on(page_at(port)) == {"0": 2, "1": 3}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        page_at(port, "/")
    assert first.stdin is not None
    assert first.stdout is not None
    first.stdin.write("\n")
    first.stdin.flush()
    assert first.stdout.readline() == "closed\n"
    assert batches_on(page_at(port)) == {"1": 3}

    assert end(second).count("no metrics for Prometheus") == 1
    assert end(first) == ""


def test_a_value_that_is_no_address_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer trains, and its log says once what the variable must be."""
    monkeypatch.setenv("MILLSTREAM_METRICS_PORT", "everywhere")
    for _ in range(2):
        assert list(millstream.load(range(3), num_epochs=1)) == [0, 1, 2]
    assert caplog.text.count("must be a port") == 1


def test_without_a_thread_a_trainer_trains(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If the system has no thread for the endpoint, the log says so, and its port is free again."""
    monkeypatch.setenv("MILLSTREAM_METRICS_PORT", str(port := free_port()))
    with no_threads():
        assert list(millstream.load(range(3), num_epochs=1)) == [0, 1, 2]
    assert "no metrics for Prometheus: The system refuses another thread" in caplog.text
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9400", ("127.0.0.1", 9400)),
        (" 0 ", ("127.0.0.1", 0)),
        ("0.0.0.0:65535", ("0.0.0.0", 65535)),
        ("[::1]:80", ("::1", 80)),
        *((text, None) for text in ("", "65536", "-1", "1.5", "host:", "²", ":x")),
    ],
)
def test_values_name_a_port_of_the_loopback_address_or_an_address(text: str, address: tuple[str, int] | None) -> None:
    """Anything else is an error with the name of the variable and an example."""
    if address is not None:
        assert address_from(text) == address
        return
    with pytest.raises(ValueError, match=r"MILLSTREAM_METRICS_PORT must be a port, such as 9400"):
        address_from(text)


def test_a_client_that_says_nothing_or_leaves_does_not_end_the_server() -> None:
    """After clients that connect and disconnect, or send no HTTP, the next one is served."""
    with serving(lambda: "x 1\n") as port:
        for request in (b"", b"\xff\x00\r\n\r\n", b"GET /metrics"):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(request)
        assert page_at(port) == "x 1\n"


def test_a_client_that_sends_a_byte_at_a_time_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds up the others for REQUEST_SECONDS, however long it goes on to send."""
    monkeypatch.setattr(monitoring, "REQUEST_SECONDS", 0.1)
    with serving(lambda: "x 1\n") as port:
        with socket.create_connection(("127.0.0.1", port), timeout=0.02) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n")
            assert any(is_disconnected(client) for _ in range(int(WAIT_SECONDS / 0.02)))
        assert page_at(port) == "x 1\n"


def is_disconnected(client: socket.socket) -> bool:
    """Waits for the end of a connection for its timeout, and sends a byte if there was none."""
    try:
        with contextlib.suppress(TimeoutError):
            return not client.recv(1)
        client.sendall(b"a")
    except ConnectionError:
        return True
    return False


def test_a_page_that_fails_is_an_error_of_the_server() -> None:
    """Prometheus sees an answer with a status, instead of a connection that was closed."""
    with (
        serving(lambda: str(1 / 0)) as port,
        pytest.raises(urllib.error.HTTPError, match="500: No page: ZeroDivisionError"),
    ):
        page_at(port)


@contextlib.contextmanager
def serving(page: Callable[[], str]) -> Iterator[int]:
    """Serves a page, and yields the port."""
    server = start_endpoint("0", page)
    with server:
        yield int(server.server_address[1])
        server.shutdown()
