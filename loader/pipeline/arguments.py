"""Checks of a DataLoader's arguments. Each mistake is an error, or a warning, at construction."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from millstream.core import tree
from millstream.core.checks import as_options, has_fields
from millstream.core.descriptions import described
from millstream.core.warn import log_warning, warn
from millstream.loader.operations.random_streams import has_randomness
from millstream.samplers import Sampler
from millstream.samplers.balanced import BalancedSampler
from millstream.samplers.base import AdaptedSampler, VectorisedSampler, has_unread_generators, largest_key, vectorised
from millstream.samplers.protocols import MixedSampler, is_mixed, is_packed
from millstream.sharding import NoSharding, ShardOptions, warn_if_unsharded
from millstream.sources import DataSource
from millstream.sources.base import LoaderView
from millstream.transforms import Batch, OnlyFor, Transformation
from millstream.transforms.given import as_transformation

MAX_GROUPINGS = 64
"""The maximum number of operations that group elements: NumPy's arrays have at most 64 dimensions."""

MAX_LOGICAL_SHARDS = 4096
"""The maximum number of logical shards that one shard runs. Each has a position and elements of its own."""

Operations = Sequence[Transformation | Callable[[Any], Any]]


def source_name(source: DataSource[Any]) -> str:
    """Returns the name of a source for texts, without reading a record."""
    if type(source) is range or type(source).__module__.startswith("millstream."):
        return described(source)
    return f"{type(source).__name__} of {len(source)} records"


def check_sampler(sampler: Sampler, source: DataSource[Any]) -> VectorisedSampler | AdaptedSampler:
    """Returns the sampler in vectorised form. Refuses record keys that the source does not have."""
    ready = vectorised(sampler)
    if is_mixed(ready):
        check_sources(ready, source)
    largest = largest_key(sampler)
    if largest is not None and largest >= len(source):
        raise ValueError(
            f"The sampler contains record keys up to {largest}, but data_source has {len(source)} records, with the "
            f"keys 0 to {len(source) - 1}. Use num_records=len(source), or keys created for this source."
        )
    return ready


def check_operations(operations: Operations) -> list[Transformation]:
    """Returns the operations, with functions converted to Maps. A note on an error names the operation."""
    check_list(operations, "operations")
    checked = []
    for number, operation in enumerate(operations):
        try:
            checked.append(as_transformation(operation))
        except (TypeError, ValueError) as error:
            error.add_note(f"millstream: operations[{number}].")
            raise
    return checked


