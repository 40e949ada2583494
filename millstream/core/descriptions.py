"""Descriptions of pipeline objects for people: one short line each, without addresses, or a box in a notebook.

Nothing here reads a record or raises. The cost is bounded: a table of a million entries is described by its size.
"""

import contextlib
import dataclasses
import functools
import reprlib
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

LINE_LENGTH = 100
"""Longest description. Longer ones are truncated."""


def function_name(function: Any) -> str:
    """Returns the name of a function as written in its source; for other callables, their description."""
    if isinstance(function, functools.partial):
        arguments = [VALUES.repr(value) for value in function.args]
        arguments += [f"{key}={VALUES.repr(value)}" for key, value in function.keywords.items()]
        return f"partial({', '.join([function_name(function.func), *arguments])})"
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) else described(function)


def described(value: object, *, with_defaults: bool = True) -> str:
    """Returns the class of an object with its parameters: `Scale(factor=2)`.

    A `__repr__` written by the author of the class is used unchanged if it is one short line. Otherwise the parameters
    are the fields of a dataclass or the public attributes.

    Args:
        value: the object to describe.
        with_defaults: True to include fields of a dataclass that have their default values.
    """
    name = type(value).__name__
    if has_own_repr(value):
        with contextlib.suppress(Exception):
            text = repr(value)
            return text if len(text) <= LINE_LENGTH and "\n" not in text and " at 0x" not in text else name
        return name
    parameters = _fields(value, with_defaults) if dataclasses.is_dataclass(value) else _public_attributes(value)
    return _shortened(f"{name}({', '.join(f'{key}={VALUES.repr(held)}' for key, held in parameters.items())})")


def has_own_repr(value: object) -> bool:
    """Returns True if the author of the class wrote its `__repr__`, and not Python or the dataclass decorator."""
    written = type(value).__repr__
    if not dataclasses.is_dataclass(value):
        return written is not object.__repr__
    # The decorator's `__repr__`, which shows every field in full, wraps a function compiled from text.
    made = getattr(written, "__wrapped__", written)
    return getattr(getattr(made, "__code__", None), "co_filename", "") != "<string>"


class _Values(reprlib.Repr):
    """Describes values of parameters: by their beginning, or by their class and size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 60

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, np.ndarray):
            return f"array of {x.dtype}, shape {x.shape}"
        if callable(x) and not isinstance(x, type):
            return function_name(x)
        return super().repr1(x, level)

    def repr_instance(self, x: Any, level: int) -> str:
        """Returns the description of an object: usually only its class, because it may contain millions of items."""
        del level
        if type(x).__module__ == "builtins" or isinstance(x, np.generic):
            return _shortened(repr(x))
        return type(x).__name__


VALUES = _Values()
"""Describes the values of parameters."""


def _fields(value: Any, with_defaults: bool) -> dict[str, Any]:
    shown = {}
    for field in dataclasses.fields(value):
        if field.repr and hasattr(value, field.name):
            held = getattr(value, field.name)
            if with_defaults or not _is_default(field, held):
                shown[field.name] = held
    return shown


def _is_default(field: "dataclasses.Field[Any]", held: object) -> bool:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    # Types first, because an array compared with None returns an array.
    return held is default or (type(held) is type(default) and held == default)


def _public_attributes(value: object) -> dict[str, Any]:
    return {name: held for name, held in getattr(value, "__dict__", {}).items() if not name.startswith("_")}


def _shortened(text: str) -> str:
    return text if len(text) <= LINE_LENGTH else f"{text[: LINE_LENGTH - 1]}…"


class Rendered:
    """An object that a notebook renders as a box: its kind, its description, and bars of its parts."""

    _card_kind: ClassVar[str]

    def _card_bars(self) -> Sequence[tuple[str, Sequence[tuple[str, float]]]]:
        """Returns the bars, each with a caption and the names and sizes of its parts; none by default."""
        return ()

    def _repr_html_(self) -> str:
        from millstream.core import html_fragments  # noqa: PLC0415  (lazy: only notebooks need it)

        bars = [html_fragments.proportions(shares, caption) for caption, shares in self._card_bars()]
        title = described(self, with_defaults=False)
        return html_fragments.figure(html_fragments.card(self._card_kind, title, *bars))
