"""The pictures in the documents: what the library shows of the pipelines in the tutorials, and how workers work."""

import importlib
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import figures
import pytest

ROOT = Path(__file__).parents[1]
DRAWN = ["a-loader", "composition", "preview-of-images", "preview-of-rows", "speed", "two-workers"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that draws the pictures."""
    monkeypatch.syspath_prepend(ROOT / "docs/programs")
    return importlib.import_module("draw_pictures")


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

    assert set(drawn) == {"preview-of-images.svg", "preview-of-rows.svg", "composition.svg"}
    for name, picture in drawn.items():
        there = (ROOT / "docs/pictures" / name).read_text()
        assert words_in(picture) == words_in(there)
        assert picture.count("<img") == there.count("<img")


@pytest.mark.third_party
def test_the_chart_of_speed_has_the_figures_of_the_readme(script: ModuleType) -> None:
    """Drawn again from the README's table, it is the same file: a bar and a number for each figure."""
    name, chart = script.speed()

    assert chart == (ROOT / "docs/pictures" / name).read_text()
    drawn = [figures.median_of(case, peers) for case in figures.FIRST_PAGE for peers in figures.COLUMNS.values()]
    assert chart.count("\N{MULTIPLICATION SIGN}") == sum(ratio is not None for ratio in drawn)


def test_the_picture_of_workers_is_of_a_run_in_which_one_was_killed(script: ModuleType) -> None:
    """Run again, it shows the same batches: the one whose worker died was made by another, and all came in order."""
    pieces, steps = script.drawn_workers.recorded()
    picture = script.drawn_workers.drawn(pieces, steps)
    made = {piece.batch: piece for piece in pieces if not piece.is_lost}
    (lost,) = (piece for piece in pieces if piece.is_lost)

    assert [step.batch for step in steps] == sorted(made) == list(range(len(made)))
    assert len(made) == len(pieces) - 1
    assert made[lost.batch].who != lost.who
    assert made[lost.batch].start > lost.stop
    assert all(step.start > made[step.batch].stop for step in steps)
    # Who makes what, and for how long, is decided anew each time.
    assert sorted(words_in(picture)) == sorted(words_in((ROOT / "docs/pictures/two-workers.svg").read_text()))


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_are_legible_in_the_light_and_in_the_dark(name: str) -> None:
    """Each says what it shows, has its colours for both themes within it, and asks nobody for anything."""
    picture = (ROOT / f"docs/pictures/{name}.svg").read_text()

    assert ET.fromstring(picture).get("aria-label")
    assert "prefers-color-scheme:dark" in picture
    assert "http" not in picture.replace("http://www.w3.org/", "")


def test_html_becomes_xml(script: ModuleType) -> None:
    """Tags without an end in HTML get one, and characters with a meaning in XML are escaped."""
    picture = script.as_svg("<style>a>b{}</style><p title='\"&'>1 < 2<br>&amp;&nbsp;<img src='x'></p>", 10, "A & B")
    tree = ET.fromstring(picture)

    assert tree.get("aria-label") == "A & B"
    assert words_in(picture) == ["1", "<", "2", "&"]
    assert [element.get("title") for element in tree.iter() if element.get("title")] == ['"&']
