"""Flags and a registry that workers import by its name."""

import threading

from absl import flags

SIZE = flags.DEFINE_integer("size_of_the_module", 8, "A number.")


class Registry:
    """Names that a program registers at run time."""

    def __init__(self) -> None:
        self.names: list[str] = []


REGISTRY = Registry()
LOCAL = threading.local()
