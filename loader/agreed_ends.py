"""Global batches until the last host has none: hosts agree at each step, and fill with rows that are not valid.

Hosts of a filter, a packer or a stream have different numbers of batches, and last batches of different sizes. Each
batch of all hosts gets as many rows as a complete one, or as the largest one so far if the number is not known, and a
leaf `valid` that is False for the rows that fill.

Guarantees:
    * A host tells how many rows it has at a step one batch in advance: the collective is dispatched before the training
      step, so that no host waits for it, and runs in the trainer's thread, in the same order on all hosts.
    * All hosts end at the same step. No batch has only rows that fill.
    * A host that has no batch, because its stream has ended before, takes the structure from the others.
"""

import base64
import functools
import json
import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from millstream.loader.device_placement import Agreement, Placement, hosts_axis, leaves_of, with_leaves
from millstream.loader.threads.thread_settings import in_fresh_thread

VALID = "valid"
"""The name of the leaf that is True for rows with an element."""

_FAILED = -1

AGREE = "agree"

_NO_ROWS = -1
"""The number of rows of a leaf that has no axes."""


class Pending(NamedTuple):
    """A batch that is announced, and not delivered.

    Attributes:
        outcome: the staged batch with its position; None if this host has no more; or an error.
        counts: the numbers of rows of all hosts, an array that may be in progress.
    """

    outcome: Any
    counts: Any


@final
class AgreedEnds:
    """The agreement of hosts on the rows of each step.

    Args:
        placement: transfers the batches.
        agreement: compares the hosts; None if there is one.
        rows: the number of rows of complete batches, the same on all hosts; None if it is not known.
    """

    def __init__(self, placement: Placement, agreement: Agreement | None, rows: int | None) -> None:
        self._placement = placement
        self._agreement = agreement
        # The structure of this host's batches, and a batch of any host without rows.
        self._described: tuple[dict[str, str], str] = {}, ""
        self._empty: Any = None
        self._rows = self._local_rows = rows or 0
        self.has_begun = False

    def begin(self, error: Exception | None, step: int | None, *, has_batch: bool) -> int | None:
        """Compares this host's stream and the structure of its batches with those of the others, once.

        Returns the step, in which hosts with a batch do not differ. One that has ended before may have another in its
        state.
        """
        if self._agreement is not None:
            structure, empty = self._described if has_batch else ({}, "")
            own = {"step": json.dumps(step), **structure} if has_batch else {}
            first = "no error" if error is None else f"an error, {type(error).__name__}"
            hosts = self._agreement.compare(first, own, unchecked=empty)
            if having := [texts for texts in hosts.values() if texts["structure"]]:
                step = json.loads(having[0]["structure"]["step"])
                self._empty = pickle.loads(base64.b64decode(having[0]["unchecked"][""]))  # noqa: S301  (of this program)
        self.has_begun = True
        return step

    def put(self, batch: Any) -> tuple[Any, int, Any]:
        """Returns a batch, its number of rows, and the batch on the device with the rows of the largest so far."""
        rows = _rows_of(batch)
        if self._agreement is not None and not self._described[1]:
            # Here, where an error is one of this batch, and hosts agree on it.
            self._described = _described(batch)
        self._local_rows = max(self._local_rows, rows)
        return batch, rows, self._put_rows(batch, rows, self._local_rows)

    def announced(self, outcome: Any) -> Pending:
        """Returns an outcome with the counts of all hosts, which are requested and not awaited."""
        rows = 0 if outcome is None else _FAILED if isinstance(outcome, BaseException) else outcome.batch[1]
        if not self._placement.is_global:
            return Pending(outcome, np.array([rows]))
        return Pending(outcome, in_fresh_thread(lambda: self._gather(np.array([rows], np.int32))))

    def batch_of(self, pending: Pending) -> Any:
        """Returns the batch of all hosts, None if all have ended, or raises the error of a host."""
        counts = np.asarray(getattr(pending.counts, "addressable_data", lambda _: pending.counts)(0)).reshape(-1)
        if isinstance(pending.outcome, BaseException):
            raise pending.outcome
        if (failed := np.flatnonzero(counts == _FAILED)).size:
            raise ValueError(f"Cannot build a global batch: host {failed[0]} has an error at this step. See its log.")
        if not counts.any():
            return None
        self._rows = max(self._rows, int(counts.max()))
        if pending.outcome is None:
            return self._put_rows(self._empty, 0, self._rows)
        batch, rows, on_device = pending.outcome.batch
        is_full = len(on_device[VALID]) == self._rows * (self._placement.num_row_groups or 1)
        return on_device if is_full else self._put_rows(batch, rows, self._rows)

    @functools.cached_property
    def _gather(self) -> Callable[[NDArray[Any]], Any]:
        make, unchanged = hosts_axis(self._placement.destination)
        return lambda row: unchanged(make(row))

    def _put_rows(self, batch: Mapping[str, Any], rows: int, size: int) -> Any:
        if VALID in batch:
            raise ValueError(f"ends='agree' adds the leaf {VALID!r}, which batches have already. Give it another name.")
        return self._placement.put({**_padded(batch, size), VALID: np.arange(size) < rows})


def _described(batch: Any) -> tuple[dict[str, str], str]:
    """Returns texts about the structure of a batch, and a pickle of a batch like it without rows."""
    arrays = {path: np.asarray(leaf) for path, leaf in leaves_of(batch)}
    structure = {f"batch{path}": f"{array.dtype} {array.shape[1:]}" for path, array in arrays.items()}
    empty = with_leaves(batch, (array[:0] for array in arrays.values()))
    return structure, base64.b64encode(pickle.dumps(empty)).decode()


def _padded(batch: Any, size: int) -> Any:
    def padded(leaf: Any) -> NDArray[Any]:
        array = np.asarray(leaf)
        if len(array) == size:
            return array
        rows = np.zeros((size, *array.shape[1:]), array.dtype)
        rows[: len(array)] = array
        return rows

    return with_leaves(batch, (padded(leaf) for _, leaf in leaves_of(batch)))


def _rows_of(batch: Any) -> int:
    """Returns the number of rows of a batch: a dict, whose leaves have one row per element."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"ends='agree' adds a leaf {VALID!r} to batches, which must be dicts, got {type(batch).__name__}. Make it "
            "one in an operation: lambda batch: {'x': batch}."
        )
    rows = {len(leaf) if np.ndim(leaf) else _NO_ROWS for _, leaf in leaves_of(batch)}
    if rows <= {_NO_ROWS}:
        raise TypeError("ends='agree' needs batches, whose leaves have rows, got an element. Add a Batch.")
    if len(rows) != 1:
        raise ValueError(f"ends='agree' needs leaves with one row per element, got leaves of {sorted(rows)} rows.")
    return rows.pop()
