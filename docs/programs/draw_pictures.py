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

import drawn_workers

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE.parent / "benchmarks"))
from suite.plot import bar_chart  # noqa: E402  (not in a package)

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
    """Returns the name and content of the chart of the README's table of speed."""
    readme = (HERE.parent / "README.md").read_text()
    lines = re.findall(r"^\|(.*)\|$", readme.partition("## How fast it is")[2], re.MULTILINE)
    head, _, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    ratios = [(row[0], [float(cell) if cell else None for cell in row[1:]]) for row in rows]
    title = "How many times faster millstream is, best mode against best mode"
    return "speed.svg", bar_chart(title, [peer.replace("`", "") for peer in head[1:]], ratios)


def main() -> None:
    """Writes all of them; the files that the tutorials leave go to a folder that is removed."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, content in [*previews(), loader(), workers(), speed()]:
            (HERE / "pictures" / name).write_text(content)
            sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    main()
