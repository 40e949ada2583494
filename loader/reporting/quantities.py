"""Text for numbers with a unit, such as bytes, seconds, shares and counts, and tables of it."""

from collections.abc import Sequence


def bytes_text(number: float) -> str:
    """Returns a number of bytes in a decimal unit: `19 MB`, `1.5 GB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(number) < 999.5:
            return _with_unit(number, unit)
        number /= 1000
    return _with_unit(number, "TB")


def seconds_text(seconds: float) -> str:
    """Returns a duration: `85 µs`, `3.2 ms`, `12 s`."""
    if not seconds:
        return "0 s"
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return _with_unit(seconds * factor, unit)
    return _with_unit(seconds, "s")


def share_text(share: float) -> str:
    """Returns a share as a percentage: `38 %`."""
    return f"{share:.0%}".replace("%", " %")


def count_text(number: int, noun: str) -> str:
    """Returns a count with its noun: `1 batch`, `12,000 records`."""
    plural = noun if number == 1 else f"{noun}es" if noun.endswith(("ch", "s")) else f"{noun}s"
    return f"{number:,} {plural}"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Returns rows of a table as lines: the first `left` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    adjust = [str.ljust if number < left else str.rjust for number in range(len(widths))]
    cells = ([fit(cell, width) for fit, cell, width in zip(adjust, row, widths, strict=True)] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]


def _with_unit(number: float, unit: str) -> str:
    # Two significant digits, as in 1.5 and 19.
    digits = 0 if abs(number) >= 9.95 or number == int(number) else 1
    return f"{number:,.{digits}f} {unit}"
