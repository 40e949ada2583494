"""The fingerprint of a pipeline: the description that a checkpoint compares, and prints if two pipelines differ.

Attributes, class constants and `fingerprint()` of sources, samplers, operations and their attributes declare it. It has
two tiers, identity and content (see `description`). Each text has the path by which a person would reach the value:
`sampler.seed`, `operations[0]._size`.

A loader runs on copies of its operations and its sampler, whether it computes in this thread, in others or in worker
processes. So a later change of an attribute reaches none of them, and an operation that changes itself, for instance by
counting its calls, changes its copy. Any change of the user's own objects was therefore made by the user.
What a description calls identity is copied: the attributes of operations, and the containers, small arrays and objects
of the user's classes that they hold. Everything else is shared: large arrays and containers, functions, locks, files,
and objects of libraries. So is an object that cannot be copied without its class, or that has a `__del__`.
"""

import copy
import copyreg
import dataclasses
import functools
import os
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, final

import numpy as np

from millstream.core.signals import is_from_signal_handler
from millstream.loader.checkpoints.description import (
    ARRAY_LIMIT,
    ENTRY_LIMIT,
    VALUE_LIMIT,
    Description,
    crc_of,
    declared_fingerprint,
    declares_attributes,
    is_foreign,
    printable,
    text_of,
    written_name,
)
from millstream.samplers import Sampler
from millstream.samplers.balanced import BalancedSampler
from millstream.samplers.mixtures.mixture import MixtureSampler
from millstream.sources.digests import spread_keys
from millstream.transforms import (
    Batch,
    Filter,
    FlatMap,
    Map,
    MapWithIndex,
    OnlyFor,
    Pack,
    RandomMap,
    Transformation,
    WithComponent,
)
from millstream.transforms.base import paths_of
from millstream.transforms.components import leaves

SAMPLE_SIZE = 16
"""The number of records of a list, tuple or array that are described."""
OWN_TEXT_LIMIT = 1000
"""The maximum number of characters of a `fingerprint()` that are shown. All of them count."""
MAX_MARKS = 64
"""The maximum number of content marks of a source."""
MAX_CHANGES = 8
"""The maximum number of texts that a state has for changes of the sampler's order; more are one CRC."""


