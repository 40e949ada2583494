"""A server of objects on loopback: HTTP ranges, and what clients of Google Cloud Storage and S3 request.

It answers late where it is told to, as stores far away do, and fails as they do.
"""

import contextlib
import dataclasses
import functools
import hashlib
import http.server
import json
import re
import socket
import socketserver
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any
from xml.sax.saxutils import escape

from support.faults.user_faults import WAIT_SECONDS

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_MODIFIED = "Thu, 01 Jan 2026 00:00:00 GMT"

_NAMES_PER_PAGE = 1000
"""As many as real stores list per request."""

Failure = Callable[["Request"], str | int | None]
"""Decides about each request: None to answer it, a status, or `reset`, `short` or `hang`."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One request for an object.

    Attributes:
        number: how many came before it.
        key: the name of the object, with its bucket before it.
        start: the first byte that is asked for; None without a range.
        stop: the byte after the last one that is asked for; None without a range.
    """

    number: int
    key: str
    start: int | None = None
    stop: int | None = None


class ObjectServer:
    """Objects by name, which can be changed while they are served.

    Attributes:
        objects: what is served: bytes by `bucket/name`.
        etags: an object's ETag header, where it is not that of its content; None for no header.
        latency: how many seconds every answer takes.
        gathering: no request is answered before this many of them were there at one time.
        failure: which requests fail, and how.
        on_headers: called with the headers of each request.
        moved: where a request with a status between 301 and 308 is sent to: `bucket/name`.
        requests: those that came.
        queries: the different queries of all requests for objects by HTTP.
        most_at_once: how many there were at one time, at most.
        port: where it listens, on 127.0.0.1.
        supports_ranges: whether parts of objects are sent, or always all of them.
        tells_sizes: whether a part says how large the whole is.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.etags: dict[str, str | None] = {}
        self.latency = 0.0
        self.gathering = 0
        self.failure: Failure = lambda _: None
        self.on_headers: Callable[[Any], object] = lambda _: None
        self.moved: Callable[[str], str] = lambda key: key
        self.requests: list[Request] = []
        self.queries: set[str] = set()
        self.most_at_once = 0
        self.supports_ranges = True
        self.tells_sizes = True
        self.released = threading.Event()
        self._at_once = 0
        self._lock = threading.Condition()
        self._server = _Server(("127.0.0.1", 0), self)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="object-server")
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the root."""
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Ends it, and all connections: their descriptors are closed when it returns."""
        self.released.set()
        with self._lock:
            self.gathering = 0
            self._lock.notify_all()
        self._server.shutdown()
        self._server.close_connections()
        self._server.server_close()
        self._thread.join()

    def forget(self) -> None:
        """Counts requests from none again."""
        with self._lock:
            self.requests.clear()
            self.most_at_once = 0

    def num_requests(self, expected: int) -> int:
        """Returns the number of requests since the last `forget`, after waiting for those that are expected."""
        with self._lock:
            self._lock.wait_for(lambda: len(self.requests) >= expected, WAIT_SECONDS)
            return len(self.requests)

    def etag(self, key: str) -> str | None:
        """The version of an object, as its header says it."""
        return self.etags.get(key, f'"{_digest(self.objects[key]).hex()}"')

    def generation(self, key: str) -> int:
        """The version of an object, as Google Cloud Storage says it."""
        return int.from_bytes(_digest(self.objects[key])[:6], "big") + 1

    @contextlib.contextmanager
    def answering(self, key: str, start: int | None, stop: int | None) -> Iterator[Request]:
        """Notes a request, for as long as it is being answered."""
        with self._lock:
            request = Request(len(self.requests), key, start, stop)
            self.requests.append(request)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            self._lock.notify_all()
            # In vain where they do not come together: then the test finds how many were there.
            self._lock.wait_for(lambda: self.most_at_once >= self.gathering, WAIT_SECONDS)
        try:
            yield request
        finally:
            with self._lock:
                self._at_once -= 1


@functools.lru_cache(maxsize=64)
def _digest(content: bytes) -> bytes:
    return hashlib.md5(content).digest()


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """One thread a connection."""

    # `server_close` waits for all of them.
    daemon_threads = False
    block_on_close = True
    request_queue_size = 512

    def __init__(self, address: tuple[str, int], owner: ObjectServer) -> None:
        self.owner = owner
        self._connections: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error."""

    def close_connections(self) -> None:
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers one connection's requests."""

    protocol_version = "HTTP/1.1"
    server: _Server
    wbufsize = -1
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        """Nothing is logged."""

    def do_GET(self) -> None:
        owner = self.server.owner
        owner.on_headers(self.headers)
        parsed = urllib.parse.urlsplit(self.path)
        path, query = parsed.path, urllib.parse.parse_qs(parsed.query)
        if match := re.fullmatch(r"/storage/v1/b/([^/]+)/o", path):
            return self._list_gcs(match[1], query)
        if match := re.fullmatch(r"/storage/v1/b/([^/]+)/o/(.+)", path):
            key, is_gcs = f"{match[1]}/{urllib.parse.unquote(match[2])}", True
        else:
            key, is_gcs = urllib.parse.unquote(path[1:]), False
            owner.queries.add(parsed.query)
            if query.get("comp") == ["list"] or "list-type" in query:
                return self._list(key.strip("/"), query)
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        start = int(match[1]) if match and match[1] else None
        stop = int(match[2]) + 1 if match and match[2] and match[1] else None
        if match and not match[1] and key in owner.objects:
            start = max(0, len(owner.objects[key]) - int(match[2]))
        with owner.answering(key, start, stop) as request:
            if owner.latency:
                time.sleep(owner.latency)  # This is what latency is.
            failure = owner.failure(request)
            if failure is None and is_gcs and query.get("alt") == ["json"] and key in owner.objects:
                self._send(200, json.dumps(self._metadata(key)).encode())
            elif failure in (None, "short", "long"):
                surplus = b"surplus" if failure == "long" else b""
                self._send_object(key, request, surplus, is_short=failure == "short")
            else:
                self._fail(key, failure)
        return None

    do_HEAD = do_GET  # noqa: N815  (the name that the server calls)

    def _fail(self, key: str, failure: str | int | None) -> None:
        owner = self.server.owner
        if failure == "hang":
            owner.released.wait()
        if not isinstance(failure, int):
            self._reset()
        elif 300 < failure < 400:
            moved = f"{owner.url}/{urllib.parse.quote(owner.moved(key))}"
            self._send(failure, b"", {"Location": moved, "ETag": '"of the server that sends on"'})
        else:
            self._send(failure, b"failed on purpose")

    def _send_object(self, key: str, request: Request, surplus: bytes, *, is_short: bool) -> None:
        owner = self.server.owner
        content = owner.objects.get(key)
        if content is None:
            return self._send(404, b"no such object")
        headers = {"x-goog-generation": str(owner.generation(key)), "Last-Modified": _MODIFIED}
        if (etag := owner.etag(key)) is not None:
            headers["ETag"] = etag
        wanted = self.headers.get("If-Match")
        if wanted not in (None, headers.get("ETag")):
            return self._send(412, b"")
        if request.start is None or not owner.supports_ranges:
            return self._send(200, content, headers, is_short=is_short)
        size = len(content)
        if request.start >= size:
            return self._send(416, b"", {"Content-Range": f"bytes */{size}"})
        stop = min(size, request.stop or size)
        headers["Content-Range"] = f"bytes {request.start}-{stop - 1}/{size if owner.tells_sizes else '*'}"
        content = content[request.start : stop] + surplus
        return self._send(206, content, headers, is_short=is_short)

    def _list_gcs(self, bucket: str, query: dict[str, list[str]]) -> None:
        names = self._names(bucket, query.get("startOffset", [""])[0], query.get("prefix", [""])[0])
        stop = query.get("endOffset", ["\U0010ffff"])[0]
        items = [self._metadata(f"{bucket}/{name}") for name in names if name < stop]
        self._send(200, json.dumps({"kind": "storage#objects", "items": items}).encode())

    def _metadata(self, key: str) -> dict[str, str]:
        owner = self.server.owner
        return {
            "name": key.partition("/")[2],
            "size": str(len(owner.objects[key])),
            "generation": str(owner.generation(key)),
            "updated": "2026-01-01T00:00:00Z",
        }

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        key = f"{bucket}/{query.get('prefix', [''])[0]}"
        with self.server.owner.answering(key, None, None) as request:
            if (failure := self.server.owner.failure(request)) is not None:
                self._fail(key, failure)
            elif "comp" in query:
                self._list_azure(bucket, query)
            else:
                self._list_xml(bucket, query)

    def _list_azure(self, container: str, query: dict[str, list[str]]) -> None:
        names, folders, marker = self._page(container, query, "marker")
        blobs = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{_MODIFIED}</Last-Modified><Content-Length>"
            f"{len(self.server.owner.objects[f'{container}/{name}'])}</Content-Length><Content-Type>a</Content-Type>"
            "<Etag>e</Etag></Properties></Blob>"
            for name in names
        ) + "".join(f"<BlobPrefix><Name>{escape(folder)}</Name></BlobPrefix>" for folder in folders)
        following = f"<NextMarker>{escape(marker)}</NextMarker>"
        body = f"<EnumerationResults><Blobs>{blobs}</Blobs>{following}</EnumerationResults>".encode()
        self._send(200, body, {"Content-Type": "application/xml"})

    def _list_xml(self, bucket: str, query: dict[str, list[str]]) -> None:
        names, folders, marker = self._page(bucket, query, "continuation-token")
        contents = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.server.owner.objects[f'{bucket}/{name}'])}</Size>"
            f'<LastModified>2026-01-01T00:00:00Z</LastModified><ETag>"{name}"</ETag></Contents>'
            for name in names
        ) + "".join(f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders)
        following = f"<NextContinuationToken>{escape(marker)}</NextContinuationToken>" if marker else ""
        self._send(
            200,
            f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{bucket}</Name><IsTruncated>{str(bool(marker)).lower()}</IsTruncated>{following}"
            f"<KeyCount>{len(names) + len(folders)}</KeyCount>{contents}</ListBucketResult>".encode(),
            {"Content-Type": "application/xml"},
        )

    def _page(self, bucket: str, query: dict[str, list[str]], marker: str) -> tuple[list[str], list[str], str]:
        """A page of a list: the names, the folders where a delimiter divides names, and where the next page begins."""
        prefix = query.get("prefix", [""])[0]
        entries: dict[str, bool] = {}
        for name in self._names(bucket, query.get(marker, [""])[0], prefix):
            part, slash, _ = name[len(prefix) :].partition("/")
            is_folder = "delimiter" in query and bool(slash)
            entries[prefix + part + slash if is_folder else name] = is_folder
            if len(entries) > _NAMES_PER_PAGE:
                break
        page = list(entries)[:_NAMES_PER_PAGE]
        following = list(entries)[_NAMES_PER_PAGE:]
        names = [entry for entry in page if not entries[entry]]
        return names, [entry for entry in page if entries[entry]], "".join(following)

    def _names(self, bucket: str, start: str, prefix: str) -> list[str]:
        keys = [key.removeprefix(f"{bucket}/") for key in self.server.owner.objects if key.startswith(f"{bucket}/")]
        return sorted(key for key in keys if key >= start and key.startswith(prefix))

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, *, is_short: bool = False) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if is_short else body)
        self.wfile.flush()
        if is_short:
            self._reset()

    def _reset(self) -> None:
        """Ends the connection as a crash does."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def serving(objects: dict[str, bytes] | None = None) -> Iterator[ObjectServer]:
    """Serves objects for the length of a block."""
    server = ObjectServer()
    server.objects.update(objects or {})
    try:
        yield server
    finally:
        server.close()
