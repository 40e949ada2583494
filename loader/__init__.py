"""The DataLoader, its iterator, and the engines that compute its batches.

`pipeline.plan` defines the content of the batches and `checkpoints.state` that of a checkpoint. README.md beside this
file is the map.
"""

from typing import TYPE_CHECKING

from millstream.core import lazy_imports

if TYPE_CHECKING:
    from millstream.loader.cluster.options import RayWorkers
    from millstream.loader.data_loader import DataLoader
    from millstream.loader.device_iterator import DeviceIterator, device_put
    from millstream.loader.iterator import DataLoaderIterator
    from millstream.loader.load_function import load, surviving_keys
    from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
    from millstream.loader.views import prometheus_text
else:
    # Worker processes import subpackages of this folder, and none of these.
    __getattr__, __dir__ = lazy_imports.hooks(__name__)

__all__ = [
    "DataLoader",
    "DataLoaderIterator",
    "DeviceIterator",
    "MultiprocessingOptions",
    "RayWorkers",
    "ReadOptions",
    "device_put",
    "load",
    "prometheus_text",
    "surviving_keys",
]
