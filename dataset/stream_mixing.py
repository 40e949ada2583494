"""Streams mixed in exact proportions. The next stream is computed, as in a MixtureSampler."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, final

from millstream.dataset.chain import NO_THREADS, Chain
from millstream.dataset.dataset_iterator import DatasetIterator
from millstream.dataset.fed_iterator import FedIterator
from millstream.dataset.iter_dataset import IterDataset
from millstream.dataset.mixed_iterator import MixedIterator
from millstream.dataset.mixed_reading import MixtureIterator, straight_node
from millstream.dataset.nodes.in_order import InOrder
from millstream.dataset.nodes.joining_nodes import Mixed
from millstream.dataset.running import Running, Shared
from millstream.dataset.stream_nodes import Combined, ReadIterDataset
from millstream.dataset.streams import as_stream
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.threads.front import FED_CHAIN
from millstream.loader.threads.options import ReadOptions
from millstream.loader.threads.shared_threads import joint_threads
from millstream.samplers.mixture_checks import named_parts
from millstream.samplers.weights import checked_weights
from millstream.sharding import NoSharding
from millstream.transforms import Transformation


@final
class MixedIterDataset(Combined):
    """The elements of several streams, in the proportions of weights: the result of `IterDataset.mix`.

    Attributes:
        names: the names of the streams; their numbers if they have none.
        weights: integers without a common divisor, one per stream.
        is_named: True if states refer to streams by name.
    """

    def __init__(
        self,
        datasets: "Sequence[Any] | Mapping[str, Any]",
        weights: "Sequence[Any] | Mapping[str, Any] | None" = None,
    ) -> None:
        self.names, parts = named_parts(datasets, "datasets")
        super().__init__([as_stream(part, f"datasets[{name!r}]") for name, part in zip(self.names, parts, strict=True)])
        self.weights = checked_weights([1] * len(parts) if weights is None else weights, self.names)
        self.is_named = isinstance(datasets, Mapping)

    def _drawn(self, shared: Shared) -> MixedIterator:
        return MixedIterator(self.parents, self.weights, self.names if self.is_named else None, shared)

    def _followed_by(
        self, operations: tuple[Transformation, ...], running: Running, *, chosen: bool
    ) -> DatasetIterator[Any] | None:
        has_workers = bool(running.workers.num_workers)
        if running.tolerance is not None or not (operations or has_workers):
            return None
        reading = running.reading if chosen else _joint_reading(self.parents)
        nodes = [straight_node(parent) for parent in self.parents]
        parts = tuple(node for node in nodes if node is not None)
        if operations and len(parts) == len(nodes):
            stream, mixed = self._drawn(_shared_by(running)), Mixed(parts, self.weights, self.names)
            fed = FedIterator(stream, operations, running)
            have_workers = any(Chain.of(parent).workers.num_workers for parent in self.parents)
            return MixtureIterator(
                fed,
                stream,
                mixed,
                operations,
                dataclasses.replace(running, reading=reading),
                parts_have_workers=have_workers and not has_workers and running.shared_workers is None,
            )
        if has_workers:
            from millstream.loader.workers.shared_workers import SharedWorkers  # noqa: PLC0415  (lazy: for workers)

            running = dataclasses.replace(running, reading=reading, shared_workers=SharedWorkers())
        stream = self._drawn(_shared_by(running))
        if operations:
            return FedIterator(stream, operations, running)
        nothing = InOrder(0, None)
        execution = running.execution("leader", Pipeline([], nothing, nothing, (), NoSharding()), FED_CHAIN)
        stream.lead_with(execution.begin())
        return stream

    def _line(self) -> str:
        return f"mix(weights={dict(zip(self.names, self.weights, strict=True))})"

    def _shares(self) -> Sequence[tuple[str, float]]:
        return [(str(name), weight) for name, weight in zip(self.names, self.weights, strict=True)]


def _shared_by(running: Running) -> Shared:
    """Returns the resources that the streams share, given the execution of the operations after them."""
    return (
        Shared(shared_workers=running.shared_workers)
        if running.threads is None
        else Shared(running.threads, running.shared_workers)
    )


def _joint_reading(streams: Sequence[IterDataset[Any]]) -> ReadOptions:
    """Returns the threads for one set of workers, or one plan, which does the work of several streams."""
    asked = [_reading(stream) for stream in streams]
    largest = max(asked, key=lambda reading: reading.num_threads)
    return dataclasses.replace(largest, num_threads=joint_threads([reading.num_threads for reading in asked]))


def _reading(stream: IterDataset[Any]) -> ReadOptions:
    """Returns the threads that a straight chain requests."""
    chain = Chain.of(stream)
    return chain.reading or (chain.leaf.reading if isinstance(chain.leaf, ReadIterDataset) else NO_THREADS)
