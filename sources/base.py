"""What a source of records is, and the rule for the keys that it takes."""

import operator
from collections.abc import Sequence
from typing import Protocol, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import NDArray

T_co = TypeVar("T_co", covariant=True)

RecordKeys = Sequence[int] | NDArray[np.integer]
"""Record keys for one batched read: a sequence of integers, or an integer array of shape (n,)."""


class _Items(Protocol[T_co]):
    def __getitem__(self, key: int, /) -> T_co: ...


class DataSource(Protocol[T_co]):
    """Records found by number: `len(source)` and `source[record_key]` are all that is needed, so a list is a source.

    Reading the same key gives an equal record each time, in every process and thread. A source goes to worker
    processes by pickle, and is read by several threads at once.

    Four more members are optional; what is there is used:

    `__getitems__(record_keys: Sequence[int]) -> Sequence[T]`
        The batched read: the records of all keys, in the order of the keys, which may repeat. It is used instead of
        `__getitem__` whenever it is there, and is where most reading speed comes from. It fails as a whole.
    `takes_key_arrays: bool`
        Whether `__getitems__` takes an int64 array as well as a list; a list of many keys takes time to make.
    `close()`, and the context manager that calls it
        Releases files and connections. The owner calls it, which is whoever constructed the source; a loader does
        not. A worker process has its own copy and closes that one.
    `fingerprint() -> str`
        A line of words that identifies the content, wherever it lies: equal for equal records, in every process and
        after moving the files; cheap, so a sample will do. It goes into checkpoints, so that a state is refused with
        another source, and its words tell the reader of that error what differs.
    """

    def __len__(self) -> int:
        """Returns how many records there are."""
        ...

    def __getitem__(self, record_key: int, /) -> T_co:
        """Returns the record of one key, 0 … len(self) - 1."""
        ...


def items_at(items: _Items[T_co], keys: Sequence[int]) -> Sequence[T_co]:
    """Returns `[items[key] for key in keys]`, in a single call of C.

    Objects that lie far apart in memory come two to three times as fast as from a loop: the processor waits for several
    of them at once.
    """
    return operator.itemgetter(*keys)(items) if len(keys) > 1 else [items[key] for key in keys]


def checked_record_key(record_key: SupportsIndex, num_records: int) -> int:
    """Returns the key as an int.

    Raises:
        TypeError: it is no integer.
        IndexError: it is negative, or beyond the last record: keys do not count from the end.
    """
    key = operator.index(record_key)
    if not 0 <= key < num_records:
        raise IndexError(f"record_key must be between 0 and len(source) - 1 = {num_records - 1}, got {key}.")
    return key


def checked_record_keys(record_keys: RecordKeys, num_records: int) -> NDArray[np.int64]:
    """Returns the keys as an int64 array of shape (n,).

    Raises:
        TypeError: they are no integers.
        ValueError: they are not one-dimensional.
        IndexError: one of them is negative, or beyond the last record.
    """
    keys = np.asarray(record_keys)
    if keys.ndim != 1:
        raise ValueError(f"record_keys must be one-dimensional, got the shape {keys.shape}.")
    if keys.dtype.kind not in "iu" or (keys.size and not 0 <= keys.min() <= keys.max() < num_records):
        # Something is wrong with at least one key, or the list is empty: the rule for one key says what.
        return np.fromiter((checked_record_key(key, num_records) for key in record_keys), dtype=np.int64)
    return keys.astype(np.int64, copy=False)
