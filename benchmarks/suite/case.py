"""The words of the suite: cases, contenders, goals, and what a measurement is."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from suite.scale import Scale
from suite.steps import identity
from suite.work import Work


@dataclasses.dataclass(frozen=True)
class Contender:
    """One peer in one mode."""

    peer: str
    workers: int = 0
    threads: int | None = 0
    mode: str = ""
    copies: int = 1

    @property
    def label(self) -> str:
        words = [self.mode] if self.mode else []
        has_none = self.peer in {"bare", "huggingface", "spdl"} or (self.peer == "tensorflow" and not self.workers)
        if not has_none:
            words.append(f"{self.workers} worker{'s'[: self.workers != 1]}")
        if self.peer.partition("_")[0] in {"millstream", "grain", "spdl"} and self.threads != 0:
            words.append("default threads" if self.threads is None else f"{self.threads} threads")
        if self.copies > 1:
            words.append(f"{self.copies} at once")
        return ", ".join(words) or "record by record"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The result of one process."""

    value: float
    details: Mapping[str, float] = dataclasses.field(default_factory=dict)


class UnsupportedError(Exception):
    """A peer cannot do this case, and the message says why: that is a result, not a failure."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One measurement to make, in this process."""

    case: "Case"
    contender: Contender
    scale: Scale
    copy: int
    gate: Callable[[], None]

    def work(self) -> Work:
        return dataclasses.replace(self.case.make_work(self.scale), shard=(self.copy, self.contender.copies))


@dataclasses.dataclass(frozen=True)
class Pick:
    """Chooses contenders by what is given; the best one counts."""

    peer: str
    workers: int | None = None
    mode: str | None = None
    threads: int | None = None
    copies: int | None = None
    case: str | None = None
    not_mode: str | None = None

    def matches(self, contender: Contender) -> bool:
        if contender.peer != self.peer or contender.mode == self.not_mode:
            return False
        names = ("workers", "mode", "threads", "copies")
        return all(getattr(self, name) in (None, getattr(contender, name)) for name in names)


@dataclasses.dataclass(frozen=True)
class Goal:
    """A goal of millstream: ours is to be `at_least` times as good as theirs."""

    text: str
    at_least: float
    theirs: Pick | float
    ours: Pick = Pick("millstream")


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to measure.

    Attributes:
        name: what the command line calls it.
        title: what is measured, in one line.
        make_work: the pipeline at a scale.
        contenders: who takes part, the bounds among them.
        goals: what we want to reach.
        measure: makes one measurement; the rate of records where it is None.
        unit: of the values.
        higher_is_better: whether a larger value wins.
        view: what of a batch is the same for all contenders, where randomness differs.
        consume: what the consumer does with each batch; nothing by default.
        count: how many records a batch holds, where it is not as many as it has rows.
    """

    name: str
    title: str
    make_work: Callable[[Scale], Work]
    contenders: tuple[Contender, ...]
    goals: tuple[Goal, ...] = ()
    measure: Callable[[Run], Measurement] | None = None
    unit: str = "records/s"
    higher_is_better: bool = True
    view: Callable[[Any], Any] = identity
    consume: Callable[[Any], None] | None = None
    count: Callable[[Any], int] | None = None

    def ratio(self, ours: float, theirs: float) -> float:
        """Returns how many times as good ours is as theirs: above 1 is better, whatever the unit."""
        return ours / theirs if self.higher_is_better else theirs / ours