class FirstTurns(NamedTuple):
    """The turns of the components of a mixture.

    Attributes:
        first: for each component that has a sampler the position of its first turn; None if it never has one.
        num_first: the number of components with a turn at position 0, with those that were left out; at least 1.
    """

    first: Sequence[int | None]
    num_first: int


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
        absent: the positions from which on components of a mixture are not needed, which were left out, by the
            beginnings of the paths that texts about them have in other fingerprints.
    """

    identity: Mapping[str, str]
    content: Mapping[str, str]
    python: str
    changes: tuple[tuple[int, str, str], ...] = ()
    absent: tuple[tuple[str, int], ...] = ()

    def before(self, position: int) -> "Fingerprint":
        """Returns the fingerprint of the stream up to a position, which has no `changes`."""
        passed = {path: text for start, path, text in self.changes if start < position}
        weights = {path: text for path, text in passed.items() if path.startswith("sampler.weights_from_")}
        components = {path: text for path, text in passed.items() if path not in weights}
        components = _summarized(components, "sampler.added", ENTRY_LIMIT)
        weights = _summarized(weights, "sampler.changes", MAX_CHANGES)
        return Fingerprint({**self.identity, **components, **weights}, self.content, self.python, absent=self.absent)


def fingerprint_of(source: Any, sampler: Sampler, operations: Sequence[Transformation]) -> Fingerprint:
    """Returns the fingerprint of a pipeline, as `Declared` describes it."""
    return Declared(source, operations).with_sampler(sampler)


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
        self._has_numbers = any(
            isinstance(leaf, WithComponent) for operation in operations for leaf in leaves(operation)
        )
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
        absent: dict[str, int] = {}
        if isinstance(sampler, MixtureSampler):
            if self._kind is None:
                # The order of the components decides which records of the one source they have.
                lengths = ":".join(map(str, sampler.source_lengths))
                found.identity["sampler.source_lengths"] = lengths if len(lengths) <= ENTRY_LIMIT else crc_of([lengths])
            for name, until in sampler.absent.items():
                absent |= {f"source[{name!r}]": until, f"sampler[{name!r}]": until}
            if self._has_numbers:
                _add_numbers(found, sampler)
            absent |= {f"sampler.{label}": until for label, until in sampler.absent_labels.items()}
        found.include(self._operations)
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return Fingerprint(found.identity, found.content, python, tuple(sorted(found.changes)), tuple(absent.items()))


def _add_numbers(found: Description, mixture: MixtureSampler) -> None:
    """Adds the number of each component, which elements have, from the first turn of the component on."""
    counted: dict[str, str] = {}
    for number, (name, turn) in enumerate(zip(mixture.names, mixture.first_turns, strict=True)):
        path = f"sampler.names.index({name!r})"
        if turn == 0:
            counted[path] = str(number)
        elif turn:
            found.changes.append((turn, path, str(number)))
    found.identity |= _summarized(counted, "sampler.names", ENTRY_LIMIT)


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
    elif (declared := declared_fingerprint(source)) is not None:
        found.identity |= _texts_of_value(path, declared)
        marks = source.content_marks() if hasattr(source, "content_marks") else {}
        texts = {f"{path}.{printable(name)}": printable(marks[name]) for name in marks}
        found.content |= _summarized(texts, f"{path}.content", MAX_MARKS)
    elif type(source) in (list, tuple, np.ndarray):
        kind = f"{source.dtype} array {source.shape}" if isinstance(source, np.ndarray) else type(source).__name__
        rows = spread_keys(len(source), SAMPLE_SIZE)
        found.identity[path] = f"{len(source)} records of {kind} {crc_of(text_of(source[row]) for row in rows)}"
    elif type(source) is range:
        found.identity[path] = f"{len(source)} records of {source}"
    else:
        found.add_object(path, source, f"{len(source)} records of {written_name(type(source))}", is_content=True)


def _add_undeclared(found: Description, path: str, sampler: Sampler, turns: FirstTurns | None = None) -> None:
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
    turns: FirstTurns | None = None,
) -> None:
    descriptions = [
        _described(add, f"{path}{name}", component, is_complete=found.is_complete)
        for name, component in components.items()
    ]
    _add_in_turns(found, path, descriptions, turns)


def _add_in_turns(found: Description, path: str, components: Sequence[Description], turns: FirstTurns | None) -> None:
    counted = Description()
    if turns is None or len(turns.first) != len(components):
        turns = FirstTurns([0] * len(components), max(1, len(components)))
    for component, turn in zip(components, turns.first, strict=True):
        # One that is added later, or left out, does not change the texts of the others.
        identity = _summarized(
            component.identity, next(iter(component.identity), path), max(1, ENTRY_LIMIT // turns.num_first)
        )
        if turn == 0:
            counted.identity |= identity
            counted.content |= component.content
        elif turn:
            found.changes += [(turn, text_path, text) for text_path, text in identity.items()]
    limit = ENTRY_LIMIT if turns.num_first <= ENTRY_LIMIT else 0
    found.identity |= _summarized(counted.identity, f"{path}.parts", limit)
    found.content |= _summarized(counted.content, f"{path}.content", MAX_MARKS)


def _described(
    add: Callable[[Description, str, Any], None], path: str, value: Any, *, is_complete: bool = False
) -> Description:
    found = Description(is_complete=is_complete)
    add(found, path, value)
    return found


def _turns_of(sampler: Any) -> FirstTurns | None:
    if not isinstance(sampler, MixtureSampler):
        return None
    named = zip(sampler.names, sampler.first_turns, strict=True)
    return FirstTurns([turn for name, turn in named if name in sampler.parts], max(1, sampler.first_turns.count(0)))


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
    if (declared := declared_fingerprint(value)) is None:
        found.add_object(path, value, kind or written_name(type(value)))
    else:
        found.identity |= _texts_of_value(path, f"{kind}: {declared}" if kind else declared, _starts_of(value))
        found.add_code(path, type(value))


def _texts_of_value(path: str, text: str, starts: Collection[str] = ()) -> dict[str, str]:
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


T = TypeVar("T")
_DEPTH_LIMIT = 32
_LEAVES = (int, float, complex, str, bytes, types.NoneType, type, types.FunctionType, types.ModuleType, np.generic)
_PLAIN = frozenset({bool, int, float, complex, str, bytes, types.NoneType, types.FunctionType, type, np.ufunc})
"""The types whose values cannot change, as far as descriptions tell."""


def _is_plain(value: object) -> bool:
    kind = type(value)
    # A function of a module such as `len`, and not a method of an object that changes.
    return kind in _PLAIN or (
        kind is types.BuiltinFunctionType and isinstance(getattr(value, "__self__", None), types.ModuleType)
    )


@final
class Origin:
    """The objects that a loader or a chain was built from.

    Args:
        sources: the sources, by the names that errors give them.
        held: returns other values, by their names.
        since: the time of the description and the remedy, for errors.

    Raises:
        Exception: an error of a `fingerprint()`.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        sampler: Any,
        operations: Sequence[Transformation],
        held: Callable[[], Mapping[str, Any]] = dict,
        since: str = "the loader was built: build another loader",
    ) -> None:
        self.sources, self.sampler, self.operations = sources, sampler, tuple(operations)
        self._held, self._since = held, since
        self._texts = self._described()
        is_changeable = any(map(_may_change, [sampler, *sources.values()])) or bool(held())
        self._attributes = None if is_changeable else self._plain_attributes()

    def check_unchanged(self) -> None:
        """Raises ValueError if a plain value of one of the objects has changed since then."""
        if self._is_same():
            return
        before, here = self._texts, self._described()
        for path in sorted(before.keys() | here.keys()):
            texts = [each.get(path, "nothing") for each in (before, here)]
            if texts[0] != texts[1]:
                raise ValueError(f"{path} changed from {texts[0]} to {texts[1]} since {self._since}.")

    def _described(self) -> dict[str, str]:
        found = Description(is_identity=is_of_user)
        add_operations(found, self.operations, {})
        if is_of_user(type(self.sampler)):
            found.add_object("sampler", self.sampler, "")
        for name, source in self.sources.items():
            if _may_change(source):
                add_source(found, name, source)
        for name, value in self._held().items():
            found.add(name, value)
        return found.identity

    def _plain_attributes(self) -> list[tuple[str, Any]] | None:
        """Returns the attributes of the operations if none of them can itself change; otherwise None."""
        attributes = [item for operation in self.operations for item in _attributes_of(operation)]
        return attributes if all(_is_plain(value) for _, value in attributes) else None

    def _is_same(self) -> bool:
        """Returns True if the attributes are the same objects, so that no description is needed to compare them."""
        before, here = self._attributes, self._plain_attributes()
        return (
            before is not None
            and here is not None
            and len(before) == len(here)
            and all(name == other and value is item for (name, value), (other, item) in zip(before, here, strict=True))
        )


