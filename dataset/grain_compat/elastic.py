"""An iterator whose position is shared by all shards, so that a state fits any number of shards."""

import dataclasses
from typing import Any, NoReturn, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_options
from millstream.core.randomness import Purpose, derive_seed
from millstream.dataset.iterators.chain_iterator import EngineIterator
from millstream.dataset.iterators.chain_positions import accepted, texts_of
from millstream.dataset.iterators.running import FixedChain, checked_maps
from millstream.dataset.map_dataset import MapDataset
from millstream.dataset.node_source import node_of
from millstream.dataset.nodes.lowering import InOrder, lower
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.compatibility import accept
from millstream.loader.checkpoints.envelope import SavedPosition, is_anything, is_list, is_number, values_of
from millstream.loader.checkpoints.state import Stream
from millstream.loader.execution import Execution
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.measuring import ELASTIC
from millstream.loader.pipeline.pipeline import Pipeline, check_kind
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.samplers.permutation import permute_blocks
from millstream.sharding import ShardOptions
from millstream.transforms import Batch
from millstream.transforms.of_chains import AbsentElement

_KIND = "an ElasticIterator"

_SEED = derive_seed(0, Purpose.ROWS)
"""Selects the permutations within global batches: any will do, and all shards need the same."""


@final
@dataclasses.dataclass(frozen=True)
class _Permuted(InOrder):
    """An order whose rows are permuted within each global batch, so that each shard has its share of each dataset."""

    global_batch: int

    def record_keys_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return permute_blocks(positions, self.global_batch, _SEED)


@final
class ElasticIterator(EngineIterator):
    """Yields this shard's part of each global batch of a MapDataset. Its state fits any number of shards and workers.

    The parts of all shards, concatenated, are the global batch, which is the same for any number of shards. The rows of
    a mixture (`MapDataset.mix`) are permuted within it, so that no shard reads some of its datasets only. The last
    elements are dropped if they do not fill a global batch. All shards have the same state after the same step.

    Args:
        ds: the dataset; every position must have an element.
        global_batch_size: the number of elements of all shards per step, a multiple of the number of shards.
        shard_options: the shard that it yields.
        read_options: the threads that read ahead; None for `ReadOptions()`.
        multiprocessing_options: the worker processes; None for none.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range, or elements may be absent: after a
            filter or flat_map. While reading, a ValueError if a map has returned None.

    Examples:
        >>> dataset = millstream.MapDataset.range(100).shuffle(seed=0)
        >>> def shard(index):
        ...     options = millstream.ShardOptions(shard_index=index, shard_count=2)
        ...     return millstream.experimental.ElasticIterator(dataset, global_batch_size=8, shard_options=options)
        >>> next(shard(0)), next(shard(1))
        (array([53,  6, 88, 19]), array([75, 41, 99, 91]))
    """

    def __init__(
        self,
        ds: MapDataset[Any],
        global_batch_size: SupportsIndex,
        shard_options: ShardOptions,
        *,
        read_options: ReadOptions | None = None,
        multiprocessing_options: MultiprocessingOptions | None = None,
    ) -> None:
        super().__init__()
        reading, workers = read_options or ReadOptions(), multiprocessing_options or MultiprocessingOptions()
        check_kind(ds, "ds", MapDataset)
        shard_options = as_options(shard_options, "shard_options", ShardOptions)
        reading = as_options(reading, "read_options", ReadOptions)
        workers = as_options(workers, "multiprocessing_options", MultiprocessingOptions)
        node = node_of(ds)
        if node.is_sparse:
            raise ValueError(
                "ElasticIterator needs an element at every position, and there is a filter or flat_map in this "
                "dataset, so that shards would have different numbers of them: filter the records beforehand."
            )
        local = shard_options.local_batch_size(global_batch_size)  # type: ignore[arg-type]  # as an index
        self._global_batch = local * shard_options.shard_count
        self._dataset = ds
        # Before any of the operations runs.
        self._identity = ds.fingerprint()
        marks = {f"source.{path}": text for path, text in ds.content_marks().items()}
        self._content = SavedPosition(sorted(marks.items()))
        fixed = FixedChain(ds, node, ())
        source, order, maps = lower(fixed.map_dataset, fixed.node)
        if node.is_mixed:
            order = _Permuted(order.length, order.num_records, self._global_batch)
        operations = (*checked_maps(maps), Batch(local, drop_remainder=True))
        shard = ShardOptions(shard_options.shard_index, shard_options.shard_count, drop_remainder=True)
        pipeline = Pipeline(source, order, order, operations, shard)
        self._execution = Execution(pipeline, workers, reading, frontend=ELASTIC)
        self._inner = DataLoaderIterator.of(self._execution)

    def __len__(self) -> int:
        """Returns the number of batches left; of an endless dataset, about `sys.maxsize // global_batch_size`."""
        return len(self._dataset) // self._global_batch - self._inner.step

    def position(self, back: int = 0) -> SavedPosition:
        """Returns the position before the last `back` elements, which is the same on all shards."""
        step = self._inner.step - back
        return SavedPosition((_KIND, step, step * self._global_batch, self._identity, self._content))

    def _move_to(self, position: Any, stream: Stream | None = None) -> None:
        del stream
        self._check_open_to("move")
        _, index, identity, saved = values_of(position, _KIND, is_number, is_number, is_anything, is_list)
        content, options = texts_of(saved, self._content), accepted()
        accept(({"source": identity}, {"source": self._identity}), content, options.allow, strict=options.strict)
        if index % self._global_batch:
            raise CheckpointError(
                f"The state is at element {index!r}, where no global batch of {self._global_batch} begins: use the "
                "global_batch_size that it had."
            )
        try:
            self._inner.seek(index // self._global_batch)
        except IndexError as error:
            raise CheckpointError(f"The state lies beyond the end: {error}") from error

    def _change_plan(self, hole: AbsentElement) -> NoReturn:
        raise ValueError(
            f"{hole} A map before ElasticIterator has returned None, so that shards would have different numbers of "
            "elements: leave such records out beforehand."
        ) from hole

    def seek(self, step: int) -> None:
        """Moves to the position after the first `step` batches, at no cost.

        Args:
            step: 0 … the number of batches in the stream.

        Raises:
            IndexError: there are fewer batches.
            ValueError: the iterator is closed.
        """
        self._check_open_to("move")
        self._inner.seek(step)
