"""The fingerprint of a pipeline: the description that a checkpoint compares, and prints if two pipelines differ.

Attributes, class constants and `fingerprint()` of sources, samplers, operations and their attributes declare it. It has
two tiers, identity and content (see `description`). Each text has the path by which a person would reach the value:
`sampler.seed`, `operations[0]._size`.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np

from millstream.loader.checkpoints.code_digests import crc_of, is_foreign, written_name
from millstream.loader.checkpoints.description import (
    ENTRY_LIMIT,
    Description,
    own_fingerprint,
    printable,
    text_of,
)
from millstream.samplers import Sampler
from millstream.samplers.balanced import BalancedSampler
from millstream.samplers.mixtures.mixture import MixtureSampler
from millstream.transforms import Batch, Filter, FlatMap, Map, MapWithIndex, OnlyFor, Pack, RandomMap, Transformation
from millstream.transforms.transformation import paths_of

SAMPLE_SIZE = 16
"""The number of records of a list, tuple or array that are described."""
OWN_TEXT_LIMIT = 1000
"""The maximum number of characters of a `fingerprint()` that are shown. All of them count."""
MAX_MARKS = 64
"""The maximum number of content marks of a source."""
MAX_CHANGES = 8
"""The maximum number of texts that a state has for changes of the sampler's order; more are one CRC."""

Turns: TypeAlias = Sequence[int | None]
"""For each component of a mixture the position from which on it counts, or None if it never counts; empty for 0s."""
_KINDS = (Map, RandomMap, MapWithIndex, Filter, FlatMap, OnlyFor, Pack, Batch)


@final
@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of a pipeline.

    Attributes:
        identity: the texts that decide the stream, by path. The number of epochs is not among them.
        content: the digests of what may change the stream, by path.
        python: the version of Python whose bytecode was digested.
        changes: further texts of the identity, as (position, path, text), positions ascending: each counts only for
            what comes after its position, such as the weights of a mixture from there on.
    """

    identity: Mapping[str, str]
    content: Mapping[str, str]
    python: str
    changes: tuple[tuple[int, str, str], ...] = ()

    def before(self, position: int) -> "Fingerprint":
        """Returns the fingerprint of the stream up to a position, which has no `changes`."""
        passed = {path: text for start, path, text in self.changes if start < position}
        passed = _summarized(passed, "sampler.changes", MAX_CHANGES)
        return Fingerprint({**self.identity, **passed}, self.content, self.python)


def fingerprint_of(
    source: Any, sampler: Sampler, operations: Sequence[Transformation], sizes: Mapping[int, str] | None = None
) -> Fingerprint:
    """Returns the fingerprint of a pipeline, as `Declared` describes it."""
    return Declared(source, operations, sizes).with_sampler(sampler)


@final
class Declared:
    """The description of a source and operations, made once, whatever they do to themselves later.

    Records are read only of a list, tuple or array: SAMPLE_SIZE of them.

    Args:
        sizes: the text for the size of a Batch, by its number among the operations, if the stream is decided by another
            size than its own. By default that of the first Batch is left out: a state compares the global batch, which
            is that size times the number of shards.
    """

    def __init__(
        self, source: Any, operations: Sequence[Transformation], sizes: Mapping[int, str] | None = None
    ) -> None:
        components = _components_of(source)
        self._kind = None if components is None else written_name(type(source))
        self._sources = [
            _described(add_source, f"source{name}", component)
            for name, component in ({"": source} if components is None else components).items()
        ]
        self._operations = Description()
        if sizes is None:
            sizes = {next((row for row, operation in enumerate(operations) if isinstance(operation, Batch)), -1): ""}
        add_operations(self._operations, operations, sizes)

    def with_sampler(self, sampler: Sampler) -> Fingerprint:
        """Returns the fingerprint of the pipeline with a sampler. Only the sampler is described."""
        found, turns = Description(is_complete=True), _turns_of(sampler)
        if self._kind is None:
            found.include(self._sources[0])
        else:
            found.identity["source"] = self._kind
            _add_in_turns(found, "source", self._sources, turns)
        add_sampler(found, sampler)
        found.include(self._operations)
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return Fingerprint(found.identity, found.content, python, tuple(sorted(found.changes)))


def add_operations(found: Description, operations: Sequence[Transformation], sizes: Mapping[int, str]) -> None:
    for row, (path, operation) in enumerate(zip(paths_of(operations), operations, strict=True)):
        _add_operation(found, path, operation)
        if row in sizes:
            del found.identity[f"{path}.batch_size"]
            found.identity |= {f"{path}.batch_size": sizes[row]} if sizes[row] else {}


def add_sampler(found: Description, sampler: Sampler) -> None:
    if hasattr(sampler, "fingerprint"):
        _add_declared(found, "sampler", sampler, "")
    _add_undeclared(found, "sampler", sampler, _turns_of(sampler))
    for name, start in _starts_of(sampler).items():
        if (text := found.identity.pop(path := f"sampler.{name}", None)) is not None:
            found.changes.append((start, path, text))


def add_source(found: Description, path: str, source: Any) -> None:
    """Adds a source: by its `fingerprint()`, by SAMPLE_SIZE records of a list, or by its attributes as content."""
    if (components := _components_of(source)) is not None:
        found.identity[path] = written_name(type(source))
        _add_components(found, path, components, add_source)
    elif (own := own_fingerprint(source)) is not None:
        found.identity |= _own_texts(path, own)
        marks = source.content_marks() if hasattr(source, "content_marks") else {}
        texts = {f"{path}.{printable(name)}": printable(marks[name]) for name in marks}
        found.content |= _summarized(texts, f"{path}.content", MAX_MARKS)
    elif type(source) in (list, tuple, np.ndarray):
        kind = f"{source.dtype} array {source.shape}" if isinstance(source, np.ndarray) else type(source).__name__
        rows = np.linspace(0, len(source) - 1, min(len(source), SAMPLE_SIZE), dtype=np.int64).tolist()
        found.identity[path] = f"{len(source)} records of {kind} {crc_of(text_of(source[row]) for row in rows)}"
    elif type(source) is range:
        found.identity[path] = f"{len(source)} records of {source}"
    else:
        found.add_object(path, source, f"{len(source)} records of {written_name(type(source))}", is_content=True)


def _add_undeclared(found: Description, path: str, sampler: Sampler, turns: Turns = ()) -> None:
    """Adds what the `fingerprint()` of a sampler or of a combination does not have: other attributes, and code."""
    if hasattr(sampler, "fingerprint"):
        found.add_code(path, type(sampler))
    else:
        _add_declared(found, path, sampler, "")
    if (components := _components_of(sampler)) is not None:
        _add_components(found, path, components, _add_undeclared, turns)


def _add_components(
    found: Description,
    path: str,
    components: Mapping[str, Any],
    add: Callable[[Description, str, Any], None],
    turns: Turns = (),
) -> None:
    own = [
        _described(add, f"{path}{name}", component, is_complete=found.is_complete)
        for name, component in components.items()
    ]
    _add_in_turns(found, path, own, turns)


def _add_in_turns(found: Description, path: str, components: Sequence[Description], turns: Turns) -> None:
    counted = Description()
    turns = turns if len(turns) == len(components) else [0] * len(components)
    for own, turn in zip(components, turns, strict=True):
        if turn == 0:
            counted.include(own)
        elif turn:
            found.changes += [(turn, text_path, text) for text_path, text in own.identity.items()]
    found.identity |= _summarized(counted.identity, f"{path}.parts", ENTRY_LIMIT)
    found.content |= _summarized(counted.content, f"{path}.content", MAX_MARKS)


def _described(
    add: Callable[[Description, str, Any], None], path: str, value: Any, *, is_complete: bool = False
) -> Description:
    found = Description(is_complete=is_complete)
    add(found, path, value)
    return found


def _turns_of(sampler: Any) -> Turns:
    return sampler.first_turns if isinstance(sampler, MixtureSampler) else ()


def _starts_of(sampler: Any) -> Mapping[str, int]:
    """Returns the positions from which on texts of the fingerprint count, by the name of the text."""
    starts: Mapping[str, int] = (
        getattr(sampler, "fingerprint_starts", {}) if is_foreign(type(sampler).__module__) else {}
    )
    return starts


def _summarized(texts: dict[str, str], path: str, limit: int) -> dict[str, str]:
    """Returns texts unchanged, or one CRC of all at a path if there are more than a limit."""
    return texts if len(texts) <= limit else {path: f"{len(texts)} {crc_of(map(' '.join, sorted(texts.items())))}"}


def _components_of(value: Any) -> Mapping[str, Any] | None:
    """Returns the sources or samplers that millstream's own class combines, by their paths; None for anything else."""
    if isinstance(value, BalancedSampler):
        return {".order": value.order}
    named = getattr(value, "parts", None) if is_foreign(type(value).__module__) else None
    return {f"[{name!r}]": component for name, component in named.items()} if isinstance(named, Mapping) else None


