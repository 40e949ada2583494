"""User code runs in an empty `contextvars.Context`, a new one for each call.

The precision of `decimal`, NumPy's `errstate` and the user's own variables have their defaults there, whatever the
caller has set. Changes by one call end with it.
"""

import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


def isolated(function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls a function in a new context without any context variable."""
    return contextvars.Context().run(function, *arguments)
