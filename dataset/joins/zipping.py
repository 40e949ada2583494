"""Streams zipped to one of tuples."""

import dataclasses
from collections.abc import Sequence
from typing import Any, final

from millstream.dataset.iterators.inputs import Input, JoinedInput
from millstream.dataset.stream_steps import Join, OpenBelow
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.envelope import SavedPosition, is_flag, is_list, is_number, values_of


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
        self._ready = 0

    def num_ready(self) -> int:
        return self._ready

    def fetch(self, limit: int) -> bool:
        if self._ended:
            return False
        self.read_together()
        for number, one in enumerate(self.inputs):
            if not (one.num_ready() or one.fetch(limit)):
                error = self._error_at_end(number)
                self._ended = True
                # Those before it have been drawn from for the last time.
                for earlier in self.inputs[:number]:
                    earlier.take(1)
                if error is not None:
                    raise error
                return False
        self._ready = min(limit, *(one.num_ready() for one in self.inputs))
        return True

    def take(self, count: int) -> list[Any]:
        taken = list(zip(*[one.take(count) for one in self.inputs], strict=True))
        self._ready -= count
        self.step += count
        return taken

    def _error_at_end(self, shorter: int) -> ValueError | None:
        """Returns an error if all must end together, and another one yields an element where one has ended."""
        if not self._strict:
            return None
        if shorter:
            return _unequal(shorter, 0)
        longer = (number for number, one in enumerate(self.inputs[1:], 1) if one.num_ready() or one.fetch(1))
        number = next(longer, None)
        return None if number is None else _unequal(0, number)

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
        self.step, self._ended, self._ready, self.is_prefetching = step, ended, 0, False


_KIND = "zipped datasets"


def _unequal(shorter: int, longer: int) -> ValueError:
    return ValueError(
        f"Datasets that are zipped must end together, but parents[{shorter}] has ended before parents[{longer}]. "
        "Write strict=False to end with the shortest."
    )
