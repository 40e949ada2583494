"""Warnings that point at the user's line."""

import sys
import warnings


def warn(message: str) -> None:
    """Warns at the line that called millstream, however many internal calls lie between."""
    frame, level = sys._getframe(1), 1  # noqa: SLF001  (what `warnings.warn` itself looks at)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "millstream":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level + 1)
