"""Datasets that have no method of MapDataset: several side by side, and a shuffle within windows."""

from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeVar

from millstream.checks import as_integer
from millstream.dataset.map_dataset import MapDataset, node_of
from millstream.dataset.nodes.index_nodes import WindowShuffle
from millstream.dataset.nodes.joining_nodes import Zipped
from millstream.randomness import as_seed
from millstream.transforms import FlatMap

T = TypeVar("T")


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
        nodes = tuple(map(node_of, self.parents))
        lengths = [node.length for node in nodes]
        if len(set(lengths)) != 1:
            raise ValueError(
                f"ZipMapDataset needs datasets of equal length, at least one, got the lengths {lengths}: slice the "
                "longer ones, dataset[:n]."
            )
        self._node = Zipped(nodes)


class WindowShuffleMapDataset(MapDataset[T]):
    """The elements of a dataset, shuffled within windows of `window_size`. Neighbours stay near.

    Each window and epoch has its own order. Each element occurs once per epoch, also in a shorter last window.

    Args:
        parent: the dataset.
        window_size: the number of elements per window, at least 1.
        seed: 0 … 2**64 - 1.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> dataset = millstream.MapDataset.range(8)
        >>> list(millstream.experimental.WindowShuffleMapDataset(dataset, window_size=4, seed=0))
        [2, 3, 0, 1, 7, 4, 6, 5]
    """

    def __init__(self, parent: MapDataset[T], *, window_size: SupportsIndex, seed: SupportsIndex) -> None:
        super().__init__(parent)
        self._node = WindowShuffle(node_of(parent), as_integer(window_size, "window_size", minimum=1), as_seed(seed))


class FlatMapMapDataset(MapDataset[Any]):
    """The children that an operation splits elements into: `parent.flat_map(transform)`.

    Args:
        parent: the dataset.
        transform: a `FlatMap`. Element i has the positions from `i * max_fan_out` on; those for which there is no child
            hold None.

    Raises:
        TypeError: the transform is not a `FlatMap`.

    Examples:
        >>> texts = millstream.MapDataset.source(["a b", "c"])
        >>> words = millstream.FlatMapTransform(str.split, max_fan_out=2)
        >>> dataset = millstream.experimental.FlatMapMapDataset(texts, words)
        >>> [dataset[position] for position in range(4)]
        ['a', 'b', 'c', None]
    """

    def __init__(self, parent: MapDataset[Any], transform: FlatMap[Any, Any]) -> None:
        super().__init__(parent)
        self._node = node_of(parent.flat_map(transform))
