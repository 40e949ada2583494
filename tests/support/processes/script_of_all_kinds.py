"""A script that defines something of every kind in itself: what works inline works with workers.

It is run as a script, from standard input, by `exec`, by `runpy`, and as a module made at run time; it prints, as JSON,
what each kind gives inline and with a worker process.
"""

# It is written as users write scripts, with few annotations and many ways to say a thing.
# mypy: ignore-errors

import abc
import collections
import contextlib
import dataclasses
import enum
import functools
import json
import operator
import os
import pathlib
import sys
import types
import typing
import weakref

import millstream

sys.path.append(pathlib.Path("no entry of the import path, which are strings"))


@functools.cache
def cached(x):
    return x + 1


@functools.lru_cache(maxsize=7, typed=True)
def fibonacci(x):
    return x if x < 2 else fibonacci(x - 1) + fibonacci(x - 2)


@functools.singledispatch
def dispatched(x):
    return repr(x)


@dispatched.register
def _(x: int):
    return x + 1


def doubled(function):
    @functools.wraps(function)
    def wrapper(x):
        return 2 * function(x)

    return wrapper


@doubled
def decorated(x):
    return x + 1


@contextlib.contextmanager
def context(x):
    yield x + 1


UserId = typing.NewType("UserId", int)
T = typing.TypeVar("T")
P = typing.ParamSpec("P")
Ts = typing.TypeVarTuple("Ts")


def annotated(x: UserId, *_more: typing.Unpack[Ts]) -> "UserId":
    return UserId(x + 1)


def typed(function: collections.abc.Callable[P, T]) -> collections.abc.Callable[P, T]:
    return function


def closure():
    total = 1

    def inner(x):
        nonlocal total
        return total + x

    return inner


class Operation:
    limit = 100
    table_of_all: typing.ClassVar[dict] = {"one": 1}

    @functools.cached_property
    def table(self):
        """The element of each number."""
        return {number: number + 1 for number in range(self.limit)}

    @functools.cache
    def by_cached_method(self, x):
        return x + 1

    @functools.singledispatchmethod
    def by_type(self, x):
        return repr(x)

    @by_type.register
    def _(self, x: int):
        return x + 1

    @staticmethod
    def by_static_method(x):
        return x + 1

    @classmethod
    def by_class_method(cls, x):
        return x + cls.table_of_all["one"]

    @functools.partialmethod
    def by_partial_method(self, x):
        return x + 1

    @property
    def one(self):
        return 1

    def by_table(self, x):
        return self.table[x]

    def __call__(self, x):
        return x + self.one


class Shown:
    __slots__ = ()

    def __repr__(self):
        return f"{type(self).__name__}({self.a})"


class Slotted:
    __slots__ = ("__hidden", "a")

    def __init__(self, a):
        self.a, self.__hidden = a, -a

    def __repr__(self):
        return f"Slotted({self.a}, {self.__hidden}, {hasattr(self, '__dict__')})"


class SlottedChild(Slotted):
    __slots__ = ("__weakref__", "b")

    def __init__(self, a):
        super().__init__(a)
        self.b = weakref.ref(self)() is self


class EmptySlots(Slotted):
    __slots__ = ()


class OpenChild(Slotted):
    def __init__(self, a):
        super().__init__(a)
        self.more = a


class OneSlot(Shown):
    __slots__ = "a"

    def __init__(self, a):
        self.a = a


class SlotsInWords(Shown, typing.Generic[T]):
    __slots__ = {"a": "The number."}

    def __init__(self, a):
        self.a = a


@dataclasses.dataclass
class Open:
    a: int
    b: list = dataclasses.field(default_factory=list)

    def is_required(self):
        return [field.default is dataclasses.MISSING for field in dataclasses.fields(self)]


@dataclasses.dataclass(slots=True)
class Slots:
    a: int
    b: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, frozen=True)
class FrozenSlots:
    a: int


@dataclasses.dataclass(slots=True)
class SlotsChild(Slots):
    c: int = 3


@dataclasses.dataclass(slots=True, kw_only=True, order=True)
class GenericSlots(typing.Generic[T]):
    a: T


@dataclasses.dataclass(slots=True, weakref_slot=True)
class WeakSlots:
    a: int


class Colour(enum.Enum):
    RED = 1
    GREEN = 2
    ROUGE = 1

    def next(self):
        return Colour((self.value + 1) % 2 + 1)


class Planet(enum.Enum):
    EARTH = (5.976e24, 6.37814e6)
    MARS = (6.421e23, 3.3972e6)

    def __init__(self, mass, radius):
        self.mass = mass
        self.radius = radius


class Coded(int, enum.Enum):
    def __new__(cls, value, label):
        member = int.__new__(cls, value)
        member._value_, member.label = value, label
        return member

    PRINT = (1, "print")
    COPY = (2, "copy")


