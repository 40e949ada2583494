"""The sources that a source or a chain reads from, and what tells their records apart from those of others.

A fingerprint is not enough: those of lists and datasets depend on a few records, those of folders and arrays on names
and shapes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from millstream.dataset.map_dataset import MapDataset
from millstream.dataset.node_source import node_of
from millstream.dataset.nodes.node import ENDLESS, Node
from millstream.dataset.nodes.source_node import Own, Source
from millstream.loader.checkpoints.fingerprint import fingerprint_of
from millstream.samplers import SequentialSampler
from millstream.sources import (
    ConcatenatedDataSource,
    FileDataSource,
    HuggingFaceDataSource,
    LanceDataSource,
    RangeDataSource,
    TfdsDataSource,
    ZarrDataSource,
)
from millstream.sources.base import ReadsSource
from millstream.sources.digests import digest
from millstream.sources.files.multi_file import Files
from millstream.sources.files.paths import FileIdentity
from millstream.transforms import Transformation


def check_end(source: Any) -> None:
    if isinstance(source, MapDataset) and len(source) == ENDLESS:
        raise ValueError("data_source must have an end, got an endless MapDataset. Pass the dataset before repeat().")


def underlying_sources(source: Any) -> Iterator[Any]:
    """Yields the sources that are read, and datasets of users, whose elements may come from anywhere."""
    if isinstance(source, ConcatenatedDataSource):
        for member in source.parts.values():
            yield from underlying_sources(member)
    elif isinstance(source, MapDataset):
        yield from _sources_of(node_of(source))
    elif isinstance(source, ReadsSource):
        yield from underlying_sources(source.source)
    else:
        yield source


def _sources_of(node: Node) -> Iterator[Any]:
    if isinstance(node, Source):
        yield from underlying_sources(node.source)
    elif isinstance(node, Own):
        yield node.dataset
    for parent in node.parents:
        yield from _sources_of(parent)


def files_of(source: Any) -> Mapping[str, FileIdentity] | None:
    """Returns the identities of the files that have all records of a source, by path; None for other sources."""
    return source.files if isinstance(source, Files | TfdsDataSource) else None


def inputs_of(source: Any) -> Iterable[str]:
    """Returns the paths and URLs of the files that a source reads; none if it does not know them."""
    if isinstance(source, FileDataSource):
        return (source.locate(key)[0] for key in range(len(source)))
    return files_of(source) or ()


def is_told_apart(source: Any) -> bool:
    """Returns True if fingerprint, files and origin of an underlying source tell it from sources with other records."""
    fingerprint = getattr(source, "fingerprint", None)
    # Those of users may be trusted.
    of_user = callable(fingerprint) and not str(getattr(fingerprint, "__module__", "")).startswith("millstream.")
    is_complete = isinstance(source, range | RangeDataSource | HuggingFaceDataSource)
    return of_user or is_complete or files_of(source) is not None


def digest_of_source(source: Any, operations: Sequence[Transformation] = (), *others: object) -> str:
    """Returns a digest of all that tells records from others: fingerprints, code, files and origins."""
    own = fingerprint_of(source, SequentialSampler(len(source)), operations)
    below = list(underlying_sources(source))
    files = [[identity.size, identity.modified] for each in below for identity in (files_of(each) or {}).values()]
    origins = [origin_of(each) for each in below]
    own_texts = [len(source), dict(own.identity), dict(own.content), own.python]
    return digest(8, json.dumps([*own_texts, files, origins, *others]).encode()).hex()


def origin_of(source: Any) -> str | None:
    """Returns a text that tells data of one shape from other data, for sources of other libraries; else None.

    Zarr and Lance may write other data to the same path.
    """
    return source.origin if isinstance(source, HuggingFaceDataSource | LanceDataSource | ZarrDataSource) else None
