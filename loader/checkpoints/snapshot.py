"""The objects that a loader is built from, as they were then.

A loader runs on copies of its operations and its sampler, whether it computes in this thread, in others or in worker
processes. So a later change of an attribute reaches none of them, and an operation that changes itself, for instance by
counting its calls, changes its copy. That is why any change of the user's own objects is one that the user has made.

What a description calls identity is copied: the attributes of operations, and the containers, small arrays and objects
of the user's classes that they hold. Everything else is shared: large arrays and containers, functions, locks, files,
and objects of libraries. So is an object that cannot be copied without its class, or that has a `__del__`.
"""

import copy
import copyreg
import functools
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np

from millstream.core.signals import is_from_signal_handler
from millstream.loader.checkpoints.code_digests import is_foreign
from millstream.loader.checkpoints.description import ARRAY_LIMIT, VALUE_LIMIT, Description, declares_attributes
from millstream.loader.checkpoints.fingerprint import add_operations, add_source
from millstream.transforms import Transformation

T = TypeVar("T")
_DEPTH_LIMIT = 32
_LEAVES = (int, float, complex, str, bytes, types.NoneType, type, types.FunctionType, types.ModuleType, np.generic)
_PLAIN = frozenset({bool, int, float, complex, str, bytes, types.NoneType, types.FunctionType})
"""The types whose values cannot change, as far as descriptions tell."""


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
        return attributes if all(type(value) in _PLAIN for _, value in attributes) else None

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
    has_slots = any(vars(kind).get("__slots__") for kind in type(operation).__mro__)
    return [("", operation)] if has_slots else vars(operation).items()


def _may_change(value: Any) -> bool:
    """Returns True for a source or a sampler whose content the program may change."""
    return is_of_user(type(value)) or type(value) in (list, tuple, np.ndarray)


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
    return "-packages" not in file and not any(Path(file).is_relative_to(folder) for folder in folders)


class _Copies:
    """Copies of objects. Each is copied once, and references between them are kept."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._left = 30 * VALUE_LIMIT
        self._depth = 0

    def of(self, value: Any) -> Any:
        if isinstance(value, _LEAVES) or self._depth > _DEPTH_LIMIT:
            return value
        if id(value) not in self._made:
            self._depth += 1
            try:
                self._made[id(value)] = self._copied(value)
            except Exception as error:
                if is_from_signal_handler(error):
                    raise
                # Whatever it is, the pipeline can run on the object itself.
                self._made[id(value)] = value
            finally:
                self._depth -= 1
        return self._made[id(value)]

    def _copied(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            is_shared = type(value) is not np.ndarray or value.nbytes > ARRAY_LIMIT or not value.flags.writeable
            return value if is_shared else value.copy(order="K")
        if isinstance(value, list | dict | set | tuple | frozenset):
            self._left -= len(value)
            is_large = len(value) > VALUE_LIMIT or self._left < 0
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
            is_same = all(made is item for made, item in zip(items, value, strict=True))
            return value if is_same else tuple.__new__(kind, items) if isinstance(value, tuple) else frozenset(items)
        made = self._made[id(value)] = copy.copy(value)
        if isinstance(value, dict):
            for key, item in value.items():
                dict.__setitem__(made, key, self.of(item))
        elif isinstance(value, list):
            list.__setitem__(made, slice(None), [self.of(item) for item in value])
        return made

    def _object(self, value: Any, kind: type) -> Any:
        made: Any = object.__new__(kind)
        self._made[id(value)] = made
        held = {name: getattr(value, name) for name in copyreg._slotnames(kind) if hasattr(value, name)}  # type: ignore[attr-defined]  # noqa: SLF001
        for name, item in held.items():
            object.__setattr__(made, name, self.of(item))
        if hasattr(value, "__dict__"):
            vars(made).update({name: self.of(item) for name, item in vars(value).items()})
        return made
