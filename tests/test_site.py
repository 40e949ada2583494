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
    assert {f"{page.stem}.html" for page in ROOT.glob("docs/*.md")} <= {page.name for page in site.glob("*.html")}
    assert {page.stem for page in ROOT.glob("examples/*.py")} == {page.stem for page in site.glob("examples/*.html")}


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


def test_the_site_asks_nobody_else_for_anything(site: Path) -> None:
    """No fonts, scripts or styles from elsewhere: it can be read, and searched, without a network."""
    loaded = re.compile(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?:[^\" >]*)")
    assert [found for page in site.rglob("*.html") for found in loaded.findall(page.read_text())] == []
