"""What all operations of a pipeline have in common."""

from typing import ClassVar


class Transformation:
    """One operation of a pipeline: a Map, RandomMap, MapWithIndex, Filter, FlatMap or Batch. Subclass one of these.

    Attributes:
        keeps_count: whether the number of elements that come out depends on nothing but the number that go in.
    """

    keeps_count: ClassVar[bool] = True