def check_depth(source: DataSource[Any]) -> None:
    """Refuses records in memory that are nested too deeply, as far as a sample of them shows that."""
    if type(source) in (list, tuple):
        for key in range(0, len(source), max(1, len(source) // tree.SAMPLE)):
            if tree.num_levels_exceed(source[key]):
                raise ValueError(
                    f"A record must have at most {tree.MAX_DEPTH} nested levels, got data_source[{key}] with more, or "
                    "one that contains itself. Use flat dicts of arrays, numbers and text."
                )


def check_groupings(operations: Sequence[Transformation]) -> None:
    groupings = [number for number, operation in enumerate(operations) if operation.gathers or operation.regroups]
    if len(groupings) > MAX_GROUPINGS:
        raise ValueError(
            f"A pipeline must have at most {MAX_GROUPINGS} operations that group elements, such as Batch, because each "
            f"adds a dimension, got {len(groupings)}. Build batches of the final size in one Batch."
        )


def check_list(value: object, name: str) -> None:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list, got {value!r} of type {type(value).__name__}. Use {name}=[...].")


def check_kind(value: object, name: str, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be of type {kind.__name__}, got {value!r} of type {type(value).__name__}.")


def resolve_shard(shard_options: ShardOptions | None, sampler: Sampler) -> ShardOptions:
    """Returns the loader's shard, else the sampler's, else NoSharding. Refuses two shards that differ."""
    carried = getattr(sampler, "shard_options", None)
    if not has_fields(carried, ShardOptions) or type(carried).__name__ == NoSharding.__name__:
        carried = None
    elif carried is not None:
        carried = as_options(carried, "shard_options", ShardOptions)
    if shard_options is None:
        if carried is None:
            warn_if_unsharded()
            return NoSharding()
        return carried
    shard_options = as_options(shard_options, "shard_options", ShardOptions)
    if carried is not None and _same(carried) != _same(shard_options):
        raise ValueError(
            f"shard_options={shard_options} differs from the sampler's {carried}. "
            "Pass shard_options to the DataLoader only, or the same to both."
        )
    return shard_options


def _same(shard: ShardOptions) -> tuple[int, int, bool, int]:
    return shard.shard_index, shard.shard_count, shard.drop_remainder, shard.logical_shards or shard.shard_count


def check_randomness(operations: Sequence[Transformation], sampler: VectorisedSampler | AdaptedSampler) -> None:
    """Refuses random operations without randomness. Warns if a sampler has two kinds of it."""
    if is_mixed(sampler):
        check_component_seeds(operations, sampler)
        return
    random = [number for number, operation in enumerate(operations) if operation.num_random]
    if not random:
        return
    name = f"operations[{random[0]}], {described(operations[random[0]])},"
    if not has_randomness(sampler):
        raise ValueError(
            f"{name} needs randomness, but the sampler has no seed. Pass one, for instance IndexSampler(..., seed=0)."
        )
    if has_unread_generators(sampler):
        warn(
            f"{name} draws from the sampler's seed, not from the rng that its __getitem__ returns, because a sampler "
            "with record_keys and a seed has the randomness of an IndexSampler. To draw from that rng, set the "
            "sampler's seed to None."
        )


def check_sources(sampler: MixedSampler, source: Any) -> None:
    if not all(hasattr(source, member) for member in ("names", "lengths", "locate")):
        if len(source) != sum(sampler.source_lengths):
            raise ValueError(
                f"The sources of the sampler's components have {sum(sampler.source_lengths)} records in total, but "
                f"data_source has {len(source)}. Pass ConcatenatedDataSource([...]) of the same sources."
            )
        return
    if len(source.names) != len(sampler.names):
        raise ValueError(
            f"The sampler mixes {len(sampler.names)} components, but data_source consists of {len(source.names)} "
            "sources. Each component needs one source."
        )
    if all(isinstance(name, str) for name in (*sampler.names, *source.names)) and sampler.names != source.names:
        raise ValueError(
            f"The sampler's components are {list(sampler.names)}, but the sources are {list(source.names)}. Use the "
            "same names in the same order."
        )
    for name, expected, length in zip(sampler.names, sampler.source_lengths, source.lengths, strict=True):
        if expected != length:
            raise ValueError(
                f"The sampler assumes that the source of component {name!r} has {expected} records, but it has "
                f"{length}. Use IndexSampler(len(source), ...) for each, or pass source_lengths to the MixtureSampler."
            )


def check_epochs(
    sampler: VectorisedSampler | AdaptedSampler, view: LoaderView, num_records: int, epoch: int = 0
) -> None:
    """Checks an order of the elements of a chain that differ by epoch. `epoch` is the number of its first one."""
    if not view.differs_by_epoch:
        return
    has_more = sampler.length is None or sampler.length > (sampler.num_records or sampler.length)
    if is_packed(sampler) and view.reordering and (epoch or has_more):
        raise ValueError(
            f"Cannot pack the elements of a chain with {view.reordering} for several epochs: a key is another document "
            "in each epoch, and the sampler knows the lengths of the first. Shuffle by PackingSampler(shuffle=True)."
        )
    without = next(_without_epochs(sampler, num_records), None)
    if without is not None:
        log_warning(
            f"the elements of data_source differ by epoch, but {without} has no num_records, the number of positions "
            "per epoch: a record key that comes again has the same element, with the same random draws. Add "
            "num_records to the sampler."
        )


def _without_epochs(sampler: VectorisedSampler | AdaptedSampler, num_records: int) -> Iterator[str]:
    """Yields the class of each sampler that has more positions than there are records, and no epochs."""
    if is_mixed(sampler):
        for component, length in zip(sampler.samplers, sampler.source_lengths, strict=True):
            yield from _without_epochs(component, length)
    elif sampler.num_records is None and (sampler.length is None or sampler.length > num_records):
        yield type(sampler.sampler if isinstance(sampler, AdaptedSampler) else sampler).__name__


def check_scopes(operations: Sequence[Transformation], sampler: VectorisedSampler | AdaptedSampler) -> None:
    names = sampler.names if is_mixed(sampler) else ()
    batch = next((number for number, operation in enumerate(operations) if operation.gathers), None)
    for number, operation in enumerate(operations):
        if not isinstance(operation, OnlyFor):
            continue
        finding = f"operations[{number}] is for component {operation.component!r} only, but"
        if not names:
            raise ValueError(f"{finding} the sampler is not a MixtureSampler.")
        if operation.component not in names:
            raise ValueError(f"{finding} the mixture's components are {', '.join(map(repr, names))}.")
        if batch is not None and batch < number:
            raise ValueError(
                f"{finding} operations[{batch}] builds batches of elements of all components. Put it before that."
            )


def check_component_seeds(operations: Sequence[Transformation], sampler: MixedSampler) -> None:
    by_name = dict(zip(sampler.names, sampler.samplers, strict=True))
    for number, operation in enumerate(operations):
        if not operation.num_random:
            continue
        names = [operation.component] if isinstance(operation, OnlyFor) else list(by_name)
        if lacking := [name for name in names if not has_randomness(by_name[name])]:
            raise ValueError(
                f"operations[{number}], {described(operation)}, needs randomness, but the sampler of component "
                f"{lacking[0]!r} has no seed. Pass a seed, or use OnlyFor(component, ...) for components with one."
            )


def check_padding(operations: Sequence[Transformation], shard: ShardOptions) -> None:
    batches = {number: operation for number, operation in enumerate(operations) if isinstance(operation, Batch)}
    if not any(batch.pad_remainder for batch in batches.values()):
        return
    if len(batches) > 1:
        raise ValueError(
            f"A Batch with pad_remainder=True must be the only Batch of the pipeline, but operations{list(batches)} "
            "are Batches. Build one batch of the final size, and reshape it in a Map after it."
        )
    if shard.drop_remainder:
        (number,) = batches
        raise ValueError(
            f"operations[{number}] has pad_remainder=True, which keeps the last records, and {shard} has "
            "drop_remainder=True, which leaves some out: choose one."
        )


def check_balance(
    operations: Sequence[Transformation],
    sampler: VectorisedSampler | AdaptedSampler,
    batch_size: int,
    shard_count: int,
) -> None:
    if not isinstance(sampler, BalancedSampler):
        return
    if (number := first_dynamic(operations)) is not None:
        raise ValueError(
            f"A BalancedSampler needs a 1:1 pipeline, got operations[{number}], {described(operations[number])}: the "
            "elements of a batch depend on their content, so it cannot be dealt in advance."
        )
    if sampler.global_batch_size != batch_size * shard_count:
        raise ValueError(
            f"global_batch_size of the BalancedSampler must be {batch_size * shard_count}, the batch size of the "
            f"pipeline times the number of shards, {batch_size} * {shard_count}, got {sampler.global_batch_size}."
        )
    if sampler.parts % shard_count:
        raise ValueError(
            f"parts of the BalancedSampler must be a multiple of the number of shards, {shard_count}, got "
            f"{sampler.parts}."
        )


def check_shapes(operations: Sequence[Transformation], shard: ShardOptions) -> None:
    for number, operation in enumerate(operations):
        if shard.shard_count > 1 and not operation.has_one_shape:
            raise ValueError(
                f"operations[{number}], {described(operation)}, cannot run on {shard.shard_count} shards: the shapes "
                "of its batches depend on their elements, so the shards of a step would differ in shape, which a "
                "global array cannot. Pack rows of one length (PackingSampler and Pack, or FirstFitPack), or pad to "
                "one length (PadTo and Batch); or read a single shard."
            )


def check_logical_shards(operations: Sequence[Transformation], shard: ShardOptions) -> None:
    first, share = first_dynamic(operations), (shard.logical_shards or shard.shard_count) // shard.shard_count
    if first is None or share == 1:
        return
    if share > MAX_LOGICAL_SHARDS:
        raise ValueError(
            f"A shard must run at most {MAX_LOGICAL_SHARDS:,} logical shards, got {share:,}: logical_shards="
            f"{shard.logical_shards} with shard_count={shard.shard_count}. Use a smaller logical_shards."
        )
    finding = (
        f"logical_shards={shard.logical_shards} with shard_count={shard.shard_count} means that each shard runs {share}"
    )
    joining = joining_batch(operations)
    if joining is None:
        last = len(operations) - 1
        raise ValueError(
            f"{finding} of them. A Batch must concatenate their elements after the last operation that drops, splits "
            f"or groups elements. There is none after it, and the last operation is operations[{last}], "
            f"{described(operations[last])}. Add a Batch, or set shard_count to logical_shards."
        )
    number, batch = joining
    if batch.batch_size % share:
        raise ValueError(
            f"{finding} of them, which fill equal parts of each batch. The batch_size of operations[{number}] must be "
            f"a multiple of {share}, got {batch.batch_size}, so that the global batch is a multiple of logical_shards."
        )


def warn_checkpoints_need_same_shards(operations: Sequence[Transformation], shard: ShardOptions) -> None:
    """Logs, before training starts, a restriction on resuming: checkpoints that need the same number of shards."""
    number = first_dynamic(operations)
    if number is not None and shard.shard_count > 1 and shard.logical_shards is None:
        log_warning(
            f"checkpoints of this DataLoader can be resumed with exactly {shard.shard_count} shards only, because "
            f"operations[{number}], {described(operations[number])}, makes each shard advance at its own pace. To "
            "resume with other numbers of shards, set logical_shards in the shard_options and put a Batch at the end, "
            "or filter keys ahead (millstream.surviving_keys) instead of using a Filter."
        )


def first_dynamic(operations: Sequence[Transformation]) -> int | None:
    """Returns the number of the first operation that drops, splits or regroups elements, or None."""
    return next(itertools.compress(itertools.count(), map(_is_dynamic, operations)), None)


def joining_batch(operations: Sequence[Transformation]) -> tuple[int, Batch] | None:
    """Returns the Batch that can concatenate elements of several logical shards, and its number, or None.

    It is the last Batch, and follows all operations that are not 1:1.
    """
    for number, operation in reversed(list(enumerate(operations))):
        if _is_dynamic(operation):
            return None
        if isinstance(operation, Batch):
            return (number, operation) if any(map(_is_dynamic, operations[:number])) else None
    return None


def _is_dynamic(operation: Transformation) -> bool:
    return not operation.keeps_count or operation.regroups
