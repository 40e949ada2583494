"""Draws the graphs of documents as pictures, for the site: ```` ```mermaid ```` blocks that say `graph TD`.

GitHub draws these blocks by itself; a site that is read without a network cannot.
"""

import html
import re
from collections import defaultdict

BLOCK = re.compile(r"^```mermaid\ngraph TD\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ARROW = re.compile(r'^\s*(\w+)(?:\["([^"]*)"\])? --> (\w+)(?:\["([^"]*)"\])?$')

LETTER, MARGIN, GAP = 6.6, 10, 16
"""The approximate width of a letter; the padding of a box; the gap between two."""

LINE, ROW = 17, 92
"""The height of a line of text; and of a row of boxes with the arrows below it."""


def drawn(block: re.Match[str]) -> str:
    """Returns the picture of a graph as HTML in one line."""
    labels: dict[str, list[str]] = {}
    arrows = []
    for line in block[1].splitlines():
        if (arrow := ARROW.match(line)) is None:
            raise ValueError(f"only arrows between boxes can be drawn, got {line!r}.")
        arrows.append((arrow[1], arrow[3]))
        for name, label in ((arrow[1], arrow[2]), (arrow[3], arrow[4])):
            if label or name not in labels:
                labels[name] = (label or name).split("<br>")
    rows = rows_of(list(labels), arrows)
    boxes, width = places(rows, labels)
    height = ROW * len(rows) - ROW + 3 * LINE
    lines = "".join(line_between(boxes[one], boxes[other]) for one, other in arrows)
    shown = "".join(box_with(boxes[name], label) for name, label in labels.items())
    head = '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    head += '<path d="M0 0L8 4L0 8z" fill="currentColor"/></marker>'
    size = f'viewBox="0 0 {width:.0f} {height}" style="max-width:{width:.0f}px;width:100%"'
    return f'<svg class="graph" role="img" {size}><defs>{head}</defs>{lines}{shown}</svg>'


def rows_of(names: list[str], arrows: list[tuple[str, str]]) -> list[list[str]]:
    """Returns the boxes row by row: each below all that have an arrow to it, and near the middle of these."""
    row = dict.fromkeys(names, 0)
    for _ in names:
        for one, other in arrows:
            row[other] = max(row[other], row[one] + 1)
    rows: list[list[str]] = [[] for _ in range(max(row.values()) + 1)]
    for name in names:
        rows[row[name]].append(name)
    above = defaultdict(list)
    for one, other in arrows:
        above[other].append(one)
    middle = {name: (number + 1) / (len(rows[0]) + 1) for number, name in enumerate(rows[0])}
    for some in rows[1:]:
        some.sort(key=lambda name: sum(middle[one] for one in above[name]) / len(above[name]))
        middle |= {name: (number + 1) / (len(some) + 1) for number, name in enumerate(some)}
    return rows


Box = tuple[float, float, float, float]
"""Left and upper edge, width and height."""


def places(rows: list[list[str]], labels: dict[str, list[str]]) -> tuple[dict[str, Box], float]:
    """Returns where each box stands, and how wide the picture is."""
    widths = {name: max(map(len, lines)) * LETTER + 2 * MARGIN for name, lines in labels.items()}
    whole = max(sum(widths[name] + GAP for name in row) - GAP for row in rows) + 2
    boxes = {}
    for number, row in enumerate(rows):
        free = (whole - sum(widths[name] for name in row)) / (len(row) + 1)
        left = 0.0
        for name in row:
            left += free
            boxes[name] = (left, 1.0 + number * ROW, widths[name], len(labels[name]) * LINE + 12.0)
            left += widths[name]
    return boxes, whole


def line_between(one: Box, other: Box) -> str:
    """Returns the arrow from the lower edge of one box to the upper edge of another."""
    start, stop = (one[0] + one[2] / 2, one[1] + one[3]), (other[0] + other[2] / 2, other[1])
    bend = (stop[1] - start[1]) / 2
    curve = f"M{start[0]:.0f} {start[1]:.0f}c0 {bend:.0f} {stop[0] - start[0]:.0f} {bend:.0f} "
    curve += f"{stop[0] - start[0]:.0f} {stop[1] - start[1]:.0f}"
    return f'<path d="{curve}" fill="none" stroke="currentColor" opacity=".45" marker-end="url(#tip)"/>'


def box_with(box: Box, lines: list[str]) -> str:
    """Returns a box with lines of text in its middle."""
    left, top, width, height = box
    shape = f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{height:.0f}" rx="5"/>'
    texts = (
        f'<text x="{left + width / 2:.0f}" y="{top + (number + 1) * LINE:.0f}">{html.escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    return shape + "".join(texts)
