"""The ratios that matter most, as a picture: a bar chart in SVG that follows the light or dark theme of its reader."""

import html
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from suite.findings import Finding

ROWS = {
    "tokens": "1 KB records from ArrayRecord files, globally shuffled, in batches of 256",
    "images": "JPEG images from ArrayRecord files: decode, crop, flip",
    "cpu_filter": "a Filter of 30 µs of Python before the batch",
    "tiny": "numbers in memory, in batches of 256",
    "tiny_random": "the same, with a random draw for each",
    "nested": "dicts of 20 small leaves in memory, held as columns where the loader can",
    "big": "arrays of 150 KB in memory, in batches of 128",
    "first_batch_2": "time to the first batch, 2 workers",
    "resume_far": "time to resume at step 10^9, without workers",
    "memory": "memory that 4 workers add to a source of 1 GB in memory",
}
"""The cases that the picture shows, each with its title."""

PEERS = ("Grain DataLoader", "Grain Dataset", "PyTorch", "tf.data")
"""The peers that it shows, in the order of their bars."""


WIDTH, LEFT, RIGHT = 760, 250, 40
BAR, GAP = 13, 16
COLOURS = ("#c1443c", "#d9873f", "#8a5cb8", "#3f8fc4")
"""One for each peer. All are legible on white and on black."""

STYLE = (
    "<style>text{font:12px system-ui,sans-serif;fill:#1f2328}.soft{fill:#59636e}.line{stroke:#d1d9e0}"
    ".one{stroke:#1f2328}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#9198a1}.line{stroke:#3d444d}.one{stroke:#e6edf3}}"
    "</style>"
)


def chart_of(findings: "Sequence[Finding]") -> str | None:
    """Returns a chart as SVG: how many times faster millstream is than each peer. None if no peer took part."""
    found = {finding.case.name: finding.ratios for finding in findings}
    rows = [(words, [found[name].get(peer) for peer in PEERS]) for name, words in ROWS.items() if name in found]
    rows = [(words, ratios) for words, ratios in rows if any(ratios)]
    title = "How many times faster (or smaller) millstream is, best mode against best mode"
    return bar_chart(title, PEERS, rows) if rows else None


def bar_chart(title: str, peers: Sequence[str], rows: Sequence[tuple[str, Sequence[float | None]]]) -> str:
    """Returns the chart as the text of an SVG file. Bars begin at 1, where both are equally fast."""
    found = [ratio for _, ratios in rows for ratio in ratios if ratio is not None]
    # A logarithmic axis, with room for the numbers beside the longest bars.
    low, high = math.log(min([0.5, *found]) / 1.7), math.log(max([2.0, *found]) * 1.7)

    def x_of(ratio: float) -> float:
        return LEFT + (math.log(ratio) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    shapes, top = [], 66.0
    for case, ratios in rows:
        bars = [(ratio, colour) for ratio, colour in zip(ratios, COLOURS, strict=True) if ratio is not None]
        label = textwrap.wrap(case, 36)
        middle = top + (len(bars) * BAR - len(label) * 15) / 2 + 11
        shapes += [_text(LEFT - 12, middle + 15 * line, words, "end") for line, words in enumerate(label)]
        for ratio, colour in bars:
            begin, end = sorted((x_of(1), x_of(ratio)))
            shapes.append(
                f'<rect x="{begin:.1f}" y="{top}" width="{end - begin:.1f}" height="{BAR - 2}" fill="{colour}"/>'
            )
            side = ("start", end + 4) if ratio >= 1 else ("end", begin - 4)
            shapes.append(_text(side[1], top + 10, f"{float(f'{ratio:.2g}'):g}\N{MULTIPLICATION SIGN}", side[0]))
            top += BAR
        top += GAP
    grid = [_line(x_of(ratio), top, "line") for ratio in (0.1, 10, 100) if low < math.log(ratio) < high] + [
        _line(x_of(1), top, "one")
    ]
    legend, left = [], float(LEFT)
    for peer, colour in zip(peers, COLOURS, strict=True):
        legend.append(f'<rect x="{left}" y="30" width="11" height="11" fill="{colour}"/>' + _text(left + 16, 40, peer))
        left += 34 + 6.6 * len(peer)
    axis = _text(x_of(1) - 8, top + 12, "\N{LEFTWARDS ARROW} the peer is faster", "end", soft=True)
    axis += _text(x_of(1) + 8, top + 12, "millstream is faster \N{RIGHTWARDS ARROW}", soft=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 22:.0f}" width="{WIDTH}" '
        f'height="{top + 22:.0f}" role="img" aria-label="{title}">{STYLE}'
        + "\n".join([_text(LEFT, 16, title), *legend, *grid, *shapes, axis])
        + "</svg>\n"
    )


def _line(x: float, bottom: float, kind: str) -> str:
    return f'<path class="{kind}" d="M{x:.1f} 56V{bottom - GAP / 2:.1f}"/>'


def _text(x: float, y: float, words: str, anchor: str = "start", *, soft: bool = False) -> str:
    kind = ' class="soft"' if soft else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{html.escape(words)}</text>'
