"""The pipeline of a loader: source, sampler, operations and shard, with the checks of each and of all together."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Self, final

from millstream.core import tree
from millstream.core.checks import as_integer, as_options, has_fields
from millstream.core.descriptions import described
from millstream.core.warn import log_warning, warn
from millstream.loader.pipeline.elements import has_randomness
from millstream.loader.pipeline.shards import are_even, are_known, check_ends, ends_of, first_dynamic, joining_batch
from millstream.samplers import Sampler
from millstream.samplers.balanced import BalancedSampler
from millstream.samplers.base import (
    AdaptedSampler,
    MixedSampler,
    VaryingBatches,
    VectorisedSampler,
    has_unread_generators,
    has_varying_batches,
    is_mixed,
    is_packed,
    largest_key,
    vectorised,
)
from millstream.sharding import NoSharding, ShardOptions, warn_if_unsharded
from millstream.sources import DataSource
from millstream.sources.base import LoaderView, loader_view
from millstream.sources.source_checks import check_no_columns
from millstream.transforms import Batch, OnlyFor, Pack, Transformation, WithComponent
from millstream.transforms.base import numbers_of, paths_of
from millstream.transforms.given import as_transformation


class FilterLimits(NamedTuple):
    """Shares of each thousand consecutive records, 0 … 1.

    Attributes:
        warning: the share from which a warning is logged, once; None for no warning.
        error: the share from which an error is raised; None for no error.
    """

    warning: float | None = None
    error: float | None = None


UNLIMITED: Final = FilterLimits()
"""No limits."""

MAX_GROUPINGS = 64
"""The maximum number of operations that group elements: NumPy's arrays have at most 64 dimensions."""

MAX_LOGICAL_SHARDS = 4096
"""The maximum number of logical shards that one shard runs. Each has a position and elements of its own."""

Operations = Sequence[Transformation | Callable[[Any], Any]]

Variant = int | str | None
"""The number of an epoch alone, or the `changes` of weights; None for the complete order as it was built."""

MAX_ERRORS = 1000
"""The default for the number of records that may fail. The error of the next one is raised."""


