"""Disjoint parts of a source, and the records of the source that the elements of a part are."""

import itertools
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import named_arguments
from millstream.core.randomness import Purpose, as_seed, derive_seed, derive_seeds
from millstream.dataset.map_dataset import MapDataset
from millstream.dataset.nodes.node import ENDLESS
from millstream.samplers.mixtures.mixing import checked_weights
from millstream.samplers.mixtures.proportions import proportions
from millstream.samplers.permutation import permute_blocks
from millstream.sources import DataSource
from millstream.sources.base import loader_view
from millstream.sources.digests import digest
from millstream.sources.source_checks import batched_read_of, check_source

_BLOCK = 64
"""The number of consecutive records whose parts are drawn together: shares are exact in each of these blocks."""

_READ_TOGETHER = 1024

_NEARLY = Fraction(1, 1 << 30)
"""The largest difference of shares from 1 that counts as rounding, such as that of three thirds."""


@named_arguments()
def split(
    source: DataSource[Any],
    shares: Mapping[str, float],
    *,
    seed: int,
    by: Any = None,
) -> dict[str, MapDataset[Any]]:
    """Returns disjoint random parts of a source, such as those for training and for validation, by name.

    A record keeps its part if others are appended to the source. Parts are sources themselves: they keep the units in
    which files are read, classes, and the files of their records.

    Args:
        source: any source.
        shares: the share of each part, by name: numbers above 0. What they lack to 1 is in no part. Shares are kept
            within each run of 64 records.
        seed: 0 … 2**64 - 1: the same seed makes the same parts in every process.
        by: for parts that share no speaker, patient or document: its name for each record, an array or list of integers
            or text, or a function of the record, for which all records are read. All records of a name are in one part,
            and names keep their part. Shares are then those of names, on average. None to split record by record.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, shares exceed 1, or a part would have no record.

    Examples:
        >>> parts = millstream.split(range(1000), {"train": 0.9, "val": 0.1}, seed=0)
        >>> {name: len(part) for name, part in parts.items()}
        {'train': 899, 'val': 101}
        >>> speakers = ["ann", "bob", "ann", "cy", "bob", "dan"]
        >>> parts = millstream.split(range(6), {"train": 0.6, "val": 0.4}, seed=1, by=speakers)
        >>> {name: list(part) for name, part in parts.items()}
        {'train': [3], 'val': [0, 1, 2, 4, 5]}
    """
    check_source(source, "source")
    if loader_view(source).differs_by_epoch:
        raise ValueError(
            "source must have the same records in each epoch, got a chain with random or shuffled elements. Split the "
            "source below it, and build the chain on each part."
        )
    if len(source) == ENDLESS:
        raise ValueError("source must have an end, got an endless MapDataset. Split it before .repeat().")
    weights, seed = _weights_of(shares), as_seed(seed)
    if by is None:
        numbers = _parts_of_records(len(source), weights, seed)
    else:
        numbers = _parts_of_names(_names_of(source, by), weights, seed)
    dataset = source if isinstance(source, MapDataset) else MapDataset.source(source)
    made = {}
    for number, name in enumerate(shares):
        keys = np.flatnonzero(numbers == number)
        if not len(keys):
            raise ValueError(
                f"Part {name!r} would have none of {len(source)} records, with a share of {shares[name]}. Use a larger "
                "share, or another seed."
            )
        made[name] = dataset.slice(keys)
    return made


def _weights_of(shares: object) -> tuple[int, ...]:
    """Returns whole numbers in the ratios of the shares; if they lack something to 1, that comes last."""
    if not isinstance(shares, Mapping) or not shares:
        raise TypeError(f"shares must be a mapping from names to numbers, such as {{'train': 0.9}}, got {shares!r}.")
    for name, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, int | float | np.integer | np.floating):
            raise TypeError(
                f"The share of part {name!r} must be a number, got {share!r} of type {type(share).__name__}."
            )
        if not 0 < share <= 1:
            raise ValueError(f"The share of part {name!r} must be above 0 and at most 1, got {share!r}.")
    # As they are written: 0.9 and 0.1 are 1. Thirds are nearly 1.
    rest = 1 - sum(Fraction(str(share)) for share in shares.values())
    if rest < -_NEARLY:
        raise ValueError(f"shares must have a sum of at most 1, got {float(1 - rest)}.")
    missing = {} if rest < _NEARLY else {"no part": rest}
    return checked_weights([*shares.values(), *missing.values()], [*shares, *missing])


def _parts_of_records(num_records: int, weights: tuple[int, ...], seed: int) -> NDArray[np.int64]:
    order = permute_blocks(np.arange(num_records), _BLOCK, derive_seed(seed, Purpose.SPLIT_RECORDS))
    return proportions(weights).locate(order)[0]


def _parts_of_names(names: NDArray[Any], weights: tuple[int, ...], seed: int) -> NDArray[np.int64]:
    distinct, owners = np.unique(names, return_inverse=True)
    hashes = np.array([int.from_bytes(digest(8, _bytes_of(name)), "little") for name in distinct], np.uint64)
    points = derive_seeds(np.array([seed], np.uint64), Purpose.SPLIT_NAMES, hashes) >> np.uint64(2)
    total = sum(weights)
    limits = np.array([(end << 62) // total for end in itertools.accumulate(weights)], np.uint64)
    numbers: NDArray[np.int64] = np.searchsorted(limits, points, side="right")
    return numbers[owners]


def _bytes_of(name: Any) -> bytes:
    value = name.item() if isinstance(name, np.generic) else name
    # Which characters `repr` escapes depends on the version of Python.
    return f"{type(value).__name__} {value!a}".encode()


def _names_of(source: Any, by: Any) -> NDArray[Any]:
    if callable(by):
        by = [by(record) for record in _records_of(source)]
    names = np.asarray(by)
    if names.shape != (len(source),):
        raise ValueError(f"by must have one name for each of the {len(source)} records, got shape {names.shape}.")
    if names.dtype.kind == "O" and all(isinstance(name, str) for name in names):
        names = names.astype(np.str_)
    if names.dtype.kind not in "iuUSb":
        raise TypeError(f"by must have integers or text, got an array of dtype {names.dtype}.")
    return names


def _records_of(source: Any) -> Any:
    read: Callable[[Any], Any] | None = batched_read_of(source)
    for start in range(0, len(source), _READ_TOGETHER):
        keys = list(range(start, min(start + _READ_TOGETHER, len(source))))
        yield from read(keys) if read is not None else map(source.__getitem__, keys)
