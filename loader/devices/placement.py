"""Transfers the leaves of batches to devices of JAX."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from millstream.core import tree
from millstream.sharding import RowGroup, ShardOptions

if TYPE_CHECKING:
    import jax

_NARROWED = {np.dtype(np.int64): np.int32, np.dtype(np.uint64): np.uint32}
"""The integers that JAX converts without an error, and to what; unless it is configured to keep 64 bits."""

Device: TypeAlias = "jax.Device | jax.sharding.Sharding | None"  # type: ignore[valid-type]  # mypy: a variable
"""A destination of batches: one device, several, or the default device."""


@final
class Placement:
    """Transfers batches to one device, or distributes them over several.

    Attributes:
        is_global: True if the batches are parts of global ones, because the sharding spans several processes.

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
        self._device = device
        self.is_global = isinstance(device, jax.sharding.Sharding) and not device.is_fully_addressable
        self._row_group: RowGroup | None = None
        if self.is_global and isinstance(device, jax.sharding.NamedSharding):
            self._row_group = RowGroup.of(device)
            _check_shard(shard, self._row_group)
        # `with jax.default_device(...)` applies to one thread only, and another one transfers the batches.
        self._default_device = jax.config.jax_default_device  # type: ignore[attr-defined, unused-ignore]

    def __repr__(self) -> str:
        return "the default device" if self._device is None else str(self._device)

    @property
    def sharding(self) -> Any:
        """The destination."""
        return self._device

    @property
    def num_row_groups(self) -> int | None:
        """The number of runs of rows that the processes need; None if it is not known."""
        return None if self._row_group is None else self._row_group.count

    def put(self, batch: Any) -> Any:
        """Returns the batch with a `jax.Array` instead of each leaf. The transfers may still be under way.

        A batch is a tree of JAX, or another structure, such as a dataclass that JAX does not know. If the sharding
        spans several processes, it is this process's rows of a global batch.

        Raises:
            TypeError: JAX has no array for a leaf: a text, bytes, or an array of them.
            OverflowError: an integer of a leaf exceeds the 32 bits that JAX keeps.
            Exception: another error of JAX, with a note that names the leaf.
        """
        import jax  # noqa: PLC0415  (lazy, as above)

        leaves = list(leaves_of(batch))
        if not jax.config.jax_enable_x64:  # type: ignore[attr-defined, unused-ignore]  # as above
            for path, leaf in leaves:
                _check_fits(path, leaf)
        with jax.default_device(self._default_device):
            try:
                arrays = self._put_leaves([leaf for _, leaf in leaves])
            except Exception:
                self._find_refused(leaves)
                raise
        return _with_leaves(batch, iter(arrays))

    def _put_leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        import jax  # noqa: PLC0415  (lazy, as above)

        if self.is_global:
            return [self._put_rows(np.asarray(leaf)) for leaf in leaves]
        arrays: Sequence[Any] = jax.device_put(leaves, self._device)
        return arrays

    def _put_rows(self, rows: NDArray[Any]) -> Any:
        """Returns the global array that has the given complete rows, even if the sharding cuts rows."""
        import jax  # noqa: PLC0415  (lazy, as above)

        # Given the local shape alone, JAX would take rows that the sharding cuts for parts of longer rows.
        group = self._row_group
        shape = (len(rows) * group.count, *rows.shape[1:]) if group is not None and rows.ndim else None
        return jax.make_array_from_process_local_data(self._device, rows, shape)

    def _find_refused(self, leaves: Sequence[tuple[str, Any]]) -> None:
        for path, leaf in leaves:
            try:
                self._put_leaves([leaf])
            except TypeError as error:
                raise TypeError(
                    f"JAX has arrays of numbers and booleans only, and batch{path} is {_described(leaf)}. "
                    "Drop it in an operation, or convert it to numbers."
                ) from error
            except Exception as error:
                error.add_note(
                    f"millstream: while batch{path}, {_described(leaf)}, was transferred to {self}. If it is a last, "
                    "short batch that does not fit, use Batch(..., drop_remainder=True) or pad_remainder=True."
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
            has_own = device.process_index == jax.process_index()
        case jax.sharding.Sharding():
            has_own = bool(device.addressable_devices)
        case _:
            raise TypeError(
                "device must be a jax.Device, a jax.sharding.Sharding, for instance NamedSharding(mesh, "
                f"PartitionSpec('data')), or None, got {device!r} of type {type(device).__name__}."
            )
    if not has_own:
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


def _with_leaves(batch: Any, leaves: Iterator[Any]) -> Any:
    """Returns the batch with other leaves, in the order of `leaves_of`."""
    import jax  # noqa: PLC0415  (lazy, as above)

    def replaced(leaf: Any) -> Any:
        children = tree.children(leaf)
        if children is None:
            return next(leaves)
        return tree.rebuilt(leaf, [_with_leaves(child, leaves) for child in children])

    return jax.tree.map(replaced, batch)


def _described(leaf: Any) -> str:
    name = type(leaf).__name__
    return f"{name} of dtype {leaf.dtype} and shape {leaf.shape}" if hasattr(leaf, "dtype") else name
