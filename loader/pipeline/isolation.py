"""The user's code runs in an empty `contextvars.Context`, a new one for each call.

So the precision of `decimal`, NumPy's `errstate` and the user's own variables are at their defaults there, whoever
calls, and what one call sets is gone with it.
"""

import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


def isolated(function: Callable[..., Result], *arguments: Any) -> Result:
    """Returns what a function returns in a context of its own, in which no context variable is set."""
    return contextvars.Context().run(function, *arguments)