def _attributes_of(operation: Transformation) -> Iterable[tuple[str, Any]]:
    return [("", operation)] if copyreg._slotnames(type(operation)) else vars(operation).items()  # type: ignore[attr-defined]  # noqa: SLF001


def _may_change(value: Any) -> bool:
    """Returns True for a source or a sampler whose content the program may change."""
    return is_of_user(type(value)) or type(value) in (list, tuple, np.ndarray)


def slots_of(value: object) -> dict[str, Any]:
    """Returns the values that an object has in slots, by the names of these."""
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]  # noqa: SLF001
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def snapshot_of(values: Sequence[T]) -> tuple[T, ...]:
    """Returns copies of operations or samplers. Objects that several of them hold are copied once."""
    copies = _Copies()
    return tuple(map(copies.of, values))


def is_of_user(kind: type) -> bool:
    """Returns True for a class of the user's own code, that of its bases included, and not of a library."""
    modules = [base.__module__ for base in kind.__mro__ if base is not object]
    # The operations of Grain's users derive from its classes.
    return not is_foreign(kind.__module__) and all(
        is_foreign(name) or name.startswith("grain.") or _is_users(name) for name in modules
    )


@functools.cache
def _is_users(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return name not in sys.builtin_module_names
    folders = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    return "-packages" not in file and not any(file.startswith(os.path.join(folder, "")) for folder in folders)  # noqa: PTH118


class _Copies:
    """Copies of objects. Each is copied once, and references between them are kept."""

    def __init__(self) -> None:
        self._copies: dict[int, Any] = {}
        self._budget = 30 * VALUE_LIMIT
        self._depth = 0

    def of(self, value: Any) -> Any:
        if isinstance(value, _LEAVES) or self._depth > _DEPTH_LIMIT:
            return value
        if id(value) not in self._copies:
            self._depth += 1
            try:
                self._copies[id(value)] = self._copied(value)
            except Exception as error:
                if is_from_signal_handler(error):
                    raise
                # Whatever it is, the pipeline can run on the object itself.
                self._copies[id(value)] = value
            finally:
                self._depth -= 1
        return self._copies[id(value)]

    def _copied(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            is_shared = type(value) is not np.ndarray or value.nbytes > ARRAY_LIMIT or not value.flags.writeable
            return value if is_shared else value.copy(order="K")
        if isinstance(value, list | dict | set | tuple | frozenset):
            self._budget -= len(value)
            is_large = len(value) > VALUE_LIMIT or self._budget < 0
            return value if is_large else self._container(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.of(value.__self__))
        if isinstance(value, functools.partial):
            keywords = {name: self.of(item) for name, item in value.keywords.items()}
            return type(value)(self.of(value.func), *map(self.of, value.args), **keywords)
        kind = type(value)
        is_copied = isinstance(value, Transformation) or declares_attributes(value) or is_of_user(kind)
        return self._object(value, kind) if is_copied and not hasattr(kind, "__del__") else value

    def _container(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, tuple | frozenset):
            items = [self.of(item) for item in value]
            is_same = all(copied is item for copied, item in zip(items, value, strict=True))
            return value if is_same else tuple.__new__(kind, items) if isinstance(value, tuple) else frozenset(items)
        copied = self._copies[id(value)] = copy.copy(value)
        if isinstance(value, dict):
            for key, item in value.items():
                dict.__setitem__(copied, key, self.of(item))
        elif isinstance(value, list):
            list.__setitem__(copied, slice(None), [self.of(item) for item in value])
        return copied

    def _object(self, value: Any, kind: type) -> Any:
        copied: Any = object.__new__(kind)
        self._copies[id(value)] = copied
        for name, item in slots_of(value).items():
            object.__setattr__(copied, name, self.of(item))
        if hasattr(value, "__dict__"):
            vars(copied).update({name: self.of(item) for name, item in vars(value).items()})
        return copied
