"""The ratios that matter most, as a picture."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from suite.findings import Finding
from suite.report import TIMES

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

COLOURS = {
    "Grain DataLoader": "#c1443c",
    "Grain Dataset": "#e89a6b",
    "PyTorch": "#7a4fa3",
    "tf.data": "#3f8fc4",
}


def draw(findings: Sequence[Finding], path: Path) -> None:
    """Writes a PNG with a group of bars per case: how many times faster millstream is than each peer.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl  # noqa: PLC0415  (only who draws needs it)

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    groups = bars_of(findings)
    num_lines = sum(len(bars) + 1 for _, bars in groups)
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.2 * num_lines), layout="constrained")
    line, ticks = 0.0, []
    for _, bars in groups:
        for title, ratio in bars:
            # A bar begins at 1, where both are equally fast: to the right millstream is ahead, to the left the peer.
            axes.barh(line, ratio - 1, left=1, height=0.85, color=COLOURS[title], zorder=2)
            side, gap = ("left", 4) if ratio >= 1 else ("right", -4)
            at = {"xytext": (gap, 0), "textcoords": "offset points", "va": "center", "ha": side, "fontsize": 8}
            axes.annotate(f"{float(f'{ratio:.2g}'):g}{TIMES}", (ratio, line), **at)
            line += 1
        ticks.append(line - (len(bars) + 1) / 2)
        line += 1
    axes.axvline(1, color="black", linewidth=1, zorder=3)
    axes.set_xscale("log")
    axes.set_xlim(0.08, 300)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}{TIMES}")
    axes.set_yticks(ticks, [textwrap.fill(words, 40) for words, _ in groups], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6, zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("the peer is ahead  $\\leftarrow$  equal  $\\rightarrow$  millstream is ahead")
    title = "How many times faster (or smaller) millstream is, best mode against best mode"
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(
        handles, COLOURS, title=title, title_fontsize=12, loc="outside upper center", ncols=len(COLOURS), frameon=False
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def bars_of(findings: Sequence[Finding]) -> list[tuple[str, list[tuple[str, float]]]]:
    """Returns what the picture shows: each case in words, with the peers that have a ratio in it; [] for no picture."""
    found = {finding.case.name: finding.ratios for finding in findings}
    groups = [(words, _bars(found[name])) for name, words in ROWS.items() if name in found]
    return [(words, bars) for words, bars in groups if bars]


def _bars(ratios: Mapping[str, float | None]) -> list[tuple[str, float]]:
    """Returns the peers that have a ratio, in the order of their colours."""
    return [(title, ratio) for title in COLOURS if (ratio := ratios.get(title))]
