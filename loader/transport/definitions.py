"""Pickling of definitions by value, where cloudpickle fails or changes them.

cloudpickle pickles the functions and classes of a script with their code. This module adds

    * caches (`functools.cache`), cached properties, `NewType` and similar objects. They are rebuilt, a cache empty,
    * code with the name of its file, so that tracebacks and stacks of workers show the lines of a script,
    * partial methods. Since Python 3.14, they cannot be created without their function,
    * weak dictionaries, which become their current content,
    * classes with `__slots__`. Without help, their instances would come back with a `__dict__`,
    * enums, whose members keep their attributes.
"""

import dataclasses
import functools
import types
import typing
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

import cloudpickle

from millstream.loader.transport.array_pickles import Reduced


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


NAMED: dict[type, Callable[[Any], Reduced]] = {
    functools._lru_cache_wrapper: reduce_cache,  # noqa: SLF001  (the type has no public name)
    typing.NewType: lambda value: (typing.NewType, (value.__name__, value.__supertype__), vars(value)),
    typing.ParamSpec: _reduce_type_variable,
    typing.TypeVarTuple: _reduce_type_variable,
}
"""Reductions of values that Python pickles by name. They are used if the name means nothing in other processes."""

if hasattr(typing, "TypeAliasType"):  # from Python 3.12 on
    NAMED[typing.TypeAliasType] = lambda alias: (
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
    made: Any = object.__new__(kind)
    functools.cached_property.__init__(made, function)
    return made


def rebuild_partial_method(kind: type[Any]) -> Any:
    """Returns a partial method without a function, because its `__new__` requires one since Python 3.14."""
    return object.__new__(kind)


def _reduce_weak_dict(value: Any) -> Reduced:
    return type(value), (dict(value),)


OTHERS: dict[type, Callable[[Any], Reduced]] = {
    types.CodeType: _reduce_code,
    functools.cached_property: _reduce_cached_property,
    functools.partialmethod: lambda value: (rebuild_partial_method, (type(value),), vars(value)),
    weakref.WeakKeyDictionary: _reduce_weak_dict,
    weakref.WeakValueDictionary: _reduce_weak_dict,
    # A dataclass field without a default refers to this very object.
    type(dataclasses.MISSING): lambda _: "MISSING",
}
"""Reductions of values that pickle cannot handle, or that are recognised by identity."""


def reduce_class(kind: type, reduced: tuple[Any, ...]) -> Reduced:
    if issubclass(kind, Enum):
        return _with_members(kind, reduced)
    return _with_slots(kind, reduced) if "__slots__" in vars(kind) else reduced


def _with_slots(kind: type, reduced: tuple[Any, ...]) -> Reduced:
    make, (metaclass, name, _, namespace, *identity), (attributes, more), *others = reduced
    if "__orig_bases__" in vars(kind):
        # Not as the bases: some, such as NamedTuple, would create a different class.
        namespace = {**namespace, "__orig_bases__": vars(kind)["__orig_bases__"]}
    attributes = {key: value for key, value in attributes.items() if not isinstance(value, types.MemberDescriptorType)}
    attributes["__slots__"] = vars(kind)["__slots__"]
    namespace = {**namespace, "__slots__": _slots(kind)}
    return make, (metaclass, name, kind.__bases__, namespace, *identity), (attributes, more), *others


def _slots(kind: type) -> tuple[str, ...]:
    """Returns the slots that a class adds to those of its bases, without name mangling."""
    own = vars(kind)
    members = [name for name, value in own.items() if isinstance(value, types.MemberDescriptorType)]
    return *members, *(name for name in ("__dict__", "__weakref__") if name in own)


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
