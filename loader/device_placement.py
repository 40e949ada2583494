"""Batches on devices of JAX: the transfer of their leaves, and the agreement of hosts on their global batches.

Guarantees of the agreement:
    * Hosts are compared once per iterator, in the trainer's thread, when it takes its first batch: no collective of the
      trainer runs at the same time. A host whose first batch is an error, or that has none, takes part as well.
    * All hosts compute the same verdict from the same texts: all raise, or none.
"""

import collections
import contextlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from millstream.core import tree
from millstream.core.trace_annotations import TRANSFER, annotation
from millstream.core.warn import log_warning
from millstream.loader.threads.thread_settings import in_fresh_thread
from millstream.sharding import RowGroup, ShardOptions

if TYPE_CHECKING:
    import jax


_NARROWED = {np.dtype(np.int64): np.int32, np.dtype(np.uint64): np.uint32}
"""The integers that JAX converts without an error, and to what; unless it is configured to keep 64 bits."""

Device: TypeAlias = "jax.Device | jax.sharding.Sharding | None"  # type: ignore[valid-type,unused-ignore]  # a variable for some
"""A destination of batches: one device, several, or the default device."""


_NOTHING = contextlib.nullcontext()


@final
class Placement:
    """Transfers batches to one device, or distributes them over several.

    Attributes:
        destination: the device, or the sharding over several.
        is_global: True if the batches are parts of global ones, because the sharding spans several processes.
        num_row_groups: the number of runs of rows that the processes need; None if it is not known.

    Args:
        device: a device of this process; a sharding over devices of this process or of several; None for the default
            device of the thread that constructs the placement.
        shard: the shard of each global batch that this process reads; None if it is not known.

    Raises:
        TypeError: `device` is of another type.
        ValueError: no device belongs to this process, or the sharding needs other rows here than those of `shard`.
    """

    def __init__(self, device: Device, shard: ShardOptions | None = None) -> None:
        import jax  # noqa: PLC0415  (lazy: jax takes a second to import)

        _check(device)
        # Imported once: the methods run for each batch.
        self._jax: Any = jax
        self.destination: Any = device
        self.is_global = isinstance(device, jax.sharding.Sharding) and not device.is_fully_addressable
        self.num_row_groups: int | None = None
        if self.is_global and isinstance(device, jax.sharding.NamedSharding):
            group = RowGroup.of(device)
            _check_shard(shard, group)
            self.num_row_groups = group.count
        # `with jax.default_device(...)` applies to one thread only, and another one transfers the batches.
        self._default_device = self._jax.config.jax_default_device

    def __repr__(self) -> str:
        return "the default device" if self.destination is None else str(self.destination)

    def put(self, batch: Any) -> Any:
        """Returns the batch with a `jax.Array` instead of each leaf. The transfers may still be under way.

        A batch is a tree of JAX, or another structure, such as a dataclass that JAX does not know. If the sharding
        spans several processes, it is this process's rows of a global batch.

        Raises:
            TypeError: JAX has no array for a leaf: a text, bytes, or an array of them.
            OverflowError: an integer of a leaf exceeds the 32 bits that JAX keeps.
            Exception: another error of JAX, with a note that names the leaf.
        """
        jax = self._jax
        # A flat dict of arrays is what `leaves_of` and `with_leaves` make of it, without a search for structures.
        is_flat = type(batch) is dict and all(type(name) is str and type(batch[name]) is np.ndarray for name in batch)
        leaves = [(f"[{name!r}]", batch[name]) for name in sorted(batch)] if is_flat else list(leaves_of(batch))
        if not jax.config.jax_enable_x64:
            for path, leaf in leaves:
                _check_fits(path, leaf)
        has_default = jax.config.jax_default_device is self._default_device
        with annotation(TRANSFER), _NOTHING if has_default else jax.default_device(self._default_device):
            try:
                arrays = self._put_leaves([leaf for _, leaf in leaves])
            except Exception:
                self._find_refused(leaves)
                raise
        return dict(zip(sorted(batch), arrays, strict=True)) if is_flat else with_leaves(batch, iter(arrays))

    def _put_leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        if self.is_global:
            return [self._put_rows(np.asarray(leaf)) for leaf in leaves]
        arrays: Sequence[Any] = self._jax.device_put(leaves, self.destination)
        return arrays

    def _put_rows(self, rows: NDArray[Any]) -> Any:
        """Returns the global array that has the given complete rows, even if the sharding cuts rows."""
        # Given the local shape alone, JAX would take rows that the sharding cuts for parts of longer rows.
        count = self.num_row_groups
        shape = (len(rows) * count, *rows.shape[1:]) if count is not None and rows.ndim else None
        return self._jax.make_array_from_process_local_data(self.destination, rows, shape)

    def _find_refused(self, leaves: Sequence[tuple[str, Any]]) -> None:
        for path, leaf in leaves:
            try:
                self._put_leaves([leaf])
            except TypeError as error:
                dtype = getattr(leaf, "dtype", None)
                if isinstance(dtype, np.dtype) and dtype.kind in "iufc" and not dtype.isnative:
                    raise TypeError(
                        f"JAX has arrays in the byte order of the machine only, and batch{path} is {_described(leaf)}. "
                        f"Convert it in an operation: array.astype({dtype.newbyteorder('=').name!r})."
                    ) from error
                raise TypeError(
                    f"JAX has arrays of numbers and booleans only, and batch{path} is {_described(leaf)}. "
                    "Drop it in an operation, or convert it to numbers."
                ) from error
            except Exception as error:
                remedy = (
                    "If it is a last, short batch that does not fit, use Batch(..., drop_remainder=True) or "
                    "pad_remainder=True."
                )
                spec: Any = getattr(self.destination, "spec", ())
                if len(spec) > np.ndim(leaf):
                    remedy = (
                        f"Use a sharding of the rows alone, PartitionSpec({spec[0]!r}), and in the step "
                        "jax.lax.with_sharding_constraint for leaves with more axes."
                    )
                error.add_note(
                    f"millstream: while batch{path}, {_described(leaf)}, was transferred to {self}. {remedy}"
                )
                raise


