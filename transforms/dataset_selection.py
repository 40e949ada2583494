"""Which elements of several datasets make a new one, said position by position."""

import abc


class DatasetSelectionMap(abc.ABC):
    """What `MapDataset.select_from_datasets` takes; any sequence of pairs will do as well. Subclass it.

    Examples:
        >>> class InTurn(millstream.DatasetSelectionMap):
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
        """Returns how many positions an epoch has."""

    @abc.abstractmethod
    def __getitem__(self, index: int) -> tuple[int, int]:
        """Returns the number of a dataset and a position in it, for any position from 0 on, after the length too."""
