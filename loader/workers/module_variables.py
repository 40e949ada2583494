"""Variables of modules that a pipeline's code reads, so that workers have the values that the program has set.

A worker imports the modules of operations again, and would see the values of their import: `config.size = 224`, set by
the program, would be 128 there. Only plain values are taken, and only those that code of the pipeline names: variables
of modules, and attributes of classes and objects that modules hold. A variable in which a module has kept the identity
of its process stays that of the process: a worker is not the main one.

Guarantees:
    * Finding variables runs no code of the user: it reads code objects, and dictionaries and slots of objects.
    * Its cost is bounded by `MAX_OBJECTS`, whatever the pipeline holds.
"""

import ast
import collections
import contextlib
import dis
import enum
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, TypeAlias, final

import numpy as np

MAX_OBJECTS = 10_000
"""The number of functions, classes and instances that are looked into."""

MAX_HELD = 100
"""The number of items of a container, and of attributes of an instance, that are looked into. More are data."""

MAX_ITEMS = 1_000
"""The number of items of a container that may be sent."""

Variables: TypeAlias = dict[tuple[str, str], Any]
"""Values by the name of the module and of the variable."""

IDENTITY = frozenset({"current_process", "parent_process", "getpid", "getppid", "get_ident", "get_native_id"})
"""The names of functions that tell processes apart."""

MAX_ARRAY_BYTES = 1 << 16
"""The size of an array that may be sent."""

_BY_TEXT = frozenset({"getattr", "attrgetter", "vars", "globals", "__dict__"})
"""The names of code that may name variables by text."""

_BUILDERS = ("__init__", "__new__", "__post_init__")
"""The methods whose assignments begin an object, and are no caches that a call fills."""

_SCALARS = (type(None), bool, int, float, complex, str, bytes, range, slice)
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque, collections.OrderedDict, collections.Counter)


def _scalars() -> tuple[type, ...]:
    """Returns the types of values that hold no others. If there are paths, their module has been imported."""
    pathlib: Any = sys.modules.get("pathlib")
    return _SCALARS if pathlib is None else (*_SCALARS, type(pathlib.Path()))


def variables_read(objects: Iterable[object], is_library: Callable[[str], bool]) -> Variables:
    """Returns the plain variables of modules that the code of objects, or code that it calls, reads and never sets.

    Args:
        objects: source, sampler and operations of a pipeline.
        is_library: returns True for the name of a module whose code and variables are not looked into.
    """
    search = _Search(objects, is_library)
    return {key: value for key, value in search.found.items() if key not in search.assigned}


def libraries_used(objects: Iterable[object], is_library: Callable[[str], bool]) -> set[str]:
    """Returns the names that the code of objects uses, those of imports when it runs included, and of library modules.

    What these libraries use themselves is not known.
    """
    return _Search(objects, is_library).libraries


