"""The pictures in the README and the tutorials: what the library shows of the pipelines in the tutorials."""

import importlib.util
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
DRAWN = ["a-loader.svg", "preview-of-images.svg", "preview-of-rows.svg"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What draws them."""
    spec = importlib.util.spec_from_file_location("draw_pictures", ROOT / "docs/draw_pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "draw_pictures", module)
    spec.loader.exec_module(module)
    return module


def words_in(picture: str) -> list[str]:
    """Returns the words that a picture shows, without those of its style sheet."""
    tree = ET.fromstring(picture)
    texts = [element.text for element in tree.iter() if element.text and not element.tag.endswith("style")]
    return " ".join([*texts, *(element.tail for element in tree.iter() if element.tail)]).split()


def test_previews_are_those_of_the_tutorials(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn again, they show the same words, and as many images."""
    monkeypatch.chdir(tmp_path)
    drawn = dict(script.previews())

    assert set(drawn) == set(DRAWN) - {"a-loader.svg"}
    for name, picture in drawn.items():
        there = (ROOT / "docs/pictures" / name).read_text()
        assert words_in(picture) == words_in(there)
        assert picture.count("<img") == there.count("<img")


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_are_legible_in_the_light_and_in_the_dark(name: str) -> None:
    """Each says what it shows, has its colours for both themes within it, and asks nobody for anything."""
    picture = (ROOT / "docs/pictures" / name).read_text()

    assert ET.fromstring(picture).get("aria-label")
    assert "prefers-color-scheme:dark" in picture
    assert "http" not in picture.replace("http://www.w3.org/", "")


def test_html_becomes_xml(script: ModuleType) -> None:
    """What has no end in HTML gets one, and what means something in XML is written as text."""
    picture = script.as_svg("<style>a>b{}</style><p title='\"&'>1 < 2<br>&amp;&nbsp;<img src='x'></p>", 10, "A & B")
    tree = ET.fromstring(picture)

    assert tree.get("aria-label") == "A & B"
    assert words_in(picture) == ["1", "<", "2", "&"]
    assert [element.get("title") for element in tree.iter() if element.get("title")] == ['"&']
