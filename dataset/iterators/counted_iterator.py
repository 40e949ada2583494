"""An iterator without states, which is resumed by drawing from its beginning."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, final

from millstream.dataset.iterators.brief_states import strictly
from millstream.dataset.iterators.dataset_iterator import DatasetIterator, call_if_possible
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.compatibility import accept_content
from millstream.loader.checkpoints.description import Description
from millstream.loader.checkpoints.envelope import is_dict, is_number, sealed, unsealed

_KIND = "a stream whose elements are counted"


@final
class CountedIterator(DatasetIterator[Any]):
    """An iterator without states. Its position is the number of elements it has yielded.

    `begin` returns the iterator at its beginning; `first` is its first result.
    """

    def __init__(self, dataset: Any, begin: Callable[[], Iterator[Any]], first: Iterator[Any]) -> None:
        super().__init__()
        self.name = type(dataset).__name__
        own = {name: value for name, value in dataset.__getstate__().items() if name not in {"_parents", "_depth"}}
        found = Description()
        found.identity["stream"] = self.name
        found.add_code("stream", type(dataset))
        for name, value in own.items():
            found.add(f"stream.{name}", value, is_content=True)
        self._described = {"words": found.identity, "content": found.content}
        self._begin = begin
        self._iterator = first
        self._count = 0
        # True if the iterator may be at another element than `_count`, or exhausted.
        self._has_failed = False

    @property
    def step(self) -> int:
        return self._count

    def __next__(self) -> Any:
        self._check_open()
        if self._has_failed:
            # A generator is exhausted once it has raised.
            self._restart(self._count)
        self._has_failed = True
        try:
            element = next(self._iterator)
        except StopIteration:
            self._has_failed = False
            raise
        self._count, self._has_failed = self._count + 1, False
        return element

    def get_state(self) -> dict[str, Any]:
        return sealed(_KIND, {"count": self._count, **self._described})

    def set_state(self, state: dict[str, Any], *, strict: bool = False) -> None:
        self._check_open()
        checked = unsealed(state, _KIND, {"count": is_number, "words": is_dict, "content": is_dict})
        here = self._described
        if checked["words"] != here["words"]:
            raise CheckpointError(
                f"The state belongs to another stream: saved {checked['words']}, here {here['words']}."
            )
        with strictly(strict=strict) as is_strict:
            accept_content(checked["content"], here["content"], strict=is_strict)
        before = self._count
        self._restart(checked["count"])
        if self._count < checked["count"]:
            there, self._has_failed = self._count, True
            self._count = before
            raise CheckpointError(f"The state is after {checked['count']} elements of {self.name}, which has {there}.")

    def _restart(self, count: int) -> None:
        self._has_failed = True
        call_if_possible(self._iterator, "close")
        self._iterator = self._begin()
        there = sum(1 for _ in itertools.islice(self._iterator, count))
        self._count, self._has_failed = there, False

    def close(self) -> None:
        call_if_possible(self._iterator, "close")
        super().close()
