"""The pipeline of a loader: source, sampler, operations and shard, checked and labelled."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

from millstream.descriptions import described
from millstream.loader.pipeline.arguments import (
    Operations,
    check_ends,
    check_logical_shards,
    check_operations,
    check_padding,
    check_randomness,
    check_sampler,
    check_shapes,
    first_dynamic,
    joining_batch,
    resolve_shard,
    warn_checkpoints_need_same_shards,
)
from millstream.loader.pipeline.mixed_arguments import check_scopes
from millstream.loader.pipeline.packing import check_packing
from millstream.loader.pipeline.tolerance import UNLIMITED, FilterLimits, Tolerance, check_tolerance
from millstream.samplers import Sampler
from millstream.samplers.base import AdaptedSampler, VectorisedSampler
from millstream.samplers.protocols import is_mixed
from millstream.sharding import ShardOptions
from millstream.sources import DataSource
from millstream.sources.source_checks import check_readable
from millstream.transforms import Batch, Transformation
from millstream.transforms.transformation import numbers_of, paths_of
from millstream.warn import warn


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
    """A pipeline of one shard. `Pipeline.of` builds it from a user's arguments and checks them.

    Attributes:
        source: the records.
        sampler: their order, as given by the user.
        order: the same order, for complete blocks.
        operations: the operations, in order.
        shard: the part of every global batch to compute.
        filter_limits: limits for the share that Filters drop.
        tolerance: the number of records that may fail; None if the first error is raised.
        measures_costs: True if the costs of each node are measured, wherever it runs.
        epoch: the number of the epoch that `of_epoch` returned; None for the complete order.
        worker_init_fn: called once in each worker process with its index and their number; None for nothing.
        num_local: the number of last operations that run in the consumer's process, in its thread or threads of their
            own, even if workers or threads run the operations before them.
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
    worker_init_fn: Callable[[int, int], object] | None = None
    num_local: int = 0

    @classmethod
    def of(
        cls,
        source: DataSource[Any],
        sampler: Sampler,
        operations: Operations,
        shard_options: ShardOptions | None,
        tolerance: Tolerance | None = None,
    ) -> Self:
        """Builds the pipeline from a user's arguments.

        Args:
            source: an object with `len` and `source[key]`.
            sampler: the record key at each position.
            operations: the operations on each record. A function is a `Map`.
            shard_options: the shard to read; None for the sampler's own, or for all of it.
            tolerance: the number of records that may fail; None if the first error is raised.

        Raises:
            TypeError, ValueError: an argument has the wrong type or is out of range, or two contradict each other.
        """
        check_readable(source, "data_source")
        if not len(source):
            warn(f"data_source has no record, got an empty {type(source).__name__}: the loader yields nothing.")
        order = check_sampler(sampler, source)
        checked = tuple(check_operations(operations))
        shard = resolve_shard(shard_options, sampler)
        check_scopes(checked, order)
        check_packing(checked, order, len(source))
        check_randomness(checked, order)
        check_padding(checked, shard)
        check_shapes(checked, shard)
        check_ends(checked, order, shard)
        check_logical_shards(checked, shard)
        check_tolerance(tolerance, order)
        warn_checkpoints_need_same_shards(checked, shard)
        return cls(source, sampler, order, checked, shard, tolerance=tolerance)

    def of_epoch(self, number: int) -> Self:
        """Returns the pipeline of one epoch alone: the sampler's `of_epoch(number)` is its order.

        Raises:
            Exception: an error of the sampler, or of its checks.
        """
        whole: Any = self.sampler
        sampler = whole.of_epoch(number)
        order = check_sampler(sampler, self.source)
        return dataclasses.replace(self, sampler=sampler, order=order, epoch=number)

    @functools.cached_property
    def components(self) -> tuple[Any, ...]:
        """The names of a mixture's components; empty without a mixture."""
        return self.order.names if is_mixed(self.order) else ()

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the operations."""
        return tuple(map(described, self.operations))

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """The labels of the operations in reports about the pipeline."""
        return tuple(f"{path}, {name}" for path, name in zip(paths_of(self.operations), self.names, strict=True))

    @functools.cached_property
    def error_labels(self) -> tuple[str, ...]:
        """The labels of the operations in error texts."""
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