def _add_operation(found: Description, path: str, operation: Transformation) -> None:
    _add_declared(found, path, operation, _kind_of(operation))
    if isinstance(operation, OnlyFor):
        # One by one: as a tuple, all of them would be content if one is a function.
        for texts in (found.identity, found.content):
            texts.pop(f"{path}.operations", None)
        for number, inner in enumerate(operation.operations):
            _add_operation(found, f"{path}.operations[{number}]", inner)


def _add_declared(found: Description, path: str, value: Any, kind: str) -> None:
    """Adds a sampler or an operation: by its `fingerprint()`, or by its attributes."""
    if (own := own_fingerprint(value)) is None:
        found.add_object(path, value, kind or written_name(type(value)))
    else:
        found.identity |= _own_texts(path, f"{kind}: {own}" if kind else own, _starts_of(value))
        found.add_code(path, type(value))


def _own_texts(path: str, text: str, starts: Collection[str] = ()) -> dict[str, str]:
    """Returns the texts of a `fingerprint()`: each `name=` has a path of its own. `starts` are always shown."""
    first, *fields = re.split(r" (?=[A-Za-z_]\w*=)", text)
    named = {f"{path}.{name}": value for name, _, value in (field.partition("=") for field in fields)}
    shown = len(text) - sum(1 + len(field) for field in fields if field.partition("=")[0] in starts)
    if shown > OWN_TEXT_LIMIT:
        return {path: f"{text[:OWN_TEXT_LIMIT]}... {crc_of([text])}"}
    return {path: first, **named} if len(named) == len(fields) else {path: text}


def _kind_of(operation: Transformation) -> str:
    name = written_name(type(operation))
    kind = next((kind.__name__ for kind in _KINDS if isinstance(operation, kind)), name)
    return kind if kind == name else f"{kind} {name}"
