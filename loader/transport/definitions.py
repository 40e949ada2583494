"""What a script defines, on its way to another process by value: what cloudpickle refuses, loses or changes.

cloudpickle pickles the functions and classes of a script with their code. Here it gets help with

    * caches (`functools.cache`), cached properties, `NewType` and its like: each is made again, a cache empty,
    * partial methods, which cannot be made without their function since Python 3.14,
    * weak dictionaries, which become what they hold now,
    * classes with `__slots__`, which keep them: an instance would otherwise come back with a `__dict__`,
    * enums, whose members keep their attributes and aliases,
    * classes whose making runs the script's code (a metaclass, `__init_subclass__`): they are rebuilt as they are, and
      that code does not run a second time.
"""

import dataclasses
import functools
import types
import typing
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from millstream.loader.transport.array_pickles import Reduced, reduce_memoryview

IsByValue: TypeAlias = Callable[[Any], bool]
"""Says whether a class or function crosses by value."""


def reduce_cache(cache: Any) -> Reduced:
    """Returns how to pickle a function with a cache: with an empty one."""
    state = {name: value for name, value in vars(cache).items() if name not in ("__wrapped__", "cache_parameters")}
    return rebuild_cache, (cache.__wrapped__, cache.cache_parameters()), state


def rebuild_cache(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """Returns a function with a cache."""
    return functools.lru_cache(**parameters)(function)


def _reduce_new_type(value: Any) -> Reduced:
    return typing.NewType, (value.__name__, value.__supertype__), vars(value)


def _reduce_type_variable(value: Any) -> Reduced:
    return type(value), (value.__name__,)


def _reduce_type_alias(value: Any) -> Reduced:
    return rebuild_type_alias, (type(value), value.__name__, value.__value__, value.__type_params__)


def rebuild_type_alias(kind: Any, name: str, value: Any, parameters: tuple[Any, ...]) -> Any:
    """Returns a type alias."""
    return kind(name, value, type_params=parameters)


NAMED: dict[type, Callable[[Any], Reduced]] = {
    functools._lru_cache_wrapper: reduce_cache,  # noqa: SLF001  (the type has no public name)
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_type_variable,
    typing.TypeVarTuple: _reduce_type_variable,
}
"""How to pickle what Python pickles by its name alone, where the name means nothing elsewhere."""

if hasattr(typing, "TypeAliasType"):  # from Python 3.12 on
    NAMED[typing.TypeAliasType] = _reduce_type_alias


def _reduce_cached_property(value: Any) -> Reduced:
    # Up to Python 3.11 it has a lock.
    state = {name: part for name, part in vars(value).items() if name != "lock"}
    return rebuild_cached_property, (type(value), value.func), state


def rebuild_cached_property(kind: type[Any], function: Callable[[Any], Any]) -> Any:
    """Returns a cached property that has no name yet."""
    made: Any = object.__new__(kind)
    functools.cached_property.__init__(made, function)
    return made


def _reduce_partial_method(value: Any) -> Reduced:
    return rebuild_partial_method, (type(value),), vars(value)


def rebuild_partial_method(kind: type[Any]) -> Any:
    """Returns a partial method that has no function yet: since Python 3.14, its `__new__` asks for one."""
    return object.__new__(kind)


def _reduce_weak_dict(value: Any) -> Reduced:
    return type(value), (dict(value),)


def _reduce_descriptor(value: Any) -> Reduced:
    return rebuild_descriptor, (value.__objclass__, value.__name__)


def rebuild_descriptor(owner: type, name: str) -> Any:
    """Returns what a class has under a name, itself and not what it gives."""
    return vars(owner)[name]


def _reduce_missing(_: Any) -> Reduced:
    return "MISSING"


OTHERS: dict[type, Callable[[Any], Reduced]] = {
    functools.cached_property: _reduce_cached_property,
    functools.partialmethod: _reduce_partial_method,
    weakref.WeakKeyDictionary: _reduce_weak_dict,
    weakref.WeakValueDictionary: _reduce_weak_dict,
    types.ClassMethodDescriptorType: _reduce_descriptor,
    types.MemberDescriptorType: _reduce_descriptor,
    memoryview: reduce_memoryview,
    # A field without a default is one that has this very object.
    type(dataclasses.MISSING): _reduce_missing,
}
"""How to pickle what cannot be pickled, or is recognised by its identity."""


# ---------------------------------------------------------------------------------------------------------------------


def reduce_class(kind: type, reduced: tuple[Any, ...], is_by_value: IsByValue) -> Reduced:
    """Returns how to pickle a class by value.

    Args:
        kind: the class.
        reduced: how cloudpickle does it.
        is_by_value: says which other classes do.
    """
    return _with_members(kind, reduced) if issubclass(kind, Enum) else _as_it_is(kind, reduced, is_by_value)


def _as_it_is(kind: type, reduced: tuple[Any, ...], is_by_value: IsByValue) -> Reduced:
    """Adds to a class's recipe its slots, and how to make it without running the script's code again."""
    make, (metaclass, name, _, namespace, *identity), (attributes, more), _, _, set_state = reduced
    if "__orig_bases__" in vars(kind):
        # Not in the place of the bases: some, such as NamedTuple, would make another class of what is one already.
        namespace = {**namespace, "__orig_bases__": vars(kind)["__orig_bases__"]}
    if "__slots__" in vars(kind):
        attributes = {
            attribute: value
            for attribute, value in attributes.items()
            if not isinstance(value, types.MemberDescriptorType)
        }
        attributes["__slots__"] = vars(kind)["__slots__"]
        namespace = {**namespace, "__slots__": _slots(kind)}
    silenced = [base for base in kind.__mro__[1:] if "__init_subclass__" in vars(base) and is_by_value(base)]
    creator = next(parent for parent in metaclass.__mro__ if not is_by_value(parent))
    if creator.__name__ == "_TypedDictMeta":
        # It makes such classes of what is written in their bodies, and of nothing else.
        creator = type
    if silenced or creator is not metaclass:
        metaclass = functools.partial(make_class, metaclass, creator, silenced)
    methods = {attribute: value for attribute, value in attributes.items() if isinstance(value, _METHODS)}
    others = {attribute: value for attribute, value in attributes.items() if attribute not in methods}
    state = _Methods(kind, methods, set_state), (others, more), set_state
    return make, (metaclass, name, kind.__bases__, namespace, *identity), state, None, None, set_class_state


def set_class_state(kind: type, state: tuple[Any, ...]) -> None:
    """Gives a class that has its methods the other attributes."""
    _, attributes, set_state = state
    set_state(kind, attributes)


_METHODS = types.FunctionType, classmethod, staticmethod, property


class _Methods(NamedTuple):
    """Gives a class its methods, when it is unpickled: before the other attributes, which may hold instances of it."""

    kind: type
    methods: dict[str, Any]
    set_state: Callable[[type, Any], Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.set_state, (self.kind, (self.methods, {}))


def _slots(kind: type) -> tuple[str, ...]:
    """Returns the slots that a class adds to its bases', by the names that they have in it."""
    own = vars(kind)
    members = [name for name, value in own.items() if isinstance(value, types.MemberDescriptorType)]
    return *members, *(name for name in ("__dict__", "__weakref__") if name in own)


def make_class(metaclass: type, creator: Any, silenced: Sequence[type], *definition: Any) -> Any:
    """Returns a class of a metaclass, made by a class that the metaclass extends.

    Args:
        metaclass: the class's.
        creator: makes it.
        silenced: bases whose `__init_subclass__` must not be told: it was told of this class where that was defined.
        definition: the class's name, its bases and its first attributes.
    """
    own = [(base, vars(base)["__init_subclass__"]) for base in silenced if "__init_subclass__" in vars(base)]
    for base, _ in own:
        type.__setattr__(base, "__init_subclass__", classmethod(_ignore))
    try:
        return creator.__new__(metaclass, *definition)
    finally:
        for base, told in own:
            type.__setattr__(base, "__init_subclass__", told)


def _ignore(_: type, /, **_options: Any) -> None:
    """Takes no note of a new subclass."""


def _with_members(kind: type[Enum], reduced: tuple[Any, ...]) -> Reduced:
    """Adds to an enum's recipe its aliases and its members' attributes."""
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
    """Gives an enum its attributes, and its members theirs."""
    set_state, attributes, of_members = state
    set_state(kind, attributes)
    for name, values in of_members.items():
        vars(kind[name]).update(values)
