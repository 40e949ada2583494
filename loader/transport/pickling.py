"""Pickling for other processes: arrays by their memory, definitions of scripts by value, and their classes by number.

cloudpickle pickles the functions and classes of a script with their code. `ValuePickler`, the base of all picklers,
adds

    * arrays by their memory, or by the file that they lie in (`array_pickles`),
    * caches (`functools.cache`), cached properties, `NewType` and similar objects. They are rebuilt, a cache empty,
    * code with the name of its file, so that tracebacks and stacks of workers show the lines of a script,
    * partial methods. Since Python 3.14, they cannot be created without their function,
    * weak dictionaries, which become their current content,
    * classes with `__slots__`. Without help, their instances would come back with a `__dict__`,
    * enums, whose members keep their attributes.

A class that crosses by value with a pipeline is numbered (`ClassTable`), and everything pickled later, in either
direction, refers to it by number. Outputs would be slow with the class by value, and wrong: each output would overwrite
the methods and attributes of the consumer's class with the worker's copies.
"""

import dataclasses
import functools
import io
import pickle
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, final

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from millstream.core.columnar import Allocate
from millstream.core.signals import SignalSafeLock
from millstream.loader.transport.array_pickles import MappedFiles, Reduced, as_memmap, reduce_array, reduce_tensor
from millstream.loader.transport.importable_modules import has_name, is_importable


def reduce_cache(cache: Any) -> Reduced:
    state = {name: value for name, value in vars(cache).items() if name not in ("__wrapped__", "cache_parameters")}
    return rebuild_cache, (cache.__wrapped__, cache.cache_parameters()), state


