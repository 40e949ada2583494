"""`hf://` URLs: files of the Hub are listed and read, and the token stays with the Hub."""

import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from millstream import DataSourceError, TextLineDataSource
from support.processes.forked import text_after_fork
from support.stores.object_server import ObjectServer

pytestmark = pytest.mark.third_party

FILES = {f"data/{number}.txt": "".join(f"{number} {line}\n" for line in range(9)) for number in range(3)}
SHA = "0" * 40


class Hub(http.server.ThreadingHTTPServer):
    """A server with the interface of the Hub, whose files are on another server.

    Attributes:
        store: the server of the files.
        tokens: the tokens of all requests, by path.
    """

    daemon_threads = False

    def __init__(self, store: ObjectServer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.store = store
        self.tokens: dict[str, str | None] = {}


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers requests of the Hub."""

    server: Hub

    def do_GET(self) -> None:
        """Lists files, or redirects to one."""
        self.server.tokens[self.path] = self.headers.get("Authorization")
        if match := re.fullmatch(r"/api/datasets/org/name/tree/([^/]+)/data\?.*", self.path):
            files = [{"type": "file", "path": path, "oid": SHA, "size": len(text)} for path, text in FILES.items()]
            self._send(200, json.dumps(files if match[1] in {"main", "refs%2Fconvert%2Fparquet"} else []).encode())
        elif match := re.fullmatch(r"/datasets/org/name/resolve/[^/]+/(.+)", self.path):
            self._send(302, b"", f"{self.server.store.url}/cdn/{match[1]}")
        else:
            self._send(404, b"")

    def _send(self, status: int, content: bytes, location: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if location is not None:
            self.send_header("Location", location)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""


@pytest.fixture
def hub(store: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with a private dataset, and a user who is logged in."""
    store.objects |= {f"cdn/{path}": text.encode() for path, text in FILES.items()}
    with Hub(store) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield server
        if hasattr(huggingface_hub, "close_session"):
            huggingface_hub.close_session()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("revision", ["", "@main", "@~parquet", "@refs%2Fconvert%2Fparquet"])
def test_files_are_listed_and_read_and_the_token_stays_with_the_hub(
    hub: Hub, store: ObjectServer, revision: str
) -> None:
    """Every request to the Hub has the token, and the server that it redirects to never sees it."""
    seen: list[str | None] = []
    store.on_headers = lambda headers: seen.append(headers.get("Authorization"))
    with TextLineDataSource(f"hf://datasets/org/name{revision}/data/*.txt") as source:
        assert [source[key] for key in range(len(source))] == "".join(FILES.values()).splitlines()
        assert "hf_secret" not in f"{source!r}{source.fingerprint()}"
    of_dataset = {path: token for path, token in hub.tokens.items() if "/org/name/" in path}
    assert of_dataset == dict.fromkeys(of_dataset, "Bearer hf_secret")
    assert len(of_dataset) == 4
    assert seen
    assert set(seen) == {None}


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        (
            "hf://datasets/org/other/data/*.txt",
            DataSourceError,
            "Cannot list hf://datasets/org/other: it does not exist",
        ),
        ("hf://datasets/org/na..me/*.txt", DataSourceError, r"list hf://datasets/org/na\.\.me: Cannot have -- or \.\."),
        ("hf://datasets/org/name@v1/data/*.txt", FileNotFoundError, "No text file matches the pattern"),
        ("hf://datasets/org/name", ValueError, "must name a file of a dataset, hf://datasets/ORG/NAME/PATH"),
        ("hf://org/name/a.txt", ValueError, "must name a file of a dataset"),
        ("hf://datasets//name/a.txt", ValueError, "must name a file of a dataset"),
    ],
)
def test_what_is_not_there_is_an_error_without_the_token(url: str, error: type[Exception], message: str) -> None:
    """A missing dataset, one that the library refuses, a pattern without matches, and URLs of other forms."""
    with pytest.raises(error, match=message) as caught:
        TextLineDataSource(url)
    assert "hf_secret" not in str(caught.value)


def test_a_forked_process_gets_an_error_instead_of_waiting(hub: Hub) -> None:
    """The threads that list files are not in a forked process."""
    url = "hf://datasets/org/name/data/*.txt"
    TextLineDataSource(url).close()
    assert "forked after its parent had read from a store" in text_after_fork(lambda: TextLineDataSource(url))
    assert hub.tokens
