"""Draws pictures of the documents again: `.venv/bin/python docs/programs/draw_pictures.py`, from the root.

Most are what the library itself shows in a notebook, put into SVG files, which have the colours of the reader's theme,
light or dark. The pipelines are those of the tutorials, so a picture shows what a reader gets. What workers do is drawn
from a run of them (`drawn_workers.py`).
"""

import contextlib
import html
import html.parser
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

import drawn_workers
import figures

HERE = Path(__file__).parents[1]

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WIDTH = 760
MARGIN = 8
VOID = {"br", "img", "hr", "meta"}
STEP_SECONDS = 0.01
"""The duration of the training step that the picture of a loader was made beside."""


class AsXml(html.parser.HTMLParser):
    """Writes HTML as XML: what has no end gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Writes where an element begins."""
        words = "".join(f' {name}="{html.escape(value or "")}"' for name, value in attrs)
        self.parts.append(f"<{tag}{words}{'/' if tag in VOID else ''}>")

    def handle_endtag(self, tag: str) -> None:
        """Writes where it ends."""
        if tag not in VOID:
            self.parts.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        """Writes text, style sheets too."""
        self.parts.append(html.escape(data, quote=False))


def as_svg(picture: str, height: int, words: str, width: int = WIDTH) -> str:
    """Returns an SVG file that shows HTML."""
    parser = AsXml()
    parser.feed(picture)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{html.escape(words)}">\n'
        f'<foreignObject x="{MARGIN}" y="{MARGIN}" width="{width - 2 * MARGIN}" height="{height - 2 * MARGIN}">\n'
        f'<div xmlns="http://www.w3.org/1999/xhtml">{"".join(parser.parts)}</div>\n</foreignObject>\n</svg>\n'
    )


def names_in(page: str, until: str) -> dict[str, Any]:
    """Returns the names of a page, whose blocks have run in this folder up to the one that has these words."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in BLOCK.findall((HERE / page).read_text()):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(block, names)  # noqa: S102  (the tutorial's own code)
        if until in block:
            return names
    raise ValueError(f"No block of {page} has {until!r}.")


def previews() -> Iterator[tuple[str, str]]:
    """Yields the names and contents of what the pages show of their batches and of their composition."""
    picture = names_in("tutorials/images.md", "make_loader().preview")["make_loader"]().preview(1)._repr_html_()
    yield ("preview-of-images.svg", as_svg(picture, 450, "The images of a batch and the names of their classes"))
    picture = names_in("tutorials/text.md", "preview.save")["preview"]._repr_html_()
    yield ("preview-of-rows.svg", as_svg(picture, 500, "Rows of documents, each document in its own colour"))
    picture = names_in("lineage.md", "print(so_far)")["so_far"]._repr_html_()
    yield ("composition.svg", as_svg(picture, 210, "The share of each corpus, and its documents, tokens and epochs"))


def loader() -> tuple[str, str]:
    """Returns the name and content of the picture of a loader that has run beside a training step."""
    running = names_in("tutorials/images.md", "def make_loader")["make_loader"](worker_count=2)
    with iter(running) as batches:
        for _ in range(300):
            next(batches)
            time.sleep(STEP_SECONDS)
    picture = running._repr_html_().replace(str(Path.cwd()), "/data")
    words = "A loader: source, order, operations with the share of the time that each takes, trainer"
    return "a-loader.svg", as_svg(picture, 420, words)


def workers() -> tuple[str, str]:
    return "two-workers.svg", drawn_workers.drawn(*drawn_workers.recorded())


def speed() -> tuple[str, str]:
    """Returns the name and content of the chart of the README's table: bars from 1, where both are as good."""
    names = list(figures.FIRST_PAGE)[::-1]
    with plt.rc_context({"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": "millstream", **figures.COLOURS}):
        figure, axes = plt.subplots(figsize=(7.6, 5.2), layout="constrained")
        height = 0.8 / len(figures.COLUMNS)
        for column, (title, peers) in enumerate(figures.COLUMNS.items()):
            ratios = [figures.median_of(name, peers) for name in names]
            places = [row - column * height for row, ratio in enumerate(ratios) if ratio]
            drawn = [ratio for ratio in ratios if ratio]
            bars = axes.barh(places, [ratio - 1 for ratio in drawn], height * 0.9, left=1, label=title)
            axes.bar_label(bars, [f"{ratio:.2g}\N{MULTIPLICATION SIGN}" for ratio in drawn], padding=2)
        axes.set_xscale("log")
        axes.axvline(1, color="0.5", linewidth=1)
        axes.set_yticks([row - height for row in range(len(names))], [figures.FIRST_PAGE[name] for name in names])
        axes.set_xlabel("\N{LEFTWARDS ARROW} the peer is ahead    millstream is ahead \N{RIGHTWARDS ARROW}")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.legend(frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    return "speed.svg", _themed(file.getvalue(), "How many times as fast, or as soon, millstream is, by case and peer")


def _themed(picture: str, words: str) -> str:
    """Returns a picture of Matplotlib with its subject in words, and with texts for a dark theme, too."""
    style = "<style>@media (prefers-color-scheme:dark){text{fill:#e6edf3!important}}</style>"
    picture = re.sub(r"<metadata>.*?</metadata>", "", picture, flags=re.DOTALL)
    return re.sub(r"<svg ([^>]*)>", rf'<svg role="img" aria-label="{words}" \1>{style}', picture, count=1)


def main() -> None:
    """Writes all of them; the files that the tutorials leave go to a folder that is removed."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, content in [*previews(), loader(), workers(), speed()]:
            (HERE / "pictures" / name).write_text(content)
            sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    main()
