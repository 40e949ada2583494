"""The documentation as a site."""

import fcntl
import html
import importlib
import inspect
import os
import pkgutil
import re
import sys
import types
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import griffe
import pytest

import millstream
from millstream.dataset.grain_compat import streams
from support.processes.worker_pools import python

ROOT = Path(__file__).parents[1]
PARTS = ["dataset", "loader", "samplers", "sources", "tools", "transforms"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built as `make docs` builds it, once a run: every warning is an error."""
    run = tmp_path_factory.getbasetemp()
    run = run.parent if "PYTEST_XDIST_WORKER" in os.environ else run
    with (run / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (run / "site").exists():
            command = ["-m", "mkdocs", "build", "--config-file", ROOT / "mkdocs.yml", "--site-dir", run / "site"]
            built = python(*command, cwd=run, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, timeout=500)
            assert built.returncode == 0, built.stderr
    return run / "site"


def test_the_site_has_no_dead_link_and_no_missing_page(site: Path) -> None:
    """It builds strictly; and each document of the repository for users has its page."""
    assert (site / "index.html").exists()
    pages = {page.relative_to(site).with_suffix("").as_posix() for page in site.rglob("*.html")}
    documents = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in ROOT.glob("docs/**/*.md")}
    assert documents <= pages
    assert {page.stem for page in ROOT.glob("examples/*.py")} == {page.stem for page in site.glob("examples/*.html")}


@pytest.mark.parametrize("document", ["tour", "seeing", "tuning", "tutorials/images"])
def test_code_is_shown_as_code_and_nothing_else_is(site: Path, document: str) -> None:
    """Each block of code of a document is one on its page, and what stands between blocks is in none."""
    page = (site / f"{document}.html").read_text()
    blocks = re.findall(r"^```.*?^```$", (ROOT / f"docs/{document}.md").read_text(), re.MULTILINE | re.DOTALL)

    assert page.count("<pre") == len(blocks)


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    """Everything public has its own heading there, under one of its names."""
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


def described_parameters(value: Any) -> set[str]:
    """Returns the parameters that a docstring describes, as the site finds them: under `Args` and `Attributes`.

    Classes that share a constructor share its docstring. A method that works as another one refers to it.
    """
    texts = [value.__doc__, getattr(value, "__init__").__doc__ if inspect.isclass(value) else None]  # noqa: B009
    described = {
        item.name.lstrip("*")
        for text in texts
        for section in griffe.Docstring(inspect.cleandoc(text or "")).parse("google", warnings=False)
        if section.kind.value in ("parameters", "attributes")
        for item in section.value
        if item.description
    }
    text = " ".join(text.partition("Examples:")[0] for text in texts if text)
    methods = [getattr(getattr(millstream, owner), name) for owner, name in re.findall(r"as `([A-Z]\w+)\.(\w+)`", text)]
    if value.__module__ == streams.__name__:
        # A name of Grain's refers to the method that it is. The docstring of the module says what the parents are.
        owners = (millstream.IterDataset, millstream.MapDataset, millstream)
        calls = re.findall(r"(\w+)\(", text)
        methods += [getattr(owner, name) for name in calls for owner in owners if hasattr(owner, name)]
        described |= {"parent", "parents", *re.findall(r"`(\w+)`", text)}
    return described.union(*map(described_parameters, methods))


def is_of_another_library(owner: Any, name: str) -> bool:
    """Returns True if a class has a method because a class of another library calls it, and documents it."""
    bases = inspect.getmro(owner)[1:] if inspect.isclass(owner) else ()
    own = {"millstream", *sys.stdlib_module_names}
    return any(hasattr(base, name) for base in bases if base.__module__.partition(".")[0] not in own)


def undescribed_parameters(value: Any) -> set[str]:
    """Returns the parameters of a callable that its docstring says nothing of."""
    given = inspect.signature(value).parameters
    return {name for name in given if name != "self" and not name.startswith("_")} - described_parameters(value)


def test_every_parameter_of_what_users_call_is_described(site: Path) -> None:
    """Whatever the reference shows a signature of says of each of its parameters what it is."""
    called: dict[str, Any] = {}
    for page in site.glob("reference/*.html"):
        parts = re.split(r'<h[23] id="(millstream\.[\w.]+)"', page.read_text())
        for name, shown in zip(parts[1::2], parts[2::2], strict=True):
            # What is shown without a signature is not called: protocols, errors, iterators that a loader makes.
            owner, _, member = name.rpartition(".")
            # A class variable that a subclass sets has no value.
            value = getattr(pkgutil.resolve_name(owner), member, None)
            is_called = callable(value) and not isinstance(value, types.GenericAlias)
            if (
                "doc-signature" in shown
                and is_called
                and not is_of_another_library(pkgutil.resolve_name(owner), member)
            ):
                called[name] = value
    missing = {name: undescribed_parameters(value) for name, value in called.items()}

    assert {
        "millstream.loader.load_function.load",
        "millstream.samplers.index.IndexSampler.record_keys",
    } <= called.keys()
    assert {name: names for name, names in missing.items() if names} == {}


def test_a_parameter_that_is_not_described_is_found() -> None:
    """One without a line, one with an empty line and one that is only mentioned are missing; others are not."""

    def scaled(value: float, factor: float, offset: float, *rest: float, limit: float | None = None) -> None:  # noqa: D417
        """Does something with a `value`, and with its `offset`.

        Args:
            factor: what it is multiplied by.
            offset:
            *rest: what is added.
        """

    assert undescribed_parameters(scaled) == {"value", "offset", "limit"}


def test_what_users_call_is_in_the_reference_and_what_they_do_not_is_not(site: Path) -> None:
    """Every method of a loader has a heading, of whichever class it is; what only the library calls has none."""
    page = (site / "reference/loader.html").read_text()
    methods = {name for name in dir(millstream.DataLoader) if not name.startswith("_")} - {"insight", "lineage"}
    assert methods == set(re.findall(r'<h3 id="[\w.]*\.DataLoader\.(\w+)"', page))
    assert set(re.findall(r'<h3 id="[\w.]*\.DataLoaderIterator\.(\w+)"', page)) == {
        *("step", "epoch", "shard_options", "start_prefetch", "seek", "close"),
        *("get_state", "set_state", "set_states", "state_dict", "load_state_dict"),
        *("metrics", "trace", "preview", "report", "profile", "summary"),
        *("skip", "reweight", "record_keys", "steps_of", "locate", "composition"),
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
    assert boxes <= set(re.findall(r"<text[^>]*>([^<]*)</text>", picture))


def test_the_site_asks_nobody_else_for_anything(site: Path) -> None:
    """No fonts, scripts or styles from elsewhere: it can be read, and searched, without a network."""
    loaded = re.compile(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?:[^\" >]*)")
    assert [found for page in site.rglob("*.html") for found in loaded.findall(page.read_text())] == []


def pages_shown(site: Path) -> list[Path]:
    """Returns the pages of documents: all but the reference and the examples, whose code is that of the repository."""
    return [page for page in site.rglob("*.html") if page.parent.name not in ("reference", "examples")]


def test_code_fits_beside_the_text(site: Path) -> None:
    """Lines of Python on pages of documents have at most 88 characters: a window of 1,280 pixels shows all of each."""
    code = re.compile(r'<div class="language-python highlight">.*?</div>', re.DOTALL)
    lines = [
        line
        for page in pages_shown(site)
        for block in code.findall(page.read_text())
        for line in html.unescape(re.sub(r"<[^>]*>", "", block)).splitlines()
    ]

    assert len(lines) > 1000
    assert [line for line in lines if len(line) > 88] == []


def test_every_picture_is_there_and_is_described(site: Path) -> None:
    """Each picture of a page is a file of the site, or in the page itself, and has a text that replaces it."""
    pictures = [
        (page, picture) for page in site.rglob("*.html") for picture in re.findall(r"<img[^>]*>", page.read_text())
    ]

    assert pictures
    for page, picture in pictures:
        source = re.search(r'src="([^"]*)"', picture)
        assert source is not None
        assert source[1].startswith("data:") or (page.parent / source[1]).exists(), source[1]
        assert re.search(r'alt="[^"]+"', picture), picture


def test_drawings_fit_into_a_page(site: Path) -> None:
    """Drawings are at most as wide as the text beside both sidebars of a page."""
    drawings = list(site.rglob("pictures/*.svg"))

    assert drawings
    for drawing in drawings:
        assert float(ET.parse(drawing).getroot().attrib["viewBox"].split()[2]) <= 760, drawing.name


def test_llms_txt_names_every_page_of_the_documents(site: Path) -> None:
    """It is a part of the site, and its links are the pages written in docs/, all of them."""
    links = set(re.findall(r"\]\(([^)]*)\)", (site / "llms.txt").read_text()))
    documents = {page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for page in ROOT.glob("docs/**/*.md")}

    assert documents - {"index.html"} <= links
    assert [link for link in links if not (site / link).exists()] == []
