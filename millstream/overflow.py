"""The treatments of a document that is longer than a row, common to all packers."""

OVERFLOWS = ("error", "truncate", "split", "drop")


def as_overflow(value: object) -> str:
    """Returns a valid treatment; refuses anything else."""
    if value not in OVERFLOWS:
        raise ValueError(f"overflow must be one of {', '.join(map(repr, OVERFLOWS))}, got {value!r}.")
    return str(value)