@final
class _Search:
    """The functions, classes and instances that can be reached from the objects of a pipeline.

    Attributes:
        libraries: the names that code uses, and those of the modules of libraries whose functions and classes it uses.
        found: the plain variables that functions name.
        assigned: the variables that functions assign, such as caches that are filled at the first call.
    """

    def __init__(self, objects: Iterable[object], is_library: Callable[[str], bool]) -> None:
        self.libraries: set[str] = set()
        self.found: Variables = {}
        self.assigned: set[tuple[str, str]] = set()
        self._assigned_attributes: set[str] = set()
        # The number of objects looked at as attributes of others.
        self._num_inner = 0
        self._is_library = functools.lru_cache(maxsize=None)(is_library)
        self._seen: set[int] = set()
        self._waiting: list[Any] = []
        for one in objects:
            self._add(one)
        self._run()

    def _add(self, value: Any) -> None:
        if not issubclass(type(value), _scalars()) and id(value) not in self._seen and len(self._seen) < MAX_OBJECTS:
            self._seen.add(id(value))
            self._waiting.append(value)

    def _run(self) -> None:
        while self._waiting:
            self._look_into(self._waiting.pop())
        self.assigned |= {
            (home, path)
            for home, path in self.found
            if "." in path and path.rpartition(".")[2] in self._assigned_attributes
        }

    def _look_into(self, value: Any) -> None:
        kind = type(value)
        if kind is FunctionType:
            self._look_into_function(value)
        elif issubclass(kind, type):
            if self._is_library(value.__module__):
                self.libraries.add(value.__module__)
            else:
                attributes = frozenset(vars(value))
                self._look_at_attributes(value.__module__, value.__qualname__, value, attributes)
                for one in (*value.__mro__[1:], *list(vars(value).values())):
                    self._add(one)
        elif not issubclass(kind, ModuleType):
            held_by = next((held_by for kinds, held_by in _HELD if issubclass(kind, kinds)), _held_by_instance)
            # As a list, because other threads may change what is looked into.
            for one in list(itertools.islice(held_by(value), MAX_HELD)):
                self._add(one)

    def _look_into_function(self, function: FunctionType) -> None:
        home = function.__globals__.get("__name__", "")
        if self._is_library(home):
            self.libraries.add(home)
            return
        for cell in function.__closure__ or ():
            # An empty cell has no contents.
            self._add(getattr(cell, "cell_contents", None))
        names, assigned = _names_in(function.__code__)
        self.libraries |= names
        self.assigned.update((home, name) for name in assigned)
        if function.__name__ not in _BUILDERS:
            self._assigned_attributes |= _attributes_assigned_in(function.__code__)
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            self._look_at_variable(home, name, value)
            if not issubclass(type(value), ModuleType):
                self._look_at_attributes(home, name, value, names)
            elif self._is_library(value.__name__):
                self.libraries.add(value.__name__)
            else:
                self._look_into_module(value, names)

    def _look_into_module(self, module: ModuleType, names: AbstractSet[str]) -> None:
        for name in names & vars(module).keys():
            value = vars(module)[name]
            self._look_at_variable(module.__name__, name, value)
            if not issubclass(type(value), ModuleType):
                self._look_at_attributes(module.__name__, name, value, names - {name})
            elif self._is_library(value.__name__):
                self.libraries.add(value.__name__)
            elif value.__name__ == f"{module.__name__}.{name}":
                self._look_into_module(value, names - {name})

    def _look_at_attributes(self, home: str, path: str, value: Any, names: AbstractSet[str]) -> None:
        """Looks at the attributes of a class, function or object that a module has by a name."""
        held = attributes_of(value)
        if is_plain(value) or issubclass(type(value), enum.EnumType) or found(sys.modules.get(home), path) is not value:
            return
        for name in names & held.keys():
            one, inner = held[name], f"{path}.{name}"
            if is_plain(one):
                self._look_at_variable(home, inner, one)
            elif not issubclass(type(one), ModuleType) and self._num_inner < MAX_OBJECTS:
                self._num_inner += 1
                self._look_at_attributes(home, inner, one, names - {name})

    def _look_at_variable(self, home: str, name: str, value: Any) -> None:
        if is_plain(value):
            # Functions of the script are sent with the variables that they read.
            module = sys.modules.get(home)
            last = name.rpartition(".")[2]
            is_of_module = home != "__main__" and module is not None and not last.startswith("__")
            if is_of_module and last not in _variables_of_identity(getattr(module, "__file__", None)):
                self.found[home, name] = value
        else:
            self._add(value)


def _held_by_instance(value: Any) -> Iterator[Any]:
    yield type(value)
    yield from list(attributes_of(value).values())


_HELD: tuple[tuple[Any, Callable[[Any], Iterator[Any]]], ...] = (
    (MethodType, lambda method: iter((method.__func__, method.__self__))),
    (functools.partial, lambda partial: iter((partial.func, *partial.args, *partial.keywords.values()))),
    ((classmethod, staticmethod), lambda method: iter((method.__func__,))),
    (property, lambda accessor: iter((accessor.fget,))),
    (dict, lambda items: iter(dict.values(items))),
    *((kind, kind.__iter__) for kind in (list, tuple, set, frozenset, collections.deque)),
)
"""For kinds of values, a function that returns the values that they hold. A user's subclass may do so by other code."""