class Tolerance(NamedTuple):
    """The maximum number of record keys that may fail; None for any number except all."""

    max_errors: int | None

    @classmethod
    def of(cls, on_error: object, max_errors: object) -> Self | None:
        """Returns the tolerance for two arguments of a loader; None if the first error is raised."""
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}.")
        if max_errors is not None:
            max_errors = as_integer(max_errors, "max_errors", 0)
        if on_error == "skip":
            return cls(max_errors)
        if max_errors != MAX_ERRORS:
            raise ValueError(f"max_errors={max_errors} needs on_error='skip': on_error='raise' raises the first error.")
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
    """A pipeline of one shard. `Pipeline.of` builds it from a user's arguments and checks them.

    Attributes:
        sampler: the order, as given by the user.
        order: the same order, for complete blocks.
        shard: the part of every global batch to compute.
        filter_limits: limits for the share that Filters drop.
        tolerance: None if the first error is raised.
        measures_costs: True if the costs of each node are measured, wherever it runs.
        epoch: the number of the epoch that `of_epoch` returned; None for the complete order.
        changes: the weights of a mixture that were set at run time, as JSON: pairs of a position and weights; "" for
            none.
        num_local: the number of last operations that run in the consumer's process, in its thread or threads of their
            own, even if workers or threads run the operations before them.
        is_loaders: True if keys are those of the source's records, False if they are positions in a chain.
    """

    source: DataSource[Any]
    sampler: Sampler
    order: VectorisedSampler | AdaptedSampler
    operations: tuple[Transformation, ...]
    shard: ShardOptions
    filter_limits: FilterLimits = UNLIMITED
    tolerance: Tolerance | None = None
    measures_costs: bool = False
    epoch: int | None = None
    changes: str = ""
    num_local: int = 0
    is_loaders: bool = False

    @classmethod
    def of(
        cls,
        source: DataSource[Any],
        sampler: Sampler,
        operations: Operations,
        shard_options: ShardOptions | None,
        tolerance: Tolerance | None = None,
    ) -> Self:
        """Checks a user's arguments. With `shard_options=None`, the sampler has the shard, or there is one only."""
        check_no_columns(source)
        if not len(source):
            warn(f"data_source has no record, got an empty {type(source).__name__}: the loader yields nothing.")
        check_depth(source)
        order = check_sampler(sampler, source)
        check_epochs(order, loader_view(source), len(source))
        checked = tuple(check_operations(operations))
        shard = resolve_shard(shard_options, sampler)
        check_scopes(checked, order)
        check_packing(checked, order, len(source))
        check_randomness(checked, order)
        check_padding(checked, shard)
        check_shapes(checked, shard)
        check_logical_shards(checked, shard)
        if tolerance is not None and is_packed(order):
            raise ValueError(
                "on_error must be 'raise' with a PackingSampler, got 'skip'. Rows are planned from the lengths of "
                "their documents, so a failed one can neither be dropped nor replaced. Omit such documents from "
                "lengths."
            )
        warn_checkpoints_need_same_shards(checked, shard)
        pipeline = cls(source, sampler, order, checked, shard, tolerance=tolerance, is_loaders=True)
        pipeline.check_ends()
        return pipeline

    def check_ends(self) -> None:
        """Warns if the shards of the order end differently; an error for the shard of a global array."""
        check_ends(self.operations, self.order.length, self.shard, skips_errors=self.tolerance is not None)

    def of_epoch(self, number: int) -> Self:
        """Returns the pipeline of one epoch alone: the sampler's `of_epoch(number)` is its order."""
        complete: Any = self.sampler
        sampler = complete.of_epoch(number)
        order = check_sampler(sampler, self.source)
        check_epochs(order, self.view, len(self.source), number)
        return dataclasses.replace(self, sampler=sampler, order=order, epoch=number)

    def with_changes(self, changes: str) -> Self:
        """Returns the pipeline with weights that were set at run time."""
        import json  # noqa: PLC0415  (lazy: slow to import, in each worker)

        given = json.loads(changes)
        sampler: Any
        applied, sampler = self._last_changed.pair or ([], self.sampler)
        count = sum(1 for _ in itertools.takewhile(bool, map(operator.eq, applied, given)))
        # Usually, a run sets weights after those that it has set before, which need not be applied again: there may be
        # thousands. A change drops those after it.
        if count == 0 or count == len(given):
            count, sampler = 0, self.sampler
        for position, weights in given[count:]:
            sampler = sampler.reweighted(position, weights)
        self._last_changed.pair = given, sampler
        return dataclasses.replace(self, sampler=sampler, order=check_sampler(sampler, self.source), changes=changes)

    @functools.cached_property
    def _last_changed(self) -> "_LastChanged":
        return _LastChanged()

    @property
    def variant(self) -> Variant:
        """The difference to the pipeline that workers got at their start."""
        return self.changes or self.epoch

    def of_variant(self, variant: Variant) -> Self:
        if variant is None:
            return self
        return self.with_changes(variant) if isinstance(variant, str) else self.of_epoch(variant)

    @functools.cached_property
    def view(self) -> LoaderView:
        """The source as this pipeline reads it."""
        return loader_view(self.source) if self.is_loaders else LoaderView(self.source)

    @functools.cached_property
    def ends_agree(self) -> bool | None:
        """True if all shards have as many rows at each step, False if their ends differ; None if it is not known.

        A single shard knows nothing of other processes, each of which may read its own records.
        """
        shard, length = self.shard, self.order.length
        if shard.shard_count == 1 or not are_known(self.operations, skips_errors=self.tolerance is not None):
            return None
        return length is None or are_even(ends_of(self.operations, length, shard))

    @property
    def end_alone(self) -> str | None:
        """The number of outputs of a single shard and the rows of its last batches; None if they are not known."""
        length = self.order.length
        if length is None or not are_known(self.operations, skips_errors=self.tolerance is not None):
            return None
        (end,) = ends_of(self.operations, length, NoSharding())
        return f"{end.outputs} elements" if not end.rows else f"{end.outputs} batches, the last one of {end.rows[-1]}"

    @functools.cached_property
    def components(self) -> tuple[Any, ...]:
        """The names of a mixture's components; empty without a mixture."""
        return self.order.names if is_mixed(self.order) else ()

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(map(described, self.operations))

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        return tuple(f"{path}, {name}" for path, name in zip(paths_of(self.operations), self.names, strict=True))

    @functools.cached_property
    def error_labels(self) -> tuple[str, ...]:
        numbers = numbers_of(self.operations)
        return tuple(f"operation {number}, {name}" for number, name in zip(numbers, self.names, strict=True))

    @functools.cached_property
    def logical_shards(self) -> tuple[ShardOptions, ...]:
        """The logical shards that this shard runs, each as a shard of its own; one if the pipeline is 1:1.

        In a 1:1 pipeline, positions alone determine a batch, whatever the number of shards.
        """
        shard, count = self.shard, self.shard.logical_shards
        if count is None or first_dynamic(self.operations) is None:
            return (shard,)
        share = count // shard.shard_count
        numbers = range(shard.shard_index * share, (shard.shard_index + 1) * share)
        return tuple(ShardOptions(number, count, shard.drop_remainder) for number in numbers)

    @functools.cached_property
    def share(self) -> Batch | None:
        """The part of the last Batch that each of several logical shards fills; None if there is only one."""
        if len(self.logical_shards) == 1 or (joining := joining_batch(self.operations)) is None:
            return None
        _, batch = joining
        return dataclasses.replace(batch, batch_size=batch.batch_size // len(self.logical_shards))

    @property
    def objects(self) -> list[tuple[str, Any]]:
        """Source, sampler and operations, with their labels in texts for users."""
        operations = zip(self.labels, self.operations, strict=True)
        return [("data_source", self.source), ("sampler", self.sampler), *operations]


@final
class _LastChanged:
    """The weights that were set last at run time, and the sampler with them. It stays in its process."""

    def __init__(self) -> None:
        self.pair: tuple[list[Any], Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _LastChanged, ()


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
    # Components that were left out have no source.
    lengths = {name: length for name, length in zip(sampler.names, sampler.source_lengths, strict=True) if length}
    if len(source.names) != len(lengths):
        raise ValueError(
            f"The sampler mixes {len(lengths)} components, but data_source consists of {len(source.names)} "
            "sources. Each component needs one source."
        )
    if all(isinstance(name, str) for name in (*lengths, *source.names)) and tuple(lengths) != source.names:
        raise ValueError(
            f"The sampler's components are {list(lengths)}, but the sources are {list(source.names)}. Use the "
            "same names in the same order."
        )
    for (name, expected), length in zip(lengths.items(), source.lengths, strict=True):
        if expected != length:
            raise ValueError(
                f"The sampler assumes that the source of component {name!r} has {expected} records, but it has "
                f"{length}. Use IndexSampler(len(source), ...) for each, or pass source_lengths to the MixtureSampler. "
                "The records by which a source has grown can be a component of their own: see reweighted(samplers=...)."
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
    # Rows of a mixture of rows have documents of one component each.
    gathers = (operation.gathers and not isinstance(operation, Pack) for operation in operations)
    mixing = next(itertools.compress(itertools.count(), gathers), None)
    for number, operation in enumerate(operations):
        if isinstance(operation, WithComponent):
            finding, last = f"operations[{number}], {described(operation)}, adds a component, but", mixing
        elif isinstance(operation, OnlyFor):
            finding, last = f"operations[{number}] is for component {operation.component!r} only, but", batch
        else:
            continue
        if not names:
            raise ValueError(f"{finding} the sampler is not a MixtureSampler. Use one, or leave the operation out.")
        if isinstance(operation, OnlyFor) and operation.component not in names:
            raise ValueError(f"{finding} the mixture's components are {', '.join(map(repr, names))}.")
        if last is not None and last < number:
            raise ValueError(
                f"{finding} operations[{last}] builds batches of elements of all components. Put it before that."
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


def check_global_batch(
    operations: Sequence[Transformation],
    sampler: VectorisedSampler | AdaptedSampler,
    batch_size: int,
    shard_count: int,
) -> None:
    order: Any = sampler
    while (given := getattr(order, "given_batch", None)) is not None:
        kind, (argument, size) = type(order).__name__, given
        if (number := first_dynamic(operations)) is not None:
            raise ValueError(
                f"A {kind} with {argument} needs a 1:1 pipeline, got operations[{number}], "
                f"{described(operations[number])}: the elements of a batch depend on their content, so the sampler "
                "cannot decide in advance which come together."
            )
        if has_varying_batches(order):
            check_varying_batches(order, operations, shard_count)
        if size != batch_size * shard_count:
            largest = "the largest " if has_varying_batches(order) else ""
            raise ValueError(
                f"{largest}{argument} of the {kind} must be {batch_size * shard_count}, the batch size of the pipeline "
                f"times the number of shards, {batch_size} * {shard_count}, got {size}. Change one of them, or add the "
                "Batch if there is none."
            )
        order = getattr(order, "order", None)
    if not isinstance(sampler, BalancedSampler):
        return
    if sampler.parts % shard_count:
        raise ValueError(
            f"parts of the BalancedSampler must be a multiple of the number of shards, {shard_count}, got "
            f"{sampler.parts}."
        )


def check_varying_batches(order: VaryingBatches, operations: Sequence[Transformation], shard_count: int) -> None:
    kind = type(order).__name__
    batches = [operation for operation in operations if isinstance(operation, Batch)]
    if len(batches) != 1 or batches[0].pad_remainder:
        raise ValueError(
            f"A {kind} with a global_batch_size per class needs exactly one Batch, without pad_remainder, which builds "
            f"each batch of the records of its step, got {len(batches)}."
        )
    if wrong := [size for size in order.batch_sizes if size % shard_count]:
        raise ValueError(
            f"Each global_batch_size of the {kind} must be a multiple of the number of shards, {shard_count}, got "
            f"{wrong[0]}."
        )


def check_shapes(operations: Sequence[Transformation], shard: ShardOptions) -> None:
    for number, operation in enumerate(operations):
        if shard.shard_count > 1 and not operation.has_one_shape:
            raise ValueError(
                f"operations[{number}], {described(operation)}, cannot run on {shard.shard_count} shards: the shapes "
                "of its batches depend on their elements, so the shards of a step would differ in shape, which a "
                "global array cannot. Pack rows of one length (PackingSampler and Pack, or FirstFitPack), pad to "
                "one length (PadTo and Batch), or to one per step (BucketSampler); or read a single shard."
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


def check_packing(
    operations: Sequence[Transformation], sampler: VectorisedSampler | AdaptedSampler, num_records: int
) -> None:
    packs = [number for number, operation in enumerate(operations) if isinstance(operation, Pack)]
    if not is_packed(sampler):
        if packs:
            raise ValueError(f"operations[{packs[0]}] builds packed rows, but the sampler is not a PackingSampler.")
        return
    if sampler.num_source_records != num_records:
        raise ValueError(
            f"The sampler's lengths are of {sampler.num_source_records} documents, but data_source has {num_records} "
            "records."
        )
    if len(packs) != 1:
        raise ValueError(
            "The sampler plans rows of several documents, so exactly one Pack is needed, got "
            f"{len(packs)}. Use operations=[..., Pack({{'tokens': {sampler.row_length}}}), ...]."
        )
    (number,) = packs
    for earlier, operation in enumerate(operations[:number]):
        if operation.gathers or not operation.keeps_count:
            raise ValueError(
                f"operations[{earlier}], {described(operation)}, comes before the Pack and changes the documents, but "
                "the sampler has planned the rows. Filter ahead, and omit the documents from lengths."
            )
    pack = operations[number]
    for name, length in pack.length_struct.items() if isinstance(pack, Pack) else ():
        if length < sampler.row_length:
            raise ValueError(
                f"operations[{number}] builds {name!r} of length {length}, but the sampler plans rows of length "
                f"{sampler.row_length}. It must be at least as long."
            )
