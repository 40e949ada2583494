"""Checks of a DataLoader's arguments when its sampler is a mixture. Each mistake is an error at construction."""

from collections.abc import Sequence
from typing import Any

from millstream.descriptions import described
from millstream.loader.operations.random_streams import has_randomness
from millstream.samplers.base import AdaptedSampler, VectorisedSampler
from millstream.samplers.protocols import MixedSampler, is_mixed
from millstream.transforms import OnlyFor, Transformation


def check_sources(sampler: MixedSampler, source: Any) -> None:
    """Refuses sources that do not match the mixture's components."""
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


def check_scopes(operations: Sequence[Transformation], sampler: VectorisedSampler | AdaptedSampler) -> None:
    """Refuses an OnlyFor without a mixture, for an unknown component, or after a Batch."""
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
    """Refuses random operations on elements of a component whose sampler has no randomness."""
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
