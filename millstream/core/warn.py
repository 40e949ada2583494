"""Warnings that point at the user's line, and warnings in the log."""

import sys
import warnings


def warn(message: str) -> None:
    """Warns at the line that called millstream, however many internal calls lie between."""
    frame, level = sys._getframe(1), 1  # noqa: SLF001  (what `warnings.warn` itself looks at)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "millstream":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level + 1)


def log_warning(message: str) -> None:
    """Logs a warning to the logger `millstream`."""
    import logging  # noqa: PLC0415  (takes long to import)

    logging.getLogger("millstream").warning("millstream: %s", message)


def log_info(message: str) -> None:
    """Logs information to the logger `millstream`, which shows it only if the program asks for that level."""
    import logging  # noqa: PLC0415  (takes long to import)

    logging.getLogger("millstream").info("millstream: %s", message)
