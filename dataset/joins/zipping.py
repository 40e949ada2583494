"""Streams zipped to one of tuples."""

import dataclasses
from collections.abc import Sequence
from typing import Any, final

from millstream.dataset.iterators.inputs import Input, JoinedInput
from millstream.dataset.stream_steps import Join, OpenBelow
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.envelope import SavedPosition, is_flag, is_list, is_number, values_of
from millstream.loader.pipeline.elements import END, Lack


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Zip(Join):
    """Tuples of the elements that streams yield at the same time."""

    strict: bool

    def opened(self, open_below: OpenBelow) -> JoinedInput:
        return _ZippedInputs(list(map(open_below, self.above)), self.strict)

    @property
    def text(self) -> str:
        return "zip" if self.strict else "zip(strict=False)"


@final
class _ZippedInputs(JoinedInput):
    """An element of each input, in order."""

    def __init__(self, inputs: Sequence[Input], strict: bool) -> None:
        super().__init__(inputs)
        self._strict = strict
        self._ended = False
        # The input that has ended first, until it is known whether the others do.
        self._shorter: int | None = None

    def fetch(self, limit: int) -> Lack | None:
        if self._ended:
            return END
        self.read_together()
        if self._shorter is None:
            for number, one in enumerate(self.inputs):
                if not one.num_ready() and (lack := self.fetch_from(one, limit, number)) is not None:
                    if lack is not END:
                        return lack
                    self._shorter = number
                    break
        if self._shorter is not None:
            return self._end(self._shorter)
        self._ready = min(limit, *(one.num_ready() for one in self.inputs))
        return None

    def take(self, count: int) -> list[Any]:
        taken = list(zip(*[one.take(count) for one in self.inputs], strict=True))
        self._count(count)
        return taken

    def _end(self, shorter: int) -> Lack:
        """Ends with an input, or raises an error if all must end together, and another one has an element."""
        longer = 0 if shorter and self._strict else None
        if self._strict and not shorter:
            for number, one in enumerate(self.inputs[1:], 1):
                lack = None if one.num_ready() else self.fetch_from(one, 1, number)
                if lack is None:
                    longer = number
                    break
                if lack is not END:
                    return lack
        self._ended = True
        # Those before it have been drawn from for the last time.
        for earlier in self.inputs[:shorter]:
            earlier.take(1)
        if longer is not None:
            raise _unequal(shorter, longer)
        return END

    def position(self, back: int = 0) -> SavedPosition:
        return SavedPosition((_KIND, self.step - back, self._ended, tuple([one.position(back) for one in self.inputs])))

    def move(self, position: Any) -> None:
        step, ended, inputs = values_of(position, _KIND, is_number, is_flag, is_list)
        if len(inputs) != len(self.inputs):
            raise CheckpointError(
                f"The state is of {len(inputs)} zipped datasets, but there are {len(self.inputs)} here: zip the "
                "same datasets as when it was saved."
            )
        for one, saved in zip(self.inputs, inputs, strict=True):
            one.move(saved)
        self.step, self._ended, self._shorter, self._ready, self.is_prefetching = step, ended, None, 0, False


_KIND = "zipped datasets"


def _unequal(shorter: int, longer: int) -> ValueError:
    return ValueError(
        f"Datasets that are zipped must end together, but parents[{shorter}] has ended before parents[{longer}]. "
        "Write strict=False to end with the shortest."
    )
