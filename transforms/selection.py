"""Which elements of several datasets make a new one, said position by position."""

import abc


class DatasetSelectionMap(abc.ABC):
    """What `MapDataset.select_from_datasets` takes; any sequence of pairs will do as well. Subclass it."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns how many positions an epoch has."""

    @abc.abstractmethod
    def __getitem__(self, index: int) -> tuple[int, int]:
        """Returns the number of a dataset and a position in it, for any position from 0 on, after the length too."""
