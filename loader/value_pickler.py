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
from millstream.loader.array_pickles import Reduced, as_memmap, reduce_array, reduce_tensor
from millstream.loader.definitions import NAMED, OTHERS, reduce_class
from millstream.loader.importable_modules import has_name, is_importable

BinaryFile = io.BytesIO | io.RawIOBase

BufferCallback = Callable[[pickle.PickleBuffer], bool]
"""Takes a buffer out of a pickle, or returns True to leave it in."""

# By identity: a metaclass may define equality as it likes.
_NAMED = {id(kind): reduce for kind, reduce in NAMED.items()}
_OTHERS = {id(kind): reduce for kind, reduce in OTHERS.items()}


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
        if kind is np.ndarray or kind is np.memmap:
            return NotImplemented if value.dtype.hasobject else self.reduce_array(value)
        if kind is self._tensor:
            return reduce_tensor(value) or NotImplemented
        number = id(kind)
        if number in _NAMED:
            return _NAMED[number](value) if self.is_by_value(value) else NotImplemented
        if number in _OTHERS:
            return _OTHERS[number](value)
        is_class = isinstance(value, type)
        if is_class or kind is types.FunctionType or kind is types.ModuleType or kind is typing.TypeVar:
            self._module_is_by_value(value.__name__ if kind is types.ModuleType else value.__module__)
        reduced = super().reducer_override(value)
        # A short recipe is that of a class such as `type(None)`.
        has_recipe = is_class and isinstance(reduced, tuple) and len(reduced) > len(("function", "arguments"))
        return reduce_class(value, reduced, self.is_by_value) if has_recipe else reduced

    def reduce_array(self, array: NDArray[Any]) -> Reduced:
        """Returns how to pickle an array without Python objects."""
        # NumPy puts the bytes of a subclass into the pickle, where nobody can share them.
        is_memmap = isinstance(array, np.memmap)
        return (as_memmap, (np.asarray(array),)) if is_memmap else reduce_array(array, self._allocate)

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
