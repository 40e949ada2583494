"""The weights of a mixture and its end, as a value: what mixtures of records, datasets and streams have in common."""

import bisect
import dataclasses
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self, TypeAlias, final

from millstream.core.checks import as_integer
from millstream.samplers.base import POSITION_LIMIT
from millstream.samplers.mixtures.mixing_schedule import (
    ALL_EXHAUSTED,
    DROP_EXHAUSTED,
    FIRST_EXHAUSTED,
    MixingSchedule,
)
from millstream.samplers.mixtures.mixture_checks import checked_weights

Weights: TypeAlias = Sequence[Any] | Mapping[str, Any]


@final
@dataclasses.dataclass(frozen=True)
class Mixing:
    """The weights of components, which may change at positions, and the rule for the end.

    Attributes:
        names: the names of the components; their numbers if they have none.
        changes: the positions from which on weights hold, ascending from 0, and the weights: whole numbers without a
            common divisor.
        stop: "first_exhausted", "all_exhausted" or "drop_exhausted", see `MixtureSampler`.
    """

    names: tuple[Any, ...]
    changes: tuple[tuple[int, tuple[int, ...]], ...]
    stop: str = FIRST_EXHAUSTED

    def __post_init__(self) -> None:
        if self.stop not in (FIRST_EXHAUSTED, ALL_EXHAUSTED, DROP_EXHAUSTED):
            raise ValueError(
                f"stop must be {FIRST_EXHAUSTED!r}, {ALL_EXHAUSTED!r} or {DROP_EXHAUSTED!r}, got {self.stop!r}."
            )

    @classmethod
    def of(cls, names: tuple[Any, ...], weights: Weights | None, stop: str = FIRST_EXHAUSTED) -> Self:
        """Returns the mixing by weights, which are checked; equal ones if None."""
        return cls(names, ((0, checked_weights([1] * len(names) if weights is None else weights, names)),), stop)

    @property
    def weights(self) -> tuple[int, ...]:
        """The weights at the beginning."""
        return self.changes[0][1]

    @property
    def is_plain(self) -> bool:
        """True if the weights never change, and the first component without another element ends the mixture."""
        return len(self.changes) == 1 and self.stop == FIRST_EXHAUSTED

    def reweighted(self, position: int, weights: Weights, optional: Collection[Any] = ()) -> Self:
        """Returns the mixing with other weights from a position on. Those set for it or later ones are replaced.

        Names in `optional` may lack a weight, which is then 0. If the same weights hold before, nothing changes at the
        position, because their period would begin again.
        """
        position = as_integer(position, "position", minimum=0)
        if position >= POSITION_LIMIT:
            raise ValueError(f"position must be between 0 and {POSITION_LIMIT - 1}, got {position}.")
        changed = checked_weights(weights, self.names, optional)
        kept = self.changes_before(position)
        is_same = bool(kept) and kept[-1][1] == changed
        return dataclasses.replace(self, changes=kept if is_same else (*kept, (position, changed)))

    def changes_before(self, position: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Returns the changes that hold before a position."""
        return self.changes[: bisect.bisect_left(self.changes, position, key=operator.itemgetter(0))]

    def schedule(self, lengths: Sequence[int | None]) -> MixingSchedule:
        """Returns the phases of the mixture, given the number of elements of each component, None if it is endless."""
        return MixingSchedule(self.changes, lengths, self.stop)

    @property
    def described_changes(self) -> list[tuple[int, Any]]:
        """The changes with the weights as a dict by name, or as a list if the components have no names."""
        is_named = isinstance(self.names[0], str)
        return [
            (position, dict(zip(self.names, weights, strict=True)) if is_named else list(weights))
            for position, weights in self.changes
        ]

    @property
    def shares(self) -> Sequence[tuple[str, float]]:
        """The names with the weights at the beginning, for a diagram."""
        return [(str(name), weight) for name, weight in zip(self.names, self.weights, strict=True)]

    @property
    def rest(self) -> str:
        """A description of all but the first weights, to append to them; "" for a plain mixing."""
        later = [] if len(self.changes) == 1 else [f", changes={self.described_changes[1:]}"]
        return "".join([*([] if self.stop == FIRST_EXHAUSTED else [f", stop={self.stop!r}"]), *later])
