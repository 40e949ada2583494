"""The ratios that matter most, as a picture."""

from collections.abc import Sequence

from suite.bar_chart import bar_chart
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


def chart_of(findings: Sequence[Finding]) -> str | None:
    """Returns a chart as SVG: how many times faster millstream is than each peer. None if no peer took part."""
    found = {finding.case.name: finding.ratios for finding in findings}
    rows = [(words, [found[name].get(peer) for peer in PEERS]) for name, words in ROWS.items() if name in found]
    rows = [(words, ratios) for words, ratios in rows if any(ratios)]
    title = "How many times faster (or smaller) millstream is, best mode against best mode"
    return bar_chart(title, PEERS, rows) if rows else None