def _check_fits(path: str, leaf: Any) -> None:
    """Refuses 64-bit integers of which JAX would keep the low 32 bits."""
    dtype = getattr(leaf, "dtype", None)
    if dtype not in _NARROWED or not (array := np.asarray(leaf)).size:
        return
    limits = np.iinfo(_NARROWED[dtype])
    for value in (int(array.min()), int(array.max())):
        if not limits.min <= value <= limits.max:
            raise OverflowError(
                f"Cannot put batch{path} on a device: its value {value} exceeds {limits.dtype}, to which JAX converts "
                f'{dtype}. Call jax.config.update("jax_enable_x64", True) first, or drop or convert it in an operation.'
            )


def _check_shard(shard: ShardOptions | None, group: RowGroup) -> None:
    # An unsharded loader may be right, because each process may read its own files.
    if shard is None or shard.shard_count == 1 or (shard.shard_index, shard.shard_count) == (group.index, group.count):
        return
    raise ValueError(
        f"The loader reads shard {shard.shard_index} of {shard.shard_count}, but this process's devices need shard "
        f"{group.index} of {group.count} of each global batch. Use shard_options=ShardBySharding(sharding, "
        "global_batch_size) with the sharding that is given to device_put."
    )


def _check(device: Any) -> None:
    import jax  # noqa: PLC0415  (lazy, as above)

    match device:
        case None:
            return
        case jax.Device():
            is_addressable = device.process_index == jax.process_index()
        case jax.sharding.Sharding():
            is_addressable = bool(device.addressable_devices)
        case _:
            raise TypeError(
                "device must be a jax.Device, a jax.sharding.Sharding, for instance NamedSharding(mesh, "
                f"PartitionSpec('data')), or None, got {device!r} of type {type(device).__name__}."
            )
    if not is_addressable:
        raise ValueError(
            f"device must belong to this process, number {jax.process_index()} of {jax.process_count()}, at least in "
            f"part, got {device}. Use jax.local_devices(), or a sharding over the devices of all processes."
        )