class Flag(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Word(enum.StrEnum):
    ONE = enum.auto()


class Point(typing.NamedTuple):
    a: int
    b: int = 5

    def total(self):
        return self.a + self.b


Tuple = collections.namedtuple("Tuple", "a b", defaults=[7])  # noqa: PYI024


class Record(typing.TypedDict, total=False):
    a: int


@typing.runtime_checkable
class HasTotal(typing.Protocol):
    def total(self): ...


class Base(abc.ABC):
    @abc.abstractmethod
    def total(self): ...


class Concrete(Shown, Base):
    def __init__(self, a):
        self.a = a

    def total(self):
        return self.a


@Base.register
class Virtual:
    def __repr__(self):
        return "Virtual()"


class Outer:
    class Nested(Shown):
        def __init__(self, a):
            self.a = a


def local_class():
    class Local(Shown):
        __slots__ = ("a",)

        def __init__(self, a):
            self.a = a

    return Local


Local = local_class()
GenericLocal = SlotsInWords[int]


class OddError(LookupError):
    pass


exec("class FromText:\n    def __call__(self, x):\n        return x + 1")
run_time = types.ModuleType("made_at_run_time")
exec("one = 1\ndef function(x):\n    return x + one", vars(run_time))
sys.modules["made_at_run_time"] = run_time

OPERATIONS = {
    "function cached": cached,
    "function that uses a cached one": lambda x: cached(x),
    "recursive cached function": fibonacci,
    "what a cache says of itself": lambda x: (cached.cache_parameters(), cached.__name__, cached.__wrapped__(x)),
    "single dispatch": dispatched,
    "single dispatch of text": lambda x: dispatched(str(x)),
    "decorated": decorated,
    "context manager": lambda x: context(x).__enter__(),
    "annotated": annotated,
    "new type": lambda x: UserId(x) + 1,
    "typed": typed(annotated),
    "closure": closure(),
    "partial": functools.partial(operator.add, 1),
    "partial of a cached function": functools.partial(cached),
    "lambda": lambda x: x + 1,
    "instance": Operation(),
    "cached property": Operation().by_table,
    "documentation of a cached property": lambda _: Operation.table.__doc__,
    "cached method": Operation().by_cached_method,
    "dispatched method": Operation().by_type,
    "static method": Operation.by_static_method,
    "class method": Operation.by_class_method,
    "partial method": Operation().by_partial_method,
    "named tuple": lambda x: Point(x).total(),
    "named tuple's defaults": lambda x: Tuple(x),
    "enum": lambda _: Colour.RED.next().name,
    "alias in an enum": lambda _: (Colour["ROUGE"] is Colour.RED, [*Colour.__members__]),
    "enum with attributes": lambda _: (Planet.EARTH.mass, Planet["MARS"].radius, Planet((5.976e24, 6.37814e6)).name),
    "enum with a constructor": lambda _: (Coded.COPY.label, Coded(1).name, Coded.COPY + 1),
    "flag": lambda x: (Flag.READ | Flag.WRITE).value + x,
    "string enum": lambda _: f"{Word.ONE}",
    "protocol": lambda x: (isinstance(Point(x), HasTotal), isinstance(x, HasTotal)),
    "abstract class": lambda x: (isinstance(Concrete(x), Base), isinstance(Virtual(), Base), isinstance(x, Base)),
    "typed dict": lambda x: (Record(a=x), sorted(Record.__annotations__), Record.__total__),
    "slots of a hidden name": lambda x: repr(Slotted(x)),
    "slots are all": lambda x: hasattr(Slots(x), "__dict__"),
    "fields without a default": lambda x: Open(x).is_required(),
    "dataclass replaced": lambda x: repr(dataclasses.replace(SlotsChild(x), c=x)),
    "dataclass in order": lambda x: GenericSlots(a=x) < GenericSlots(a=x + 1),
    "class from text": FromText(),  # noqa: F821
    "function of a module made at run time": run_time.function,
    "module made at run time": lambda x: run_time.function(x),
    "exception": lambda x: repr(OddError(x)),
}

ELEMENTS = [
    Slotted(1), SlottedChild(2), EmptySlots(3), OpenChild(4), OneSlot(5), SlotsInWords(6), GenericLocal(7),
    Open(1), Slots(2, [3]), FrozenSlots(3), SlotsChild(4), GenericSlots(a=5), WeakSlots(6),
    Colour.GREEN, Colour.ROUGE, Planet.MARS, Coded.COPY, Flag.READ | Flag.WRITE, Word.ONE,
    Point(1), Tuple(2), Record(a=3), Concrete(4), Virtual(), Outer.Nested(5), Local(6), OddError(7),
]  # fmt: skip


def tried(operation, x):
    """Returns what an operation gives, in words."""
    try:
        return repr(operation(x))
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def run_all(x):
    """Returns what all operations give for a number."""
    return {name: tried(operation, x) for name, operation in OPERATIONS.items()}


def mark(numbered):
    """Returns an element, whether its class is the one that the operation knows, and where that was found."""
    number, element = numbered
    return element, type(element) is type(ELEMENTS[number]), os.getpid()


def elements_as_they_arrive(worker_count):
    """Returns what each element is after its way, whether its class is known here, and whether it was there."""
    source = list(enumerate(ELEMENTS))
    arrived = list(millstream.load(source, num_epochs=1, transformations=[mark], worker_count=worker_count))
    assert all((pid == os.getpid()) == (worker_count == 0) for _, _, pid in arrived)
    return {
        repr(original): [repr(element), type(element) is type(original), was_known]
        for original, (element, was_known, _) in zip(ELEMENTS, arrived, strict=True)
    }


def outcome(worker_count):
    """Returns what everything gives."""
    numbers = millstream.load(range(3), num_epochs=1, transformations=[run_all], worker_count=worker_count)
    return {"operations": list(numbers), "elements": elements_as_they_arrive(worker_count)}


def main():
    """Prints what everything gives inline and with a worker."""
    json.dump({"inline": outcome(0), "with a worker": outcome(1)}, sys.stdout)


main()
