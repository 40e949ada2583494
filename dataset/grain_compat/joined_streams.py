"""Joins of streams, under Grain's names."""

from collections.abc import Sequence
from typing import Any, SupportsIndex

from millstream.core.checks import as_flag, as_integer, as_integer_or_none
from millstream.dataset.iter_dataset import IterDataset, as_stream, as_streams
from millstream.dataset.joins.limits import Cache, Take
from millstream.dataset.joins.turns import Repeat
from millstream.dataset.joins.zipping import Zip
from millstream.dataset.map_dataset import MapDataset
from millstream.dataset.node_source import node_of
from millstream.dataset.stream_steps import steps_of


class LimitIterDataset(IterDataset[Any]):
    """The first elements of a dataset.

    Args:
        parent: the dataset.
        count: the maximum number of elements, at least 1.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> list(millstream.experimental.LimitIterDataset(millstream.MapDataset.range(100), 3))
        [0, 1, 2]
    """

    def __init__(self, parent: Any, count: SupportsIndex) -> None:
        stream = as_stream(parent, "parent")
        self._made_of(Take(steps_of([stream]), as_integer(count, "count", minimum=1)), stream)


class RepeatIterDataset(IterDataset[Any]):
    """The elements of a dataset several times: the same ones, with the same draws, each time.

    Args:
        parent: the dataset.
        num_epochs: the number of times, at least 1; None for an endless stream.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> list(millstream.experimental.RepeatIterDataset(millstream.MapDataset.source(["a", "b"]), num_epochs=2))
        ['a', 'b', 'a', 'b']
    """

    def __init__(self, parent: Any, num_epochs: SupportsIndex | None = None) -> None:
        stream = as_stream(parent, "parent")
        self._made_of(Repeat(steps_of([stream]), as_integer_or_none(num_epochs, "num_epochs")), stream)


class CacheIterDataset(IterDataset[Any]):
    """The elements of a dataset, kept in memory once they have been drawn: for a `RepeatIterDataset` after it.

    Where it is resumed in another process, the elements before are drawn once more.

    Args:
        parent: the dataset; all of its elements must fit into memory.

    Raises:
        TypeError: the parent is not a dataset. While reading, a CheckpointError if a state is beyond the end.

    Examples:
        >>> kept = millstream.experimental.CacheIterDataset(millstream.MapDataset.range(3).map(lambda x: x * 10))
        >>> list(millstream.experimental.RepeatIterDataset(kept, num_epochs=2))
        [0, 10, 20, 0, 10, 20]
    """

    def __init__(self, parent: Any) -> None:
        stream = as_stream(parent, "parent")
        self._made_of(Cache(steps_of([stream])), stream)


class ZipIterDataset(IterDataset[tuple[Any, ...]]):
    """Tuples of the elements that datasets yield at the same time.

    Args:
        parents: the datasets, at least one.
        strict: True to raise an error if one ends before the others; False to end with the shortest.

    Raises:
        TypeError, ValueError: there are no datasets, or one is not a dataset. While reading, a ValueError if their
            lengths differ.

    Examples:
        >>> numbers, letters = millstream.MapDataset.range(2), millstream.MapDataset.source(["a", "b", "c"])
        >>> list(millstream.experimental.ZipIterDataset([numbers, letters], strict=False))
        [(0, 'a'), (1, 'b')]
    """

    def __init__(self, parents: Sequence[Any], *, strict: bool = True) -> None:
        if not parents:
            raise ValueError("ZipIterDataset needs at least one dataset, got none.")
        streams = as_streams(parents, "parents")
        self._made_of(Zip(steps_of(streams), as_flag(strict, "strict")), *streams)


class ZipMapDataset(MapDataset[tuple[Any, ...]]):
    """Tuples of the elements that datasets have at the same position.

    What is absent in a dataset is a None in the tuple.

    Args:
        parents: datasets of equal length, at least one.

    Raises:
        ValueError: there are none, or their lengths differ.

    Examples:
        >>> numbers, letters = millstream.MapDataset.range(2), millstream.MapDataset.source(["a", "b"])
        >>> millstream.experimental.ZipMapDataset([numbers, letters])[1]
        (1, 'b')
    """

    def __init__(self, parents: Sequence[MapDataset[Any]]) -> None:
        super().__init__(parents)
        if not parents:
            raise ValueError("ZipMapDataset needs datasets of equal length, at least one, got none.")
        first, *others = self.parents
        self._node = node_of(first.zip(*others))


class InterleaveIterDataset(IterDataset[Any]):
    """One element of each of `cycle_length` datasets, one after another, in Grain's order.

    With `[a, b, c]` and `cycle_length=2`, it draws from a, b, a, b, … Once one of them has ended, c replaces it from
    its next turn on.

    Args:
        datasets: a list of datasets; or a `MapDataset` whose elements are datasets, such as one that maps names of
            files to datasets. Each is read when its turn comes, so the MapDataset may be endless.
        cycle_length: the number of datasets that are open at a time, at least 1.
        num_make_iter_threads: accepted for compatibility with Grain, without effect, like the next two: one set of
            threads reads all open datasets, up to the number that their own `ReadOptions` allow.
        make_iter_buffer_size: see `num_make_iter_threads`.
        iter_buffer_size: see `num_make_iter_threads`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> datasets = [millstream.MapDataset.source(list(text)) for text in ("aaa", "b", "cc")]
        >>> list(millstream.experimental.InterleaveIterDataset(datasets, cycle_length=2))
        ['a', 'b', 'a', 'a', 'c', 'c']
    """

    def __init__(
        self,
        datasets: Any,
        *,
        cycle_length: SupportsIndex,
        num_make_iter_threads: int = 1,
        make_iter_buffer_size: int = 1,
        iter_buffer_size: int = 1,
    ) -> None:
        del num_make_iter_threads, make_iter_buffer_size, iter_buffer_size
        stream = IterDataset.interleave(datasets, cycle_length)
        self._made_of(stream._step, *stream.parents)  # noqa: SLF001  (of the base class)
