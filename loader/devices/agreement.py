"""The agreement of hosts on their global batches: all must read one stream, and as many rows at each step.

Guarantees:
    * Hosts are compared once per iterator, in the trainer's thread, when it takes its first batch: no collective of the
      trainer runs at the same time. A host whose first batch is an error, or that has none, takes part as well.
    * All hosts compute the same verdict from the same texts: all raise, or none.
"""

import collections
import json
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.warn import log_warning
from millstream.loader.devices.placement import Placement, leaves_of

if TYPE_CHECKING:
    import jax

MAX_DIFFERENCES = 4
"""The maximum number of differences in an error."""
MAX_CHARACTERS = 80
"""The maximum number of characters of each value in it."""

Texts = dict[str, dict[str, str]]
"""The texts of a host: those that must be the same on all under "identity", those that should be under "content"."""


@final
class Agreement:
    """Checks that the batches of one iterator fit together with those of other processes.

    Args:
        placement: transfers the batches, to a sharding that spans several processes.
        iterator: yields this process's rows of them.
    """

    def __init__(self, placement: Placement, iterator: Any) -> None:
        self._sharding = placement.sharding
        # Processes that all need the same rows read the same stream, whose rows are the same.
        self._is_one_group = placement.num_row_groups == 1
        self._iterator = iterator
        self._max_rows: dict[str, int] = {}
        self.is_compared = False

    @classmethod
    def of(cls, placement: Placement, iterator: Any) -> Self | None:
        """Returns the agreement on the batches of an iterator; None if they are those of this process alone."""
        return cls(placement, iterator) if placement.is_global else None

    def check_rows(self, leaves: Sequence[tuple[str, Any]], step: int | None) -> None:
        """Refuses a batch, the one after `step` others, that may have other numbers of rows on other hosts.

        Raises:
            ValueError: it has fewer rows than an earlier one, or is known to differ between hosts.
        """
        known = getattr(self._iterator, "rows_agree", None)
        agree = None if known is None or step is None else known(step)
        if agree or self._is_one_group:
            return
        for path, leaf in leaves:
            rows = np.shape(leaf)[:1]
            if not rows:
                continue
            before = self._max_rows.setdefault(path, rows[0])
            self._max_rows[path] = max(before, rows[0])
            if agree is False or rows[0] < before:
                fewer = f", {before} in batches before" if rows[0] < before else ""
                raise ValueError(
                    f"Cannot build a global batch: batch{path} has {rows[0]} row{'s' * (rows[0] != 1)} on this host"
                    f"{fewer}, and other hosts may have another number of rows, or no batch, at this step. Use "
                    "Batch(..., drop_remainder=True) to train, or Batch(..., pad_remainder=True) to evaluate."
                )

    def compare(self, step: int | None, batch: Any = None, error: Exception | None = None) -> None:
        """Compares this host with the others, given the first batch or its error, and the step before it.

        Raises:
            ValueError: hosts read different streams, or have different outcomes. All hosts raise it.
        """
        differing = _gathered(self._sharding, self._texts(step, batch, error))
        if differing is not None:
            if text := _difference(differing, "identity"):
                raise ValueError(
                    f"Cannot build a global batch: {text}. Build the loader, and restore its position, with the same "
                    "source, sampler, operations and global batch size on all hosts."
                )
            if text := _difference(differing, "content"):
                log_warning(f"the streams of hosts may not fit together: {text}.")
        self.is_compared = True

    def _texts(self, step: int | None, batch: Any, error: Exception | None) -> Texts:
        own = getattr(self._iterator, "texts_for_hosts", None)
        identity, content = ({}, {}) if own is None else own(is_same_shard=self._is_one_group)
        outcomes = {type(None): "a batch", StopIteration: "none, because the stream has ended"}
        first = outcomes.get(type(error), f"an error, {type(error).__name__}")
        leaves = {} if error is not None else {path: f"{leaf.dtype} {leaf.shape}" for path, leaf in leaves_of(batch)}
        own_texts = {"first batch": first, "iterator": type(self._iterator).__name__, "step": str(step)}
        arrays = {f"batch{path}": text for path, text in leaves.items()}
        return {"identity": {**own_texts, **identity, **arrays}, "content": content}


