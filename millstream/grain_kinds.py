"""Base classes of datasets and loaders that Keras recognises by class name and by "grain" in the module's name.

Programs and Keras also read private attributes of Grain's loader, because it has no public ones.
"""

import contextlib
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar, final

if TYPE_CHECKING:
    from collections.abc import Callable

Element = TypeVar("Element")
Out = TypeVar("Out")
Parameters = ParamSpec("Parameters")


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

    _data_source = property(attrgetter("data_source"))
    _sampler = property(attrgetter("sampler"))
    _operations = property(attrgetter("operations"))
    _shard_options = property(attrgetter("shard_options"))
    _multiprocessing_options = property(attrgetter("_workers"))


class _Dataset:
    """The members of both kinds of datasets that do not depend on the kind."""

    _stats: ClassVar[Stats] = STATS

    def pipe(
        self,
        function: "Callable[Concatenate[Self, Parameters], Out]",
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Out:
        """Returns `function(self, *args, **kwargs)`, so that functions of datasets fit into a chain.

        Args:
            function: a function of a dataset.
            *args: its further positional arguments.
            **kwargs: its keyword arguments.

        Examples:
            >>> def scaled(dataset, factor):
            ...     return dataset.map(lambda number: number * factor)
            >>> list(millstream.MapDataset.range(3).pipe(scaled, factor=10))
            [0, 10, 20]
        """
        return function(self, *args, **kwargs)


class IterDataset(_Dataset):
    """The base of `millstream.IterDataset`."""


class MapDataset(_Dataset):
    """The base of `millstream.MapDataset`."""
