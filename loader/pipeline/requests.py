"""Requests to a plan: values that can be sent to any thread or process."""

from typing import NamedTuple, TypeAlias

from millstream.loader.pipeline.elements import Elements


class Blocks(NamedTuple):
    """Requests the outputs of blocks `start … stop - 1` of stage 0 of a logical shard."""

    start: int
    stop: int
    shard: int = 0


class Group(NamedTuple):
    """Requests the outputs of a later stage, made from the elements of one group."""

    stage: int
    elements: Elements


class Fed(NamedTuple):
    """Requests the outputs of stage 0, made from elements that were not read from the source."""

    elements: Elements


class Rest(NamedTuple):
    """Requests the local operations of a stage, given the results of the operations before them."""

    stage: int
    elements: Elements


Request: TypeAlias = Blocks | Group | Fed | Rest
