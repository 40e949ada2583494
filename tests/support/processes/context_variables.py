"""A context variable that every process has: one cannot be pickled, so worker processes import it."""

import contextvars

VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=0)
