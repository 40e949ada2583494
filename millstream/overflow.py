"""What becomes of a document that is longer than a row: the choices that all packers have."""

OVERFLOWS = ("error", "truncate", "split", "drop")


def as_overflow(value: object) -> str:
    """Returns a valid choice; refuses anything else."""
    if value not in OVERFLOWS:
        raise ValueError(f"overflow must be one of {', '.join(map(repr, OVERFLOWS))}, got {value!r}.")
    return str(value)
