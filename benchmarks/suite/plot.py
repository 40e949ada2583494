"""The ratios as a picture."""

from collections.abc import Sequence
from pathlib import Path

from suite.findings import COLUMNS, Finding
from suite.report import TIMES

COLOURS = {
    "Grain DataLoader": "#c1443c",
    "Grain Dataset": "#e89a6b",
    "PyTorch": "#7a4fa3",
    "tf.data": "#3f8fc4",
    "the bound": "#555555",
}
MARKERS = {"the bound": "|"}


def draw(findings: Sequence[Finding], path: Path) -> None:
    """Writes a PNG with one row per case and one point per peer: how many times as fast millstream is.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl  # noqa: PLC0415  (only who draws needs it)

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    findings = [finding for finding in findings if any(finding.ratios.values())]
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.34 * len(findings)), layout="constrained")
    rows = range(len(findings))
    for title in COLUMNS:
        points = [(finding.ratios[title], row) for row, finding in enumerate(findings) if finding.ratios[title]]
        if points:
            across, down = zip(*points, strict=True)
            marker, size = MARKERS.get(title, "o"), 120 if title in MARKERS else 42
            axes.scatter(across, down, s=size, marker=marker, color=COLOURS[title], label=title, zorder=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}{TIMES}")
    axes.set_yticks(rows, [finding.case.name for finding in findings])
    axes.invert_yaxis()
    axes.grid(axis="both", color="#dddddd", linewidth=0.6, zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("millstream is so many times as fast as …  (right of the line it is ahead, left of it behind)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.0 + 1.2 / (1 + len(findings))), ncols=5, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