def leaves_of(batch: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a batch with their paths: `['image']`.

    JAX's trees come first, because user classes may be registered as such. A leaf of JAX may still be a structure, and
    may contain trees again.
    """
    import jax  # noqa: PLC0415  (lazy, as above)

    for keys, leaf in jax.tree_util.tree_leaves_with_path(batch):
        here = path + jax.tree_util.keystr(keys)
        children = tree.children(leaf)
        if children is None:
            yield here, leaf
        else:
            for step, child in zip(tree.paths(leaf), children, strict=True):
                yield from leaves_of(child, here + step)


def with_leaves(batch: Any, leaves: Iterator[Any]) -> Any:
    """Returns the batch with other leaves, in the order of `leaves_of`."""
    import jax  # noqa: PLC0415  (lazy, as above)

    def replaced(leaf: Any) -> Any:
        children = tree.children(leaf)
        if children is None:
            return next(leaves)
        return tree.rebuilt(leaf, [with_leaves(child, leaves) for child in children])

    return jax.tree.map(replaced, batch)


def _described(leaf: Any) -> str:
    name = type(leaf).__name__
    return f"{name} of dtype {leaf.dtype} and shape {leaf.shape}" if hasattr(leaf, "dtype") else name


MAX_DIFFERENCES = 4
"""The maximum number of differences in an error."""
MAX_CHARACTERS = 80
"""The maximum number of characters of each value in it."""

Texts = dict[str, dict[str, str]]
"""The texts of a host: those that must be the same on all under "identity", those that should be under "content"; and
those that must be the same on all that have a batch under "structure"."""


@final
class Agreement:
    """Checks that the batches of one iterator fit together with those of other processes.

    Args:
        placement: transfers the batches, to a sharding that spans several processes.
        iterator: yields this process's rows of them.
    """

    def __init__(self, placement: Placement, iterator: Any) -> None:
        self._placement = placement
        # Processes that all need the same rows read the same stream, whose rows are the same.
        self._is_one_group = placement.num_row_groups == 1
        self._iterator = iterator
        self._max_rows: dict[str, int] = {}
        self.is_compared = False

    def put(self, batch: Any) -> Any:
        """Puts the batch that the iterator has just yielded.

        Raises:
            ValueError: it has fewer rows than an earlier one, or is known to differ between hosts.
        """
        self._check_rows(batch)
        return self._placement.put(batch)

    def _check_rows(self, batch: Any) -> None:
        known, step = getattr(self._iterator, "rows_agree", None), getattr(self._iterator, "step", None)
        agree = None if known is None or step is None else known(step - 1)
        if agree or self._is_one_group:
            return
        for path, leaf in leaves_of(batch):
            rows = np.shape(leaf)[:1]
            if not rows:
                continue
            before = self._max_rows.setdefault(path, rows[0])
            self._max_rows[path] = max(before, rows[0])
            if agree is False or (agree is None and rows[0] < before):
                fewer = f", {before} in batches before" if rows[0] < before else ""
                raise ValueError(
                    f"Cannot build a global batch: batch{path} has {rows[0]} row{'s' * (rows[0] != 1)} on this host"
                    f"{fewer}, and other hosts may have another number of rows, or no batch, at this step. Use "
                    "Batch(..., drop_remainder=True) to train, or Batch(..., pad_remainder=True) to evaluate."
                )

    def compare(
        self, first: str, structure: Mapping[str, str], step: int | None = None, *, unchecked: str = ""
    ) -> Mapping[int, Texts]:
        """Compares this host with the others, and returns the texts of each.

        Args:
            first: the outcome of the first step.
            structure: texts about its batch, the same on all hosts that have one; empty without a batch.
            step: the number of steps before; None if hosts may differ in it.
            unchecked: a text for the other hosts, `["unchecked"][""]` of the result, in which all may differ.

        Raises:
            ValueError: hosts read different streams, or have different outcomes or batches. All hosts raise it.
        """
        describe = getattr(self._iterator, "texts_for_hosts", None)
        identity, content = ({}, {}) if describe is None else describe(is_same_shard=self._is_one_group)
        beginning = {"first batch": first, "iterator": type(self._iterator).__name__, "step": str(step)}
        texts: Texts = {"identity": beginning | identity, "content": content, "structure": dict(structure)}
        texts["unchecked"] = {"": unchecked}
        hosts = gathered_texts(self._placement.destination, texts) or {0: texts}
        having = {host: each for host, each in hosts.items() if each["structure"]}
        if text := difference_of(hosts, "identity") or difference_of(having, "structure"):
            raise ValueError(
                f"Cannot build a global batch: {text}. Build the loader, and restore its position, with the same "
                "source, sampler, operations and global batch size on all hosts."
            )
        if text := difference_of(hosts, "content"):
            log_warning(f"the streams of hosts may not fit together: {text}.")
        self.is_compared = True
        return hosts


def gathered_texts(sharding: "jax.sharding.Sharding", texts: Texts) -> dict[int, Texts] | None:
    """Returns the texts of each process of a sharding, by its number; None if they are equal."""
    # A thread of the library has no context of the trainer's, such as another mesh.
    result = in_fresh_thread(lambda: _exchanged(sharding, json.dumps(texts).encode()))
    return None if result is None else {process: json.loads(encoded) for process, encoded in result.items()}


def _exchanged(sharding: "jax.sharding.Sharding", encoded: bytes) -> dict[int, bytes] | None:
    # A few integers, unless they differ.
    marks = _allgather(sharding, np.array([zlib.crc32(encoded), len(encoded)], np.uint32))
    if len({mark.tobytes() for mark in marks.values()}) == 1:
        return None
    lengths = {process: int(length) for process, (_, length) in marks.items()}
    row = np.zeros(max(lengths.values()), np.uint8)
    row[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    rows = _allgather(sharding, row)
    return {process: row[: lengths[process]].tobytes() for process, row in rows.items()}


def _allgather(sharding: "jax.sharding.Sharding", row: NDArray[Any]) -> dict[int, NDArray[Any]]:
    """Returns the array of each process of a sharding; all of these must call this. Others need not."""
    make, unchanged = hosts_axis(sharding)
    gathered = unchanged(make(row))
    return dict(zip(_devices_of(sharding), np.asarray(gathered.addressable_data(0)), strict=True))


def _devices_of(sharding: "jax.sharding.Sharding") -> dict[int, list[Any]]:
    """Returns the devices of each process of a sharding, by its number."""
    devices = collections.defaultdict(list)
    all_devices: set[Any] = sharding.device_set
    for device in sorted(all_devices, key=lambda device: (device.process_index, device.id)):
        devices[device.process_index].append(device)
    return dict(devices)


def hosts_axis(sharding: "jax.sharding.Sharding") -> tuple[Callable[[NDArray[Any]], Any], Callable[[Any], Any]]:
    """Returns two functions: one makes a global array with a row per process, the other one gives it to all."""
    import jax  # noqa: PLC0415  (lazy: jax takes a second to import)
    from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: PLC0415  (as above)

    devices = _devices_of(sharding)
    width = min(map(len, devices.values()))
    mesh = Mesh(np.array([of_process[:width] for of_process in devices.values()]), ("hosts", "devices"))
    rows = NamedSharding(mesh, PartitionSpec("hosts"))

    def make(row: NDArray[Any]) -> Any:
        return jax.make_array_from_process_local_data(rows, row[np.newaxis], (len(devices), *row.shape))

    return make, jax.jit(_unchanged, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _unchanged(array: Any) -> Any:
    return array


def difference_of(hosts: Mapping[int, Texts], tier: str) -> str:
    """Returns the difference between hosts in words; "" if there is none."""
    groups = collections.defaultdict(list)
    for host, texts in hosts.items():
        groups[json.dumps(texts[tier], sort_keys=True)].append(host)
    if len(groups) <= 1:
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
