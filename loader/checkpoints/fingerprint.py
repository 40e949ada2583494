"""The fingerprint of a pipeline: what a checkpoint compares, and what it shows if two pipelines differ.

It is declared: attributes, class constants, and what `fingerprint()` of sources, samplers, operations and their
attributes returns. It has two tiers (see `description`). Each text has the path by which a person would reach what it
describes: `sampler.seed`, `operations[0]._size`.
"""

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from millstream.loader.checkpoints.code_marks import crc_of, written_name
from millstream.loader.checkpoints.description import (
    ENTRY_LIMIT,
    Description,
    own_fingerprint,
    printable,
    spread,
    text_of,
)
from millstream.samplers import Sampler
from millstream.transforms import Batch, Filter, FlatMap, Map, MapWithIndex, OnlyFor, Pack, RandomMap, Transformation
from millstream.transforms.transformation import paths_of

SOURCE_RECORDS = 16
"""The number of records of a plain sequence that count."""
OWN_TEXT_LIMIT = 1000
"""The maximum number of characters of a `fingerprint()` that are shown; all of them count."""

MAX_MARKS = 64
"""The maximum number of marks of a source."""

_KINDS = (Map, RandomMap, MapWithIndex, Filter, FlatMap, OnlyFor, Pack, Batch)


@final
@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of a pipeline.

    Attributes:
        words: the identity by path: of the source, of the sampler without its number of epochs, of the operations.
        content: what may change the stream, by path: a difference is a warning.
        python: the version of Python whose bytecode was marked.
    """

    words: Mapping[str, str]
    content: Mapping[str, str]
    python: str


def fingerprint_of(
    source: Any, sampler: Sampler, operations: Sequence[Transformation], sizes: Mapping[int, str] | None = None
) -> Fingerprint:
    """Returns the fingerprint of a pipeline. Records are read only of a list, tuple or array: SOURCE_RECORDS of them.

    Args:
        source: where records come from.
        sampler: their order.
        operations: what is done with them.
        sizes: the text for the size of a Batch, by its number among the operations, if another size than its own
            decides the stream. By default that of the first Batch is left out: a state compares the global batch, which
            is that size times the shards.

    Raises:
        TypeError: a `fingerprint()` returned something else than a string.
    """
    found = Description()
    add_source(found, "source", source)
    _add_sampler(found, "sampler", sampler)
    if sizes is None:
        first = next((number for number, operation in enumerate(operations) if isinstance(operation, Batch)), -1)
        sizes = {first: ""}
    for number, (path, operation) in enumerate(zip(paths_of(operations), operations, strict=True)):
        if type(operation) is Batch:
            _add_batch(found, path, operation, sizes.get(number, str(operation.batch_size)))
        else:
            _add_operation(found, path, operation)
    return Fingerprint(found.identity, found.content, f"{sys.version_info.major}.{sys.version_info.minor}")


def add_source(found: Description, path: str, source: Any) -> None:
    """Adds a source: by its `fingerprint()`, by some records of a plain sequence, or by its attributes as content."""
    if (own := own_fingerprint(source)) is not None:
        _add_own(found, path, own)
        found.content |= {f"{path}.{name}": mark for name, mark in _content_marks(source).items()}
        _add_silent_parts(found, path, source)
    elif type(source) in (list, tuple, np.ndarray):
        what = f"{source.dtype} array {source.shape}" if isinstance(source, np.ndarray) else type(source).__name__
        records = [text_of(source[key]) for key in spread(len(source), SOURCE_RECORDS)]
        found.identity[path] = f"{len(source)} records of {what} {crc_of(records)}"
    elif type(source) is range:
        found.identity |= {path: f"{len(source)} records of range"}
        found.identity |= {f"{path}.{name}": str(getattr(source, name)) for name in ("start", "stop", "step")}
    else:
        found.add_object(path, source, f"{len(source)} records of {written_name(type(source))}", is_content=True)


def _content_marks(source: Any) -> dict[str, str]:
    """Returns the marks of a source that knows its fingerprint; of more than MAX_MARKS, one for all."""
    own = getattr(source, "content_marks", None)
    marks = {printable(name): printable(mark) for name, mark in (own() if callable(own) else {}).items()}
    return marks if len(marks) <= MAX_MARKS else {"content": crc_of(map(" ".join, sorted(marks.items())))}


def _add_sampler(found: Description, path: str, sampler: Sampler) -> None:
    if (own := own_fingerprint(sampler)) is None:
        found.add_object(path, sampler, written_name(type(sampler)))
        return
    _add_own(found, path, own)
    found.add_code(path, type(sampler))
    _add_silent_parts(found, path, sampler)


def _add_silent_parts(found: Description, path: str, value: Any) -> None:
    """Adds those parts of a source or sampler that do not say themselves what they are."""
    parts = getattr(value, "parts", None)
    if not isinstance(parts, Mapping):
        return
    silent = {name: part for name, part in parts.items() if not callable(getattr(part, "fingerprint", None))}
    if len(silent) > ENTRY_LIMIT:
        texts = [f"{name} {text_of(part)}" for name, part in silent.items()]
        found.identity[f"{path}.parts"] = f"{len(texts)} parts {crc_of(texts)}"
        return
    for name, part in silent.items():
        if hasattr(part, "__len__") and path == "source":
            add_source(found, f"{path}[{name!r}]", part)
        else:
            _add_sampler(found, f"{path}[{name!r}]", part)


def _add_own(found: Description, path: str, text: str) -> None:
    """Adds what a `fingerprint()` says: each `name=` under a path of its own."""
    if len(text) > OWN_TEXT_LIMIT:
        found.identity[path] = f"{text[:OWN_TEXT_LIMIT]}... {crc_of([text])}"
        return
    first, *others = re.split(r" (?=[A-Za-z_]\w*=)", text)
    named = dict(part.split("=", 1) for part in others)
    if len(named) < len(others):
        found.identity[path] = text
    else:
        found.identity |= {path: first} | {f"{path}.{name}": what for name, what in named.items()}


def _add_operation(found: Description, path: str, operation: Transformation) -> None:
    name = written_name(type(operation))
    kind = next((kind.__name__ for kind in _KINDS if isinstance(operation, kind)), name)
    head = kind if kind == name else f"{kind} {name}"
    if (own := own_fingerprint(operation)) is None:
        found.add_object(path, operation, head)
    else:
        _add_own(found, path, f"{head}: {own}")
        found.add_code(path, type(operation))


def _add_batch(found: Description, path: str, batch: Batch, size: str) -> None:
    """Adds a Batch: its size, its function, and what is not the default."""
    found.identity[path] = "Batch"
    if size:
        found.identity[f"{path}.batch_size"] = size
    found.identity |= {f"{path}.{name}": "True" for name in ("drop_remainder", "pad_remainder") if getattr(batch, name)}
    found.add(f"{path}.batch_fn", batch.batch_fn)
