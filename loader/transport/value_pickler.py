"""The pickler of all that crosses between processes: arrays by their memory, what a script defines by value."""

import io
import pickle
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from millstream.columnar import Allocate
from millstream.loader.transport.array_pickles import Reduced, as_memmap, reduce_array, reduce_tensor
from millstream.loader.transport.definitions import NAMED, OTHERS, reduce_class
from millstream.loader.transport.importable_modules import has_name, is_importable

BinaryFile = io.BytesIO | io.RawIOBase

BufferCallback = Callable[[pickle.PickleBuffer], bool]
"""Takes a buffer out of a pickle, or returns True to leave it in."""

# By identity: a metaclass may define equality as it likes.
_NAMED = {id(kind): reduce for kind, reduce in NAMED.items()}
_OTHERS = {id(kind): reduce for kind, reduce in OTHERS.items()}

# What NumPy makes arrays of again, whose pickles name it each time.
_OF_NUMPY = frozenset({id(np.dtype), *map(id, np.empty(0).__reduce_ex__(5)[:1])})
_SPECIAL = frozenset({*_NAMED, *_OTHERS, *map(id, (types.FunctionType, types.ModuleType, typing.TypeVar, np.memmap))})


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    """A pickler that knows more kinds of values than cloudpickle.

    Args:
        file: where to write.
        buffer_callback: what to do with the memory of arrays; by default it stays in the pickle.
        allocate: gives the memory for arrays that are not contiguous, which have to be copied.
    """

    def __init__(
        self, file: BinaryFile, buffer_callback: BufferCallback | None = None, allocate: Allocate = np.empty
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._allocate = allocate
        # Who has tensors has imported PyTorch.
        self._tensor = getattr(sys.modules.get("torch"), "Tensor", None)
        self._by_value: dict[str, bool] = {}
        self._registered: list[types.ModuleType] = []

    def dump(self, value: Any) -> None:
        """Writes the pickle of a value.

        Raises:
            Exception: the value cannot be pickled.
        """
        try:
            super().dump(value)
        finally:
            while self._registered:
                cloudpickle.unregister_pickle_by_value(self._registered.pop())

    def reducer_override(self, value: Any) -> Any:
        """Returns how to pickle a value, NotImplemented for pickle's own way."""
        kind = type(value)
        if kind is np.ndarray:
            return NotImplemented if value.dtype.hasobject else self.reduce_array(value)
        if id(value) in _OF_NUMPY:
            return NotImplemented
        if id(kind) in _SPECIAL or isinstance(value, type):
            return self._reduce_special(value, id(kind))
        if kind is self._tensor:
            return reduce_tensor(value) or NotImplemented
        # Nothing else is special to cloudpickle, either: to ask it takes as long as all of this.
        return NotImplemented

    def reduce_array(self, array: NDArray[Any]) -> Reduced:
        """Returns how to pickle an array without Python objects."""
        return reduce_array(array, self._allocate)

    def in_file(self, _: NDArray[Any]) -> Reduced | None:
        """Returns how to pickle an array by its place in a file, None to send its bytes."""
        return None

    def _reduce_special(self, value: Any, kind: int) -> Any:
        """Returns how to pickle a class, or a value of one of the special kinds, which is given by its identity."""
        if kind in _NAMED:
            return _NAMED[kind](value) if self.is_by_value(value) else NotImplemented
        if kind in _OTHERS:
            return _OTHERS[kind](value)
        if isinstance(value, np.memmap):
            # NumPy puts the bytes of a subclass into the pickle, where nobody can share them.
            return NotImplemented if value.dtype.hasobject else self.in_file(value) or (as_memmap, (np.asarray(value),))
        self._module_is_by_value(value.__name__ if isinstance(value, types.ModuleType) else value.__module__)
        reduced = super().reducer_override(value)
        # A short recipe is that of a class such as `type(None)`.
        has_recipe = (
            isinstance(value, type) and isinstance(reduced, tuple) and len(reduced) > len(("call", "arguments"))
        )
        return reduce_class(value, reduced, self.is_by_value) if has_recipe else reduced

    def is_by_value(self, value: Any) -> bool:
        """Returns whether a class, a function or the like crosses by value."""
        name = value.__module__
        return self._module_is_by_value(name) or not has_name(value, sys.modules.get(name))

    def _module_is_by_value(self, name: Any) -> bool:
        """Returns whether what a module defines crosses by value, and sees to it that cloudpickle agrees."""
        if not isinstance(name, str):
            return True
        found = self._by_value.get(name)
        if found is None:
            registered = any(
                f"{name}.".startswith(f"{by_value}.") for by_value in cloudpickle.list_registry_pickle_by_value()
            )
            found = self._by_value[name] = registered or not is_importable(name)
            module = sys.modules.get(name)
            if found and not registered and module is not None and name != "__main__":
                cloudpickle.register_pickle_by_value(module)
                self._registered.append(module)
        return found