def rebuild_cache(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_type_variable(value: Any) -> Reduced:
    return type(value), (value.__name__,)


def rebuild_type_alias(kind: Any, name: str, value: Any, parameters: tuple[Any, ...]) -> Any:
    """Creates a type alias. Its parameter is keyword-only, so that a reduction cannot call its class."""
    return kind(name, value, type_params=parameters)


_BY_VALUE_IF_UNIMPORTABLE: dict[type, Callable[[Any], Reduced]] = {
    functools._lru_cache_wrapper: reduce_cache,  # noqa: SLF001  (the type has no public name)
    typing.NewType: lambda value: (typing.NewType, (value.__name__, value.__supertype__), vars(value)),
    typing.ParamSpec: _reduce_type_variable,
    typing.TypeVarTuple: _reduce_type_variable,
}
"""Reductions of values that Python pickles by name, for names that mean nothing in other processes."""

if hasattr(typing, "TypeAliasType"):  # from Python 3.12 on
    _BY_VALUE_IF_UNIMPORTABLE[typing.TypeAliasType] = lambda alias: (
        rebuild_type_alias,
        (type(alias), alias.__name__, alias.__value__, alias.__type_params__),
    )


def _reduce_code(code: types.CodeType) -> Reduced:
    return rebuild_code, (*cloudpickle.Pickler.dispatch_table[types.CodeType](code), code.co_filename)


def rebuild_code(make: Callable[..., types.CodeType], arguments: tuple[Any, ...], file_name: str) -> types.CodeType:
    return make(*arguments).replace(co_filename=file_name)


def _reduce_cached_property(value: Any) -> Reduced:
    # Up to Python 3.11, it has a lock.
    state = {name: item for name, item in vars(value).items() if name != "lock"}
    return rebuild_cached_property, (type(value), value.func), state


def rebuild_cached_property(kind: type[Any], function: Callable[[Any], Any]) -> Any:
    rebuilt: Any = object.__new__(kind)
    functools.cached_property.__init__(rebuilt, function)
    return rebuilt


def rebuild_partial_method(kind: type[Any]) -> Any:
    """Returns a partial method without a function, because its `__new__` requires one since Python 3.14."""
    return object.__new__(kind)


def _reduce_weak_dict(value: Any) -> Reduced:
    return type(value), (dict(value),)


def _reduce_memoryview(value: memoryview) -> Reduced:
    # cloudpickle reduces it to bytes, so that elements would have another type with workers than without.
    return rebuild_memoryview, (np.array(value), value.readonly)


def rebuild_memoryview(content: Any, is_readonly: bool) -> memoryview:
    if is_readonly:
        content.flags.writeable = False
    return memoryview(content)


_ALWAYS_REBUILT: dict[type, Callable[[Any], Reduced]] = {
    types.CodeType: _reduce_code,
    functools.cached_property: _reduce_cached_property,
    functools.partialmethod: lambda value: (rebuild_partial_method, (type(value),), vars(value)),
    weakref.WeakKeyDictionary: _reduce_weak_dict,
    weakref.WeakValueDictionary: _reduce_weak_dict,
    memoryview: _reduce_memoryview,
    # A dataclass field without a default refers to this very object.
    type(dataclasses.MISSING): lambda _: "MISSING",
}
"""Reductions of values that pickle cannot handle, or that are recognised by identity."""


def reduce_class(kind: type, reduced: tuple[Any, ...]) -> Reduced:
    if issubclass(kind, Enum):
        return _with_members(kind, reduced)
    return _with_slots(kind, reduced) if "__slots__" in vars(kind) else reduced


def _with_slots(kind: type, reduced: tuple[Any, ...]) -> Reduced:
    make, (metaclass, name, _, namespace, *identity), (attributes, more), *remainder = reduced
    if "__orig_bases__" in vars(kind):
        # Not as the bases: some, such as NamedTuple, would create a different class.
        namespace = {**namespace, "__orig_bases__": vars(kind)["__orig_bases__"]}
    attributes = {key: value for key, value in attributes.items() if not isinstance(value, types.MemberDescriptorType)}
    attributes["__slots__"] = vars(kind)["__slots__"]
    namespace = {**namespace, "__slots__": _slots(kind)}
    return make, (metaclass, name, kind.__bases__, namespace, *identity), (attributes, more), *remainder


def _slots(kind: type) -> tuple[str, ...]:
    """Returns the slots that a class adds to those of its bases, without name mangling."""
    members_of_class = vars(kind)
    members = [name for name, value in members_of_class.items() if isinstance(value, types.MemberDescriptorType)]
    return *members, *(name for name in ("__dict__", "__weakref__") if name in members_of_class)


def _with_members(kind: type[Enum], reduced: tuple[Any, ...]) -> Reduced:
    make, (bases, name, qualified_name, _, *identity), (attributes, more), _, _, set_state = reduced
    members = {member_name: member.value for member_name, member in kind.__members__.items()}
    attributes = {attribute: value for attribute, value in attributes.items() if attribute not in members}
    of_members = {
        member.name: {key: value for key, value in vars(member).items() if not (key[:1] == key[-1:] == "_")}
        for member in kind
    }
    state = set_state, (attributes, more), of_members
    return make, (bases, name, qualified_name, members, *identity), state, None, None, set_enum_state


def set_enum_state(kind: type[Enum], state: tuple[Any, ...]) -> None:
    set_state, attributes, of_members = state
    set_state(kind, attributes)
    for name, values in of_members.items():
        vars(kind[name]).update(values)


BinaryFile = io.BytesIO | io.RawIOBase

BufferCallback = Callable[[pickle.PickleBuffer], bool]
"""A function that takes a buffer out of a pickle, or returns True to leave it in."""


def taking_out(taken: list[Any], min_bytes: int) -> BufferCallback:
    """Returns a function that moves the memory of larger buffers from a pickle to a list."""

    def take_out(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= min_bytes:
            taken.append(raw)
        return raw.nbytes < min_bytes

    return take_out


_OF_NUMPY = frozenset({id(np.dtype), *map(id, np.empty(0).__reduce_ex__(5)[:1])})
"""The function and the class that pickles of arrays refer to."""


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    """A pickler that supports more types than cloudpickle.

    Args:
        buffer_callback: takes the memory of arrays out of the pickle; by default it stays there.
        allocate: allocates the copies of arrays that are not contiguous.
        files: the mapped files whose arrays are pickled by their offsets; None to send their bytes.
        numbers: the numbers that replace classes, by the identities of these; None for no class.

    Attributes:
        classes: the classes that were pickled by value.
    """

    def __init__(
        self,
        file: BinaryFile,
        buffer_callback: BufferCallback | None = None,
        allocate: Allocate = np.empty,
        files: MappedFiles | None = None,
        numbers: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.classes: list[type] = []
        # By identity: a metaclass may define equality in any way.
        self._numbers = {} if numbers is None else numbers
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
        if isinstance(value, type):
            return self._reduce_class(value)
        if (reduce := _REDUCTIONS.get(id(kind))) is not None:
            return reduce(self, value)
        if kind is self._tensor:
            return reduce_tensor(value) or NotImplemented
        if value is self._flags:
            return "FLAGS"
        # Nothing else is special to cloudpickle, whose own override would take as long as all of the above.
        return NotImplemented

    def _in_file(self, array: NDArray[Any]) -> Reduced | None:
        return None if self._files is None else self._files.reduce(array)

    def reduce_memmap(self, value: NDArray[Any]) -> Any:
        # NumPy pickles the bytes of a subclass in band, where they cannot be shared.
        if value.dtype.hasobject:
            return NotImplemented
        return self._in_file(value) or (as_memmap, (np.asarray(value),))

    def reduce_definition(self, value: Any) -> Any:
        self._module_is_by_value(value.__name__ if isinstance(value, types.ModuleType) else value.__module__)
        return super().reducer_override(value)

    def _reduce_class(self, kind: type) -> Any:
        if (number := self._numbers.get(id(kind))) is not None:
            return class_of_number, (number,)
        self._module_is_by_value(kind.__module__)
        reduced = super().reducer_override(kind)
        if reduced is not NotImplemented:
            self.classes.append(kind)
        # Classes such as `type(None)` have a short reduction.
        has_recipe = isinstance(reduced, tuple) and len(reduced) > len(("call", "arguments"))
        return reduce_class(kind, reduced) if has_recipe else reduced

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


def _if_unimportable(reduce: Callable[[Any], Reduced]) -> Callable[[ValuePickler, Any], Any]:
    return lambda pickler, value: reduce(value) if pickler.is_by_value(value) else NotImplemented


def _always(reduce: Callable[[Any], Reduced]) -> Callable[[ValuePickler, Any], Any]:
    return lambda _, value: reduce(value)


_REDUCTIONS: dict[int, Callable[[ValuePickler, Any], Any]] = {
    **{id(kind): _if_unimportable(reduce) for kind, reduce in _BY_VALUE_IF_UNIMPORTABLE.items()},
    **{id(kind): _always(reduce) for kind, reduce in _ALWAYS_REBUILT.items()},
    **{id(kind): ValuePickler.reduce_definition for kind in (types.FunctionType, types.ModuleType, typing.TypeVar)},
    id(np.memmap): ValuePickler.reduce_memmap,
}
"""Reductions by the identity of the type, because a metaclass may define equality in any way."""

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


@final
class ClassTable:
    """The classes that crossed by value with pipelines, by their numbers, which are the same in every process."""

    def __init__(self, classes: Sequence[type] = ()) -> None:
        self._classes: dict[int, type] = {}
        self._numbers: dict[int, int] = {}
        self.define(dict(enumerate(classes)))

    def __len__(self) -> int:
        return len(self._classes)

    def __iter__(self) -> Iterator[type]:
        return iter(self._classes.values())

    def define(self, classes: Mapping[int, type]) -> None:
        self._classes.update(classes)
        self._numbers.update((id(kind), number) for number, kind in classes.items())

    def number(self, classes: Sequence[type]) -> tuple[int, ...]:
        """Returns the numbers of classes. New ones get the next numbers."""
        for kind in classes:
            if id(kind) not in self._numbers:
                self.define({len(self._classes): kind})
        return tuple(self._numbers[id(kind)] for kind in classes)

    def dumps(self, value: Any, buffer_callback: BufferCallback | None = None, allocate: Allocate = np.empty) -> bytes:
        """Returns the pickle of a value. The classes of the table are replaced by their numbers."""
        file = io.BytesIO()
        ValuePickler(file, buffer_callback, allocate, numbers=self._numbers).dump(value)
        return file.getvalue()

    def loads(self, data: Any, buffers: Iterable[Any] = ()) -> Any:
        """Returns the value that `dumps` pickled, with this table or with its copy in another process."""
        return LookupUnpickler(data, class_of_number, self._classes.__getitem__, buffers).load()


def class_of_number(number: int) -> type:
    """Stands for a class of the table in a pickle. `ClassTable.loads` looks the class up instead of calling this."""
    raise pickle.UnpicklingError(f"Class {number} of the pipeline is known to a ClassTable only.")


@final
class LookupUnpickler(pickle.Unpickler):
    """An unpickler of values that the receiver knows: the pickle has their numbers, and a function in their place.

    Args:
        stand_in: the function, which pickles name.
        lookup: returns the value of a number.
    """

    def __init__(
        self, data: Any, stand_in: Callable[[int], Any], lookup: Callable[[int], Any], buffers: Iterable[Any]
    ) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._stand_in = stand_in.__module__, stand_in.__name__
        self._lookup = lookup

    def find_class(self, module: str, name: str) -> Any:
        return self._lookup if (module, name) == self._stand_in else super().find_class(module, name)
