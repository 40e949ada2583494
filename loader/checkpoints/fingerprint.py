"""Which stream a loader makes, in words: what a checkpoint compares, and what it shows where two differ.

Words stand under the path by which a person would reach what they describe: `sampler.seed`, `operations[0]._size`. The
marks of code are apart, because changed code may well make the same stream.
"""

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np

from millstream.loader.checkpoints.contents import crc_of
from millstream.loader.checkpoints.words import ENTRY_LIMIT, Description, Words, describe, printable, spread
from millstream.samplers import Sampler
from millstream.transforms import Batch, Filter, FlatMap, Map, MapWithIndex, OnlyFor, Pack, RandomMap, Transformation

SOURCE_RECORDS = 16
"""How many records of a plain sequence are looked at."""
OWN_WORDS_LIMIT = 1000
"""The most characters of what a source or sampler says of itself; more of it counts, but is not shown."""

_KINDS = (Map, RandomMap, MapWithIndex, Filter, FlatMap, OnlyFor, Pack)


@final
@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Which stream a state belongs to.

    Attributes:
        words: what decides the stream, by path: the source, the sampler without its number of epochs, the operations.
        code: the marks of the code that they run, by the path of the part and the name of the function.
        python: the version of Python whose bytecode was marked.
    """

    words: Mapping[str, str]
    code: Mapping[str, Mapping[str, str]]
    python: str


def fingerprint_of(
    source: Any, sampler: Sampler, operations: Sequence[Transformation], sizes: Mapping[int, str] | None = None
) -> Fingerprint:
    """Returns the fingerprint of a pipeline.

    Source and sampler say what they are by `fingerprint()` if they have it. Records are read, SOURCE_RECORDS of them,
    only of a list, tuple or array.

    Args:
        source: where records come from.
        sampler: their order.
        operations: what is done with them.
        sizes: what to say of the size of a Batch, by its number among the operations, where it is not the size that
            decides the stream. By default that of the first Batch is left out: a state compares the global batch, which
            is that size times the shards.

    Raises:
        TypeError: a `fingerprint()` returned something else than a string.
    """
    words: dict[str, str] = {}
    code: dict[str, dict[str, str]] = {}
    if sizes is None:
        first = next((number for number, operation in enumerate(operations) if isinstance(operation, Batch)), -1)
        sizes = {first: ""}
    for path, texts, marks in _parts(source, sampler, operations, sizes):
        words |= texts
        if marks:
            code[path] = _listed_code(marks)
    return Fingerprint(words, code, f"{sys.version_info.major}.{sys.version_info.minor}")


def _parts(
    source: Any, sampler: Sampler, operations: Sequence[Transformation], sizes: Mapping[int, str]
) -> Iterator[tuple[str, Mapping[str, str], Mapping[str, int]]]:
    """Yields each part of a pipeline: its path, its words by path, and the marks of its code."""
    yield "source", *source_words(source)
    yield "sampler", *_sampler_words(sampler)
    for number, operation in enumerate(operations):
        path = f"operations[{number}]"
        if type(operation) is Batch:
            words, marks = _batch_words(operation, sizes.get(number, str(operation.batch_size)))
        else:
            words, marks = _operation_words(operation)
        yield path, words.listed(path), marks


def source_words(source: Any) -> tuple[Mapping[str, str], Mapping[str, int]]:
    """Returns a source in words, by path, and the marks of its code."""
    if (own := _own_words("source", source)) is not None:
        return own | _silent_parts("source", source), {}
    if type(source) in (list, tuple, np.ndarray):
        what = f"{source.dtype} array {source.shape}" if isinstance(source, np.ndarray) else type(source).__name__
        records = [describe(source[key]).words.text for key in spread(len(source), SOURCE_RECORDS)]
        return {"source": f"{len(source)} records of {what} {crc_of(records)}"}, {}
    words, code = describe(source)
    listed = words.listed("source")
    return listed | {"source": f"{len(source)} records of {listed['source']}"}, code


def _sampler_words(sampler: Sampler) -> tuple[Mapping[str, str], Mapping[str, int]]:
    words, code = describe(sampler)
    own = _own_words("sampler", sampler)
    return words.listed("sampler") if own is None else own | _silent_parts("sampler", sampler), code


def _silent_parts(path: str, value: Any) -> dict[str, str]:
    """Returns the words of those parts of a source or sampler that do not say themselves what they are."""
    parts = getattr(value, "parts", None)
    if not isinstance(parts, Mapping):
        return {}
    silent = {name: part for name, part in parts.items() if not callable(getattr(part, "fingerprint", None))}
    words = {f"{path}[{name!r}]": describe(part).words.text for name, part in silent.items()}
    if len(words) <= ENTRY_LIMIT:
        return words
    return {f"{path}.parts": f"{len(words)} parts {crc_of([f'{name} {text}' for name, text in words.items()])}"}


def _own_words(path: str, value: Any) -> dict[str, str] | None:
    """Returns what a source or sampler says of itself, each `name=` under a path of its own; None where it does not."""
    own = getattr(value, "fingerprint", None)
    if not callable(own):
        return None
    text = own()
    if not isinstance(text, str):
        raise TypeError(f"{type(value).__name__}.fingerprint() must return a str, got {type(text).__name__}.")
    text = printable(text)
    if len(text) > OWN_WORDS_LIMIT:
        return {path: f"{text[:OWN_WORDS_LIMIT]}... {crc_of([text])}"}
    first, *others = re.split(r" (?=[A-Za-z_]\w*=)", text)
    named = dict(part.split("=", 1) for part in others)
    if len(named) < len(others):
        return {path: text}
    return {path: first} | {f"{path}.{name}": what for name, what in named.items()}


def _operation_words(operation: Transformation) -> Description:
    """Returns an operation in words, which begin with its kind."""
    words, code = describe(operation)
    kinds = (kind.__name__ for kind in (*_KINDS, Batch) if isinstance(operation, kind))
    kind = next(kinds, type(operation).__name__)
    if words.head != kind:  # A subclass of the user's.
        words = words._replace(text=f"{kind} {words.text}", head=f"{kind} {words.head}")
    return Description(words, code)


def _batch_words(batch: Batch, size: str) -> Description:
    """Returns a Batch in words: its size, its function, and what is not as it usually is."""
    function, code = describe(batch.batch_fn)
    shown = {"batch_size": size} if size else {}
    shown |= {name: "True" for name in ("drop_remainder", "pad_remainder") if getattr(batch, name)}
    parts = [(f".{name}", Words(text)) for name, text in shown.items()]
    parts += [] if batch.batch_fn is None else [(".batch_fn", function)]
    return Description(Words("Batch", "Batch", tuple(parts)), code)


def _listed_code(marks: Mapping[str, int]) -> dict[str, str]:
    """Returns the marks as they are saved: the first ones each for itself, the rest as one."""
    shown = {printable(name): f"{mark:08x}" for name, mark in list(marks.items())[:ENTRY_LIMIT]}
    rest = [f"{name} {mark}" for name, mark in list(marks.items())[ENTRY_LIMIT:]]
    return shown | {f"{len(rest)} others": crc_of(rest)[1:]} if rest else shown
