"""What can be asked of a plan: values that travel to whoever makes the outputs."""

from typing import NamedTuple, TypeAlias

from millstream.loader.pipeline.elements import Elements


class Blocks(NamedTuple):
    """The outputs of blocks `start … stop - 1` of stage 0, of one of the logical shards."""

    start: int
    stop: int
    shard: int = 0


class Group(NamedTuple):
    """The outputs of a later stage, made of the elements of one group."""

    stage: int
    elements: Elements


class Fed(NamedTuple):
    """The outputs of stage 0, made of elements that were not read from the source."""

    elements: Elements


Request: TypeAlias = Blocks | Group | Fed
