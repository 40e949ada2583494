"""Draws the README's table of speed as a bar chart, in SVG with colours for light and dark pages."""

import html
import math
import re
import textwrap

WIDTH, LEFT, RIGHT = 760, 250, 40
BAR, GAP = 13, 16
RANGE = (0.3, 200)
"""The ratios at the left and right edges of the chart, on a logarithmic axis."""

COLOURS = ("#c1443c", "#d9873f", "#8a5cb8", "#3f8fc4")
"""One per peer, legible on white and on black."""

STYLE = (
    "<style>text{font:12px system-ui,sans-serif;fill:#1f2328}.soft{fill:#59636e}.line{stroke:#d1d9e0}"
    ".one{stroke:#1f2328}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#9198a1}.line{stroke:#3d444d}.one{stroke:#e6edf3}}"
    "</style>"
)


def table_of(readme: str) -> tuple[list[str], list[tuple[str, list[float | None]]]]:
    """Returns the peers and the rows of the README's table of speed: a case, and a ratio for each peer or None."""
    lines = re.findall(r"^\|(.*)\|$", readme.partition("## How fast it is")[2], re.MULTILINE)
    head, _, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [peer.replace("`", "") for peer in head[1:]], [
        (row[0], [float(cell) if cell else None for cell in row[1:]]) for row in rows
    ]


def drawn(peers: list[str], rows: list[tuple[str, list[float | None]]]) -> str:
    """Returns the chart as an SVG file. Bars begin at 1, where both are equally fast."""
    shapes, top = [], 66.0
    for case, ratios in rows:
        bars = [(ratio, colour) for ratio, colour in zip(ratios, COLOURS, strict=True) if ratio is not None]
        label = textwrap.wrap(case, 36)
        middle = top + (len(bars) * BAR - len(label) * 15) / 2 + 11
        shapes += [_text(LEFT - 12, middle + 15 * line, words, "end") for line, words in enumerate(label)]
        for ratio, colour in bars:
            begin, end = sorted((_x(1), _x(ratio)))
            shapes.append(
                f'<rect x="{begin:.1f}" y="{top}" width="{end - begin:.1f}" height="{BAR - 2}" fill="{colour}"/>'
            )
            side = ("start", end + 4) if ratio >= 1 else ("end", begin - 4)
            shapes.append(_text(side[1], top + 10, f"{ratio:g}\N{MULTIPLICATION SIGN}", side[0]))
            top += BAR
        top += GAP
    grid = [_line(_x(ratio), top, "line") for ratio in (10, 100)] + [_line(_x(1), top, "one")]
    legend, left = [], float(LEFT)
    for peer, colour in zip(peers, COLOURS, strict=True):
        legend.append(f'<rect x="{left}" y="30" width="11" height="11" fill="{colour}"/>' + _text(left + 16, 40, peer))
        left += 34 + 6.6 * len(peer)
    words = "How many times faster millstream is, best mode against best mode"
    axis = _text(_x(1) - 8, top + 12, "\N{LEFTWARDS ARROW} the peer is faster", "end", soft=True)
    axis += _text(_x(1) + 8, top + 12, "millstream is faster \N{RIGHTWARDS ARROW}", soft=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 22:.0f}" width="{WIDTH}" '
        f'height="{top + 22:.0f}" role="img" aria-label="{words}">{STYLE}'
        + "\n".join([_text(LEFT, 16, words), *legend, *grid, *shapes, axis])
        + "</svg>\n"
    )


def _x(ratio: float) -> float:
    low, high = map(math.log, RANGE)
    return LEFT + (math.log(ratio) - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def _line(x: float, bottom: float, kind: str) -> str:
    return f'<path class="{kind}" d="M{x:.1f} 56V{bottom - GAP / 2:.1f}"/>'


def _text(x: float, y: float, words: str, anchor: str = "start", *, soft: bool = False) -> str:
    kind = ' class="soft"' if soft else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{html.escape(words)}</text>'
