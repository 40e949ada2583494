"""Streams mixed in exact proportions. The stream that is due is computed, as in a MixtureSampler."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, final

from millstream.dataset.chain import Chain, as_stream, joint_reading
from millstream.dataset.fixed_chain import FixedChain
from millstream.dataset.iterators.dataset_iterator import DatasetIterator
from millstream.dataset.iterators.fed_iterator import FedIterator
from millstream.dataset.iterators.mixed_iterator import MixedIterator
from millstream.dataset.iterators.mixed_reading import MixtureIterator, straight_node
from millstream.dataset.iterators.running import Running, Shared
from millstream.dataset.nodes.joining_nodes import Mixed
from millstream.dataset.stream_nodes import Combined
from millstream.loader.threads.options import ReadOptions
from millstream.samplers.mixtures.mixture_checks import checked_weights, named_components


@final
class MixedIterDataset(Combined):
    """The elements of several streams, in the proportions of weights: the result of `IterDataset.mix`.

    If it is named, states refer to streams by name.
    """

    def __init__(
        self,
        datasets: "Sequence[Any] | Mapping[str, Any]",
        weights: "Sequence[Any] | Mapping[str, Any] | None" = None,
    ) -> None:
        self.names, components = named_components(datasets, "datasets")
        named = zip(self.names, components, strict=True)
        super().__init__([as_stream(component, f"datasets[{name!r}]") for name, component in named])
        self.weights = checked_weights([1] * len(components) if weights is None else weights, self.names)
        self.is_named = isinstance(datasets, Mapping)

    def _drawn(self, shared: Shared) -> MixedIterator:
        return MixedIterator(self.parents, self.weights, self.names if self.is_named else None, shared)

    def followed_by(
        self, chain: FixedChain, running: Running, reading: ReadOptions | None
    ) -> DatasetIterator[Any] | None:
        if running.tolerance is not None or not chain.operations:
            return None
        nodes = [straight_node(parent) for parent in self.parents]
        lowered = tuple(node for node in nodes if node is not None)
        if len(lowered) < len(nodes):
            return None
        shared = running.shared.combined()
        runs_here = not running.workers.num_workers and shared.shared_workers is None
        inputs_have_workers = runs_here and any(Chain.of(parent).workers.num_workers for parent in self.parents)
        stream = self._drawn(dataclasses.replace(shared, raises_absent=inputs_have_workers))
        return MixtureIterator(
            FedIterator(stream, chain, running),
            stream,
            Mixed(lowered, self.weights, self.names),
            chain.operations,
            dataclasses.replace(running, reading=joint_reading(self.parents, reading)),
            inputs_have_workers=inputs_have_workers,
        )

    def _line(self) -> str:
        return f"mix(weights={dict(zip(self.names, self.weights, strict=True))})"

    def _shares(self) -> Sequence[tuple[str, float]]:
        return [(str(name), weight) for name, weight in zip(self.names, self.weights, strict=True)]
