"""The fakes of Google Cloud Storage and S3 that PyPI has, each in a process of its own: moto and gcp-storage-emulator.

Others have written them: what they understand by the two protocols is not what this project does.
"""

import contextlib
import json
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping

_S3 = """
import os, sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()
os._exit(0)
"""

_GCS = """
import os, sys
from xml.sax.saxutils import escape
from gcp_storage_emulator import server as emulator
from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.server import create_server

# Of the XML interface, which obstore uses, the emulator has downloads without date and ETag, and no lists.
def download(request, response, storage, *args, **kwargs):
    objects.download(request, response, storage, *args, **kwargs)
    if response.status >= 400:
        return
    response["Last-Modified"] = "Thu, 01 Jan 2026 00:00:00 GMT"
    response["ETag"] = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])["etag"]

def listed(request, response, storage, *args, **kwargs):
    files, _ = storage.get_file_list(request.params["bucket_name"], request.query.get("prefix", [None])[0], None)
    entries = "".join(
        f"<Contents><Key>{escape(file['name'])}</Key><Size>{file['size']}</Size>"
        "<LastModified>2026-01-01T00:00:00Z</LastModified><ETag>e</ETag></Contents>"
        for file in files
    )
    response.write(f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>")

(path, methods), bucket = emulator.HANDLERS[-1], r"^/(?P<bucket_name>[-.\\w]+)$"
emulator.HANDLERS = (*emulator.HANDLERS[:-1], (path, {**methods, "GET": download}), (bucket, {"GET": listed}))
server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
server.start()
print("http://127.0.0.1:%d" % server._api._httpd.server_address[1], flush=True)
sys.stdin.read()
os._exit(0)
"""


@contextlib.contextmanager
def fake_s3(objects: Mapping[str, bytes]) -> Iterator[str]:
    """Serves objects of the bucket `bucket` by moto for the length of a block, and gives the server's address."""
    with _running(_S3) as address:
        _send("PUT", f"{address}/bucket")
        for name, content in objects.items():
            _send("PUT", f"{address}/bucket/{urllib.parse.quote(name)}", content)
        yield address


@contextlib.contextmanager
def fake_gcs(objects: Mapping[str, bytes]) -> Iterator[str]:
    """Serves objects of the bucket `bucket` by gcp-storage-emulator, in the same way."""
    with _running(_GCS) as address:
        for name, content in objects.items():
            query = urllib.parse.urlencode({"uploadType": "media", "name": name})
            answer = _send("POST", f"{address}/upload/storage/v1/b/bucket/o?{query}", content)
            assert json.loads(answer)["name"] == name
        yield address


@contextlib.contextmanager
def _running(code: str) -> Iterator[str]:
    """Runs a server, which prints its address and ends with its standard input."""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), f"The server did not start: {code}"
        try:
            yield address
        finally:
            process.stdin.close()


def _send(method: str, url: str, content: bytes = b"") -> bytes:
    headers = {"Content-Type": "application/octet-stream"}
    request = urllib.request.Request(url, content, headers, method=method)
    with urllib.request.urlopen(request) as answer:
        received: bytes = answer.read()
    return received
