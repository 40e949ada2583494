"""What can be asked of a plan: values that travel to whoever makes the outputs."""

from typing import NamedTuple, TypeAlias

from millstream.loader.elements import Elements


class Units(NamedTuple):
    """The outputs of units `start … stop - 1` of phase 0."""

    start: int
    stop: int


class Group(NamedTuple):
    """The outputs of a later phase, made of the elements of one group."""

    phase: int
    elements: Elements


Request: TypeAlias = Units | Group
