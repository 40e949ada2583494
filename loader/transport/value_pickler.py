"""The base of all picklers: arrays by their memory, definitions of scripts by value."""

import io
import pickle
import sys
import threading
import types
import typing
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from millstream.core.columnar import Allocate
from millstream.core.signals import SignalSafeLock
from millstream.loader.transport.array_pickles import MappedFiles, Reduced, as_memmap, reduce_array, reduce_tensor
from millstream.loader.transport.definitions import NAMED, OTHERS, reduce_class
from millstream.loader.transport.importable_modules import has_name, is_importable

BinaryFile = io.BytesIO | io.RawIOBase

BufferCallback = Callable[[pickle.PickleBuffer], bool]
"""A function that takes a buffer out of a pickle, or returns True to leave it in."""

# By identity: a metaclass may define equality in any way.
_NAMED = {id(kind): reduce for kind, reduce in NAMED.items()}
_OTHERS = {id(kind): reduce for kind, reduce in OTHERS.items()}

# The function and the class that pickles of arrays refer to.
_OF_NUMPY = frozenset({id(np.dtype), *map(id, np.empty(0).__reduce_ex__(5)[:1])})
_SPECIAL = frozenset({*_NAMED, *_OTHERS, *map(id, (types.FunctionType, types.ModuleType, typing.TypeVar, np.memmap))})


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    """A pickler that supports more types than cloudpickle.

    Args:
        buffer_callback: takes the memory of arrays out of the pickle; by default it stays there.
        allocate: allocates the copies of arrays that are not contiguous.
        files: the mapped files whose arrays are pickled by their offsets; None to send their bytes.
    """

    def __init__(
        self,
        file: BinaryFile,
        buffer_callback: BufferCallback | None = None,
        allocate: Allocate = np.empty,
        files: MappedFiles | None = None,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._allocate = allocate
        self._files = files
        # A program with tensors has imported PyTorch.
        self._tensor = getattr(sys.modules.get("torch"), "Tensor", None)
        # A program with absl has one object that holds all flags. Every process has its own.
        self._flags = getattr(sys.modules.get("absl.flags"), "FLAGS", None)
        self._by_value: dict[str, bool] = {}
        self._registered: list[types.ModuleType] = []

    def dump(self, value: Any) -> None:
        try:
            super().dump(value)
        finally:
            if self._registered:
                _unregister(self._registered)

    def reducer_override(self, value: Any) -> Any:  # noqa: PLR0911  (a kind each)
        kind = type(value)
        if kind is np.ndarray:
            if value.dtype.hasobject:
                return NotImplemented
            return self._in_file(value) or reduce_array(value, self._allocate)
        if id(value) in _OF_NUMPY:
            return NotImplemented
        if id(kind) in _SPECIAL or isinstance(value, type):
            return self._reduce_special(value, id(kind))
        if kind is self._tensor:
            return reduce_tensor(value) or NotImplemented
        if value is self._flags:
            return "FLAGS"
        # Nothing else is special to cloudpickle, whose own override would take as long as all of the above.
        return NotImplemented

    def _in_file(self, array: NDArray[Any]) -> Reduced | None:
        return None if self._files is None else self._files.reduce(array)

    def _reduce_special(self, value: Any, kind: int) -> Any:
        if kind in _NAMED:
            return _NAMED[kind](value) if self.is_by_value(value) else NotImplemented
        if kind in _OTHERS:
            return _OTHERS[kind](value)
        if isinstance(value, np.memmap):
            # NumPy pickles the bytes of a subclass in band, where they cannot be shared.
            if value.dtype.hasobject:
                return NotImplemented
            return self._in_file(value) or (as_memmap, (np.asarray(value),))
        self._module_is_by_value(value.__name__ if isinstance(value, types.ModuleType) else value.__module__)
        reduced = super().reducer_override(value)
        # Classes such as `type(None)` have a short reduction.
        has_recipe = (
            isinstance(value, type) and isinstance(reduced, tuple) and len(reduced) > len(("call", "arguments"))
        )
        return reduce_class(value, reduced) if has_recipe else reduced

    def is_by_value(self, value: Any) -> bool:
        name = value.__module__
        return self._module_is_by_value(name) or not has_name(value, sys.modules.get(name))

    def _module_is_by_value(self, name: Any) -> bool:
        """Returns True if the definitions of a module cross by value, and tells cloudpickle so."""
        if not isinstance(name, str):
            return True
        found = self._by_value.get(name)
        if found is None:
            found = self._by_value[name] = _register(name, self._registered)
        return found


_registering = SignalSafeLock(threading.RLock())
_users: dict[str, set[int]] = {}
"""The picklers, in any thread, that need each module that this module has registered."""


def _register(name: str, registered: list[types.ModuleType]) -> bool:
    """Returns True if the definitions of a module cross by value, and tells cloudpickle so, for the whole process.

    A module that the user has not registered is appended to `registered`. It stays until all picklers have ended.
    """
    importable = is_importable(name)
    with _registering:
        by_user = cloudpickle.list_registry_pickle_by_value() - _users.keys()
        if any(f"{name}.".startswith(f"{by_value}.") for by_value in by_user):
            return True
        module = sys.modules.get(name)
        if not importable and module is not None and name != "__main__":
            registered.append(module)
            _users.setdefault(module.__name__, set()).add(id(registered))
            cloudpickle.register_pickle_by_value(module)
    return not importable


def _unregister(registered: list[types.ModuleType]) -> None:
    with _registering:
        while registered:
            name = registered[-1].__name__
            _users.get(name, set()).discard(id(registered))
            if not _users.get(name) and name in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.unregister_pickle_by_value(registered[-1])
                _users.pop(name, None)
            registered.pop()
