"""The modes in which each peer is at its best: which of them wins differs from case to case, so all run."""

from suite.case import Contender


def rates(*bounds: str, from_files: bool = False) -> tuple[Contender, ...]:
    """Returns all contenders of a case that measures a rate.

    Threads that read are off for data in memory, as Grain's documentation advises, and at the default for files.

    Args:
        bounds: modes of the bare loop, which measure what the machine can do without any loader.
        from_files: whether records are read from files.
    """
    threads = None if from_files else 0
    return (
        Contender("millstream", threads=0),
        Contender("millstream", threads=None),
        Contender("millstream", workers=2),
        *([Contender("millstream", workers=2, threads=None)] if from_files else []),
        Contender("grain", threads=threads, mode="DataLoader"),
        Contender("grain", threads=threads, workers=2, mode="DataLoader"),
        Contender("grain", threads=threads, mode="Dataset"),
        Contender("grain", threads=threads, workers=2, mode="Dataset"),
        Contender("pytorch"),
        Contender("pytorch", workers=2, mode="fork"),
        Contender("pytorch", workers=2, mode="forkserver"),
        Contender("pytorch", mode="record by record"),
        Contender("tensorflow"),
        Contender("tensorflow", mode="batches first"),
        *(Contender("bare", mode=bound) for bound in bounds),
    )


COLUMNS = (
    Contender("millstream", threads=0, mode="columns"),
    Contender("millstream", threads=None, mode="columns"),
)
"""millstream where it holds the records as tf.data does: as columns, which it batches before any step."""

LISTS = (
    Contender("millstream", threads=0, mode="lists"),
    Contender("millstream", threads=None, mode="lists"),
    Contender("millstream", workers=2, mode="lists"),
)
"""millstream where it delivers texts as PyTorch does: as a list of them, which is no array."""


def with_workers(count: int) -> tuple[Contender, ...]:
    """Returns all contenders that have worker processes, with this many of them."""
    return (
        Contender("millstream", workers=count),
        Contender("grain", workers=count, mode="DataLoader"),
        Contender("grain", workers=count, mode="Dataset"),
        Contender("pytorch", workers=count, mode="fork"),
        Contender("pytorch", workers=count, mode="forkserver"),
    )
