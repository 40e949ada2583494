"""The site in a real browser: in a wide window, light, and on a phone, dark, nothing is cut off or missing."""

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_site import site

__all__ = ["site"]

CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
PAGES = [
    *("index", "tour", "guarantees", "formats", "packing", "seeing", "benchmarks", "tutorials/images"),
    *("reference/loader", "coming-from-grain", "contributing"),
]
WIDTHS = {"wide": 1280, "phone": 390}
"""The widths of the window, in pixels."""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

PROBE = """<!doctype html><meta charset="utf-8"><body style="margin: 0"><pre id="found"></pre><script>
const pages = %(pages)s, found = [], frame = document.createElement("iframe");
frame.style = "border: 0; width: %(width)dpx; height: 2400px";
localStorage.setItem("/.__palette", JSON.stringify({index: %(scheme)d, color: {scheme: "%(name)s", media: "",
                                                    primary: "teal", accent: "teal"}}));
frame.onload = () => setTimeout(() => {
  found.push(look());
  if (found.length < pages.length) frame.src = `/${pages[found.length]}.html`;
  else document.getElementById("found").textContent = JSON.stringify(found);
}, 500);
function look() {
  const inside = frame.contentDocument, width = %(width)d;
  // What scrolls in a box of its own, such as a wide table or a long line of code, may be wider than the window.
  const scrolls = (one) => {
    for (let box = one; box && box !== inside.body; box = box.parentElement)
      if (["auto", "scroll", "hidden"].includes(frame.contentWindow.getComputedStyle(box).overflowX)) return true;
    return false;
  };
  const cut = [...inside.querySelectorAll(".md-content *")].filter(
    (one) => one.getBoundingClientRect().right > width + 1 && !scrolls(one));
  return {
    page: pages[found.length],
    width: inside.documentElement.scrollWidth,
    cut: cut.map((one) => one.tagName + " " + one.textContent.slice(0, 40)),
    missing: [...inside.images].filter((image) => image.complete && !image.naturalWidth).map((image) => image.src),
    scheme: inside.body.getAttribute("data-md-color-scheme"),
  };
}
frame.src = `/${pages[0]}.html`;
document.body.appendChild(frame);
</script>"""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The address of a server of the site; pages whose names begin with `probe` look at the others.

    The search has nothing to find: each page would index the whole site, which takes half of its time.
    """

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if found := re.fullmatch(r"/probe/(\w+)/(\w+)", self.path):
                shown = {"width": WIDTHS[found[1]], "name": found[2], "scheme": int(found[2] == "slate")}
                self.answer("text/html", PROBE % {**shown, "pages": json.dumps(PAGES)})
            elif self.path == "/search/search_index.json":
                self.answer("application/json", json.dumps({"config": {"lang": ["en"]}, "docs": []}))
            else:
                super().do_GET()

        def answer(self, kind: str, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def browse(url: str, folder: Path, *arguments: str) -> str:
    """Returns what a browser without a window prints about a page."""
    assert CHROMIUM is not None
    quiet = ["--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-component-update"]
    more = ["--disable-sync", "--no-first-run", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}"]
    command = [CHROMIUM, "--headless", *quiet, *more, "--virtual-time-budget=30000", *arguments, url]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.parametrize(("width", "scheme"), [("wide", "default"), ("phone", "slate")], ids=["wide", "phone, dark"])
def test_nothing_is_cut_off_or_missing(width: str, scheme: str, address: str, tmp_path: Path) -> None:
    """No page is wider than the window, nothing ends outside of it, and each picture is shown: light, and dark."""
    shown = browse(f"{address}/probe/{width}/{scheme}", tmp_path, "--dump-dom")

    text = re.search(r'<pre id="found">(.*?)</pre>', shown, re.DOTALL)
    assert text is not None
    found = json.loads(html.unescape(text[1]))
    assert [(one["page"], one["scheme"], one["missing"], one["cut"]) for one in found] == [
        (page, scheme, [], []) for page in PAGES
    ]
    assert max(one["width"] for one in found) <= WIDTHS[width]


def test_a_page_is_a_picture(address: str, tmp_path: Path) -> None:
    """A screenshot of the first page is not empty."""
    picture = tmp_path / "index.png"
    browse(f"{address}/index.html", tmp_path / "user", f"--screenshot={picture}", "--window-size=1280,1600")
    assert picture.stat().st_size > 20_000
