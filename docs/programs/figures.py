"""The tables of measured figures in README.md and in pages, as the results in benchmarks/results make them.

`python docs/programs/figures.py` writes them between their marks; a test fails where they differ.
"""

import functools
import json
import re
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import formats  # noqa: E402

from suite.report import Measured, from_json, number  # noqa: E402

COLUMNS = {"Grain": ("grain",), "PyTorch": ("pytorch", "torchdata"), "tf.data": ("tensorflow",)}
FIRST_PAGE = {
    "tokens": "1 KB records from ArrayRecord files",
    "images": "JPEG images: decode, crop, flip",
    "text": "texts from Parquet through a tokenizer",
    "filter": "a filter of 30 µs of Python",
    "numbers": "numbers in memory, a random draw for each",
    "first_batch": "time to the first batch, 2 workers",
    "resume": "time to resume, 2 workers",
}
"""The cases on the first page, and what they are called there."""


COLOURS = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), "#808890")
"""Of the chart's texts: legible on white and on black."""


@functools.cache
def measured_cases() -> dict[str, Measured]:
    return from_json(json.loads((ROOT / "benchmarks/results/latest.json").read_text()))


def first_page() -> str:
    """Returns the table of the README: a median and its interval for each case and peer."""
    measured = measured_cases()
    lines = [f"| | {' | '.join(COLUMNS)} |", f"|---|{'--:|' * len(COLUMNS)}"]
    for case, title in FIRST_PAGE.items():
        cells = [ratio_of(measured[case], peers) for peers in COLUMNS.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ratio_of(measured: Measured, peers: tuple[str, ...]) -> str:
    """Returns the ratio to the first of some peers that took part; nothing if none did."""
    ratios = _ratios(measured, peers)
    return f"{number(median(ratios))} ({number(min(ratios))} to {number(max(ratios))})" if ratios else ""


def median_of(case: str, peers: tuple[str, ...]) -> float | None:
    ratios = _ratios(measured_cases()[case], peers)
    return median(ratios) if ratios else None


def _ratios(measured: Measured, peers: tuple[str, ...]) -> list[float]:
    return next((found for peer in peers if (found := measured.ratios(peer))), [])


def of_formats() -> str:
    return formats.table(json.loads((ROOT / "benchmarks/results/formats.json").read_text())["rows"])


def of_workers() -> str:
    """Returns the table of `results/workers.md` without the names of the cases, and the warning of other work."""
    lines = (ROOT / "benchmarks/results/workers.md").read_text().splitlines()
    warnings = [f"{line}\n" for line in lines if line.startswith("**")]
    rows = [line.split("|")[2:] for line in lines if line.startswith("|")]
    return "\n".join([*warnings, *(f"|{'|'.join(row)}" for row in rows)])


TABLES = {"README.md": first_page, "docs/formats.md": of_formats, "docs/tuning.md": of_workers}
"""By document."""

MARKED = re.compile(r"(?<=<!-- measured -->\n\n).*?(?=\n\n<!-- until here -->)", re.DOTALL)
"""A table, between its marks."""


def written(document: str) -> str:
    """Returns the document with its table as it was measured."""
    table = TABLES[document]()
    return MARKED.sub(lambda _: table, (ROOT / document).read_text())


if __name__ == "__main__":
    for name in TABLES:
        text = written(name)
        (ROOT / name).write_text(text)