def _gathered(sharding: "jax.sharding.Sharding", texts: Texts) -> dict[int, Texts] | None:
    """Returns the texts of each process of a sharding, by its number; None if they are equal.

    A new thread has no context of the trainer's, such as another mesh.
    """
    results: list[Any] = []

    def gather() -> None:
        try:
            results.append(_exchanged(sharding, json.dumps(texts).encode()))
        except BaseException as error:  # noqa: BLE001  (raised by the caller)
            results.append(error)

    thread = threading.Thread(target=gather, name="millstream-hosts", daemon=True)
    thread.start()
    thread.join()
    (result,) = results
    if isinstance(result, BaseException):
        raise result
    return None if result is None else {process: json.loads(encoded) for process, encoded in result.items()}


def _exchanged(sharding: "jax.sharding.Sharding", encoded: bytes) -> dict[int, bytes] | None:
    # A few integers, unless they differ.
    marks = _allgather(sharding, np.array([zlib.crc32(encoded), len(encoded)], np.uint32))
    if len({mark.tobytes() for mark in marks.values()}) == 1:
        return None
    lengths = {process: int(length) for process, (_, length) in marks.items()}
    own = np.zeros(max(lengths.values()), np.uint8)
    own[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    rows = _allgather(sharding, own)
    return {process: row[: lengths[process]].tobytes() for process, row in rows.items()}


def _allgather(sharding: "jax.sharding.Sharding", own: NDArray[Any]) -> dict[int, NDArray[Any]]:
    """Returns the array of each process of a sharding; all of these must call this. Others need not."""
    import jax  # noqa: PLC0415  (lazy: jax takes a second to import)
    from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: PLC0415  (as above)

    devices = collections.defaultdict(list)
    all_devices: set[Any] = sharding.device_set
    for device in sorted(all_devices, key=lambda device: (device.process_index, device.id)):
        devices[device.process_index].append(device)
    width = min(map(len, devices.values()))
    mesh = Mesh(np.array([of_process[:width] for of_process in devices.values()]), ("hosts", "devices"))
    rows = NamedSharding(mesh, PartitionSpec("hosts"))
    shape = (len(devices), *own.shape)
    array = jax.make_array_from_process_local_data(rows, own[np.newaxis], shape)
    gathered = jax.jit(_unchanged, out_shardings=NamedSharding(mesh, PartitionSpec()))(array)
    return dict(zip(devices, np.asarray(gathered.addressable_data(0)), strict=True))


def _unchanged(array: Any) -> Any:
    return array


def _difference(hosts: Mapping[int, Texts], tier: str) -> str:
    """Returns the difference between hosts in words; "" if there is none."""
    groups = collections.defaultdict(list)
    for host, texts in hosts.items():
        groups[json.dumps(texts[tier], sort_keys=True)].append(host)
    if len(groups) == 1:
        return ""
    most, odd, *_ = sorted(groups.values(), key=lambda group: (-len(group), group))
    usual, other = hosts[most[0]][tier], hosts[odd[0]][tier]
    paths = [path for path in {**usual, **other} if usual.get(path) != other.get(path)]
    here, there = _hosts(most), _hosts(odd)
    listed = [f"{path} is {_short(other, path)} on {there}, {_short(usual, path)} on {here}" for path in paths]
    more = [f"and {len(paths) - MAX_DIFFERENCES} more"] if len(paths) > MAX_DIFFERENCES else []
    return f"{there} and {here} differ: {'; '.join([*listed[:MAX_DIFFERENCES], *more])}"


def _short(texts: Mapping[str, str], path: str) -> str:
    text = texts.get(path, "absent")
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."


def _hosts(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"hosts {', '.join(first)} and {last}" if first else f"host {last}"
