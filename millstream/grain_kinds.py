"""Base classes of datasets and loaders that Keras recognises by class name and by "grain" in the module's name.

Programs and Keras also read private attributes of Grain's loader, because it has no public ones.
"""

import contextlib
from typing import Any, TypeVar, final

Element = TypeVar("Element")


@final
class Stats:
    """Grain's `self._stats`, which datasets and iterators of users call. It records nothing: times are always known."""

    def record_self_time(
        self, *, num_elements: int = 1, offset_ns: float = 0
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that does nothing."""
        del num_elements, offset_ns
        return contextlib.nullcontext()

    def record_output_spec(self, element: Element) -> Element:
        """Returns the element."""
        return element

    record_bytes_consumed = record_bytes_produced = record_output_spec

    def report(self) -> Any:
        """Does nothing."""


STATS = Stats()
"""The only instance, because it has no state."""


class DataLoader:
    """The base of `millstream.DataLoader`: its arguments, under the private names of Grain's loader."""

    @property
    def _data_source(self) -> Any:
        return self.data_source  # type: ignore[attr-defined]  # of the subclass

    @property
    def _sampler(self) -> Any:
        return self.sampler  # type: ignore[attr-defined]  # as above

    @property
    def _operations(self) -> Any:
        return self.operations  # type: ignore[attr-defined]  # as above

    @property
    def _shard_options(self) -> Any:
        return self.shard_options  # type: ignore[attr-defined]  # as above

    @property
    def _multiprocessing_options(self) -> Any:
        return self._workers  # type: ignore[attr-defined]  # as above


class IterDataset:
    """The base of `millstream.IterDataset`."""


class MapDataset:
    """The base of `millstream.MapDataset`."""
