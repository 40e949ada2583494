"""A mapping from the positions of a new dataset to elements of other datasets."""

import abc


class DatasetSelectionMap(abc.ABC):
    """The argument of `MapDataset.select_from_datasets`. Subclass it, or use any sequence of pairs instead.

    Examples:
        >>> class InTurn(millstream.transforms.DatasetSelectionMap):
        ...     def __len__(self):
        ...         return 4
        ...
        ...     def __getitem__(self, index):
        ...         return index % 2, index // 2
        >>> datasets = [millstream.MapDataset.source(["a", "b"]), millstream.MapDataset.source(["X", "Y"])]
        >>> list(millstream.MapDataset.select_from_datasets(datasets, InTurn()))
        ['a', 'X', 'b', 'Y']
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of positions per epoch."""

    @abc.abstractmethod
    def __getitem__(self, index: int) -> tuple[int, int]:
        """Returns the number of a dataset and a position in it, for any position from 0, also beyond the length."""
