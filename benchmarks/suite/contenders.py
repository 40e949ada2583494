"""The modes in which each peer is at its best: which of them wins differs from case to case, so all run."""

from suite.case import Contender, Goal, Pick


def modes(peer: str, *names: str, workers: tuple[int, ...] = (0, 2), threads: int | None = 0) -> tuple[Contender, ...]:
    return tuple(Contender(peer, count, threads, mode) for mode in names or ("",) for count in workers)


def fork_server(peer: str) -> tuple[Contender, ...]:
    return Contender(peer), Contender(peer, workers=2, mode="forkserver")


def rates(*bounds: str, from_files: bool = False, as_chain: bool = False) -> tuple[Contender, ...]:
    """Returns all contenders of a case that measures a rate.

    Threads that read are off for data in memory, as Grain's documentation advises, and at the default for files.

    Args:
        bounds: modes of the bare loop, which measure what the machine can do without any loader.
        from_files: whether records are read from files.
        as_chain: whether millstream takes part as a chain, too.
    """
    threads = None if from_files else 0
    return (
        Contender("millstream", threads=0),
        Contender("millstream", threads=None),
        Contender("millstream", workers=2),
        *([Contender("millstream", workers=2, threads=None)] if from_files else []),
        *(chains(from_files=from_files) if as_chain else ()),
        *modes("grain", "DataLoader", "Dataset", threads=threads),
        Contender("pytorch"),
        Contender("pytorch", workers=2, mode="fork"),
        Contender("pytorch", workers=2, mode="forkserver"),
        Contender("pytorch", mode="record by record"),
        Contender("tensorflow"),
        Contender("tensorflow", mode="batches first"),
        *(Contender("bare", mode=bound) for bound in bounds),
    )


def chains(*, from_files: bool = False) -> tuple[Contender, ...]:
    """Returns millstream as a chain, in the modes in which its `DataLoader` may be best."""
    return (
        *modes("millstream", "chain"),
        *([Contender("millstream", workers=2, threads=None, mode="chain")] if from_files else []),
    )


def chain_goals(times_grain: float | None = None) -> tuple[Goal, ...]:
    """Returns what a chain is to reach: the speed of the loader, and this many times that of Grain's chains."""
    whole, chain = "as a chain, 0.9 of the DataLoader", "chain"
    grain = f"as a chain, {times_grain:g} times Grain's" if times_grain else ""
    return (
        Goal(f"{whole}, without workers", 0.9, Pick("millstream", 0, "", 0), Pick("millstream", 0, chain)),
        Goal(f"{whole}, with 2 workers", 0.9, Pick("millstream", 2, ""), Pick("millstream", 2, chain)),
        *([Goal(grain, times_grain, Pick("grain"), Pick("millstream", mode=chain))] if times_grain else []),
    )


def grain_goals(times: float, workers: int | None = None) -> tuple[Goal, ...]:
    """Returns the goals of being so many times as fast as each of Grain's interfaces, with as many workers."""
    both = "" if workers is None else f", both with {workers} workers"
    ours = Pick("millstream", workers)
    return (
        Goal(f"{times:g} times Grain's DataLoader{both}", times, Pick("grain", workers, "DataLoader"), ours),
        Goal(f"{times:g} times Grain, its Dataset too{both}", times, Pick("grain", workers), ours),
    )


COLUMNS = (
    Contender("millstream", threads=0, mode="columns"),
    Contender("millstream", threads=None, mode="columns"),
)
"""millstream where it holds the records as tf.data does: as columns, which it batches before any step."""

RECORDS = Pick("millstream", not_mode="columns")
"""millstream's modes that hold records one by one, as all peers do but tf.data."""


def with_workers(count: int) -> tuple[Contender, ...]:
    return (
        Contender("millstream", workers=count),
        *modes("grain", "DataLoader", "Dataset", workers=(count,)),
        *modes("pytorch", "fork", "forkserver", workers=(count,)),
    )