def attributes_of(value: Any) -> Mapping[str, Any]:
    """Returns the attributes in the dictionary and the slots of an object, as no code of its class shows them."""
    kinds = type(value).__mro__
    # A proxy may have a property of this name, which is code.
    dictionaries = (vars(kind).get("__dict__") for kind in kinds)
    dictionary = next((one for one in dictionaries if type(one) in _OF_C), None)
    attributes: Mapping[str, Any] = {}
    if dictionary is not None:
        with contextlib.suppress(AttributeError):
            attributes = dictionary.__get__(value)
    slots = {}
    for kind in kinds:
        for name in vars(kind) if "__slots__" in vars(kind) else ():
            if type(slot := vars(kind)[name]) is MemberDescriptorType:
                # An empty slot has no value.
                with contextlib.suppress(AttributeError):
                    slots[name] = slot.__get__(value)
    return {**slots, **attributes} if slots else attributes


_OF_C = (GetSetDescriptorType, MemberDescriptorType)
"""The types of the attributes that the interpreter defines."""


def is_plain(value: Any, depth: int = 4) -> bool:
    """Returns True for numbers, text, paths, None, and small containers of them: they mean the same in any process."""
    kind = type(value)
    if kind in _scalars() or issubclass(kind, np.generic):
        return True
    if issubclass(kind, enum.Enum):
        return _is_importable(kind)
    if kind is np.ndarray:
        return not value.dtype.hasobject and value.nbytes <= MAX_ARRAY_BYTES
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields") and _is_importable(kind)
    if not (kind in _CONTAINERS or is_named_tuple) or depth == 0 or len(value) > MAX_ITEMS:
        return False
    items: Sequence[Any] = [*value.keys(), *value.values()] if isinstance(value, Mapping) else list(value)
    return all(is_plain(item, depth - 1) for item in items)


def _is_importable(kind: type) -> bool:
    return kind.__module__ != "__main__" and found(sys.modules.get(kind.__module__), kind.__qualname__) is kind


@functools.lru_cache(maxsize=1_000)
def _variables_of_identity(path: str | None) -> frozenset[str]:
    """Returns the variables that a module computes from the identity of its process when it is imported."""
    found = set(IDENTITY)
    with contextlib.suppress(OSError, SyntaxError, ValueError, TypeError):
        with open(str(path), "rb") as file:  # noqa: PTH123  (not pathlib, which takes long to import)
            content = file.read()
        for statement in _statements(ast.parse(content).body):
            names = {
                node.id if isinstance(node, ast.Name) else node.attr
                for node in ast.walk(statement)
                if isinstance(node, ast.Name | ast.Attribute)
            }
            if names & found:
                found |= {
                    node.id
                    for node in ast.walk(statement)
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                }
    return frozenset(found - IDENTITY)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that run when a module is imported, those of its classes included."""
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from _statements(statement.body)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement


def found(module: Any, path: str) -> Any:
    """Returns the object at a path in a module, such as `Config.size`, or None."""
    for name in path.split("."):
        module = attributes_of(module).get(name)
    return module


@functools.lru_cache(maxsize=10_000)
def _names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Returns all names that code and the functions in it use, and those of global variables that it assigns."""
    names, assigned = set(code.co_names), set(_assigned_in(code))
    if names & _BY_TEXT:
        names.update(constant for constant in code.co_consts if isinstance(constant, str))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner, inner_assigned = _names_in(constant)
            names |= inner
            assigned |= inner_assigned
    return frozenset(names), frozenset(assigned)


def _assigned_in(code: CodeType) -> Iterator[str]:
    return (step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"))


@functools.lru_cache(maxsize=10_000)
def _attributes_assigned_in(code: CodeType) -> frozenset[str]:
    inner = [_attributes_assigned_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_ATTR", "DELETE_ATTR")}
    return frozenset(names.union(*inner))
