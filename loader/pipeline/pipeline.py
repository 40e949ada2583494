"""The pipeline of a loader: source, sampler, operations and shard, checked and labelled."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self

from millstream.core.checks import as_integer
from millstream.core.descriptions import described
from millstream.core.warn import warn
from millstream.loader.pipeline.arguments import (
    Operations,
    check_depth,
    check_epochs,
    check_logical_shards,
    check_operations,
    check_padding,
    check_randomness,
    check_sampler,
    check_scopes,
    check_shapes,
    first_dynamic,
    joining_batch,
    resolve_shard,
    warn_checkpoints_need_same_shards,
)
from millstream.loader.pipeline.ends import are_even, are_known, check_ends, ends_of
from millstream.loader.pipeline.packing import check_packing
from millstream.samplers import Sampler
from millstream.samplers.base import AdaptedSampler, VectorisedSampler
from millstream.samplers.protocols import is_mixed, is_packed
from millstream.sharding import NoSharding, ShardOptions
from millstream.sources import DataSource
from millstream.sources.base import LoaderView, loader_view
from millstream.sources.source_checks import check_no_columns, check_readable
from millstream.transforms import Batch, Transformation
from millstream.transforms.transformation import numbers_of, paths_of


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
        worker_init_fn: called once in each worker process with its index and their number; None for nothing.
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
    worker_init_fn: Callable[[int, int], object] | None = None
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
        check_readable(source, "data_source")
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
        whole: Any = self.sampler
        sampler = whole.of_epoch(number)
        order = check_sampler(sampler, self.source)
        check_epochs(order, self.view, len(self.source), number)
        return dataclasses.replace(self, sampler=sampler, order=order, epoch=number)

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
    def own_end(self) -> str | None:
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
