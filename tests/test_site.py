"""The documentation as a site."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import millstream

ROOT = Path(__file__).parents[1]
PARTS = ["dataset", "loader", "samplers", "sources", "tools", "transforms"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built as `make docs` builds it: every warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(ROOT / "mkdocs.yml"), "--site-dir"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        [*command, str(folder)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_the_site_has_no_dead_link_and_no_missing_page(site: Path) -> None:
    """It builds strictly; and each document of the repository for users has its page."""
    assert (site / "index.html").exists()
    pages = {page.relative_to(site).with_suffix("").as_posix() for page in site.rglob("*.html")}
    documents = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in ROOT.glob("docs/**/*.md")}
    assert documents <= pages
    assert {page.stem for page in ROOT.glob("examples/*.py")} == {page.stem for page in site.glob("examples/*.html")}


@pytest.mark.parametrize("document", ["README.md", "docs/seeing.md", "docs/tuning.md", "docs/tutorials/images.md"])
def test_code_is_shown_as_code_and_nothing_else_is(site: Path, document: str) -> None:
    """Each block of code of a document is one on its page, and what stands between blocks is in none."""
    shown = "tour" if document == "README.md" else document.removeprefix("docs/").removesuffix(".md")
    page = (site / f"{shown}.html").read_text()
    blocks = re.findall(r"^```.*?^```$", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)

    assert page.count("<pre") == len(blocks)


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    """What is public has a heading of its own there, under one of its names."""
    headings = {
        word
        for page in site.glob("reference/*.html")
        for heading in re.findall(r"<h2.*?</h2>", page.read_text(), re.DOTALL)
        for word in re.sub(r"<[^>]*>", " ", heading).split()
    }
    names: dict[int, set[str]] = {}
    for module in (millstream, *(importlib.import_module(f"millstream.{part}") for part in PARTS)):
        for name in module.__all__:
            if callable(value := getattr(module, name)):
                names.setdefault(id(value), set()).add(f"{module.__name__}.{name}")
    assert [some for some in names.values() if not some & headings] == []


def test_what_users_call_is_in_the_reference_and_what_they_do_not_is_not(site: Path) -> None:
    """Every method of a loader has a heading, of whichever class it is; what only the library calls has none."""
    page = (site / "reference/loader.html").read_text()
    methods = {name for name in dir(millstream.DataLoader) if not name.startswith("_")}
    assert methods == set(re.findall(r'<h3 id="[\w.]*\.DataLoader\.(\w+)"', page))
    assert set(re.findall(r'<h3 id="[\w.]*\.DataLoaderIterator\.(\w+)"', page)) == {
        "step",
        "epoch",
        "start_prefetch",
        "get_state",
        "set_state",
        "set_states",
        "seek",
        "close",
    }


def test_graphs_are_drawn(site: Path) -> None:
    """A site that loads nothing from elsewhere draws them itself: each box and each arrow is in the picture."""
    drawing = re.search(r"```mermaid\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert drawing is not None
    page = (site / "contributing.html").read_text()
    assert "graph TD" not in page
    assert page.count('marker-end="url(#tip)"') == drawing[1].count("-->")
    (picture,) = re.findall(r'<svg class="graph".*?</svg>', page)
    boxes = {box.split("<br>")[0] for box in re.findall(r'"([^"]*)"', drawing[1])}
    assert boxes == {text for text in re.findall(r"<text[^>]*>([^<]*)</text>", picture) if text.endswith("/")}


def test_the_site_asks_nobody_else_for_anything(site: Path) -> None:
    """No fonts, scripts or styles from elsewhere: it can be read, and searched, without a network."""
    loaded = re.compile(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?:[^\" >]*)")
    assert [found for page in site.rglob("*.html") for found in loaded.findall(page.read_text())] == []
