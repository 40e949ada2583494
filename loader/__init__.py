"""Who does the work, and where: the DataLoader, its iterator, and the executors beneath them.

Read `plan` for what the batches are, `schedule` for their order, `executors` for who makes them, `state` for what a
checkpoint holds. README.md beside this file has the picture.
"""

from millstream.loader.data_loader import DataLoader
from millstream.loader.device_iterator import DeviceIterator, device_put
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.load import load
from millstream.loader.surviving_keys import surviving_keys
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions

__all__ = [
    "DataLoader",
    "DataLoaderIterator",
    "DeviceIterator",
    "MultiprocessingOptions",
    "ReadOptions",
    "device_put",
    "load",
    "surviving_keys",
]
