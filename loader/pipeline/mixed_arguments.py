"""What a DataLoader accepts where its sampler is a mixture: each mistake is an error at construction."""

from collections.abc import Sequence
from typing import Any

from millstream.descriptions import described
from millstream.loader.pipeline.random_streams import has_randomness
from millstream.samplers.base import AdaptedSampler, VectorisedSampler
from millstream.samplers.protocols import MixedSampler, is_mixed
from millstream.transforms import OnlyFor, RandomMap, Transformation
from millstream.transforms.only_for import leaves


def check_sources(sampler: MixedSampler, source: Any) -> None:
    """Refuses sources that are not those which the mixture's components are for."""
    if not all(hasattr(source, member) for member in ("names", "lengths", "locate")):
        if len(source) != sum(sampler.source_lengths):
            raise ValueError(
                f"The sources of the sampler's components have {sum(sampler.source_lengths)} records together, but "
                f"data_source has {len(source)}: give ConcatenatedDataSource([...]) of the same sources."
            )
        return
    if len(source.names) != len(sampler.names):
        raise ValueError(
            f"The sampler mixes {len(sampler.names)} components, but data_source consists of {len(source.names)} "
            "sources: there must be one for each."
        )
    if all(isinstance(name, str) for name in (*sampler.names, *source.names)) and sampler.names != source.names:
        raise ValueError(
            f"The sampler's components are {list(sampler.names)}, but the sources are {list(source.names)}: give both "
            "the same names in the same order."
        )
    for name, asked, length in zip(sampler.names, sampler.source_lengths, source.lengths, strict=True):
        if asked != length:
            raise ValueError(
                f"The sampler assumes that the source of component {name!r} has {asked} records, but it has {length}. "
                "Use IndexSampler(len(source), ...) for each, or give the MixtureSampler source_lengths."
            )


def check_scopes(operations: Sequence[Transformation], sampler: VectorisedSampler | AdaptedSampler) -> None:
    """Refuses an OnlyFor where nothing is mixed, for a component that there is not, or after a Batch."""
    names = sampler.names if is_mixed(sampler) else ()
    batch = next((number for number, operation in enumerate(operations) if operation.gathers), None)
    for number, operation in enumerate(operations):
        if not isinstance(operation, OnlyFor):
            continue
        what = f"operations[{number}] is for component {operation.component!r} only, but"
        if not names:
            raise ValueError(f"{what} the sampler mixes nothing: it must be a MixtureSampler.")
        if operation.component not in names:
            raise ValueError(f"{what} the mixture's components are {', '.join(map(repr, names))}.")
        if batch is not None and batch < number:
            raise ValueError(
                f"{what} operations[{batch}] makes batches, which hold elements of all components: put it before."
            )


def check_component_seeds(operations: Sequence[Transformation], sampler: MixedSampler) -> None:
    """Refuses random operations on elements of a component whose sampler gives nothing to draw from."""
    by_name = dict(zip(sampler.names, sampler.samplers, strict=True))
    for number, operation in enumerate(operations):
        if not any(isinstance(part, RandomMap) for part in leaves(operation)):
            continue
        names = [operation.component] if isinstance(operation, OnlyFor) else list(by_name)
        if lacking := [name for name in names if not has_randomness(by_name[name])]:
            raise ValueError(
                f"operations[{number}], {described(operation)}, needs randomness, but the sampler of component "
                f"{lacking[0]!r} has no seed: give it one, or write OnlyFor(component, ...) for those that have one."
            )
